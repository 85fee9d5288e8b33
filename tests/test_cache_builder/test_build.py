"""Building, resuming after a kill, extending, refusing: whole and as asked for, or absent."""

import json
import multiprocessing
import os
import random
import re
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from cache_builder.build import build
from cache_builder.commit import committed_shards
from cache_builder.config import BuildConfig, Forward, TargetConfig
from cache_builder.lock import builder_lock
from cache_builder.pool import Events
from cache_builder.processes import run_processes
from cache_builder.progress import Progress
from cache_builder.target import Target
from cache_builder.worker import Job, Task
from shared.cache import Cache
from shared.errors import (
    CacheIncompatibleError,
    CacheLockedError,
    CaptureError,
    DataError,
    DraftCacheError,
    TargetError,
)
from shared.layout import MANIFEST, RECORDS, WIP, record_key
from tests.conftest import conversations, write_jsonl
from tests.test_cache_builder.stored import Killer, assert_clean
from tests.test_shared.test_files import needs_proc, synced

pytestmark = pytest.mark.slow

MakeBuild = Callable[..., BuildConfig]


def digests(cache: Path) -> dict[str, str]:
    """What identifies a cache to the bit: the digest of every record, which hold all others."""
    manifest = json.loads((cache / MANIFEST).read_text())
    return {**manifest["records"], "index": manifest["index"]["sha256"]}


@pytest.fixture(scope="module")
def many_shards(tiny_build: MakeBuild) -> MakeBuild:
    def make(cache: Path, **options: object) -> BuildConfig:
        config = tiny_build(cache, **options)
        return replace(config, plan=replace(config.plan, shard_mib=0.125))

    return make


@pytest.fixture(scope="module")
def undisturbed(many_shards: MakeBuild, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    path = tmp_path_factory.mktemp("undisturbed") / "cache"
    build(many_shards(path))
    return digests(path)


def test_lossless_states_are_the_hook_outputs_bit_for_bit(
    tiny_build: MakeBuild, tiny_target: Path, tmp_path: Path
) -> None:
    config = tiny_build(tmp_path / "cache", preset="lossless", dtype="bfloat16")
    # One sample a forward: a matrix product may round differently in another batch shape.
    build(replace(config, capture=replace(config.capture, batch_tokens=1)))
    cache = Cache(tmp_path / "cache")
    target = Target.load(tiny_target, TargetConfig(path=str(tiny_target)), (0, 2), "none", "cpu")
    for position in range(len(cache.index)):
        sample = cache.read(position)
        (states,) = target.capture([sample.token_ids])
        assert len(sample.token_ids) == cache.index.num_tokens[position]
        assert torch.equal(cache.unpack(sample).view(torch.int16), states.view(torch.int16))


def test_building_again_captures_nothing(many_shards: MakeBuild, tmp_path: Path) -> None:
    config = many_shards(tmp_path / "cache")
    first = build(config)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("c/0/0/0")}
    second = build(config)
    assert first.num_new_shards > 3
    assert second.num_new_shards == 0
    assert second.manifest == first.manifest
    assert before == {p: p.stat().st_mtime_ns for p in (tmp_path / "cache").rglob("c/0/0/0")}


def test_more_data_captures_only_the_new_samples(
    many_shards: MakeBuild, tiny_data: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    build(many_shards(cache))
    first = Cache(cache)
    more = write_jsonl(tmp_path / "more.jsonl", conversations(range(40, 60), "new"))
    report = build(many_shards(cache, data=[tiny_data, more]))
    second = Cache(cache)
    assert len(first.index) == 48
    assert len(report.plan) == 12  # 40..47 have the ids of samples that are there already
    assert len(second.index) == 60
    assert second.manifest.generation == 2
    assert second.manifest.sources == ("even", "odd", "new")
    assert report.plan.description["report"]["already_cached"] == 48
    # What was there is untouched, and readers of the first generation still have it.
    assert first.manifest.records.items() <= second.manifest.records.items()
    old = Cache(cache, generation=1)
    assert [old.read(i).sample_id for i in range(48)] == [
        first.index.sample_id(i) for i in range(48)
    ]


def test_data_that_change_and_change_back_store_no_sample_twice(
    many_shards: MakeBuild, tiny_data: Path, tmp_path: Path
) -> None:
    """A build is stopped, the data grow, the rest is built, and the data shrink again."""
    from cache_builder import build as building

    cache = tmp_path / "cache"
    original = building.capture_shards

    def first_shards_only(*arguments: object) -> None:
        config, job, plan, tasks, prepared = arguments
        original(config, job, plan, tasks[:2], prepared)  # type: ignore[arg-type, index]
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(building, "capture_shards", first_shards_only)
        with pytest.raises(KeyboardInterrupt, match=r"2 of [0-9]+ shards.*same command"):
            build(many_shards(cache))
    assert len(committed_shards(cache)) == 2
    more = write_jsonl(tmp_path / "more.jsonl", conversations(range(48, 60)))
    build(many_shards(cache, data=[tiny_data, more]))
    assert len(Cache(cache).index) == 60
    report = build(many_shards(cache))
    assert report.num_new_shards == 0
    index = Cache(cache).index
    assert len({row.tobytes() for row in index.sample_ids}) == len(index) == 60


def test_every_sample_is_stored_once_with_its_own_tokens(
    many_shards: MakeBuild, tmp_path: Path
) -> None:
    report = build(many_shards(tmp_path / "cache"))
    cache = Cache(tmp_path / "cache")
    stored = {cache.read(i).sample_id: cache.read(i) for i in range(len(cache.index))}
    assert len(stored) == len(report.plan) == 48
    for position in range(len(report.plan)):
        planned = report.plan.sample(position)
        sample = stored[planned.sample_id]
        assert np.array_equal(sample.token_ids, planned.token_ids)
        assert np.array_equal(sample.loss_mask, planned.loss_mask)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        pytest.param({"layer_ids": (0, 1)}, "target_layer_ids", id="taps"),
        pytest.param({"preset": "lossless"}, r"codec\.preset", id="codec"),
        pytest.param({"max_length": 200}, r"data\.max_length", id="length"),
        pytest.param({"dtype": "bfloat16"}, "target.dtype", id="dtype"),
    ],
)
def test_other_settings_are_refused_naming_the_field(
    tiny_build: MakeBuild, tiny_cache: Path, change: dict[str, object], field: str
) -> None:
    before = (tiny_cache / MANIFEST).read_bytes()
    with pytest.raises(CacheIncompatibleError, match=field):
        build(tiny_build(tiny_cache, **change))
    assert (tiny_cache / MANIFEST).read_bytes() == before


def test_another_template_text_is_another_cache(
    tiny_build: MakeBuild, tiny_cache: Path, tiny_target: Path, tmp_path: Path
) -> None:
    import shutil

    target = tmp_path / "target"
    shutil.copytree(tiny_target, target)
    template = target / "chat_template.jinja"
    template.write_text(template.read_text() + " ")
    config = replace(tiny_build(tiny_cache), target=TargetConfig(path=str(target), dtype="float32"))
    with pytest.raises(CacheIncompatibleError, match="chat template"):
        build(config)


def test_two_workers_make_the_cache_that_one_makes(
    many_shards: MakeBuild, undisturbed: dict[str, str], tmp_path: Path
) -> None:
    config = many_shards(tmp_path / "cache")
    build(replace(config, workers=replace(config.workers, num_workers=2)))
    assert digests(tmp_path / "cache") == undisturbed


@needs_proc
def test_every_file_of_a_shard_is_synced_before_its_record_is_written(
    tiny_build: MakeBuild, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a loss of power could leave a shard that counts as committed and is not there."""
    path = tmp_path / "cache"
    events = synced(monkeypatch)
    build(tiny_build(path))
    cache = Cache(path)
    for shard_id in cache.shard_ids:
        wip, record = str(path / WIP / shard_id), str(path / record_key(shard_id))
        committed = next(i for i, event in enumerate(events) if event.startswith(record))
        of_shard = [e.removeprefix(wip) for e in events[:committed] if e.startswith(wip)]
        files = {event.partition("/")[2] for event in of_shard}
        assert cache.record(shard_id).files.keys() <= files


def test_killed_at_any_write_the_build_ends_with_the_same_cache(
    many_shards: MakeBuild, undisturbed: dict[str, str], tmp_path: Path
) -> None:
    """SIGKILL before a write, 20 times; each kill is followed by a resume, which may be killed."""
    killer = Killer(build, tmp_path)
    total = killer.count(many_shards(tmp_path / "counting"))
    rng = random.Random(0)
    kills = midway = caches = 0
    while kills < 20:
        config = many_shards(tmp_path / f"cache-{caches}")
        caches += 1
        while (code := killer.run(config, kill_at=rng.randrange(1, total))) == -signal.SIGKILL:
            kills += 1
            midway += (config.cache.path / RECORDS).exists() and bool(
                committed_shards(config.cache.path)
            )
        assert code == 0
        assert digests(config.cache.path) == undisturbed
        assert_clean(config.cache.path)
    assert midway > 0, "no kill fell between two commits: the test has lost its point"


def test_killed_at_any_rename_before_there_is_a_cache_the_build_goes_on(
    many_shards: MakeBuild, undisturbed: dict[str, str], tmp_path: Path
) -> None:
    """A kill leaves the partial file of what should have been in place with the rename."""
    killer = Killer(build, tmp_path)
    counting = many_shards(tmp_path / "counting")
    left = [
        (number, Path(write.partition(" ")[2]).relative_to(counting.cache.path).as_posix())
        for number, write in enumerate(killer.writes(counting), 1)
        if write.startswith("os.rename") and write.endswith(".partial")
    ]
    first = [number for number, name in left if name.startswith(("head.", "cache.json."))]
    first += [number for number, name in left if name.startswith(("target/", "shards.zarr/"))][:2]
    assert len(first) == 4
    for number in first:
        config = many_shards(tmp_path / f"cache-{number}")
        assert killer.run(config, kill_at=number) == -signal.SIGKILL
        assert list(config.cache.path.rglob("*.partial"))
        build(config)
        assert digests(config.cache.path) == undisturbed
        assert_clean(config.cache.path)


def test_nothing_is_published_without_a_shard_that_was_planned(
    many_shards: MakeBuild, undisturbed: dict[str, str], tmp_path: Path
) -> None:
    """As if something had taken its record away after the commit."""
    from cache_builder import build as building

    cache = tmp_path / "cache"
    original = building.capture_shards

    def one_too_few(*arguments: object) -> None:
        original(*arguments)  # type: ignore[arg-type]  # passed through
        (cache / record_key("0001-00001")).unlink()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(building, "capture_shards", one_too_few)
        with pytest.raises(CaptureError, match=r"1 shard that should be .* \(0001-00001\)"):
            build(many_shards(cache))
    assert not (cache / MANIFEST).exists()
    build(many_shards(cache))
    assert digests(cache) == undisturbed
    assert_clean(cache)


def test_a_killed_worker_costs_no_shard(
    many_shards: MakeBuild, undisturbed: dict[str, str], tmp_path: Path
) -> None:
    """One of two workers is killed after its first shard; the other captures the rest."""
    cache = tmp_path / "cache"
    config = many_shards(cache)
    config = replace(config, workers=replace(config.workers, num_workers=2))
    killed = []

    def kill_one(self: Progress, name: str, tokens: int) -> None:
        if killed:
            return
        children = multiprocessing.active_children()
        victim = next(child for child in children if child.name == name)
        os.kill(victim.pid or 0, signal.SIGKILL)
        killed.append(name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Progress, "advanced", kill_one)
        build(config)
    assert killed
    assert digests(cache) == undisturbed


def test_a_target_that_cannot_be_loaded_is_said_by_the_worker(
    many_shards: MakeBuild, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    report = build(many_shards(cache))
    job = Job(
        cache=cache,
        plan=report.plan.directory,
        spec=Cache(cache).spec,
        target_path=tmp_path,  # not a target: every worker refuses
        target=TargetConfig(path="-"),
        target_stamps={},
        min_free_bytes=0,
    )
    events = Events(on_prepared=lambda prepared: None)
    tasks = [Task("0001-00000", Forward(1, 1))]
    with pytest.raises(TargetError):
        run_processes(job, [("cpu",), ("cpu",)], tasks, None, events)


def test_a_second_builder_is_refused(tiny_build: MakeBuild, tmp_path: Path) -> None:
    config = tiny_build(tmp_path / "cache")
    build(config)
    with builder_lock(tmp_path / "cache"), pytest.raises(CacheLockedError, match="another builder"):
        build(config)
    build(config)  # the lock went with its holder


def test_unusable_states_fail_the_build_by_sample(tiny_build: MakeBuild, tmp_path: Path) -> None:
    original = Target.capture

    def poisoned(self: Target, token_ids: list[np.ndarray]) -> list[torch.Tensor]:
        states = [state.clone() for state in original(self, token_ids)]
        for ids, state in zip(token_ids, states, strict=True):
            if len(ids) == 58:
                state[3, 1, 5] = torch.nan
        return states

    config = tiny_build(tmp_path / "cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Target, "capture", poisoned)
        with pytest.raises(CaptureError, match="block 2 are not finite"):
            build(config)
        # Allowed to lose some, the build ends, and the sample is named in the record.
        build(replace(config, capture=replace(config.capture, max_quarantined_fraction=0.5)))
    cache = Cache(tmp_path / "cache")
    assert cache.manifest.totals.quarantined == 1
    assert len(cache.index) == 47
    assert 58 not in cache.index.num_tokens


def test_a_directory_with_other_files_is_left_alone(tiny_build: MakeBuild, tmp_path: Path) -> None:
    for name in ("thesis.tex", "film.partial", "head.safetensors.partial", "film.1.partial"):
        (tmp_path / name).write_text("x")
        with pytest.raises(DataError, match=re.escape(name)):
            build(tiny_build(tmp_path))
        (tmp_path / name).unlink()  # it was left there


def test_an_unwritable_path_is_one_line(tiny_build: MakeBuild, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(DraftCacheError, match="cannot be written"):
        build(tiny_build(tmp_path / "file" / "cache"))


def test_a_full_disk_keeps_what_is_committed(
    many_shards: MakeBuild, undisturbed: dict[str, str], tmp_path: Path
) -> None:
    import errno

    from shared.errors import OutOfSpaceError
    from shared.shard_writer import ShardWriter

    cache = tmp_path / "cache"
    original = ShardWriter._append
    written = []

    def full(self: ShardWriter, data: bytes) -> None:
        written.append(len(data))
        if len(written) > 30:
            from shared.files import writing

            with writing(self._directory):
                raise OSError(errno.ENOSPC, "No space left on device")
        original(self, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShardWriter, "_append", full)
        with pytest.raises(OutOfSpaceError, match="free some space"):
            build(many_shards(cache))
    assert committed_shards(cache)
    build(many_shards(cache))
    assert digests(cache) == undisturbed


def test_a_target_that_is_swapped_between_hashing_and_loading_is_refused(
    tiny_build: MakeBuild, tiny_target: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "target"
    shutil.copytree(tiny_target, copy)
    config = tiny_build(tmp_path / "cache")
    config = replace(config, target=replace(config.target, path=str(copy)))
    original = Target.load

    def swapped(*arguments: object) -> Target:
        data = (copy / "model.safetensors").read_bytes()
        (copy / "other").write_bytes(data[:-1] + b"\0")
        (copy / "other").replace(copy / "model.safetensors")
        return original(*arguments)  # type: ignore[arg-type]  # passed through

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Target, "load", swapped)
        with pytest.raises(TargetError, match=r"model\.safetensors: changed since the target was"):
            build(config)
    assert not committed_shards(tmp_path / "cache")


def test_data_that_change_between_hashing_and_reading_are_refused(
    tiny_build: MakeBuild, tmp_path: Path
) -> None:
    from cache_builder import planning

    data = write_jsonl(tmp_path / "data.jsonl", conversations(range(6)))
    original = planning.digest_file

    def grown(file: Path) -> str:
        digest = original(file)
        write_jsonl(file, conversations(range(7)))
        return digest

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "digest_file", grown)
        with pytest.raises(DataError, match=r"data\.jsonl: changed while it was read"):
            build(tiny_build(tmp_path / "cache", data=[data]))
    assert not committed_shards(tmp_path / "cache")
    assert build(tiny_build(tmp_path / "cache", data=[data])).manifest.totals.num_samples == 7


def test_every_dropped_row_is_listed_beside_the_plan(tiny_build: MakeBuild, tmp_path: Path) -> None:
    bad = {"messages": [{"role": "user", "content": "q"}]}
    data = write_jsonl(tmp_path / "data.jsonl", [*conversations(range(3)), *20 * [bad]])
    report = build(tiny_build(tmp_path / "cache", data=[data]))
    lines = (report.plan.directory / "dropped.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["row"] for row in rows] == list(range(4, 24))
    assert {row["reason"] for row in rows} == {"no_assistant_turn"}
    assert {row["file"] for row in rows} == {str(data)}


def test_source_tags_of_all_builds_of_a_cache_count(tiny_build: MakeBuild, tmp_path: Path) -> None:
    from cache_builder import corpus

    cache, data = tmp_path / "cache", tmp_path / "data.jsonl"
    build(tiny_build(cache, data=[write_jsonl(data, conversations(range(3), "a"))]))
    more = conversations(range(3, 4), "b") + conversations(range(4, 6), "c")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "MAX_SOURCES", 2)
        with pytest.raises(
            DataError, match=r"data\.jsonl:2: source tag 'c' is one more than the 2"
        ):
            build(tiny_build(cache, data=[write_jsonl(data, more)]))
    assert len(build(tiny_build(cache, data=[data])).manifest.sources) == 3


def test_every_file_of_the_tokenizer_is_kept_with_the_cache(
    tiny_build: MakeBuild, tiny_target: Path, tmp_path: Path
) -> None:
    """Some tokenizers have no `tokenizer.json`, and without these the ids say nothing."""
    target, cache = tmp_path / "target", tmp_path / "cache"
    shutil.copytree(tiny_target, target)
    for name in ("vocab.json", "merges.txt", "added_tokens.json"):
        (target / name).write_text("{}" if name.endswith("json") else "")
    data = write_jsonl(tmp_path / "data.jsonl", conversations(range(2)))
    config = tiny_build(cache, data=[data])
    build(replace(config, target=replace(config.target, path=str(target))))
    for name in ("vocab.json", "merges.txt", "added_tokens.json", "tokenizer.json"):
        assert Cache(cache).target_file(name) == (target / name).read_bytes()
        assert name in Cache(cache).target_files
