"""What settings and options say of themselves is true: each one is read, and can be set."""

import ast
import dataclasses
import typing
from pathlib import Path
from typing import Any

import pytest

from cache_builder.commands.reuse import import_command
from cache_builder.config import BuildConfig
from cache_builder.importing.config import ImportConfig, read_options
from shared.location import S3Url
from tests.conftest import REPOSITORY
from trainer.config import TrainConfig
from trainer.sweep.config import SweepConfig

ONLY_CHECKED = {"DrafterConfig.partial_rotary_factor"}
"""There to refuse what a published `config.json` may say."""


def sections(schema: type[Any]) -> set[type[Any]]:
    """`schema` and the sections in it, at any depth."""
    found, kinds = {schema}, [*typing.get_type_hints(schema).values()]
    while kinds:
        kind = kinds.pop()
        if isinstance(kind, type) and dataclasses.is_dataclass(kind) and kind is not S3Url:
            found |= sections(kind)
        kinds += typing.get_args(kind)
    return found


def attributes_read(package: str) -> set[str]:
    """Names of all attributes that `package` reads, but for checks of a configuration itself."""
    names = set()
    for path in (REPOSITORY / package).rglob("*.py"):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                node.body = [b for b in node.body if getattr(b, "name", "") != "__post_init__"]
        nodes = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute)]
        names |= {node.attr for node in nodes if isinstance(node.ctx, ast.Load)}
    return names


@pytest.mark.parametrize(
    ("package", "schema"),
    [
        ("cache_builder", BuildConfig),
        ("cache_builder", ImportConfig),
        ("trainer", TrainConfig),
        ("trainer", SweepConfig),
    ],
)
def test_every_setting_is_read(package: str, schema: type[Any]) -> None:
    read = attributes_read(package)
    dead = {
        f"{section.__name__}.{field.name}"
        for section in sections(schema)
        for field in dataclasses.fields(section)
        if field.name not in read
    }
    assert dead - ONLY_CHECKED == set()


def test_every_fact_of_an_import_can_be_given() -> None:
    given: dict[str, Any] = {p.name: None for p in import_command.params if p.name != "help"}
    given |= {"kind": "specforge", "source": Path("s"), "cache": S3Url("caches"), "target": "t"}
    given |= {"scratch": Path("/x")}
    given |= {"keep_last": True, "skip_mismatched": True, "no_recapture": False}
    given |= {"states": Path("h"), "tag": "g", "same_as": S3Url("other"), "dtype": "float32"}
    given |= {"revision": "main", "codec": "small", "layer_ids": "1", "layer_numbering": "block"}
    given |= {"last_hidden": "before-norm", "num_samples": 3, "tolerance": 0.5, "seed": 4}
    given |= {"max_quarantined_fraction": 0.5, "shard_mib": 1.0, "min_free_gb": 1.0}
    config = read_options(**given)
    given_sections = (getattr(config, field.name) for field in dataclasses.fields(config))
    unset = {
        f"{type(section).__name__}.{field.name}"
        for section in (config, *filter(dataclasses.is_dataclass, given_sections))
        if not isinstance(section, S3Url)
        for field in dataclasses.fields(section)
        if field.default is not dataclasses.MISSING
        and getattr(section, field.name) == field.default
    }
    assert unset == set()
    assert set(given) == {p.name for p in import_command.params}
    assert isinstance(config.cache.path, S3Url)
    assert config.cache.path.scratch == Path("/x")
