"""TOML and overrides into dataclasses: what is accepted, and the words of every refusal."""

import math
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.config import build, differences, flatten, kind_of, load, to_dict
from shared.errors import ConfigError
from shared.location import Location
from tests.conftest import REPOSITORY


@dataclass(frozen=True, kw_only=True)
class Inner:
    seed: int
    rate: float = 1e-3
    mode: Literal["fast", "safe"] = "fast"

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise ValueError(f"seed must not be negative, got {self.seed}")


@dataclass(frozen=True, kw_only=True)
class Outer:
    sampler: Inner
    path: Path
    is_on: bool = False
    name: str = "run"
    limit: int | None = None
    edges: tuple[int, ...] = ()
    pair: tuple[int, float] = (1, 1.0)
    sizes: dict[str, float] = field(default_factory=dict)
    devices: Literal["auto", "cpu"] | tuple[str, ...] = "auto"
    level: Literal[0, 1] = 0
    other: Inner | None = None
    place: Location | None = None


SMALLEST = 'path = "data"\n[sampler]\nseed = 3\n'


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(SMALLEST)
    return path


def refusal(tree: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        build(Outer, {"path": "data", "sampler": {"seed": 3}} | tree)
    return str(caught.value)


def test_what_is_not_given_keeps_its_default(file: Path) -> None:
    assert load(Outer, file) == Outer(sampler=Inner(seed=3), path=Path("data"))


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        pytest.param("is_on", True, True, id="bool"),
        pytest.param("path", "a/b c", Path("a/b c"), id="path"),
        pytest.param("limit", 4, 4, id="optional-value"),
        pytest.param("limit", None, None, id="optional-none"),
        pytest.param("edges", [1, 2], (1, 2), id="tuple-of-any-length"),
        pytest.param("edges", [], (), id="empty-tuple"),
        pytest.param("pair", [2, 3], (2, 3.0), id="tuple-of-two-kinds"),
        pytest.param("sizes", {"a": 1, "b": 2.5}, {"a": 1.0, "b": 2.5}, id="dict"),
        pytest.param("devices", "cpu", "cpu", id="union-literal"),
        pytest.param("devices", ["cuda:0"], ("cuda:0",), id="union-tuple"),
        pytest.param("level", 1, 1, id="literal-of-ints"),
        pytest.param("other", {"seed": 1}, Inner(seed=1), id="optional-section"),
    ],
)
def test_values_become_their_types(key: str, value: Any, expected: Any) -> None:
    config = build(Outer, {"path": "data", "sampler": {"seed": 3}} | {key: value})
    found = getattr(config, key)
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        pytest.param("1e-4", 1e-4, id="text-that-yaml-would-leave"),
        pytest.param(1e-4, 1e-4, id="exponent"),
        pytest.param(0.0006, 0.0006, id="decimal"),
        pytest.param(2, 2.0, id="int"),
    ],
)
def test_a_float_may_be_written_in_any_way(value: Any, expected: float) -> None:
    rate = build(Inner, {"seed": 1, "rate": value}).rate
    assert rate == expected
    assert type(rate) is float


@pytest.mark.parametrize(
    "value",
    [
        pytest.param("abc", id="word"),
        pytest.param(True, id="true"),
        pytest.param("", id="nothing"),
        pytest.param(math.nan, id="nan"),
        pytest.param("nan", id="nan-as-text"),
        pytest.param(-math.inf, id="infinity"),
        pytest.param(10**400, id="integer-beyond-floats"),
        pytest.param([1.0], id="list"),
        pytest.param(None, id="none"),
    ],
)
def test_what_is_no_finite_number_is_no_float(value: Any) -> None:
    assert refusal({"sampler": {"seed": 1, "rate": value}}).startswith(
        "sampler.rate: expected float, got "
    )


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        pytest.param({"pth": "x"}, "unknown key 'pth', did you mean 'path'?", id="unknown"),
        pytest.param(
            {"sampler": {"sed": 4, "seed": 3}},
            "sampler: unknown key 'sed', did you mean 'seed'?",
            id="unknown-nested",
        ),
        pytest.param(
            {"sampler": {"zzz": 4, "seed": 3}},
            "sampler: unknown key 'zzz' (known: mode, rate, seed)",
            id="unknown-and-like-nothing",
        ),
        pytest.param({"sampler": {}}, "sampler: missing key 'seed'", id="missing-nested"),
        pytest.param(
            {"sampler": {"seed": True}}, "sampler.seed: expected int, got True", id="true-as-int"
        ),
        pytest.param(
            {"sampler": {"seed": 3.0}}, "sampler.seed: expected int, got 3.0", id="float-as-int"
        ),
        pytest.param(
            {"sampler": {"seed": "3"}}, "sampler.seed: expected int, got '3'", id="text-as-int"
        ),
        pytest.param({"is_on": 1}, "is_on: expected bool, got 1", id="one-as-bool"),
        pytest.param({"name": 7}, "name: expected str, got 7", id="number-as-text"),
        pytest.param({"path": 7}, "path: expected Path, got 7", id="number-as-path"),
        pytest.param(
            {"sampler": {"seed": 3, "mode": "saf"}},
            "sampler.mode: expected one of ['fast', 'safe'], got 'saf', did you mean 'safe'?",
            id="literal",
        ),
        pytest.param(
            {"level": True},
            "level: expected one of [0, 1], got True (known: 0, 1)",
            id="true-as-literal-one",
        ),
        pytest.param({"level": [0]}, "level: expected one of [0, 1], got [0]", id="unhashable"),
        pytest.param({"limit": "x"}, "limit: expected int, got 'x'", id="optional"),
        pytest.param({"edges": 3}, "edges: expected a list, got 3", id="no-list"),
        pytest.param({"edges": [1, "a"]}, "edges[1]: expected int, got 'a'", id="list-item"),
        pytest.param({"pair": [1]}, "pair: expected 2 values, got 1", id="pair-of-one"),
        pytest.param({"sizes": [1]}, "sizes: expected a table, got [1]", id="no-table"),
        pytest.param({"sizes": {"a": "x"}}, "sizes.a: expected float, got 'x'", id="table-value"),
        pytest.param(
            {"limit": 2**63},
            "limit: expected an integer of 64 bits, got 9223",
            id="integer-too-long",
        ),
        pytest.param(
            {"limit": 10**5000},
            "limit: expected an integer of 64 bits, got one of",
            id="beyond-repr",
        ),
        pytest.param({"path": "a\0b"}, "path: expected a path without NUL", id="nul-in-path"),
        pytest.param(
            {"path": "a/" + 300 * "b"}, "path: expected names of at most 255", id="long-name"
        ),
        pytest.param({"edges": 300 * "b"}, "edges: expected a list, got 'bbb", id="long-value"),
        pytest.param({"sampler": 3}, "sampler: expected a section, got 3", id="no-section"),
        pytest.param({"other": 3}, "other: expected a section, got 3", id="no-optional-section"),
        pytest.param(
            {"sampler": {"seed": -1}},
            "sampler: seed must not be negative, got -1",
            id="range-check-of-the-dataclass",
        ),
    ],
)
def test_a_value_that_does_not_fit_is_refused_with_its_place(
    tree: dict[str, Any], message: str
) -> None:
    assert refusal(tree).startswith(message)


def test_a_missing_key_at_the_top_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^missing key 'path'$"):
        build(Outer, {"sampler": {"seed": 3}})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(b"a = \n", "not TOML: ", id="syntax"),
        pytest.param(b"a = '\xff'", "not TOML: ", id="not-utf8"),
        pytest.param(SMALLEST.encode() + b"sed = 1\n", "sampler: unknown key 'sed'", id="schema"),
    ],
)
def test_messages_about_a_file_begin_with_its_path(
    file: Path, content: bytes, message: str
) -> None:
    file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load(Outer, file)
    assert str(caught.value).startswith(f"{file}: {message}")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such configuration file"):
        load(Outer, tmp_path / "absent.toml")


def test_a_directory_is_no_configuration(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load(Outer, tmp_path)


@pytest.mark.parametrize(
    ("override", "key", "expected"),
    [
        pytest.param("name=seven", "name", "seven", id="bare-word"),
        pytest.param('name="quoted"', "name", "quoted", id="quoted"),
        pytest.param("name=", "name", "", id="empty"),
        pytest.param("name=a=b", "name", "a=b", id="equals-sign-in-the-value"),
        pytest.param("path=/data/my runs/1", "path", Path("/data/my runs/1"), id="bare-path"),
        pytest.param("path=../a-b.c", "path", Path("../a-b.c"), id="relative-path"),
        pytest.param(" is_on = true", "is_on", True, id="spaces"),
        pytest.param("edges=[1, 2,3]", "edges", (1, 2, 3), id="list"),
        pytest.param("edges=[]", "edges", (), id="empty-list"),
        pytest.param('devices=["cuda:0","cuda:1"]', "devices", ("cuda:0", "cuda:1"), id="words"),
        pytest.param("sizes.a=2", "sizes", {"a": 2.0}, id="table-that-is-not-in-the-file"),
        pytest.param("sizes={a = 1}", "sizes", {"a": 1.0}, id="inline-table"),
        pytest.param("other.seed=5", "other", Inner(seed=5), id="section-not-in-the-file"),
        pytest.param("sampler.seed=9", "sampler", Inner(seed=9), id="over-the-file"),
        pytest.param("sampler.rate=1e-4", "sampler", Inner(seed=3, rate=1e-4), id="exponent"),
    ],
)
def test_an_override_sets_one_key(file: Path, override: str, key: str, expected: Any) -> None:
    assert getattr(load(Outer, file, [override]), key) == expected


def test_the_last_of_two_overrides_counts(file: Path) -> None:
    assert load(Outer, file, ["limit=1", "limit=2"]).limit == 2


@pytest.mark.parametrize(
    ("override", "message"),
    [
        pytest.param("name", "--set name: expected section.key=value", id="no-value"),
        pytest.param("=3", "--set =3: expected section.key=value", id="no-key"),
        pytest.param("sampler..seed=3", "--set sampler..seed=3: expected", id="empty-part"),
        pytest.param("name.x=3", "name: expected str, got {'x': 3}", id="key-under-a-text"),
        pytest.param("path.x=3", "--set path.x=3: 'path' is not a section", id="key-under-a-value"),
        pytest.param("sampler.sed=4", "sampler: unknown key 'sed', did you mean", id="unknown"),
        pytest.param("edges=[1, x]", "edges: expected a list, got '[1, x]'", id="list-of-words"),
        pytest.param("sampler.seed=true", "sampler.seed: expected int, got True", id="true"),
    ],
)
def test_an_override_that_does_not_fit_is_refused(file: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(Outer, file, [override])
    assert message in str(caught.value)


long_integers = st.integers(-(2**63), 2**63 - 1)


@pytest.mark.parametrize(
    ("overrides", "blamed"),
    [
        pytest.param(["sampler.sed=4"], "--set sampler.sed=4: sampler: unknown key", id="unknown"),
        pytest.param(["limit=4", "limit=x"], "--set limit=x: limit: expected int", id="last"),
        pytest.param(["limit=x", "name=a"], "--set limit=x: limit: expected int", id="one-of-two"),
        pytest.param(["sampler.seed=-1"], "--set sampler.seed=-1: sampler: seed must", id="range"),
        pytest.param(
            ["other.rate=1", "other.mode=safe"],
            "--set other.rate=1 --set other.mode=safe: other: missing key 'seed'",
            id="only-together",
        ),
        pytest.param(["name"], "--set name: expected section.key=value", id="no-value"),
    ],
)
def test_an_error_of_an_override_is_not_blamed_on_the_file(
    file: Path, overrides: list[str], blamed: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(Outer, file, overrides)
    assert str(caught.value).startswith(blamed)


def test_an_error_of_the_file_is_not_blamed_on_an_override(file: Path) -> None:
    file.write_text("limit = 'x'\n" + SMALLEST)
    with pytest.raises(ConfigError) as caught:
        load(Outer, file, ["name=a", "sampler.seed=4"])
    assert str(caught.value).startswith(f"{file}: limit: expected int")
    assert load(Outer, file, ["limit=3"]).limit == 3


def test_a_number_that_python_does_not_read_is_not_toml(file: Path) -> None:
    file.write_text(f"limit = 1{5000 * '0'}\n" + SMALLEST)
    with pytest.raises(ConfigError, match="not TOML"):
        load(Outer, file)


inners = st.builds(
    Inner,
    seed=st.integers(0, 2**63 - 1),
    rate=st.floats(allow_nan=False, allow_infinity=False),
    mode=st.sampled_from(["fast", "safe"]),
)
outers = st.builds(
    Outer,
    sampler=inners,
    path=st.text(min_size=1)
    .filter(lambda text: not text.startswith("~") and "\0" not in text)
    .map(Path)
    .filter(lambda path: str(path).strip()),  # "\r/" is the path "\r"
    is_on=st.booleans(),
    name=st.text(),
    limit=st.none() | long_integers,
    edges=st.lists(long_integers).map(tuple),
    pair=st.tuples(long_integers, st.floats(allow_nan=False, allow_infinity=False)),
    sizes=st.dictionaries(st.text(), st.floats(allow_nan=False, allow_infinity=False)),
    devices=st.sampled_from(["auto", "cpu", ("cuda:0", "cuda:1"), ()]),
    level=st.sampled_from([0, 1]),
    other=st.none() | inners,
)


@given(outers)
def test_what_to_dict_wrote_builds_the_same_config(config: Outer) -> None:
    plain = to_dict(config)
    assert build(Outer, plain) == config
    assert to_dict(build(Outer, plain)) == plain


def test_to_dict_holds_plain_values_and_the_defaults() -> None:
    assert to_dict(Outer(sampler=Inner(seed=3), path=Path("data"), edges=(1, 2))) == {
        "sampler": {"seed": 3, "rate": 1e-3, "mode": "fast"},
        "path": "data",
        "is_on": False,
        "name": "run",
        "limit": None,
        "edges": [1, 2],
        "pair": [1, 1.0],
        "sizes": {},
        "devices": "auto",
        "level": 0,
        "other": None,
        "place": None,
    }


@pytest.mark.parametrize("key", ["sampler.seed", "other.seed"])
def test_the_type_of_a_setting_is_told_also_where_its_section_may_be_left_out(key: str) -> None:
    assert kind_of(Outer, key) is int


def test_a_place_in_a_bucket_is_no_section() -> None:
    assert kind_of(Outer, "place") == Location | None


@pytest.mark.parametrize("key", ["sampler", "other"])
def test_a_section_is_no_setting(key: str) -> None:
    with pytest.raises(ConfigError, match=f"^{key}: is a section"):
        kind_of(Outer, key)


def test_flatten_joins_the_keys_and_keeps_an_empty_table() -> None:
    assert flatten({"a": {"b": {"c": 1}, "d": [2]}, "e": {}}) == {"a.b.c": 1, "a.d": [2], "e": {}}


def test_differences_name_every_leaf_that_differs() -> None:
    ours = {"same": 1, "target": {"dtype": "bfloat16", "only_ours": 1}, "ids": [1, 2]}
    theirs = {"same": 1, "target": {"dtype": "float32"}, "ids": [1, 3]}
    assert differences(ours, theirs) == [
        "ids: [1, 2] asked for, [1, 3] in the cache",
        "target.dtype: 'bfloat16' asked for, 'float32' in the cache",
        "target.only_ours: 1 asked for, '(absent)' in the cache",
    ]
    assert differences(ours, ours) == []


def test_a_path_may_start_at_home_but_not_be_empty(tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Place:
        path: Path

    assert build(Place, {"path": "~/cache"}).path == Path.home() / "cache"
    assert build(Place, {"path": "~name"}).path == Path("~name")
    with pytest.raises(ConfigError, match="empty text"):
        build(Place, {"path": " "})


def test_a_file_is_utf_8_whatever_the_locale(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_bytes('path = "r\u00e9sum\u00e9"'.encode())
    script = (
        "import sys, pathlib, shared.config as config\n"
        "print(ascii(config.read_toml(pathlib.Path(sys.argv[1]))))"
    )
    env = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    found = subprocess.run(
        [sys.executable, "-c", script, str(file)],
        capture_output=True,
        text=True,
        env=env,
        cwd=REPOSITORY,
    )
    assert found.stdout == "{'path': 'r\\xe9sum\\xe9'}\n", found.stderr
