"""A cache in a bucket, against a real S3 server on loopback: the same bytes, and nothing lost."""

import http.server
import json
import multiprocessing
import os
import random
import signal
import socket
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from click.testing import CliRunner

from cache_builder import commit, lease
from cache_builder.build import build
from cache_builder.cli import main
from cache_builder.commit import committed_shards, uncommitted_groups
from cache_builder.config import BuildConfig, CacheConfig
from cache_builder.lock import builder_lock
from cache_builder.merge import merge
from cache_builder.prune import prune
from cache_builder.publication import publish
from cache_builder.repair import repair
from cache_builder.space import bytes_here
from cache_builder.verify import verify_cache
from cache_builder.workspace import workspace
from shared import bucket, object_storage
from shared import config as configs
from shared.cache import Cache
from shared.errors import (
    CacheError,
    CacheLockedError,
    CacheNotFoundError,
    ConfigError,
    ShardCorruptError,
    StorageError,
)
from shared.layout import MANIFEST, PLANS, WIP, generation_key, record_key
from shared.location import Location, S3Url, parse_location
from shared.shard import GROUP, STATES, STATES_OBJECT
from shared.storage import Storage, open_storage
from tests.conftest import conversations, write_jsonl
from tests.test_cache_builder.stored import contents
from tests.test_trainer.test_train import learned
from trainer.train import train

pytest.importorskip("obstore")
import obstore

pytestmark = pytest.mark.slow

MakeBuild = Callable[..., BuildConfig]


@pytest.fixture(autouse=True)
def environment(s3_server: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-to-be-shown")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "machine"))


@pytest.fixture
def url(request: pytest.FixtureRequest) -> S3Url:
    """A place where no other test has been."""
    return S3Url("caches", f"of/{zlib.crc32(request.node.nodeid.encode()):08x}")


def digests(cache: Location) -> dict[str, str]:
    manifest = Cache(cache).manifest
    return {**manifest.records, "index": manifest.index.sha256}


@pytest.fixture(params=["local", "s3"])
def storage(request: pytest.FixtureRequest, tmp_path: Path, url: S3Url) -> Storage:
    return open_storage(url if request.param == "s3" else tmp_path)


def test_both_storages_keep_the_same_promises(storage: Storage, tmp_path: Path) -> None:
    assert storage.names(None) in ([], ["machine"])
    assert storage.names("a") == []
    assert storage.version("a/b") is None
    assert not storage.exists("a/b")
    finished = tmp_path / "machine" / "finished"
    (finished / "c").mkdir(parents=True)
    (finished / "c" / "d").write_bytes(b"0123456789")
    (finished / "empty").write_bytes(b"")
    if isinstance(storage.location, Path):
        (storage.location / "a").mkdir()
    storage.put_tree(finished, "a/tree")
    assert not finished.exists()
    assert storage.sizes("a/tree") == {"c/d": 10, "empty": 0}
    assert storage.names("a/tree") == ["c", "empty"]
    (tmp_path / "machine" / "again" / "c").mkdir(parents=True)
    (tmp_path / "machine" / "again" / "c" / "d").write_bytes(b"9876543210")
    storage.put_tree(tmp_path / "machine" / "again", "a/tree")
    assert storage.sizes("a/tree") == {"c/d": 10}
    assert storage.read("a/tree/c/d") == b"9876543210"
    storage.put("a/tree/c/d", b"0123456789")
    storage.put("a/tree/empty", b"")
    assert storage.exists("a/tree/c/d")
    assert not storage.exists("a/tree/c")
    assert storage.read("a/tree/empty") == b""
    assert storage.read_many(["a/tree/c/d", "a/tree/empty"]) == [b"0123456789", b""]
    assert storage.read_range("a/tree/c/d", 3, 4) == b"3456"
    with pytest.raises(ShardCorruptError, match=r"d: expected 7 bytes at 4, found 6\. The file"):
        storage.read_range("a/tree/c/d", 4, 7)
    with pytest.raises(ShardCorruptError, match=r"expected 7 bytes at 40, found 0\. The file"):
        storage.read_range("a/tree/c/d", 40, 7)
    with pytest.raises(ShardCorruptError, match=r"absent: missing\. Run `cache-builder repair`"):
        storage.read_range("absent", 0, 1)
    with pytest.raises(ShardCorruptError, match="absent: missing"):
        storage.read("absent")
    for key in ("../b", "/b", "a/../../b", ""):
        with pytest.raises(CacheError, match="leaves the cache"):
            storage.put(key, b"")
    first = storage.put_over("a/b", b"one", None)
    assert storage.version("a/b") == first
    with pytest.raises(CacheLockedError, match="another builder wrote it meanwhile"):
        storage.put_over("a/b", b"two", None)
    second = storage.put_over("a/b", b"two", first)
    assert second == storage.version("a/b") != first
    with pytest.raises(CacheLockedError, match="another builder wrote it meanwhile"):
        storage.put_over("a/b", b"three", first)
    assert storage.read("a/b") == b"two"
    storage.delete("a/b", "a/absent")
    storage.delete_trees("a/tree", "a/nothing")
    assert storage.names("a") == []


def test_large_objects_go_in_parts(url: S3Url, tmp_path: Path) -> None:
    data = np.random.default_rng(0).bytes((9 << 20) + 5)
    (tmp_path / "file").write_bytes(data)
    storage = object_storage.ObjectStorage(url)
    storage.put_file(tmp_path / "file", "large")
    storage.put("also", data)
    assert storage.read("large") == storage.read("also") == data
    assert storage.read_range("large", 7, (8 << 20) + 100) == data[7 : (8 << 20) + 107]


@pytest.fixture(scope="module")
def stored(
    tiny_build: MakeBuild, s3_server: str, tmp_path_factory: pytest.TempPathFactory
) -> S3Url:
    """The tiny cache in a bucket. Read it only."""
    url = S3Url("caches", "stored/tiny", scratch=tmp_path_factory.mktemp("scratch"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", s3_server)
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "not-to-be-shown")
        patch.setenv("AWS_REGION", "us-east-1")
        build(tiny_build(url))
    return url


@pytest.fixture(scope="module")
def fewer(tiny_build: MakeBuild) -> MakeBuild:
    """Makes a BuildConfig of few shards: requests take the time of these tests."""

    def make(cache: Location, **options: Any) -> BuildConfig:
        config = tiny_build(cache, **options)
        return replace(config, plan=replace(config.plan, shard_mib=0.5))

    return make


@pytest.fixture(scope="module")
def undisturbed(fewer: MakeBuild, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What a local build of few shards makes."""
    path = tmp_path_factory.mktemp("undisturbed") / "cache"
    build(fewer(path))
    return digests(path)


def test_a_build_into_a_bucket_makes_the_records_of_a_local_one(
    tiny_build: MakeBuild, tiny_cache: Path, stored: S3Url
) -> None:
    assert digests(stored) == digests(tiny_cache)
    assert contents(stored) == contents(tiny_cache)
    assert verify_cache(stored, deep=True) == []
    place = workspace(stored)
    assert stored.scratch is not None
    assert place.is_relative_to(stored.scratch)
    assert list((place / WIP).iterdir()) == []
    names = open_storage(stored).names(None)
    assert "builder.lock" not in names  # it went with its builder
    assert set(names) == {
        *("cache.json", "manifest.json", "head.safetensors"),
        *("calibrations", "generations", "plans", "records", "shards.zarr", "target"),
    }
    again = build(tiny_build(stored))
    assert (again.num_new_shards, again.manifest.generation) == (0, 1)
    assert again.plan.directory.is_relative_to(place)


def test_zarr_reads_the_states_through_its_own_object_store(
    stored: S3Url, tiny_cache: Path
) -> None:
    shard_id = Cache(stored).shard_ids[0]
    bucket = obstore.store.S3Store(
        stored.bucket, prefix=f"{stored.prefix}/{GROUP}", client_options={"allow_http": True}
    )
    group = zarr.open_group(zarr.storage.ObjectStore(bucket, read_only=True), mode="r")
    local = zarr.open_group(tiny_cache / GROUP, mode="r")
    for name in (STATES, "token_ids", "chunk_crc32c"):
        expected = np.asarray(local[f"{shard_id}/{name}"])
        assert expected.size
        np.testing.assert_array_equal(np.asarray(group[f"{shard_id}/{name}"]), expected)


def test_training_from_a_bucket_learns_the_same_to_the_bit(
    tiny_train: Callable[..., Any], tiny_cache: Path, stored: S3Url, tmp_path: Path
) -> None:
    train(tiny_train(tmp_path / "local", tiny_cache, steps=2))
    train(tiny_train(tmp_path / "s3", stored, steps=2))
    assert learned(tmp_path / "s3") == learned(tmp_path / "local")
    settings = json.loads((tmp_path / "s3" / "config.json").read_text())
    assert settings["cache"]["path"] == str(stored) == "s3://caches/stored/tiny"
    shown = "".join(path.read_text() for path in (tmp_path / "s3").rglob("*.json*"))
    assert "not-to-be-shown" not in shown


def test_more_data_is_added_from_another_machine(
    fewer: MakeBuild, url: S3Url, tiny_data: Path, tmp_path: Path
) -> None:
    first = build(fewer(url))
    more = write_jsonl(tmp_path / "more.jsonl", conversations(range(100, 104)))
    there = replace(url, scratch=tmp_path / "another")
    second = build(fewer(there, data=[tiny_data, more]))
    assert second.plan.plan_id == "0002"
    assert second.manifest.generation == 2
    assert second.manifest.records.items() > first.manifest.records.items()
    assert len(Cache(url).index) == 52
    assert len(Cache(url, generation=1).index) == 48
    assert verify_cache(url, deep=True) == []


def test_verify_finds_what_is_missing_or_changed_and_repair_makes_it_again(
    tiny_build: MakeBuild, tiny_cache: Path, url: S3Url
) -> None:
    build(tiny_build(url))
    storage = open_storage(url)
    first, second, third = (f"{GROUP}/{shard_id}" for shard_id in Cache(url).shard_ids[:3])
    storage.delete(f"{first}/token_ids/c/0")
    states = bytearray(storage.read(f"{second}/{STATES_OBJECT}"))
    states[5] ^= 1
    storage.put(f"{second}/{STATES_OBJECT}", bytes(states))
    storage.put(f"{third}/{STATES_OBJECT}", storage.read(f"{third}/{STATES_OBJECT}")[:-9])
    found = {(problem.shard, problem.kind) for problem in verify_cache(url, deep=False)}
    assert found == {(first[-10:], "missing"), (third[-10:], "damaged")}
    found = {(problem.shard, problem.kind) for problem in verify_cache(url, deep=True)}
    assert found == {(i[-10:], k) for i, k in ((first, "missing"), (second, "damaged"))} | {
        (third[-10:], "damaged")
    }
    with pytest.raises(ShardCorruptError, match=f"{second[-10:]}.*checksum"):
        Cache(url).shard(second[-10:]).read(0)
    assert repair(tiny_build(url)) == [shard[-10:] for shard in (first, second, third)]
    assert digests(url) == digests(tiny_cache)
    assert verify_cache(url, deep=True) == []


def test_what_was_never_committed_is_named_and_goes_with_the_next_build(
    fewer: MakeBuild, undisturbed: dict[str, str], url: S3Url
) -> None:
    build(fewer(url))
    storage = open_storage(url)
    storage.put(f"{GROUP}/0009-00000/{STATES_OBJECT}", b"half")
    storage.put(f"{PLANS}/0009/token_ids.i32", b"half")
    done = CliRunner().invoke(main, ["verify", str(url), "--json"])
    assert done.exit_code == 0
    assert json.loads(done.stdout)["uncommitted"] == ["0009-00000"]
    done = CliRunner().invoke(main, ["verify", str(url)])
    assert "1 shard never committed (0009-00000)" in done.output
    build(fewer(url))
    assert uncommitted_groups(url) == []
    assert storage.names(PLANS) == ["0001"]
    assert digests(url) == undisturbed


def _build_and_die(
    config: BuildConfig, die_at: int, after: bool, count: Path, environment: dict[str, str]
) -> None:
    """Build, and die before or after the request that is the `die_at`-th to change the bucket."""
    os.environ.update(environment)
    lease.BEAT_SECONDS = 1e6  # its requests would be more on a slower machine
    requests, lock = 0, threading.Lock()

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal requests
            with lock:
                requests += 1
                is_last = requests == die_at
            if is_last and not after:
                os.kill(os.getpid(), signal.SIGKILL)
            answer = function(*arguments, **options)
            if is_last:
                os.kill(os.getpid(), signal.SIGKILL)
            return answer

        return call

    obstore.put, obstore.delete = counted(obstore.put), counted(obstore.delete)
    build(config)
    count.write_text(str(requests))


_NAMES = ("AWS_", "XDG_CACHE_HOME")


def _run(config: BuildConfig, die_at: int, after: bool, count: Path) -> int | None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["cache_builder.build", "transformers.models.qwen3"])
    # The fork server may have been started before this module set the environment.
    environment = {name: value for name, value in os.environ.items() if name.startswith(_NAMES)}
    process = context.Process(
        target=_build_and_die, args=(config, die_at, after, count, environment)
    )
    process.start()
    process.join()
    return process.exitcode


def test_killed_at_any_request_the_build_ends_with_the_same_cache(
    fewer: MakeBuild, undisturbed: dict[str, str], url: S3Url, tmp_path: Path
) -> None:
    count = tmp_path / "count"
    assert _run(fewer(replace(url, prefix=f"{url.prefix}/counting")), -1, False, count) == 0
    total = int(count.read_text())
    rng = random.Random(0)
    kills = 0
    for die_at in (rng.randrange(total // 4, total - 8), total - 2):  # in the shards, at the end
        place = replace(url, prefix=f"{url.prefix}/{die_at}")
        code = _run(fewer(place), die_at, bool(rng.randrange(2)), count)
        assert code == -signal.SIGKILL
        kills += 1
        build(fewer(place))  # of the same machine: nobody to wait for
        assert digests(place) == undisturbed
        assert verify_cache(place, deep=True) == []
        assert uncommitted_groups(place) == []
    assert kills == 2


def test_another_machine_goes_on_where_one_died(
    fewer: MakeBuild, undisturbed: dict[str, str], url: S3Url, tmp_path: Path, monkeypatch: Any
) -> None:
    """It waits until the lock has not changed for a while, and captures only what is missing."""
    monkeypatch.setattr(lease, "LEASE_SECONDS", 0.5)
    monkeypatch.setattr(lease, "_POLL_SECONDS", 0.1)
    assert _run(fewer(url), 50, False, tmp_path / "count") == -signal.SIGKILL
    done = committed_shards(url)
    assert 0 < len(done) < len(undisturbed) - 1  # the index
    assert open_storage(url).exists("builder.lock")
    report = build(fewer(replace(url, scratch=tmp_path / "another")))
    assert report.num_new_shards == len(undisturbed) - 1 - len(done)
    assert digests(url) == undisturbed


def test_two_builders_of_one_cache(
    fewer: MakeBuild, url: S3Url, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(lease, "BEAT_SECONDS", 0.1)
    monkeypatch.setattr(lease, "_POLL_SECONDS", 0.1)
    other = fewer(replace(url, scratch=tmp_path / "another"))
    with builder_lock(url):
        with pytest.raises(CacheLockedError, match=r"another builder is at work \(process"):
            build(other)
        with pytest.raises(CacheLockedError, match=r"another builder is at work \(process"):
            build(fewer(url))  # of this machine
    build(other)


def test_a_lock_that_is_let_go_while_somebody_looks_at_it_is_taken(
    url: S3Url, monkeypatch: Any
) -> None:
    storage = open_storage(url)
    storage.put(lease.LEASE, b'{"owner": "another", "holder": "another"}')
    find = object_storage.ObjectStorage.version

    def let_go(self: Any, key: str) -> str | None:
        found = find(self, key)
        storage.delete(lease.LEASE)
        return found

    monkeypatch.setattr(object_storage.ObjectStorage, "version", let_go)
    with builder_lock(url):
        lease.require_lease(url)


def test_a_lock_that_is_there_and_cannot_be_read_is_said_to_be(
    url: S3Url, monkeypatch: Any
) -> None:
    """It is not let go: looking at it again and again would take for ever, without a word."""
    storage = open_storage(url)
    storage.put(lease.LEASE, b'{"owner": "another", "holder": "another"}')
    reads: list[str] = []

    def unreadable(self: Any, key: str) -> bytes:
        reads.append(key)
        if len(reads) > 3:
            pytest.fail("it looks at the lock without an end")
        raise ShardCorruptError(f"{self}/{key}: missing.")

    monkeypatch.setattr(object_storage.ObjectStorage, "read", unreadable)
    with pytest.raises(ShardCorruptError, match=r"builder\.lock: missing"), builder_lock(url):
        pass


def test_a_builder_that_lost_its_lock_commits_nothing(
    fewer: MakeBuild, url: S3Url, monkeypatch: Any
) -> None:
    """As if it had been suspended for longer than others wait."""
    from cache_builder import capture

    original = capture.commit_shard

    def commit_late(cache: Location, *rest: Any, **named: Any) -> Any:
        open_storage(cache).put("builder.lock", b'{"owner": "another", "holder": "another"}')
        return original(cache, *rest, **named)

    monkeypatch.setattr(capture, "commit_shard", commit_late)
    with pytest.raises(CacheLockedError, match="another builder took over"):
        build(fewer(url))
    assert committed_shards(url) == set()
    assert uncommitted_groups(url) == []
    assert open_storage(url).exists("builder.lock")  # the other's


def test_a_lock_is_kept_whose_heartbeat_was_written_but_called_failed(
    url: S3Url, monkeypatch: Any
) -> None:
    monkeypatch.setattr(lease, "BEAT_SECONDS", 0.05)
    put_over = object_storage.ObjectStorage.put_over
    beats: list[str] = []
    has_gone_on = threading.Event()

    def answer_lost(self: Any, key: str, data: bytes, version: str | None) -> str:
        done = put_over(self, key, data, version)
        beats.append(done)
        if len(beats) == 2:
            raise StorageError("timed out")
        if len(set(beats)) >= 5:
            has_gone_on.set()
        return done

    monkeypatch.setattr(object_storage.ObjectStorage, "put_over", answer_lost)
    with builder_lock(url):
        assert has_gone_on.wait(300)
        lease.require_lease(url)


def test_a_lock_that_is_deleted_ends_its_heartbeat_and_is_said(
    url: S3Url, monkeypatch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lease, "BEAT_SECONDS", 0.05)
    before = threading.enumerate()
    with builder_lock(url):
        (beat,) = set(threading.enumerate()) - {*before}
        open_storage(url).delete(lease.LEASE)
        beat.join(300)
        assert not beat.is_alive()
        with pytest.raises(CacheLockedError, match="was deleted"):
            lease.require_lease(url)
        assert not open_storage(url).exists(lease.LEASE)
    assert "next commit is refused" in caplog.text


@pytest.mark.parametrize("other", ["host", "boot"])
def test_machines_with_one_home_directory_are_two_builders(
    url: S3Url, tmp_path: Path, monkeypatch: Any, other: str
) -> None:
    """Where each keeps its file locks for itself, as some shared file systems do."""
    from cache_builder import lock

    monkeypatch.setattr(lock, "try_lock", lambda *arguments: True)
    monkeypatch.setattr(lease, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(lease, "_POLL_SECONDS", 0.2)
    with builder_lock(url):
        ours = lease.lease_owner(url)
        with pytest.MonkeyPatch.context() as there:
            if other == "host":
                names = list(os.uname())
                there.setattr(os, "uname", lambda: os.uname_result((names[0], "b", *names[2:])))
            else:
                (tmp_path / "boot").write_text("of another start\n")
                there.setattr(lease, "_BOOT_ID", tmp_path / "boot")
            assert lease.lease_owner(url) != ours
            with pytest.raises(CacheLockedError, match="another builder is at work"):
                lease._take(open_storage(url), lease._Holder(lease.lease_owner(url)))
            with pytest.raises(CacheLockedError, match="took over"):
                lease.require_lease(url)
        lease.require_lease(url)


def test_only_the_plans_that_are_asked_for_are_copied(
    fewer: MakeBuild, url: S3Url, tiny_data: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    from cache_builder import stored_plans

    few = write_jsonl(tmp_path / "few.jsonl", conversations(range(4)))
    more = write_jsonl(tmp_path / "more.jsonl", conversations(range(100, 104)))
    config = fewer(url, data=[few])
    build(config)
    build(fewer(url, data=[few, more]))
    prune(config)  # of the shards that are left, none is of the second plan
    into = tmp_path / "into"
    build(fewer(into, data=[more]))
    copied: list[tuple[str, int]] = []
    fetch = stored_plans.fetch_plan

    def counted(storage: Storage, plan_id: str, place: Path) -> Path:
        directory = fetch(storage, plan_id, place)
        copied.append((plan_id, len(list(place.iterdir()))))
        return directory

    monkeypatch.setattr(stored_plans, "fetch_plan", counted)
    assert merge(into, [url]).num_samples == 4
    assert copied == [("0001", 1)]
    copied.clear()
    assert verify_cache(url, deep=False) == []
    assert copied == [("0001", 1), ("0002", 1), ("0003", 1)]


@pytest.mark.parametrize("when", ["before it looks", "after its upload"])
def test_a_builder_that_slept_undoes_nothing_of_the_one_that_took_over(
    fewer: MakeBuild,
    undisturbed: dict[str, str],
    url: S3Url,
    tmp_path: Path,
    monkeypatch: Any,
    when: str,
) -> None:
    """Suspended within a commit; the other one commits the same shard and publishes meanwhile."""
    monkeypatch.setattr(lease, "BEAT_SECONDS", 1000.0)
    monkeypatch.setattr(lease, "LEASE_SECONDS", 0.5)
    monkeypatch.setattr(lease, "_POLL_SECONDS", 0.1)
    require, put_tree = commit.require_lease, object_storage.ObjectStorage.put_tree
    others: list[Any] = []

    def sleep() -> None:
        if not others:
            others.append(None)
            build(fewer(replace(url, scratch=tmp_path / "another")))
            others.append(Cache(url).manifest)

    def looked(cache: Location) -> None:
        require(cache)
        if (
            when == "before it looks"
            and cache == url
            and sys._getframe(1).f_code.co_name == ("commit_shard")
        ):
            sleep()

    def uploaded(self: Any, directory: Path, key: str, *rest: Any) -> None:
        if len(others) > 1:
            raise StorageError("the sleeper's machine dies")
        put_tree(self, directory, key, *rest)
        if when == "after its upload":
            sleep()

    monkeypatch.setattr(commit, "require_lease", looked)
    monkeypatch.setattr(object_storage.ObjectStorage, "put_tree", uploaded)
    with pytest.raises(CacheLockedError, match="another builder took over"):
        build(fewer(url))
    assert others[1:] == [Cache(url).manifest]
    assert digests(url) == undisturbed
    assert verify_cache(url, deep=True) == []


@pytest.mark.parametrize("other", ["a builder that took over", "a worker of this one"])
def test_a_worker_that_slept_in_its_upload_overwrites_nothing(
    stored: S3Url, url: S3Url, tmp_path: Path, monkeypatch: Any, other: str
) -> None:
    """Suspended between two files; its replacement commits the shard with other bytes meanwhile."""
    shard_id = "0001-00000"
    group, key = f"{GROUP}/{shard_id}", record_key(shard_id)
    source, storage = open_storage(stored), open_storage(url)
    record = Cache(stored).record(shard_id)
    finished = workspace(url) / WIP / shard_id
    for name in record.files:
        (finished / name).parent.mkdir(parents=True, exist_ok=True)
        (finished / name).write_bytes(source.read(f"{group}/{name}"))
    theirs = {f"{group}/{name}": b"theirs" for name in record.files}
    num_puts, put, clock = 0, obstore.put, 0.0
    monkeypatch.setattr(lease, "BEAT_SECONDS", 1000.0)  # none of the puts that are counted
    monkeypatch.setattr(object_storage, "_THREADS", 1)
    monkeypatch.setattr(commit, "_now", lambda: clock)

    def sleep_before_the_third(*arguments: Any, **options: Any) -> Any:
        nonlocal num_puts, clock
        num_puts += 1
        answer = put(*arguments, **options)
        if num_puts == 2:
            monkeypatch.setattr(obstore, "put", put)
            clock += 100.0
            for name, data in {**theirs, key: json.dumps(record.to_dict()).encode()}.items():
                storage.put(name, data)
            if other == "a builder that took over":
                storage.put("builder.lock", b'{"owner": "another", "holder": "another"}')
        return answer

    with builder_lock(url):
        monkeypatch.setattr(obstore, "put", sleep_before_the_third)
        with pytest.raises(CacheError) as refusal:
            commit.commit_shard(url, record)
    is_locked = isinstance(refusal.value, CacheLockedError)
    assert is_locked == (other == "a builder that took over")
    assert {name: storage.read(name) for name in theirs} == theirs


def test_a_worker_whose_lock_is_lost_sends_no_further_part(
    url: S3Url, tmp_path: Path, monkeypatch: Any
) -> None:
    """What an object held before stays, although parts of another were uploaded."""
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "states").write_bytes(bytes((20 << 20) + 5))
    storage, looks = open_storage(url), 0
    storage.put("a/states", b"theirs")

    def look() -> None:
        nonlocal looks
        looks += 1
        if looks > 3:
            raise CacheLockedError("another builder took over")

    with pytest.raises(CacheLockedError, match="another builder took over"):
        storage.put_tree(tmp_path / "tree", "a", look)
    assert storage.sizes("a") == {"states": 6}
    looks = -10
    storage.put_tree(tmp_path / "tree", "a", look)
    assert storage.sizes("a") == {"states": (20 << 20) + 5}


@pytest.mark.parametrize("key", [MANIFEST, generation_key(2, "index.safetensors")])
def test_two_builders_cannot_both_publish(
    fewer: MakeBuild, url: S3Url, tmp_path: Path, tiny_data: Path, monkeypatch: Any, key: str
) -> None:
    """The lock should keep them apart; where it did not, the conditional put does."""
    from cache_builder import publication

    build(fewer(url))
    assert workspace(url).is_relative_to(tmp_path / "machine")
    original = publication.build_index
    theirs = b"what the other one published"

    def index_late(storage: Storage, *arguments: Any) -> Any:
        index = original(storage, *arguments)
        storage.put(key, theirs)
        return index

    monkeypatch.setattr(publication, "build_index", index_late)
    more = write_jsonl(tmp_path / "more.jsonl", conversations(range(100, 104)))
    with pytest.raises(CacheLockedError, match=f"{key}: another builder wrote it meanwhile"):
        build(fewer(url, data=[tiny_data, more]))
    assert open_storage(url).read(key) == theirs


def test_prune_and_merge_in_buckets(
    fewer: MakeBuild, tiny_cache: Path, url: S3Url, tmp_path: Path
) -> None:
    few = write_jsonl(tmp_path / "few.jsonl", conversations(range(20), "even"))
    into = replace(url, prefix=f"{url.prefix}/into")
    build(fewer(url))
    build(fewer(into, data=[few]))
    everything = contents(tiny_cache)
    report = prune(fewer(url, data=[few]))
    assert report.num_kept_samples == 20
    assert verify_cache(url, deep=True) == []
    kept = contents(url)
    assert len(kept) == 20
    assert all(kept[sample_id][2:4] == everything[sample_id][2:4] for sample_id in kept)
    assert merge(into, [tiny_cache]).num_samples == 28
    assert contents(into).keys() == everything.keys()
    assert verify_cache(into, deep=True) == []
    assert merge(into, [url]).num_samples == 0
    scratch = tmp_path / "scratch"
    done = CliRunner().invoke(main, ["merge", str(into), str(url), "--scratch", str(scratch)])
    assert done.exit_code == 0, done.output
    assert workspace(replace(into, scratch=scratch)).is_dir()
    with pytest.raises(ConfigError, match="scratch is for caches at s3://"):
        CliRunner().invoke(
            main, ["merge", "a", "b", "--scratch", str(scratch)], catch_exceptions=False
        )


def test_faults_of_the_place_are_one_line(
    s3_server: str, stored: S3Url, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CacheNotFoundError, match="s3://caches/nothing: no cache here"):
        Cache(S3Url("caches", "nothing"))
    with pytest.raises(StorageError, match=f"no bucket 'elsewhere' at {s3_server}"):
        Cache(S3Url("elsewhere", "tiny"))
    with socket.socket() as silent, monkeypatch.context() as patch:
        silent.bind(("127.0.0.1", 0))  # nobody else gets the port, and nobody listens there
        port = silent.getsockname()[1]
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        patch.setattr(bucket.time, "sleep", lambda seconds: pytest.fail("it is asked again"))
        done = CliRunner().invoke(main, ["inspect", str(stored)])
    assert isinstance(done.exception, StorageError)
    message = str(done.exception)
    assert "Connection refused" in message
    assert f"127.0.0.1:{port}" in message
    assert "AWS_ENDPOINT_URL" in message
    assert "not-to-be-shown" not in message
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    bucket._connect.cache_clear()
    with pytest.raises(StorageError, match=r"pip install 'draftcache\[s3\]'"):
        Cache(stored)
    bucket._connect.cache_clear()


def test_a_large_conditional_put_may_take_as_long_as_it_is_large(
    url: S3Url, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The index of a generation is one request: it must not end at the time of a small one."""

    class Slow(http.server.BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            time.sleep(1.5)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.send_header("ETag", '"1"')
            self.end_headers()

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    monkeypatch.setattr(bucket, "_TIMEOUT_SECONDS", 1)
    monkeypatch.setattr(bucket, "_SLOWEST_BYTES_PER_SECOND", 100)  # 128 s for 10,000 bytes
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Slow) as slow:
        threading.Thread(target=slow.serve_forever, daemon=True).start()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{slow.server_port}")
        storage = open_storage(url)
        with pytest.raises(StorageError, match="cannot put"):
            storage.put_over("index", bytes(100), None)
        assert storage.put_over("index", bytes(10_000), None) == '"1"'
        slow.shutdown()


@pytest.fixture
def unsteady(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """A server that answers with the status codes of a list, then with 200."""
    answers: list[int] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            code = answers.pop(0) if answers else 200
            body = b"here" if code == 200 else b"<Error><Code>Made</Code></Error>"
            self.send_response(code)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("ETag", '"1"')
            self.send_header("Last-Modified", "Wed, 21 Oct 2026 07:28:00 GMT")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as unsteady_server:
        threading.Thread(target=unsteady_server.serve_forever, daemon=True).start()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{unsteady_server.server_port}")
        monkeypatch.setattr(bucket, "_PAUSES", (0.01, 0.01))
        yield answers
        unsteady_server.shutdown()


def test_faults_that_pass_are_tried_again_and_said(
    unsteady: list[int], url: S3Url, caplog: pytest.LogCaptureFixture
) -> None:
    storage = open_storage(url)
    unsteady[:] = [503, 500]  # already the first: of many workers that start at once, say
    assert storage.read("file") == b"here"
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2
    assert "503 Service Unavailable" in lines[0]
    assert "tried again in 0.01 s" in lines[0]
    unsteady[:] = [503] * 3
    with pytest.raises(StorageError, match="503"):
        storage.read("file")
    unsteady[:] = [403]
    with pytest.raises(StorageError, match=r"access denied .*Made.*AWS_ACCESS_KEY_ID"):
        storage.read("file")


def test_a_fault_of_the_network_is_not_damage(
    tiny_build: MakeBuild, stored: S3Url, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A repair that took it for that would capture everything anew."""
    original = object_storage.ObjectStorage.sizes

    def failing(self: Any, key: str) -> dict[str, int]:
        if "0001-00002" in key:
            raise StorageError("timeout")
        return original(self, key)

    monkeypatch.setattr(object_storage.ObjectStorage, "sizes", failing)
    with pytest.raises(StorageError, match="timeout"):
        verify_cache(stored, deep=False)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("s3://bucket/a/b/", S3Url("bucket", "a/b")),
        ("s3://bucket", S3Url("bucket")),
        ("a/b", Path("a/b")),
        ("~/caches", Path.home() / "caches"),
    ],
)
def test_locations(text: str, expected: Location) -> None:
    assert parse_location(text) == expected
    assert configs.build(CacheConfig, {"path": text}).path == expected


@pytest.mark.parametrize(
    "text",
    [
        *("s3://", "s3://b/x", "s3://bucket/../x", "s3://bucket//x", "s3://bucket/a b"),
        *("s3://bucket/./x", "s3://bucket/x?y", "s3:///x", "gs://bucket/x", ""),
    ],
)
def test_bad_locations_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_location(text)


def test_a_secret_in_a_url_is_not_repeated() -> None:
    with pytest.raises(ConfigError, match="do not belong into a URL") as caught:
        parse_location("s3://key:secret@bucket/x")
    assert "secret@" not in str(caught.value)


def test_only_caches_may_lie_in_a_bucket() -> None:
    from trainer.config import RunConfig

    with pytest.raises(ConfigError, match=r"path: s3://\.\.\. is not a path"):
        configs.build(RunConfig, {"path": "s3://bucket/run"})
    with pytest.raises(ConfigError, match="scratch is for caches at s3://"):
        configs.build(CacheConfig, {"path": "caches/demo", "scratch": "/tmp/x"})
    config = configs.build(CacheConfig, {"path": "s3://bucket/x", "scratch": "/tmp/x"})
    assert workspace(config.path).parent == Path("/tmp/x")
    assert configs.to_dict(config)["path"] == "s3://bucket/x"


def test_a_published_shard_without_record_is_not_published_away(
    fewer: MakeBuild, url: S3Url
) -> None:
    build(fewer(url))
    open_storage(url).delete(record_key("0001-00001"))
    with pytest.raises(CacheError, match="records of 1 published shards are missing"):
        build(fewer(url))
    with pytest.raises(CacheLockedError, match="another builder took over"):
        publish(url, Cache(url).spec)  # without the lock


def test_a_bucket_needs_room_here_for_the_shards_in_progress_only() -> None:
    assert bytes_here(S3Url("bucket", "x"), 100, 10, num_writers=3) == 30
    assert bytes_here(S3Url("bucket", "x"), 20, 10, num_writers=3) == 20
    assert bytes_here(Path("x"), 100, 10, num_writers=3) == 100
