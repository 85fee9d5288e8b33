"""Pruning removes what is no longer in the data, and not a bit of anything else."""

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from cache_builder import cli
from cache_builder.build import build
from cache_builder.commit import committed_shards, read_record
from cache_builder.config import BuildConfig
from cache_builder.lock import builder_lock
from cache_builder.plan import Plan
from cache_builder.prune import prune
from cache_builder.publication import publish
from cache_builder.repair import repair
from cache_builder.retirement import RETIRED, retire
from cache_builder.rewrite import write_selection
from cache_builder.selection import Selection, plan_selections
from cache_builder.verify import verify_cache
from shared.cache import Cache
from shared.errors import (
    CacheError,
    CacheIncompatibleError,
    CacheLockedError,
    CacheNotFoundError,
    DataError,
    OutOfSpaceError,
    ShardCorruptError,
)
from shared.files import canonical_json, sha256_bytes
from shared.layout import PLANS, record_key
from shared.local_storage import LocalStorage
from shared.shard import GROUP, STATES_OBJECT
from tests.conftest import conversations, write_jsonl
from tests.test_cache_builder.stored import (
    Contents,
    Killer,
    assert_clean,
    contents,
    one_by_one,
    rows_by_id,
    tree,
    without,
)
from tests.test_cache_builder.test_verify import flip
from trainer.config import TrainConfig
from trainer.learner import Learner
from trainer.train import train

pytestmark = pytest.mark.slow

MakeBuild = Callable[..., BuildConfig]
MakeTrain = Callable[..., TrainConfig]


class Case:
    """A cache to prune: one shard goes, two lose some samples, the others stay."""

    def __init__(self, config: BuildConfig, data: Path) -> None:
        self.path = config.cache.path
        self.before = contents(self.path)
        cache = Cache(self.path)
        self.removed, *self.thinned = cache.shard_ids[1:4]
        self.untouched = [cache.shard_ids[0], *cache.shard_ids[4:]]
        rows = rows_by_id(self.path)
        gone = []
        for shard_id in (self.removed, *self.thinned):
            reader = cache.shard(shard_id)
            lost = slice(None) if shard_id == self.removed else slice(1, None, 3)
            gone += [reader.sample_id(row) for row in range(len(reader))[lost]]
        self.gone = set(gone)
        self.data = without(
            data, [rows[sample_id] for sample_id in gone], self.path.parent / "less.jsonl"
        )
        self.config = replace(config, data=replace(config.data, sources=(str(self.data),)))

    @property
    def kept(self) -> Contents:
        return {key: value for key, value in self.before.items() if key not in self.gone}


@pytest.fixture(scope="module")
def built(
    tiny_build: MakeBuild, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], BuildConfig]:
    made: dict[str, BuildConfig] = {}

    def make(preset: str) -> BuildConfig:
        if preset not in made:
            path = tmp_path_factory.mktemp("built") / "cache"
            made[preset] = one_by_one(tiny_build(path, preset=preset))
            build(made[preset])
        return made[preset]

    return make


@pytest.fixture
def make_case(
    built: Callable[[str], BuildConfig], tiny_data: Path, tmp_path: Path
) -> Callable[..., Case]:
    def make(preset: str = "balanced", name: str = "copy") -> Case:
        config = built(preset)
        path = tmp_path / name
        shutil.copytree(config.cache.path, path)
        return Case(replace(config, cache=replace(config.cache, path=path)), tiny_data)

    return make


@pytest.mark.parametrize("preset", ["lossless", "balanced"])
def test_what_stays_is_bit_for_bit_what_was_stored(
    make_case: Callable[..., Case], preset: str
) -> None:
    case = make_case(preset)
    old = Cache(case.path)
    times = {
        path: path.stat().st_mtime_ns
        for shard_id in case.untouched
        for path in (case.path / GROUP / shard_id).rglob("*")
    }
    report = prune(case.config)
    new = Cache(case.path)
    assert contents(case.path) == case.kept
    assert report.num_samples == len(case.gone)
    assert report.num_tokens == old.manifest.totals.num_tokens - new.manifest.totals.num_tokens
    assert report.freed_bytes == old.manifest.totals.stored_bytes - new.manifest.totals.stored_bytes
    assert (report.num_removed, report.num_rewritten) == (1, 2)
    assert new.manifest.generation == 2
    assert new.shard_ids == sorted([*case.untouched, "0002-00000", "0002-00001"])
    assert times == {path: path.stat().st_mtime_ns for path in times}
    assert_clean(case.path)


def test_a_rewritten_shard_says_what_it_holds(make_case: Callable[..., Case]) -> None:
    case = make_case()
    before = {
        shard_id: read_record(case.path, Cache(case.path).spec, shard_id)[0]
        for shard_id in case.thinned
    }
    prune(case.config)
    plan = Plan(case.path / PLANS / "0002")
    assert plan.description["report"]["copied_from"] == {
        "0002-00000": f"copy/{case.thinned[0]}",
        "0002-00001": f"copy/{case.thinned[1]}",
    }
    cache = Cache(case.path)
    for old, shard_id in zip(case.thinned, plan.shard_ids, strict=True):
        record, reader = cache.record(shard_id), cache.shard(shard_id)
        positions = plan.shard_positions(shard_id).tolist()
        assert [plan.sample(p).sample_id for p in positions] == [
            reader.sample_id(row) for row in range(len(reader))
        ]
        states = np.concatenate(
            [cache.unpack(reader.read(row)).float().numpy() for row in range(len(reader))]
        )
        for number, layer in enumerate(record.layers):
            assert layer.rms == pytest.approx(float(np.sqrt((states[:, number] ** 2).mean())))
            assert layer.max_abs == np.abs(states[:, number]).max()
            assert layer.relative_error == before[old].layers[number].relative_error
    rows = rows_by_id(case.path)
    assert all(rows[sample_id] for sample_id in case.kept)  # the file's rows came along


def test_a_dry_run_says_the_same_and_changes_nothing(make_case: Callable[..., Case]) -> None:
    case = make_case()
    before = tree(case.path)
    foretold = prune(case.config, dry_run=True)
    assert tree(case.path) == before
    done = prune(case.config)
    assert foretold.freed_bytes == pytest.approx(done.freed_bytes, rel=0.15)
    assert replace(foretold, freed_bytes=0) == replace(done, freed_bytes=0)


def test_where_all_is_wanted_nothing_happens(make_case: Callable[..., Case]) -> None:
    case = make_case()
    prune(case.config)
    before = tree(case.path)
    report = prune(case.config)
    assert (report.num_samples, report.freed_bytes) == (0, 0)
    assert tree(case.path) == before


def test_building_after_it_captures_nothing(make_case: Callable[..., Case]) -> None:
    case = make_case()
    prune(case.config)
    for _ in range(2):
        report = build(case.config)
        assert report.num_new_shards == 0
        assert report.manifest.generation == 2
    assert contents(case.path) == case.kept


@pytest.mark.parametrize("only_whole", [True, False])
def test_data_that_come_back_are_captured_again_and_nothing_else(
    make_case: Callable[..., Case], tiny_data: Path, only_whole: bool
) -> None:
    case = make_case("lossless")
    everything = replace(case.config, data=replace(case.config.data, sources=(str(tiny_data),)))
    config = case.config
    if only_whole:
        reader, rows = Cache(case.path).shard(case.removed), rows_by_id(case.path)
        lost = [rows[reader.sample_id(row)] for row in range(len(reader))]
        less = without(tiny_data, lost, case.path.parent / "whole.jsonl")
        config = replace(case.config, data=replace(case.config.data, sources=(str(less),)))
    report = prune(config)
    assert len(build(everything).plan) == report.num_samples
    assert contents(case.path) == case.before
    assert_clean(case.path)


def test_data_that_come_back_in_a_configuration_of_before_are_captured_again(
    tiny_build: MakeBuild, tiny_data: Path, tmp_path: Path
) -> None:
    """The plan of that configuration is complete, but what it left out as stored is gone."""
    cache = tmp_path / "cache"
    more = write_jsonl(tmp_path / "more.jsonl", conversations(range(100, 104)))
    both = tiny_build(cache, data=[tiny_data, more])
    build(tiny_build(cache))
    second = build(both).plan
    assert len(second) == 4
    ids = contents(cache).keys()
    prune(tiny_build(cache, data=[more]))
    assert len(Cache(cache).index) == 4
    report = build(both)
    assert report.plan.plan_id != second.plan_id
    assert len(report.plan) == 48
    assert contents(cache).keys() == ids
    assert build(both).plan.plan_id == report.plan.plan_id  # nothing of it is gone now
    assert_clean(cache)


def test_a_rewritten_shard_that_is_damaged_is_repaired(make_case: Callable[..., Case]) -> None:
    case = make_case()
    prune(case.config)
    flip(case.path / GROUP / "0002-00001" / STATES_OBJECT, 100)
    assert {problem.shard for problem in verify_cache(case.path, deep=True)} == {"0002-00001"}
    assert repair(case.config) == ["0002-00001"]
    assert contents(case.path) == case.kept
    assert_clean(case.path)


def test_a_damaged_shard_stops_it_and_goes_on_after_repair(
    make_case: Callable[..., Case],
) -> None:
    case = make_case()
    flip(case.path / GROUP / case.thinned[1] / STATES_OBJECT, 100)
    with pytest.raises(ShardCorruptError, match=case.thinned[1]):
        prune(case.config)
    assert (case.path / RETIRED).exists()
    assert {problem.shard for problem in verify_cache(case.path, deep=True)} == {case.thinned[1]}
    assert repair(case.config) == [case.thinned[1]]
    assert contents(case.path).keys() > case.kept.keys()
    prune(case.config)
    assert contents(case.path) == case.kept
    assert_clean(case.path)


def test_a_damaged_shard_that_is_on_its_way_out_needs_no_repair(
    make_case: Callable[..., Case],
) -> None:
    case = make_case()

    def stopped(*arguments: object, **named: object) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cache_builder.prune.publish", stopped)
        with pytest.raises(KeyboardInterrupt):
            prune(case.config)
    for shard_id in (case.removed, case.thinned[0]):
        flip(case.path / GROUP / shard_id / STATES_OBJECT, 100)
    assert repair(case.config) == []
    assert contents(case.path) == case.kept
    assert_clean(case.path)


def test_older_generations_that_lost_a_shard_say_so(make_case: Callable[..., Case]) -> None:
    case = make_case()
    reader, late = Cache(case.path), Cache(case.path)
    positions = {
        shard_id: int(np.flatnonzero(reader.index.shard == number)[0])
        for number, shard_id in enumerate(reader.shard_ids)
    }
    place = positions[case.thinned[0]]
    before = reader.read(place)  # this one is open when it goes, and stays readable until closed
    prune(case.config)
    assert reader.read(positions[case.untouched[0]])
    assert torch.equal(reader.read(place).packed.planes_PTW, before.packed.planes_PTW)
    for cache, shard_id in ((reader, case.removed), (late, case.removed), (late, case.thinned[0])):
        with pytest.raises(ShardCorruptError, match=r"removed by `cache-builder prune`.*--fresh"):
            cache.read(positions[shard_id])
    with pytest.raises(CacheNotFoundError, match=r"generation 1 is gone.*prune.*newest is 2"):
        Cache(case.path, generation=1)
    assert sorted(p.name for p in (case.path / "generations").iterdir()) == [
        "0002.index.safetensors",
        "0002.json",
    ]


def test_older_generations_that_lost_nothing_stay(
    make_case: Callable[..., Case], tiny_data: Path, tmp_path: Path
) -> None:
    case = make_case()
    more = write_jsonl(tmp_path / "more.jsonl", conversations(range(60, 70)))
    sources = (str(tiny_data), str(more))
    build(replace(case.config, data=replace(case.config.data, sources=sources)))
    prune(replace(case.config, data=replace(case.config.data, sources=sources[:1])))
    assert Cache(case.path).manifest.generation == 3
    assert len(Cache(case.path, generation=1).index) == len(case.before)
    with pytest.raises(CacheNotFoundError, match="generation 2 is gone"):
        Cache(case.path, generation=2)
    assert contents(case.path) == case.before


def test_the_trainer_trains_on_and_a_run_from_before_is_told(
    make_case: Callable[..., Case], tiny_train: MakeTrain, tmp_path: Path
) -> None:
    case = make_case()
    original, steps = Learner.train_step, []

    def stopped(self: Learner, *arguments: object) -> object:
        steps.append(1)
        if len(steps) > 2:
            raise KeyboardInterrupt
        return original(self, *arguments)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Learner, "train_step", stopped)
        with pytest.raises(KeyboardInterrupt):
            train(tiny_train(tmp_path / "old", case.path, steps=4))
    prune(case.config)
    train(tiny_train(tmp_path / "new", case.path, steps=2))
    with pytest.raises(CacheNotFoundError, match="generation 1 is gone"):
        train(tiny_train(tmp_path / "old", case.path, steps=4))


def test_a_sample_in_two_shards_is_left_in_one(make_case: Callable[..., Case]) -> None:
    case = make_case()
    cache = Cache(case.path)
    record = cache.record(case.thinned[0])
    selection = Selection(LocalStorage(case.path), record, np.arange(2), 1, {})
    plan = plan_selections(case.path, [selection], cache.spec, "test")
    write_selection(case.path, selection, cache.spec, plan, plan.shard_ids[0])
    assert publish(case.path, cache.spec).totals.num_samples == len(case.before) + 2
    prune(case.config)
    assert contents(case.path) == case.kept


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        pytest.param(['{"messages": [{"role": "user"'], r"less\.jsonl:\d+", id="malformed-line"),
        pytest.param(
            ['{"messages": [{"role": "user", "content": "hello"}]}'],
            r"no_assistant_turn.*nothing is removed.*--ignore-bad-rows",
            id="bad-row",
        ),
    ],
)
def test_data_that_cannot_be_read_whole_remove_nothing(
    make_case: Callable[..., Case], rows: list[str], message: str
) -> None:
    case = make_case()
    before = tree(case.path)
    with case.data.open("a") as file:
        file.writelines(f"{row}\n" for row in rows)
    with pytest.raises(DataError, match=message):
        prune(case.config)
    with pytest.raises(DataError, match=message):
        prune(case.config, dry_run=True)
    assert tree(case.path) == before


def test_bad_rows_can_be_accepted_but_a_malformed_line_never(
    make_case: Callable[..., Case],
) -> None:
    case = make_case()
    with case.data.open("a") as file:
        file.write('{"messages": [{"role": "user", "content": "hello"}]}\n')
    prune(case.config, ignore_bad_rows=True)
    assert contents(case.path) == case.kept
    with case.data.open("a") as file:
        file.write("{\n")
    with pytest.raises(DataError, match="one JSON object per line"):
        prune(case.config, ignore_bad_rows=True)


def test_what_is_refused_changes_nothing(make_case: Callable[..., Case], tmp_path: Path) -> None:
    case = make_case()
    config, before = case.config, tree(case.path)
    other = write_jsonl(tmp_path / "other.jsonl", conversations(range(100, 110)))
    with pytest.raises(DataError, match="none of its samples is in these data"):
        prune(replace(config, data=replace(config.data, sources=(str(other),))))
    with pytest.raises(CacheIncompatibleError, match="target_layer_ids"):
        prune(replace(config, capture=replace(config.capture, target_layer_ids=(0, 1))))
    with pytest.raises(OutOfSpaceError, match="needed"):
        prune(replace(config, cache=replace(config.cache, min_free_gb=1e6)))
    with builder_lock(case.path), pytest.raises(CacheLockedError):
        prune(config)
    with pytest.raises(CacheNotFoundError):
        prune(replace(config, cache=replace(config.cache, path=tmp_path / "absent")))
    assert not (tmp_path / "absent").exists()
    assert tree(case.path) == before
    (case.path / record_key(case.untouched[0])).unlink()
    with pytest.raises(CacheError, match=r"1 of \d+ shards are missing.*repair"):
        prune(config)
    assert repair(config) == [case.untouched[0]]
    prune(config)
    assert contents(case.path) == case.kept


def test_a_damaged_journal_is_one_line(make_case: Callable[..., Case]) -> None:
    case = make_case()
    path = case.path / RETIRED
    retire(case.path, {"0001-00001": None})
    intact = path.read_text()
    assert "0001-00001" not in committed_shards(case.path)
    path.write_text(intact.replace("00001", "00000"))  # one flipped bit: another shard would go
    with pytest.raises(CacheError, match=r"retired\.json.*sha256"):
        committed_shards(case.path)
    for shards in (["a"], {"../x": None}, {"0001-00001": 5}, {"0001-00001": "x"}, None):
        digest = sha256_bytes(canonical_json(shards))
        path.write_text(json.dumps({"shards": shards, "sha256": digest}))
        with pytest.raises(CacheError, match=r"retired\.json"):
            committed_shards(case.path)
    for text in ("{", "{}", "[]", '{"0001-00001": null}'):
        path.write_text(text)
        with pytest.raises(CacheError, match=r"retired\.json"):
            committed_shards(case.path)


def test_killed_at_random_writes_it_ends_with_the_same_cache(
    make_case: Callable[..., Case], tmp_path: Path
) -> None:
    """After each kill a reader has the old samples or the new ones, and the next command goes on:
    the same one, or a build of the same data, which captures nothing."""
    killer = Killer(prune, tmp_path)
    total = killer.count(make_case(name="count").config)
    rng, midway = random.Random(0), 0
    for number, part in enumerate(np.linspace(2, total, 7).astype(int)[:-1]):
        case = make_case(name=f"cache-{number}")
        moment = rng.randrange(part, part + total // 6)
        assert killer.run(case.config, kill_at=moment) == -9
        midway += (case.path / RETIRED).exists()
        assert contents(case.path) in (case.before, case.kept)
        if number % 3 == 1:
            assert killer.run(case.config, kill_at=rng.randrange(2, total)) in (-9, 0)
            assert contents(case.path).keys() >= case.kept.keys()
        if number % 3 == 2:
            assert build(case.config).num_new_shards == 0
            assert contents(case.path).items() >= case.kept.items()
        prune(case.config)
        assert contents(case.path) == case.kept
        assert_clean(case.path)
        assert build(case.config).num_new_shards == 0
    assert midway > 1, "too few kills fell after the first shard: the test has lost its point"


def test_its_command_says_what_goes(make_case: Callable[..., Case], tmp_path: Path) -> None:
    case = make_case()
    config = case.config
    (tmp_path / "build.toml").write_text(
        f"""
        [cache]
        path = "{case.path}"
        min_free_gb = 0
        [target]
        path = "{config.target.path}"
        dtype = "float32"
        [data]
        sources = ["{case.data}"]
        max_length = 256
        [capture]
        target_layer_ids = [0, 2]
        """
    )
    arguments = ["prune", "--config", str(tmp_path / "build.toml")]
    dry = CliRunner().invoke(cli.main, [*arguments, "--dry-run"], catch_exceptions=False)
    done = CliRunner().invoke(cli.main, arguments, catch_exceptions=False)
    for result, verb in ((dry, "would go"), (done, "gone")):
        assert result.exit_code == 0
        assert f"{verb}" in result.output
        assert f"{len(case.gone)} samples" in result.output
        assert "1 removed, 2 rewritten" in result.output
    assert json.loads((case.path / "manifest.json").read_text())["generation"] == 2
