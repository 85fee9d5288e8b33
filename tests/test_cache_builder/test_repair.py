"""Repair makes again what the rest of the cache holds, and says what no command can."""

import contextlib
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_builder import build as building
from cache_builder import planning
from cache_builder.build import build
from cache_builder.config import BuildConfig, TargetConfig
from cache_builder.inspect import inspect_cache
from cache_builder.plan import find_plans
from cache_builder.planning import stored_samples
from cache_builder.publication import publish
from cache_builder.repair import repair
from cache_builder.target import Target
from cache_builder.verify import verify_cache, verify_unpublished
from shared.cache import Cache
from shared.errors import CacheError, CaptureError, DataError, DraftCacheError
from shared.files import canonical_json, sha256_bytes
from shared.layout import DESCRIPTION, HEAD, MANIFEST, PLANS, generation_key, record_key
from shared.shard import GROUP, STATES_OBJECT
from tests.conftest import conversations, write_jsonl
from tests.test_shared.mutate import json_values, mutated

MakeBuild = Callable[..., BuildConfig]
INDEX = generation_key(1, "index.safetensors")


@pytest.fixture
def copy(tiny_cache: Path, tmp_path: Path) -> Path:
    path = tmp_path / "copy"
    shutil.copytree(tiny_cache, path)
    return path


@pytest.fixture
def without_target(tiny_build: MakeBuild, copy: Path) -> BuildConfig:
    """The configuration of `copy` on a machine that does not have the target."""
    return replace(tiny_build(copy), target=TargetConfig(path=str(copy / "nowhere")))


@pytest.mark.parametrize(
    ("name", "piece"),
    [
        pytest.param(INDEX, "index", id="index"),
        pytest.param(MANIFEST, "manifest", id="manifest"),
        pytest.param(generation_key(1, "json"), "generation", id="generation"),
    ],
)
@pytest.mark.parametrize("data", [None, b"{", b""], ids=["lost", "damaged", "empty"])
def test_metadata_are_made_again_from_the_cache_itself(
    copy: Path, without_target: BuildConfig, name: str, piece: str, data: bytes | None
) -> None:
    before = (copy / name).read_bytes()
    if data is None:
        (copy / name).unlink()
    else:
        (copy / name).write_bytes(data)
    (problem,) = verify_cache(copy, deep=False)
    assert problem.piece == piece
    assert problem.shard is None
    assert name in problem.message
    assert repair(without_target) == []
    assert (copy / name).read_bytes() == before
    assert verify_cache(copy, deep=True) == []


def test_an_index_and_a_shard_lost_together_come_back(copy: Path, tiny_build: MakeBuild) -> None:
    before = (copy / INDEX).read_bytes()
    victim = Cache(copy).shard_ids[1]
    (copy / INDEX).unlink()
    shutil.rmtree(copy / GROUP / victim)
    assert repair(tiny_build(copy)) == [victim]
    assert (copy / INDEX).read_bytes() == before
    assert verify_cache(copy, deep=True) == []


def test_copies_of_the_targets_files_are_checked_and_copied_again(
    copy: Path, tiny_build: MakeBuild
) -> None:
    path = copy / "target" / "config.json"
    before = path.read_bytes()
    path.write_bytes(before.replace(b"64", b"65", 1))
    with pytest.raises(CacheError, match=r"target/config\.json: expected sha256"):
        Cache(copy).target_file("config.json")
    (problem,) = verify_cache(copy, deep=False)
    assert (problem.piece, problem.name) == ("target", "config.json")
    repair(tiny_build(copy))
    assert path.read_bytes() == before
    (copy / "target" / "chat_template.jinja").unlink()
    assert [problem.kind for problem in verify_cache(copy, deep=False)] == ["missing"]
    repair(tiny_build(copy))
    assert verify_cache(copy, deep=False) == []


def test_a_changed_plan_is_named_and_refused(copy: Path, tiny_build: MakeBuild) -> None:
    path = copy / "plans" / "0001" / "plan.json"
    path.write_text(path.read_text().replace("even", "evil"))
    (problem,) = verify_cache(copy, deep=False)
    assert (problem.piece, problem.name) == ("plan", "0001")
    with pytest.raises(CacheError, match=r"plan\.json: states sha256.*delete its directory"):
        build(tiny_build(copy))
    shutil.rmtree(path.parent)
    assert build(tiny_build(copy)).num_new_shards == 0
    assert len(Cache(copy).index) == 48


def test_a_committed_shard_that_was_never_published_is_repaired(
    copy: Path, tiny_build: MakeBuild, tiny_data: Path, tmp_path: Path
) -> None:
    """A build was killed before it published, and one of its shards was damaged since."""
    more = write_jsonl(tmp_path / "more.jsonl", conversations(range(60, 64)))
    config = tiny_build(copy, data=[tiny_data, more])
    manifest = (copy / MANIFEST).read_bytes()
    build(config)
    after = Cache(copy).manifest
    for path in (copy / "generations").glob("0002*"):
        path.unlink()
    (copy / MANIFEST).write_bytes(manifest)
    (copy / GROUP / "0002-00000" / "token_ids" / "c" / "0").write_bytes(b"x")
    with pytest.raises(CacheError, match="repair"):
        build(config)
    assert repair(config) == ["0002-00000"]
    assert Cache(copy).manifest == after


def test_shards_let_go_of_are_captured_by_the_same_build_whose_plan_left_them_out(
    copy: Path, tiny_build: MakeBuild, tiny_data: Path, tmp_path: Path
) -> None:
    more = write_jsonl(tmp_path / "more.jsonl", conversations(range(100, 104)))
    config = tiny_build(copy, data=[tiny_data, more])
    build(config)
    lost = Cache(copy).shard_ids[1]
    (copy / GROUP / lost / "token_ids" / "c" / "0").write_bytes(b"x")
    shutil.rmtree(copy / PLANS / "0001")
    with pytest.raises(CacheError, match="no plan on disk"):
        repair(config)
    repair(config, drop_lost=True)
    left = len(Cache(copy).index)
    assert left < 52
    assert len(build(config).plan) == 52 - left
    assert len(Cache(copy).index) == 52
    assert verify_cache(copy, deep=True) == []


def test_a_half_finished_plan_is_followed_only_while_what_it_left_out_is_stored(
    copy: Path, tiny_build: MakeBuild, tiny_data: Path, tmp_path: Path
) -> None:
    more = write_jsonl(tmp_path / "more.jsonl", conversations(range(100, 104)))
    config = tiny_build(copy, data=[tiny_data, more])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(building, "capture_shards", _interrupted)
        with pytest.raises(KeyboardInterrupt):
            build(config)
        with pytest.raises(KeyboardInterrupt):
            build(config)
    assert [path.name for path in find_plans(copy / PLANS)] == ["0001", "0002"]
    lost = Cache(copy).shard_ids[1]
    (copy / GROUP / lost / "token_ids" / "c" / "0").write_bytes(b"x")
    shutil.rmtree(copy / PLANS / "0001")
    repair(config, drop_lost=True)
    assert build(config).plan.plan_id == "0003"
    assert len(Cache(copy).index) == 52


def test_a_plan_that_does_not_say_on_what_it_relies_is_followed_only_if_on_nothing(
    copy: Path, tiny_build: MakeBuild, tiny_data: Path, tmp_path: Path
) -> None:
    """As older versions wrote them."""
    more = write_jsonl(tmp_path / "more.jsonl", conversations(range(100, 104)))
    config = tiny_build(copy, data=[tiny_data, more])
    build(config)
    for directory in find_plans(copy / PLANS):
        fields = json.loads((directory / "plan.json").read_text())
        del fields["relies_on"], fields["sha256"]
        digest = sha256_bytes(canonical_json(fields))
        (directory / "plan.json").write_text(json.dumps({**fields, "sha256": digest}))
    assert build(tiny_build(copy)).plan.plan_id == "0001"
    assert build(config).plan.plan_id == "0003"
    assert len(Cache(copy).index) == 52


def _interrupted(*arguments: object) -> None:
    raise KeyboardInterrupt


def test_files_among_the_records_are_named_and_left_alone(
    copy: Path, tiny_build: MakeBuild, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    for name in ("notes.json", "0001-00000.json.bak", "README"):
        (copy / "records" / name).write_text("mine")
    problems = verify_cache(copy, deep=False)
    assert {problem.kind for problem in problems} == {"foreign"}
    assert {problem.name for problem in problems} == {"notes.json", "0001-00000.json.bak", "README"}
    more = write_jsonl(tmp_path / "more.jsonl", conversations(range(60, 64)))
    build(tiny_build(copy, data=[more]))
    assert "notes.json" in caplog.text
    assert (copy / "records" / "notes.json").read_text() == "mine"
    assert len(Cache(copy).index) == 52


def test_a_changed_record_is_not_published_again(
    copy: Path, tiny_build: MakeBuild, tmp_path: Path
) -> None:
    """It still is a record, only with another count: no build may take it over."""
    victim = Cache(copy).shard_ids[0]
    path = copy / record_key(victim)
    fields = json.loads(path.read_text())
    path.write_text(json.dumps({**fields, "num_supervised": fields["num_supervised"] + 1}))
    more = write_jsonl(tmp_path / "more.jsonl", conversations(range(60, 64)))
    with pytest.raises(CacheError, match=rf"changed \({victim}\).*repair"):
        build(tiny_build(copy, data=[more]))
    assert repair(tiny_build(copy)) == [victim]
    assert verify_cache(copy, deep=True) == []


class Poison:
    """Makes the states of samples of one length unusable."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.length = 0
        original = Target.capture

        def poisoned(target: Target, token_ids: Any) -> Any:
            states = [state.clone() for state in original(target, token_ids)]
            for ids, state in zip(token_ids, states, strict=True):
                if len(ids) == self.length:
                    state[3, 1, 5] = torch.nan
            return states

        monkeypatch.setattr(Target, "capture", poisoned)


def allowing(config: BuildConfig, fraction: float) -> BuildConfig:
    return replace(config, capture=replace(config.capture, max_quarantined_fraction=fraction))


def test_quarantined_samples_are_captured_again_when_told_to_and_count_once(
    tiny_build: MakeBuild, tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison = Poison(monkeypatch)
    cache = tmp_path / "cache"
    poison.length = 58
    config = tiny_build(cache)
    build(allowing(config, 0.5))
    assert Cache(cache).manifest.totals.quarantined == 1
    poison.length = 0
    # Neither the same build nor one with more data tries it again.
    with pytest.raises(CaptureError, match=r"1 of 48 samples.*--retry-quarantined"):
        build(config)
    more = write_jsonl(tmp_path / "more.jsonl", conversations(range(60, 64)))
    larger = tiny_build(cache, data=[tiny_data, more])
    assert len(build(allowing(larger, 0.5)).plan) == 4
    assert Cache(cache).manifest.totals.quarantined == 1
    # Told to, one that fails again still counts once; one that does not, not any more.
    poison.length = 58
    build(allowing(larger, 0.5), retry_quarantined=True)
    assert Cache(cache).manifest.totals.quarantined == 1
    poison.length = 0
    report = build(larger, retry_quarantined=True)
    assert len(report.plan) == 1
    assert report.manifest.totals.quarantined == 0
    assert len(Cache(cache).index) == 52
    assert build(larger, retry_quarantined=True).num_new_shards == 0
    assert verify_cache(cache, deep=True) == []


def test_a_retry_reads_the_data_with_the_checks_of_any_build(
    tiny_build: MakeBuild,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    poison = Poison(monkeypatch)
    poison.length = 58
    rows = [*conversations(range(32)), {"messages": [{"role": "user", "content": "q"}]}]
    data = write_jsonl(tmp_path / "data.jsonl", rows)
    config = tiny_build(tmp_path / "cache", data=[data])
    build(allowing(config, 0.5))
    poison.length = 0
    original = planning.digest_file

    def grown(file: Path) -> str:
        digest = original(file)
        write_jsonl(file, [*rows, *conversations(range(60, 61))])
        return digest

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "digest_file", grown)
        with pytest.raises(DataError, match=r"data\.jsonl: changed while it was read"):
            build(config, retry_quarantined=True)
    caplog.clear()
    assert len(build(config, retry_quarantined=True).plan) == 2
    assert "every dropped row is listed in" in caplog.text


def test_repair_publishes_no_more_unusable_samples_than_a_build(
    copy: Path, tiny_build: MakeBuild, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = Cache(copy)
    victim = cache.shard_ids[0]
    poison = Poison(monkeypatch)
    poison.length = int(cache.index.num_tokens[0])
    before = (copy / MANIFEST).read_bytes()
    (copy / GROUP / victim / STATES_OBJECT).unlink()
    with pytest.raises(CaptureError, match="max_quarantined_fraction allows"):
        repair(tiny_build(copy))
    assert (copy / MANIFEST).read_bytes() == before
    poison.length = 0
    build_again = repair(tiny_build(copy))  # the shard's record is not the published one
    assert build_again == [victim]
    assert (copy / MANIFEST).read_bytes() == before


OTHER_TYPES: list[Any] = [None, "x", [], {}, True, -1.5, 10**400]


def _documents(cache: Path) -> list[str]:
    return [
        DESCRIPTION,
        MANIFEST,
        generation_key(1, "json"),
        record_key(Cache(cache).shard_ids[0]),
        "plans/0001/plan.json",
    ]


def _ours(operation: Callable[..., object], *arguments: object) -> None:
    """Any exception but ours is a bug."""
    with contextlib.suppress(DraftCacheError):
        operation(*arguments)


def _look(path: Path) -> None:
    verify_cache(path, deep=False)


@pytest.mark.parametrize("number", range(5))
def test_no_change_of_a_metadata_file_is_a_traceback_for_readers(copy: Path, number: int) -> None:
    """Every key removed, every value of every other type, and every file cut at many places."""
    path = copy / _documents(copy)[number]
    intact = path.read_bytes()
    fields = json.loads(intact)
    versions = [json.dumps({k: v for k, v in fields.items() if k != key}) for key in fields]
    versions += [
        json.dumps({**fields, key: value})
        for key in fields
        for value in OTHER_TYPES
        if type(value) is not type(fields[key])
    ]
    versions += [intact[:size].decode() for size in range(0, len(intact), len(intact) // 7)]
    for version in versions:
        path.write_text(version)
        for operation in (Cache, inspect_cache, _look):
            _ours(operation, copy)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(5))
def test_no_change_of_a_metadata_file_is_a_traceback_for_the_builder(
    copy: Path, tiny_build: MakeBuild, tmp_path: Path, number: int
) -> None:
    """Each key removed before a build, and of another type before a repair."""
    name = _documents(copy)[number]
    fields = json.loads((copy / name).read_text())
    for position, key in enumerate(fields):
        value = OTHER_TYPES[position % len(OTHER_TYPES)]
        for command, version in (
            (build, {k: v for k, v in fields.items() if k != key}),
            (repair, {**fields, key: value}),
        ):
            work = tmp_path / "work"
            shutil.copytree(copy, work)
            (work / name).write_text(json.dumps(version))
            _ours(command, tiny_build(work))
            shutil.rmtree(work)


@pytest.mark.parametrize("name", [HEAD, INDEX, "calibrations", "plans/0001/samples.safetensors"])
def test_no_cut_of_a_binary_file_is_a_traceback(
    copy: Path, tiny_build: MakeBuild, name: str
) -> None:
    path = copy / name
    if path.is_dir():
        (path,) = path.iterdir()
    intact = path.read_bytes()
    for size in (0, 7, 9, len(intact) // 2, len(intact) - 1):
        path.write_bytes(intact[:size])
        for operation in (Cache, inspect_cache):
            _ours(operation, copy)
        assert verify_cache(copy, deep=False)
    _ours(repair, tiny_build(copy))


def test_no_mutation_of_an_unpublished_record_is_a_traceback(
    tiny_cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """No manifest has its digest yet: what it says is all there is."""
    cache = tmp_path_factory.mktemp("unpublished") / "cache"
    shutil.copytree(tiny_cache, cache)
    spec, shard_id = Cache(cache).spec, Cache(cache).shard_ids[0]
    (cache / MANIFEST).unlink()
    path = cache / record_key(shard_id)
    fields = json.loads(path.read_text())

    @settings(max_examples=60)
    @given(st.one_of(mutated(fields), st.dictionaries(st.text(), json_values)))
    def check(tree: Any) -> None:
        path.write_text(json.dumps(tree))
        verify_unpublished(cache, spec, [shard_id])
        _ours(stored_samples, cache)
        _ours(publish, cache, spec)
        (cache / MANIFEST).unlink(missing_ok=True)

    check()
