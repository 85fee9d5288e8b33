"""Damage is found by shard, and repair redoes exactly what is damaged."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from cache_builder.build import build
from cache_builder.config import BuildConfig, TargetConfig
from cache_builder.repair import repair
from cache_builder.verify import verify_cache
from shared.cache import Cache
from shared.errors import CacheError, CacheIncompatibleError
from shared.layout import DESCRIPTION, HEAD, MANIFEST, PLANS, record_key
from shared.shard import GROUP, STATES_OBJECT
from tests.conftest import conversations, write_jsonl
from tests.test_cache_builder.stored import tree

MakeBuild = Callable[..., BuildConfig]


@pytest.fixture
def copy(tiny_cache: Path, tmp_path: Path) -> Path:
    path = tmp_path / "copy"
    shutil.copytree(tiny_cache, path)
    return path


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


DAMAGES = [
    pytest.param(lambda g, r: flip(g / STATES_OBJECT, 100), False, id="bit-of-states"),
    pytest.param(lambda g, r: flip(g / "hidden_states" / "zarr.json", 5), True, id="bit-of-json"),
    pytest.param(lambda g, r: flip(g / "token_ids" / "c" / "0", 9), True, id="bit-of-tokens"),
    pytest.param(lambda g, r: (g / STATES_OBJECT).unlink(), True, id="missing-states"),
    pytest.param(lambda g, r: shutil.rmtree(g), True, id="missing-group"),
    pytest.param(lambda g, r: r.unlink(), True, id="missing-record"),
    pytest.param(lambda g, r: flip(r, 30), True, id="bit-of-record"),
]


@pytest.mark.parametrize(("damage", "is_seen_fast"), DAMAGES)
def test_damage_is_found_and_repaired(
    copy: Path,
    tiny_build: MakeBuild,
    damage: Callable[[Path, Path], None],
    is_seen_fast: bool,
) -> None:
    before = {path.name: path.read_bytes() for path in (copy / "records").iterdir()}
    manifest = (copy / MANIFEST).read_bytes()
    victim = Cache(copy).shard_ids[2]
    damage(copy / GROUP / victim, copy / record_key(victim))
    assert {p.shard for p in verify_cache(copy, deep=False)} == (
        {victim} if is_seen_fast else set()
    )
    assert {p.shard for p in verify_cache(copy, deep=True)} == {victim}
    others = {
        path: path.stat().st_mtime_ns
        for path in (copy / GROUP).rglob("c/0/0/0")
        if victim not in path.parts
    }
    assert repair(tiny_build(copy)) == [victim]
    assert verify_cache(copy, deep=True) == []
    assert {path.name: path.read_bytes() for path in (copy / "records").iterdir()} == before
    assert (copy / MANIFEST).read_bytes() == manifest
    assert all(path.stat().st_mtime_ns == mtime for path, mtime in others.items())


def test_two_swapped_shards_are_both_found(copy: Path) -> None:
    first, second = (copy / GROUP / shard_id for shard_id in Cache(copy).shard_ids[:2])
    first.rename(copy / "aside")
    second.rename(first)
    (copy / "aside").rename(second)
    assert {p.shard for p in verify_cache(copy, deep=True)} == {first.name, second.name}


def test_a_healthy_cache_has_nothing_to_repair(copy: Path, tiny_build: MakeBuild) -> None:
    assert repair(tiny_build(copy)) == []


def test_a_damaged_shard_without_a_plan_is_named_and_built_again(
    copy: Path, tiny_build: MakeBuild
) -> None:
    victim = Cache(copy).shard_ids[1]
    shutil.rmtree(copy / "plans")
    flip(copy / GROUP / victim / STATES_OBJECT, 100)
    with pytest.raises(CacheError, match=rf"{victim}.*no plan.*--drop-lost"):
        repair(tiny_build(copy))
    assert (copy / record_key(victim)).is_file()
    assert repair(tiny_build(copy), drop_lost=True) == []
    build(tiny_build(copy))
    assert len(Cache(copy).index) == 48
    assert verify_cache(copy, deep=True) == []


@pytest.mark.parametrize("is_lost", [False, True], ids=["damaged", "lost"])
@pytest.mark.parametrize("piece", ["head", "calibration"])
def test_what_the_target_gives_again_is_put_back_and_nothing_else_is(
    copy: Path, tiny_build: MakeBuild, piece: str, is_lost: bool
) -> None:
    """A bit of one file must not cost a cache: its digest says whether what is made is what was."""
    (calibration,) = (copy / "calibrations").glob("*.safetensors")
    file = copy / HEAD if piece == "head" else calibration
    before = tree(copy)
    if is_lost:
        file.unlink()
    else:
        flip(file, 1000)
    (problem,) = verify_cache(copy, deep=False)
    assert (problem.piece, problem.shard) == (piece, None)
    assert file.name in problem.message
    assert repair(tiny_build(copy)) == []
    assert tree(copy) == before


@pytest.mark.parametrize("data", [None, b"{", b'{"format": "draftcache"}'])
def test_a_description_is_made_again_by_the_configuration_of_its_build(
    copy: Path, tiny_build: MakeBuild, data: bytes | None
) -> None:
    before = tree(copy)
    (copy / DESCRIPTION).unlink()
    if data is not None:
        (copy / DESCRIPTION).write_bytes(data)
    damaged = tree(copy)
    with pytest.raises(CacheError, match=r"cache\.json"):
        build(tiny_build(copy))
    with pytest.raises(CacheError, match=r"cache\.json.*configuration and target of the build"):
        repair(tiny_build(copy, max_length=128))
    assert tree(copy) == damaged
    assert repair(tiny_build(copy)) == []
    assert tree(copy) == before


def test_a_cache_of_another_format_version_is_not_repaired(
    copy: Path, tiny_build: MakeBuild
) -> None:
    """It is not damaged. One of its files alone that says so is, and is made again."""
    before = tree(copy)

    def write_version_3(file: Path) -> None:
        file.write_text(json.dumps(json.loads(file.read_text()) | {"format_version": 3}))

    for file in (copy / DESCRIPTION, copy / MANIFEST):
        write_version_3(file)
        assert repair(tiny_build(copy)) == []
        assert tree(copy) == before
    for file in (copy / DESCRIPTION, copy / MANIFEST, *(copy / "generations").glob("*.json")):
        write_version_3(file)
    before = tree(copy)
    with pytest.raises(CacheIncompatibleError, match="format version 3, this version reads 2"):
        repair(tiny_build(copy))
    assert tree(copy) == before


@pytest.mark.parametrize("piece", ["head", "calibration"])
def test_another_target_puts_nothing_back(
    copy: Path, tiny_build: MakeBuild, tiny_target: Path, tmp_path: Path, piece: str
) -> None:
    other = tmp_path / "other"
    shutil.copytree(tiny_target, other)
    weights = load_file(other / "model.safetensors")
    save_file({name: 2 * tensor for name, tensor in weights.items()}, other / "model.safetensors")
    (calibration,) = (copy / "calibrations").glob("*.safetensors")
    (copy / HEAD if piece == "head" else calibration).unlink()
    before = tree(copy)
    config = replace(tiny_build(copy), target=TargetConfig(path=str(other), dtype="float32"))
    with pytest.raises(CacheError, match=rf"{other} .*give other bytes.*build the cache anew"):
        repair(config)
    assert tree(copy) == before


def test_problems_are_plain_json(copy: Path) -> None:
    shutil.rmtree(copy / GROUP / Cache(copy).shard_ids[0])
    problems = json.loads(json.dumps([p.to_dict() for p in verify_cache(copy, deep=False)]))
    assert all(problem.keys() == {"piece", "shard", "kind", "message"} for problem in problems)
    assert {problem["kind"] for problem in problems} == {"missing"}


def test_a_lost_calibration_is_named_and_repair_deletes_nothing(
    copy: Path, tiny_build: MakeBuild
) -> None:
    """Every shard needs it and none can be captured without: the cache must survive the attempt."""
    shutil.rmtree(copy / PLANS)  # of what it was made is not known any more
    (calibration,) = (copy / "calibrations").glob("*.safetensors")
    data = calibration.read_bytes()
    calibration.unlink()
    assert {p.shard for p in verify_cache(copy, deep=False)} == {None}
    with pytest.raises(CacheError, match="build the cache anew"):
        repair(tiny_build(copy))
    calibration.write_bytes(data)
    assert verify_cache(copy, deep=True) == []


def test_a_build_does_not_go_on_without_a_published_record(
    copy: Path, tiny_build: MakeBuild, tmp_path: Path
) -> None:
    """It would delete the shard and publish a smaller cache without a word."""
    victim = Cache(copy).shard_ids[1]
    (copy / record_key(victim)).unlink()
    more = write_jsonl(tmp_path / "more.jsonl", conversations(range(60, 64)))
    with pytest.raises(CacheError, match=rf"{victim}.*repair"):
        build(tiny_build(copy, data=[more]))
    assert (copy / GROUP / victim / STATES_OBJECT).is_file()
    assert repair(tiny_build(copy)) == [victim]
    build(tiny_build(copy, data=[more]))
    assert len(Cache(copy).index) == 52


def test_new_data_are_captured_although_the_plans_are_lost(
    copy: Path, tiny_build: MakeBuild, tiny_data: Path, tmp_path: Path
) -> None:
    """Plan numbers of committed shards are not used again."""
    shutil.rmtree(copy / "plans" / "0001")
    more = write_jsonl(tmp_path / "more.jsonl", conversations(range(60, 64)))
    build(tiny_build(copy, data=[tiny_data, more]))
    assert len(Cache(copy).index) == 52


def test_what_is_damaged_is_not_called_missing_by_a_word_of_its_message(
    tiny_cache: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "missing" / "cache"
    shutil.copytree(tiny_cache, copy)
    flip(copy / HEAD, 500)
    (copy / record_key(Cache(copy).shard_ids[0])).unlink()
    found = {problem.piece: problem.kind for problem in verify_cache(copy, deep=False)}
    assert found == {"head": "damaged", "shard": "missing"}
