"""What a worker on another machine checks before it works, and where it works."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from cache_builder.build import build
from cache_builder.capture import _claim
from cache_builder.commit import commit_shard, committed_shards
from cache_builder.config import BuildConfig
from cache_builder.jobs import make_job
from cache_builder.lock import own_slot
from cache_builder.outpost import beacon, outpost
from cache_builder.target_files import stamp_files
from cache_builder.verify import verify_cache
from cache_builder.worker import Job
from shared.cache import Cache
from shared.errors import CacheError, CacheLockedError, TargetError
from shared.layout import WIP, record_key
from shared.shard import GROUP
from shared.storage import open_storage
from tests.test_cache_builder.stored import tree


@pytest.fixture
def job(tiny_build: Callable[..., BuildConfig], tmp_path: Path) -> Job:
    """That of a small cache, which is built."""
    config = tiny_build(tmp_path / "cache")
    plan = build(config).plan
    target = Path(config.target.path)
    return make_job(config, plan, Cache(tmp_path / "cache").spec, target, stamp_files(target))


def test_a_directory_is_the_builders_own_or_refused(job: Job, tmp_path: Path) -> None:
    copy = tmp_path / "same-path-on-another-machine"
    shutil.copytree(tmp_path / "cache", copy)
    with beacon(job.cache) as sign:
        with outpost(job, sign) as own:
            assert own == job
        with (
            pytest.raises(CacheError, match=r"not the builder's directory.*in a bucket"),
            outpost(replace(job, cache=copy), sign),
        ):
            pass
    assert list((tmp_path / "cache" / WIP).iterdir()) == []


def test_a_copy_of_the_target_is_as_good_and_another_one_is_refused(
    job: Job, tmp_path: Path
) -> None:
    copy = tmp_path / "target"
    with beacon(job.cache) as sign:
        with (
            pytest.raises(TargetError, match=r"no such directory.*same path on all nodes"),
            outpost(replace(job, target_path=copy), sign),
        ):
            pass
        shutil.copytree(job.target_path, copy)
        with outpost(replace(job, target_path=copy), sign) as own:
            assert own.target_stamps == stamp_files(copy) != job.target_stamps
        weights = copy / "model.safetensors"
        data = bytearray(weights.read_bytes())
        data[-1] ^= 1
        weights.write_bytes(data)
        with (
            pytest.raises(TargetError, match="another model than the builder's"),
            outpost(replace(job, target_path=copy), sign),
        ):
            pass


def test_slots_are_nobody_elses_and_empty(tmp_path: Path) -> None:
    with own_slot(tmp_path / "slots") as first:
        (first / "file").write_text("x")
        with own_slot(tmp_path / "slots") as second:
            assert (first.name, second.name) == ("0", "1")
            assert not list(second.iterdir())
    (tmp_path / "slots" / "0").mkdir()  # of a worker that was killed
    (tmp_path / "slots" / "0" / "shard").mkdir()
    with own_slot(tmp_path / "slots") as again:
        assert again.name == "0"
        assert not list(again.iterdir())


def test_a_worker_that_was_taken_for_dead_neither_commits_nor_undoes(
    job: Job, tmp_path: Path
) -> None:
    """Cut off for a while, it comes back when another one has its shard, or has committed it."""
    cache = Cache(tmp_path / "cache")
    shard_id = cache.shard_ids[0]
    wip = tmp_path / "cache" / WIP
    lost = _claim(wip, shard_id)
    lost.mkdir()
    (lost / "states").write_text("half")
    other = _claim(wip, shard_id)
    assert other != lost
    assert not any(wip.iterdir())
    with pytest.raises(CacheLockedError, match="taken for dead"):
        commit_shard(tmp_path / "cache", cache.record(shard_id), lost)
    assert shard_id in committed_shards(tmp_path / "cache")
    assert (tmp_path / "cache" / "shards.zarr" / shard_id).is_dir()


def test_a_shard_that_is_committed_already_stays_as_it_is(job: Job, tmp_path: Path) -> None:
    """Its worker died before it could say so, or comes second."""
    path = tmp_path / "cache"
    cache = Cache(path)
    shard_id, group = cache.shard_ids[0], path / GROUP / cache.shard_ids[0]
    before, first = tree(path), cache.record(shard_id)
    late = replace(first, threads=7)
    wip = path / WIP / shard_id
    wip.mkdir()
    (wip / "states").write_text("other bytes")
    assert commit_shard(path, late) == first
    assert tree(path) == before
    assert verify_cache(path, deep=True) == []
    # What a repair found damaged it replaces; a record of another version it does not.
    version = open_storage(path).version(record_key(shard_id))
    shutil.copytree(group, wip)
    assert commit_shard(path, late, replaces=version) == late
    assert Cache(path).storage.read(record_key(shard_id)) != before[record_key(shard_id)]
    shutil.copytree(group, wip)
    assert commit_shard(path, first, replaces=version) == late
    # Nothing is adopted unseen.
    (group / "token_ids" / "c" / "0").write_bytes(b"x")
    wip.mkdir()
    with pytest.raises(CacheError, match=r"token_ids/c/0\)\. Run `cache-builder repair`"):
        commit_shard(path, late)
