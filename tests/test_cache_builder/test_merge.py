"""Merging adds what other caches have, each sample once, as it is stored there."""

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import zarr
from click.testing import CliRunner

from cache_builder import cli
from cache_builder.build import build
from cache_builder.config import BuildConfig
from cache_builder.lock import builder_lock
from cache_builder.merge import merge
from cache_builder.prune import prune
from cache_builder.repair import repair
from cache_builder.verify import verify_cache
from shared import index
from shared.cache import Cache
from shared.errors import (
    CacheError,
    CacheIncompatibleError,
    CacheLockedError,
    CacheNotFoundError,
    OutOfSpaceError,
    ShardCorruptError,
)
from shared.files import sha256_file
from shared.layout import CALIBRATIONS, DESCRIPTION, HEAD, MANIFEST
from shared.shard import GROUP, STATES_OBJECT
from tests.conftest import conversations, write_jsonl
from tests.test_cache_builder.stored import (
    Killer,
    assert_clean,
    contents,
    one_by_one,
    tree,
)
from tests.test_cache_builder.test_verify import flip
from trainer.config import TrainConfig
from trainer.train import train

pytestmark = pytest.mark.slow

MakeBuild = Callable[..., BuildConfig]
MakeTrain = Callable[..., TrainConfig]


class Halves:
    """Two caches with some samples in common, and the configurations that made them."""

    def __init__(self, directory: Path, config: BuildConfig, data: tuple[Path, Path]) -> None:
        self.directory = directory
        self._config = config
        self.data = data
        self.into, self.other = directory / "into", directory / "other"
        self.before = contents(self.into), contents(self.other)
        self.common = self.before[0].keys() & self.before[1].keys()

    def config(self, *numbers: int, path: Path | None = None) -> BuildConfig:
        sources = tuple(str(self.data[number]) for number in numbers)
        return replace(
            self._config,
            cache=replace(self._config.cache, path=path or self.into),
            data=replace(self._config.data, sources=sources),
        )

    @property
    def merged(self) -> dict[str, object]:
        """What both together hold; a sample of both is that of the first."""
        return {**self.before[1], **self.before[0]}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    directory = tmp_path_factory.mktemp("halves")
    return (
        write_jsonl(directory / "left.jsonl", conversations(range(30), "left")),
        write_jsonl(directory / "right.jsonl", conversations(range(22, 48), "right")),
    )


@pytest.fixture(scope="module")
def built(
    tiny_build: MakeBuild, data: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Directories with `into` and `other`, built apart, and `all`, built from both data."""
    made: dict[str, Path] = {}

    def make(preset: str) -> Path:
        if preset not in made:
            directory = made[preset] = tmp_path_factory.mktemp(preset)
            for name, files in (("into", data[:1]), ("other", data[1:]), ("all", data)):
                build(small_shards(tiny_build(directory / name, preset=preset, data=files)))
        return made[preset]

    return make


def small_shards(config: BuildConfig) -> BuildConfig:
    return one_by_one(replace(config, plan=replace(config.plan, shard_mib=0.125)))


@pytest.fixture
def make_halves(
    built: Callable[[str], Path], tiny_build: MakeBuild, data: tuple[Path, Path], tmp_path: Path
) -> Callable[..., Halves]:
    def make(preset: str = "balanced", name: str = "copy") -> Halves:
        for cache in ("into", "other"):
            shutil.copytree(built(preset) / cache, tmp_path / name / cache)
        config = small_shards(tiny_build(tmp_path / name / "into", preset=preset))
        return Halves(tmp_path / name, config, data)

    return make


def levels(stored: dict[str, tuple[object, ...]]) -> dict[str, tuple[object, ...]]:
    """Without source and calibration."""
    return {key: (*value[:5], *value[8:]) for key, value in stored.items()}


def test_two_halves_make_the_cache_that_all_data_make(
    make_halves: Callable[..., Halves], built: Callable[[str], Path]
) -> None:
    halves = make_halves("lossless")
    report = merge(halves.into, [halves.other])
    assert levels(contents(halves.into)) == levels(contents(built("lossless") / "all"))
    assert contents(halves.into) == halves.merged
    assert report.num_samples == 18
    assert report.num_duplicates == len(halves.common) == 8
    assert report.num_rewritten > 0
    assert report.manifest.generation == 2
    assert report.manifest.sources == ("left", "right")
    assert_clean(halves.into)


def test_a_lost_plan_is_named_and_costs_only_where_samples_came_from(
    make_halves: Callable[..., Halves], caplog: pytest.LogCaptureFixture
) -> None:
    halves = make_halves("lossless")
    (halves.other / "plans" / "0001" / "plan.json").write_text("{}")
    merge(halves.into, [halves.other])
    assert contents(halves.into) == halves.merged
    (line,) = [r.getMessage() for r in caplog.records if "without file and row" in r.getMessage()]
    assert str(halves.other / "plans" / "0001") in line


def test_halves_of_one_cache_make_it_again_with_its_calibration(
    built: Callable[[str], Path], make_halves: Callable[..., Halves], tmp_path: Path
) -> None:
    """Pruned to one half and to the other, and merged."""
    halves = make_halves()
    whole = built("balanced") / "all"
    for number in (0, 1):
        shutil.copytree(whole, tmp_path / str(number))
        prune(halves.config(number, path=tmp_path / str(number)))
    merge(tmp_path / "0", [tmp_path / "1"])
    assert contents(tmp_path / "0") == contents(whole)
    assert len(list((tmp_path / "0" / CALIBRATIONS).iterdir())) == 1
    assert_clean(tmp_path / "0")


def test_caches_of_other_calibrations_keep_theirs(make_halves: Callable[..., Halves]) -> None:
    halves = make_halves()
    names = {Cache(path).description["calibration"] for path in (halves.into, halves.other)}
    assert len(names) == 2
    others_own = tree(halves.other)
    report = merge(halves.into, [halves.other])
    assert contents(halves.into) == halves.merged
    assert {value[7] for value in contents(halves.into).values()} == names
    assert tree(halves.other) == others_own
    assert report.stored_bytes == report.manifest.totals.stored_bytes - sum(
        Cache(halves.into, generation=1).record(s).stored_bytes
        for s in Cache(halves.into, generation=1).shard_ids
    )
    assert len(contents(halves.into)) == 48
    assert Cache(halves.into, generation=1).index.source.max() == 0
    assert_clean(halves.into)


def test_a_copied_shard_has_its_new_name_everywhere(make_halves: Callable[..., Halves]) -> None:
    halves = make_halves()
    report = merge(halves.into, [halves.other])
    cache = Cache(halves.into)
    added = [shard_id for shard_id in cache.shard_ids if shard_id.startswith("0002-")]
    assert len(added) == report.num_copied + report.num_rewritten
    assert report.num_copied > 0
    for shard_id in added:
        group = zarr.open_group(halves.into / GROUP / shard_id, mode="r")
        assert group.attrs["shard_id"] == cache.record(shard_id).shard_id == shard_id
        assert group["token_ids"][:].tolist() == cache.shard(shard_id).arrays["token_ids"].tolist()


def test_merging_again_adds_nothing(make_halves: Callable[..., Halves]) -> None:
    halves = make_halves()
    merge(halves.into, [halves.other])
    before = tree(halves.into)
    report = merge(halves.into, [halves.other])
    assert (report.num_samples, report.num_duplicates) == (0, 26)
    assert report.manifest.generation == 2
    assert tree(halves.into) == before


def test_samples_that_two_of_the_others_share_are_added_once(
    make_halves: Callable[..., Halves], tiny_build: MakeBuild, tmp_path: Path
) -> None:
    halves = make_halves()
    third = write_jsonl(tmp_path / "third.jsonl", conversations(range(40, 56), "third"))
    build(small_shards(tiny_build(tmp_path / "third", data=[third])))
    report = merge(halves.into, [halves.other, tmp_path / "third"])
    assert report.num_duplicates == 8 + 8
    assert len(Cache(halves.into).index) == 56
    assert report.manifest.sources == ("left", "right", "third")
    assert_clean(halves.into)


def test_building_after_it_captures_nothing(make_halves: Callable[..., Halves]) -> None:
    halves = make_halves()
    merge(halves.into, [halves.other])
    for numbers in ((0,), (0, 1), (1,)):
        report = build(halves.config(*numbers))
        assert report.num_new_shards == 0
        assert report.manifest.generation == 2


def test_pruning_after_it_gives_what_was_there(make_halves: Callable[..., Halves]) -> None:
    halves = make_halves()
    merge(halves.into, [halves.other])
    prune(halves.config(0))
    assert contents(halves.into) == halves.before[0]
    assert_clean(halves.into)


@pytest.mark.parametrize("preset", ["lossless", "balanced"])
def test_shards_that_were_added_can_be_repaired(
    make_halves: Callable[..., Halves], preset: str
) -> None:
    """One that was copied and one that was rewritten; a shard anew has this cache's calibration."""
    halves = make_halves(preset)
    merge(halves.into, [halves.other])
    sizes = {
        shard_id: Cache(halves.other).record(shard_id).num_samples
        for shard_id in Cache(halves.other).shard_ids
    }
    added = [i for i in Cache(halves.into).shard_ids if i.startswith("0002-")]
    for shard_id in added:
        flip(halves.into / GROUP / shard_id / STATES_OBJECT, 50)
    assert {problem.shard for problem in verify_cache(halves.into, deep=True)} == set(added)
    assert repair(halves.config(0)) == added
    assert sum(sizes.values()) == 26
    if preset == "lossless":
        assert contents(halves.into) == halves.merged
    assert contents(halves.into).keys() == halves.merged.keys()
    assert_clean(halves.into)


def test_the_trainer_trains_on_two_calibrations(
    make_halves: Callable[..., Halves], tiny_train: MakeTrain, tmp_path: Path
) -> None:
    halves = make_halves()
    merge(halves.into, [halves.other])
    train(tiny_train(tmp_path / "run", halves.into, steps=2))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        pytest.param({"layer_ids": (0, 1)}, r"target_layer_ids: \[0, 1\] there, \[0, 2\] here"),
        pytest.param({"preset": "lossless"}, r"codec\.preset"),
        pytest.param({"max_length": 200}, "data.max_length: 200 there, 256 here"),
    ],
)
def test_other_fingerprints_are_refused_naming_the_fields(
    make_halves: Callable[..., Halves],
    tiny_build: MakeBuild,
    tmp_path: Path,
    change: dict[str, object],
    field: str,
) -> None:
    halves = make_halves()
    build(tiny_build(tmp_path / "foreign", data=[halves.data[1]], **change))
    before = tree(halves.into)
    with pytest.raises(CacheIncompatibleError, match=field):
        merge(halves.into, [halves.other, tmp_path / "foreign"])
    assert tree(halves.into) == before


def test_what_is_refused_changes_nothing(
    make_halves: Callable[..., Halves], tmp_path: Path
) -> None:
    halves = make_halves()
    before = tree(halves.into)
    with pytest.raises(CacheError, match="named twice"):
        merge(halves.into, [halves.other, halves.into])
    (tmp_path / "link").symlink_to(halves.other)
    with pytest.raises(CacheError, match="named twice"):
        merge(halves.into, [halves.other, tmp_path / "link"])
    for paths in ((tmp_path / "absent", halves.other), (halves.into, tmp_path / "absent")):
        with pytest.raises(CacheNotFoundError):
            merge(paths[0], [paths[1]])
    assert not (tmp_path / "absent").exists()
    with builder_lock(halves.into), pytest.raises(CacheLockedError):
        merge(halves.into, [halves.other])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cache_builder.space.free_bytes", lambda path: 10)
        with pytest.raises(OutOfSpaceError, match="needed"):
            merge(halves.into, [halves.other])
    assert tree(halves.into) == before


def test_a_head_of_other_bytes_is_refused(make_halves: Callable[..., Halves]) -> None:
    halves = make_halves()
    before = tree(halves.into)
    flip(halves.other / HEAD, 5000)
    with pytest.raises(CacheError, match=r"head\.safetensors: expected sha256"):
        merge(halves.into, [halves.other])
    fields = json.loads((halves.other / DESCRIPTION).read_text())
    fields["head_sha256"] = sha256_file(halves.other / HEAD)
    (halves.other / DESCRIPTION).write_text(json.dumps(fields))
    with pytest.raises(CacheIncompatibleError, match="expected a head with sha256"):
        merge(halves.into, [halves.other])
    assert tree(halves.into) == before


def test_a_damaged_calibration_is_refused(make_halves: Callable[..., Halves]) -> None:
    halves = make_halves()
    before = contents(halves.into)
    (calibration,) = (halves.other / CALIBRATIONS).iterdir()
    flip(calibration, 500)
    with pytest.raises(CacheError, match="calibrations"):
        merge(halves.into, [halves.other])
    assert contents(halves.into) == before
    assert len(list((halves.into / CALIBRATIONS).iterdir())) == 1


@pytest.mark.parametrize(
    ("name", "is_longer"),
    [
        pytest.param(STATES_OBJECT, False, id="bit-of-states"),
        pytest.param(STATES_OBJECT, True, id="longer-states"),
        pytest.param("zarr.json", False, id="bit-of-json"),
        pytest.param("token_ids/c/0", False, id="bit-of-tokens"),
    ],
)
def test_a_damaged_shard_is_named_and_nothing_of_it_is_added(
    make_halves: Callable[..., Halves], name: str, is_longer: bool
) -> None:
    halves = make_halves()
    other = Cache(halves.other)
    victim = next(  # one that is copied whole
        shard_id
        for shard_id in other.shard_ids
        if halves.common.isdisjoint(
            other.shard(shard_id).sample_id(row) for row in range(len(other.shard(shard_id)))
        )
    )
    path = halves.other / GROUP / victim / name
    if is_longer:
        path.write_bytes(path.read_bytes() + b" ")
    else:
        flip(path, 100 if name == STATES_OBJECT else 5)
    with pytest.raises(ShardCorruptError, match=victim):
        merge(halves.into, [halves.other])
    assert contents(halves.into) == halves.before[0]
    repair(halves.config(1, path=halves.other))
    merge(halves.into, [halves.other])
    assert contents(halves.into) == halves.merged
    assert_clean(halves.into)


def test_killed_at_random_writes_it_ends_with_the_same_samples(
    make_halves: Callable[..., Halves], tmp_path: Path
) -> None:
    killer = Killer(merge, tmp_path)
    counted = make_halves(name="count")
    total = killer.count(counted.into, [counted.other])
    rng, midway = random.Random(1), 0
    for number, part in enumerate(np.linspace(2, total, 6).astype(int)[:-1]):
        halves = make_halves(name=f"cache-{number}")
        moment = rng.randrange(part, part + total // 5)
        assert killer.run(halves.into, [halves.other], kill_at=moment) == -9
        midway += len(list((halves.into / "records").glob("0002-*.json"))) > 0
        assert contents(halves.into) in (halves.before[0], halves.merged)
        if number % 3 == 1:
            code = killer.run(halves.into, [halves.other], kill_at=rng.randrange(2, total))
            assert code in (-9, 0)
        if number % 3 == 2:
            build(halves.config(0))
            assert contents(halves.into).items() >= halves.before[0].items()
        merge(halves.into, [halves.other])
        assert contents(halves.into) == halves.merged
        assert_clean(halves.into)
    assert build(halves.config(0, 1)).num_new_shards == 0
    assert midway > 1, "too few kills fell between two commits: the test has lost its point"


def test_its_command_says_what_was_added(make_halves: Callable[..., Halves]) -> None:
    halves = make_halves()
    arguments = ["merge", str(halves.into), str(halves.other)]
    result = CliRunner().invoke(cli.main, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    assert "18 samples" in result.output
    assert "8 samples" in result.output
    assert json.loads((halves.into / MANIFEST).read_text())["generation"] == 2
    assert CliRunner().invoke(cli.main, arguments[:2]).exit_code == 2


def test_more_source_tags_than_an_index_tells_apart_are_refused_before_anything_is_copied(
    make_halves: Callable[..., Halves], monkeypatch: pytest.MonkeyPatch
) -> None:
    halves = make_halves()
    before = tree(halves.into)
    monkeypatch.setattr(index, "MAX_SOURCES", 1)
    with pytest.raises(CacheError, match="2 source tags, an index can tell 1 apart"):
        merge(halves.into, [halves.other])
    assert tree(halves.into) == before
    monkeypatch.setattr(index, "MAX_SOURCES", 2)
    assert merge(halves.into, [halves.other]).manifest.sources == ("left", "right")
