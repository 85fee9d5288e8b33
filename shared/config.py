"""TOML files and `key=value` overrides into frozen dataclasses, strictly.

What is accepted: nested dataclasses, `int`, `float`, `bool`, `str`, `Path`, `Location`, `Literal`,
`X | None`, `tuple[X, ...]`, `tuple[X, Y]` and `dict[str, X]`. Everything else is refused, and so is
an unknown key (with a suggestion), a missing one, and `true` for a number.
"""

import copy
import dataclasses
import difflib
import math
import tomllib
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, Union

from shared.errors import ConfigError
from shared.location import S3Url, parse_location, parse_path

T = TypeVar("T")

MAX_SHOWN = 200
"""Characters of a value that a message repeats."""


def load(schema: type[T], path: Path, overrides: Sequence[str] = ()) -> T:
    """Read `path` and the `section.key=value` overrides into `schema`.

    Raises:
        ConfigError: the file cannot be read, or a key or value does not fit.
    """
    tree = read_toml(path)
    try:
        return build(schema, _overridden(tree, overrides))
    except ConfigError as error:
        if blamed := _blame(schema, tree, overrides, str(error)):
            raise ConfigError(f"{' '.join(f'--set {one}' for one in blamed)}: {error}") from None
        raise ConfigError(f"{path}: {error}") from None


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return tomllib.loads(path.read_bytes().decode())
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such configuration file.") from None
    except (ValueError, RecursionError) as error:  # not TOML, not UTF-8, numbers beyond Python's
        raise ConfigError(f"{path}: not TOML: {error}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}).") from None


def build(schema: type[T], tree: Mapping[str, Any], where: str = "") -> T:
    """Turn a tree of plain values into `schema`. `where` prefixes the messages."""
    hints = typing.get_type_hints(schema)
    fields = {field.name: field for field in dataclasses.fields(schema)}  # type: ignore[arg-type]  # T is a dataclass
    for key in tree:
        if key not in fields:
            raise ConfigError(f"{_at(where)}unknown key {key!r}{suggest(key, list(fields))}")
    values: dict[str, Any] = {}
    for name, field in fields.items():
        if name in tree:
            values[name] = _convert(hints[name], tree[name], f"{where}.{name}" if where else name)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ConfigError(f"{_at(where)}missing key {name!r}")
    try:
        return schema(**values)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{_at(where)}{error}") from None


def kind_of(schema: type[Any], key: str) -> Any:
    """The type of the setting `section.name` of `schema`.

    Raises:
        ConfigError: there is none.
    """
    kind: Any = schema
    for name in key.split("."):
        hints = typing.get_type_hints(kind) if dataclasses.is_dataclass(kind) else {}
        if name not in hints:
            hint = suggest(name, list(hints)) if hints else ", which lies in no section"
            raise ConfigError(f"{key}: unknown key {name!r}{hint}")
        kind = _section_of(hints[name])
    if dataclasses.is_dataclass(kind):
        raise ConfigError(f"{key}: is a section, expected a setting of it")
    return kind


def _section_of(kind: Any) -> Any:
    """The section that a setting is, if it may also be left out; else `kind`."""
    if typing.get_origin(kind) in (Union, types.UnionType):
        choices = [one for one in typing.get_args(kind) if one is not type(None)]
        if len(choices) == 1 and dataclasses.is_dataclass(choices[0]):
            return choices[0]
    return kind


def to_dict(config: Any) -> Any:
    """`config` as plain JSON values, defaults included. What is saved, logged and hashed."""
    if isinstance(config, Path | S3Url):
        return str(config)
    if dataclasses.is_dataclass(config):
        return {f.name: to_dict(getattr(config, f.name)) for f in dataclasses.fields(config)}
    if isinstance(config, Mapping):
        return {key: to_dict(value) for key, value in config.items()}
    if isinstance(config, list | tuple):
        return [to_dict(value) for value in config]
    return config


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"a": {"b": 1}}` as `{"a.b": 1}`, for tables and for differences."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def differences(
    ours: Mapping[str, Any],
    theirs: Mapping[str, Any],
    names: tuple[str, str] = ("asked for", "in the cache"),
) -> list[str]:
    """Lines `key: X asked for, Y in the cache` of every leaf that differs."""
    left, right = flatten(ours), flatten(theirs)
    absent = "(absent)"
    return [
        f"{key}: {left.get(key, absent)!r} {names[0]}, {right.get(key, absent)!r} {names[1]}"
        for key in sorted(left.keys() | right.keys())
        if left.get(key, absent) != right.get(key, absent)
    ]


def _overridden(tree: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """A copy of `tree` with the overrides in it."""
    changed = copy.deepcopy(tree)
    for override in overrides:
        _override(changed, override)
    return changed


def _blame(
    schema: type[Any], tree: dict[str, Any], overrides: Sequence[str], message: str
) -> list[str]:
    """The overrides without which `message` would be another or none; empty: the file's fault."""

    def without(blamed: Sequence[str]) -> str:
        try:
            build(schema, _overridden(tree, [one for one in overrides if one not in blamed]))
        except ConfigError as error:
            return str(error)
        return ""

    of_key: dict[str, list[str]] = {}
    for override in overrides:
        of_key.setdefault(override.partition("=")[0].strip(), []).append(override)
    guilty = [of_key[key][-1] for key in of_key if without(of_key[key]) != message]
    if not guilty and overrides and without(overrides) != message:
        return list(overrides)  # only together
    return guilty


def _override(tree: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    path = key.strip().split(".")
    if not separator or not all(path):
        raise ConfigError("expected section.key=value")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        value = text.strip()  # a bare word is a string, so that paths need no quotes
    node = tree
    for name in path[:-1]:
        node = node.setdefault(name, {})
        if not isinstance(node, dict):
            raise ConfigError(f"{name!r} is not a section")
    node[path[-1]] = value


def _convert(kind: Any, value: Any, where: str) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where}: expected a section, got {_short(value)}")
        return build(typing.cast(type, kind), value, where)
    if origin in (Union, types.UnionType):
        return _convert_union(arguments, value, where)
    if origin is Literal:
        if not any(value == choice and type(value) is type(choice) for choice in arguments):
            hint = suggest(_short(value).strip("'"), [str(choice) for choice in arguments])
            raise ConfigError(
                f"{where}: expected one of {list(arguments)}, got {_short(value)}{hint}"
            )
        return value
    if origin is tuple:
        return _convert_tuple(arguments, value, where)
    if origin is dict:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where}: expected a table, got {_short(value)}")
        return {key: _convert(arguments[1], item, f"{where}.{key}") for key, item in value.items()}
    return _convert_scalar(kind, value, where)


def _convert_union(arguments: tuple[Any, ...], value: Any, where: str) -> Any:
    if value is None and type(None) in arguments:
        return None
    if S3Url in arguments and isinstance(value, str):  # a Location
        return _located(parse_location, value, where)
    errors = []
    for choice in arguments:
        if choice is type(None):
            continue
        try:
            return _convert(choice, value, where)
        except ConfigError as error:
            errors.append(error)
    raise errors[0]


def _convert_tuple(arguments: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise ConfigError(f"{where}: expected a list, got {_short(value)}")
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        kinds: Sequence[Any] = [arguments[0]] * len(value)
    elif len(arguments) == len(value):
        kinds = arguments
    else:
        raise ConfigError(f"{where}: expected {len(arguments)} values, got {len(value)}")
    return tuple(
        _convert(kind, item, f"{where}[{i}]")
        for i, (kind, item) in enumerate(zip(kinds, value, strict=True))
    )


def _convert_scalar(kind: Any, value: Any, where: str) -> Any:
    if kind is Path and isinstance(value, str):
        return _located(parse_path, value, where)
    if kind is bool and isinstance(value, bool):
        return value
    if kind is int and isinstance(value, int) and not isinstance(value, bool):
        if not -(2**63) <= value < 2**63:
            raise ConfigError(f"{where}: expected an integer of 64 bits, got {_short(value)}")
        return value
    if kind is float and isinstance(value, int | float | str) and not isinstance(value, bool):
        try:
            number = float(value)
        except (ValueError, OverflowError):
            number = math.nan
        if math.isfinite(number):  # nan would pass every range check
            return number
    if kind is str and isinstance(value, str):
        return value
    raise ConfigError(f"{where}: expected {kind.__name__}, got {_short(value)}")


def _short(value: Any) -> str:
    """`value` for a message, which stays a line."""
    if isinstance(value, int) and abs(value) > 10**40:
        return f"one of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def _located(parse: Callable[[str], T], value: str, where: str) -> T:
    try:
        return parse(value)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _at(where: str) -> str:
    return f"{where}: " if where else ""


def suggest(word: str, choices: list[str]) -> str:
    """What a message adds about `word`, which is none of `choices`."""
    close = difflib.get_close_matches(word, choices, n=1)
    return f", did you mean {close[0]!r}?" if close else f" (known: {', '.join(sorted(choices))})"
