"""Workers: any number gives the same cache, and none of their deaths loses or repeats a shard."""

import math
import multiprocessing
import os
import signal
import struct
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cache_builder import devices, processes
from cache_builder.build import build
from cache_builder.commit import committed_shards
from cache_builder.config import (
    BuildConfig,
    CacheConfig,
    CaptureConfig,
    DataConfig,
    Forward,
    PlanConfig,
    TargetConfig,
    WorkersConfig,
)
from cache_builder.crew import WorkerDiedError
from cache_builder.pool import Events, run_crew
from cache_builder.processes import ProcessCrew, ProcessMember, _serve
from cache_builder.progress import Progress
from cache_builder.repair import repair
from cache_builder.target import Target
from cache_builder.worker import Prepared, Task
from shared.cache import Cache
from shared.errors import CaptureError, ConfigError
from shared.manifest import ShardRecord
from shared.shard import GROUP, STATES_OBJECT
from tests.conftest import write_jsonl

MakeBuild = Callable[..., BuildConfig]


@pytest.fixture
def make(tiny_build: MakeBuild) -> MakeBuild:
    """Some shards of the tiny target, with other values for `forward`."""

    def config(cache: Path, *, batch_tokens: int = 1024, threads: int = 1, workers: int = 1) -> Any:
        made = tiny_build(cache, dtype="bfloat16")
        return replace(
            made,
            capture=replace(made.capture, batch_tokens=batch_tokens),
            plan=replace(made.plan, shard_mib=0.125),
            workers=WorkersConfig(num_workers=workers, threads=threads),
        )

    return config


def records(cache: Path) -> dict[str, str]:
    return Cache(cache).manifest.records


@pytest.mark.slow
def test_any_number_of_workers_gives_the_same_cache_of_the_real_target(
    target_dir: Path, tmp_path: Path
) -> None:
    """In bfloat16, where a matrix product rounds by the threads and rows it is computed with."""
    rng = np.random.default_rng(0)
    rows = [
        {"input_ids": rng.integers(20, 40_000, n).tolist(), "loss_mask": [0] * 4 + [1] * (n - 4)}
        for n in (97, 80, 64, 60, 41, 33, 30, 21, 20, 9)
    ]
    data = write_jsonl(tmp_path / "data.jsonl", rows)

    def manifest(count: int) -> Any:
        config = BuildConfig(
            cache=CacheConfig(path=tmp_path / f"cache-{count}", min_free_gb=0),
            target=TargetConfig(path=str(target_dir)),
            data=DataConfig(sources=(str(data),), max_length=128),
            capture=CaptureConfig(batch_tokens=200),
            plan=PlanConfig(shard_mib=0.75),
            workers=WorkersConfig(num_workers=count),
        )
        return build(config).manifest

    one = manifest(1)
    assert one.totals.num_shards >= 3
    assert manifest(2) == one


def test_a_worker_computes_on_its_threads_and_gives_them_back(
    make: MakeBuild, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = set()
    original = Target.capture

    def watched(self: Target, token_ids: Any) -> Any:
        seen.add(torch.get_num_threads())
        return original(self, token_ids)

    monkeypatch.setattr(Target, "capture", watched)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        build(make(tmp_path / "one"))
        assert seen == {1}
        assert torch.get_num_threads() == 2
        seen.clear()
        build(make(tmp_path / "three", threads=3))
        assert seen == {3}
    finally:
        torch.set_num_threads(before)
    record = Cache(tmp_path / "three").record("0001-00000")
    assert (record.batch_tokens, record.threads) == (1024, 3)


def test_other_batches_plan_anew_what_is_missing_and_leave_what_is_there(
    make: MakeBuild, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped, then started again with other settings of the forward; then repaired."""
    cache = tmp_path / "cache"

    def stop(self: Progress, *arguments: object) -> None:
        if len(committed_shards(cache)) == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Progress, "committed", stop)
        with pytest.raises(KeyboardInterrupt):
            build(make(cache))
    build(make(cache, batch_tokens=200, threads=2))
    opened = Cache(cache)
    assert len(opened.index) == 48
    forwards = {shard_id: opened.record(shard_id).batch_tokens for shard_id in opened.shard_ids}
    assert {shard_id for shard_id, tokens in forwards.items() if tokens == 1024} == {
        "0001-00000",
        "0001-00001",
    }
    assert {tokens for s, tokens in forwards.items() if s.startswith("0002-")} == {200}
    # Whatever the configuration says now, repair gives each shard the bits it had.
    before = records(cache)
    victims = ["0001-00001", "0002-00000"]
    for victim in victims:
        (cache / GROUP / victim / STATES_OBJECT).unlink()
    assert repair(make(cache, batch_tokens=77, threads=3)) == victims
    assert records(cache) == before


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(torch.OutOfMemoryError("CUDA out of memory"), id="gpu"),
        pytest.param(
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), id="cpu"
        ),
    ],
)
@pytest.mark.parametrize("place", ["forward", "writer"])
def test_a_batch_that_memory_does_not_hold_is_halved_and_recorded(
    make: MakeBuild,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    place: str,
) -> None:
    cache, limit = tmp_path / "cache", 400
    original = Target.capture
    told: list[int] = []
    advanced = Progress.advanced

    def limited(self: Target, token_ids: Any) -> Any:
        if len(token_ids) * max(map(len, token_ids)) > limit:
            if place == "forward":
                raise error
            states = original(self, token_ids)
            return [_Unpackable(state, error) for state in states]
        return original(self, token_ids)

    def listen(self: Progress, name: str, tokens: int) -> None:
        told.append(tokens)
        advanced(self, name, tokens)

    with monkeypatch.context() as patch:
        patch.setattr(Target, "capture", limited)
        patch.setattr(Progress, "advanced", listen)
        build(make(cache))
    opened = Cache(cache)
    assert len(opened.index) == 48
    assert sum(told) == opened.manifest.totals.num_tokens
    used = {shard_id: opened.record(shard_id).batch_tokens for shard_id in opened.shard_ids}
    halved = [shard_id for shard_id, tokens in used.items() if tokens and tokens <= limit]
    assert halved
    assert f"shard {halved[0]}: out of memory" in caplog.text
    # With enough memory again, repair still gives what the record says.
    before = records(cache)
    (cache / GROUP / halved[0] / STATES_OBJECT).unlink()
    assert repair(make(cache)) == [halved[0]]
    assert records(cache) == before


class _Unpackable:
    """States whose first use runs out of memory, as that of a full device does."""

    def __init__(self, states: torch.Tensor, error: Exception) -> None:
        self._error = error

    def __getattr__(self, name: str) -> Any:
        raise self._error


def test_a_sample_that_memory_does_not_hold_alone_is_named(
    make: MakeBuild, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(self: Target, token_ids: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    build(make(tmp_path / "whole"))  # the calibration would need the memory too
    (tmp_path / "whole" / "records" / "0001-00000.json").unlink()
    (tmp_path / "whole" / "manifest.json").unlink()
    monkeypatch.setattr(Target, "capture", never)
    with pytest.raises(CaptureError, match=r"shard 0001-00000, sample [0-9a-f]{32}: the memory"):
        build(make(tmp_path / "whole"))


def _commits_one_shard(*arguments: Any) -> None:
    """Main function of a worker that gets stuck in the commit of any other."""
    from cache_builder import capture

    commit = capture.commit_shard

    def get_stuck(cache: Path, record: ShardRecord, *rest: Any, **named: Any) -> ShardRecord:
        while record.shard_id != "0001-00000":
            signal.pause()
        return commit(cache, record, *rest, **named)

    capture.commit_shard = get_stuck
    _serve(*arguments)


@pytest.mark.slow
def test_when_every_worker_is_killed_the_missing_shards_are_named(
    make: MakeBuild, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGKILL of all, in the middle of their shards."""
    cache, heard = tmp_path / "cache", []

    def note(self: Progress, name: str, record: ShardRecord, timing: object) -> None:
        heard.append(record.shard_id)

    def kill_all(self: Progress, name: str, tokens: int) -> None:
        if heard:
            for child in multiprocessing.active_children():
                os.kill(child.pid or 0, signal.SIGKILL)

    with monkeypatch.context() as patch:
        patch.setattr(processes, "_serve", _commits_one_shard)
        patch.setattr(Progress, "committed", note)
        patch.setattr(Progress, "advanced", kill_all)
        with pytest.raises(CaptureError) as caught:
            build(make(cache, workers=2))
    report = build(make(cache))
    committed, *missing = report.plan.shard_ids
    message = str(caught.value)
    assert report.num_new_shards == len(missing) > 2
    assert f"{len(missing)} shards" in message
    assert all(shard_id in message for shard_id in missing)
    assert heard == [committed]
    assert "exit code -9" in message
    assert len(Cache(cache).index) == 48


def _dies_when_ready(connection: Connection) -> None:
    connection.send(("started", "here"))
    connection.send(("ready",))
    os._exit(1)


def _works(connection: Connection) -> None:
    connection.send(("started", "here"))
    connection.send(("ready",))
    while connection.recv()[0] != "stop":
        connection.send(("committed", None, None))


def _member(number: int, serve: Callable[[Connection], None]) -> ProcessMember:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    return ProcessMember(number, process, ours)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # the children touch no lock
def test_a_worker_killed_in_the_middle_of_a_long_message_is_dead_like_any_other() -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=os._exit, args=(3,))
    process.start()
    os.write(theirs.fileno(), struct.pack("!i", 100_000) + bytes(20_000))
    theirs.close()
    with pytest.raises(WorkerDiedError, match="died with exit code 3"):
        ProcessMember(0, process, ours).receive()
    ours.close()


@pytest.mark.parametrize("has_other", [True, False])
def test_a_worker_that_dies_when_it_is_ready_costs_nothing(has_other: bool) -> None:
    """It is gone when the first shard is sent to it: a broken pipe, not a message."""
    crew = ProcessCrew()
    crew.members.append(_member(0, _dies_when_ready))
    crew.members[0].process.join()
    if has_other:
        crew.members.append(_member(1, _works))
    done: list[str] = []
    events = Events(
        on_prepared=lambda prepared: None,
        on_committed=lambda name, record, timing: done.append(name),
    )
    tasks = [Task(f"0001-0000{i}", Forward(1, 1)) for i in range(2)]
    with crew:
        outcome = run_crew(crew, tasks, Prepared("0" * 64, None), events)
    if has_other:
        assert done == ["worker 1 (here)"] * 2
        assert outcome.missing == {}
    else:
        assert outcome.missing.keys() == {"0001-00000", "0001-00001"}
        assert "worker 0 (here) died with exit code 1" in outcome.missing["0001-00000"]


@pytest.mark.parametrize(
    ("config", "free_gb", "shards", "expected"),
    [
        pytest.param(WorkersConfig(devices="cpu"), 100, 99, 8, id="a-core-each"),
        pytest.param(WorkersConfig(devices="cpu", threads=3), 100, 99, 2, id="three-cores-each"),
        pytest.param(WorkersConfig(devices="cpu", threads=9), 100, 99, 1, id="more-than-cores"),
        pytest.param(WorkersConfig(devices="cpu"), 100, 3, 3, id="no-more-than-shards"),
        pytest.param(WorkersConfig(devices="cpu"), 3, 99, 3, id="memory"),
        pytest.param(WorkersConfig(devices="cpu"), 0, 99, 1, id="never-none"),
        pytest.param(WorkersConfig(devices="cpu", num_workers=5), 0, 99, 5, id="as-asked"),
        pytest.param(WorkersConfig(devices=("cuda:0", "cuda:1")), 0, 99, 2, id="a-gpu-each"),
        pytest.param(WorkersConfig(devices=("cpu",)), 100, 99, 1, id="as-listed"),
        pytest.param(WorkersConfig(devices_per_worker=2), 0, 99, 1, id="two-gpus-each"),
    ],
)
def test_the_number_of_workers(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    config: WorkersConfig,
    free_gb: int,
    shards: int,
    expected: int,
) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(1_000_000))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(devices, "num_cores", lambda: 8)
    monkeypatch.setattr(devices, "available_bytes", lambda: int(free_gb * 1.1e9))
    picked = devices.pick_devices(config, num_shards=shards, target_path=tmp_path)
    assert len(picked) == expected


def test_gpus_are_shared_out_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 6)

    def groups(size: int, **changes: Any) -> Any:
        return devices.require_devices(WorkersConfig(devices_per_worker=size, **changes))

    assert groups(1)[:2] == [("cuda:0",), ("cuda:1",)]
    assert groups(3) == [("cuda:0", "cuda:1", "cuda:2"), ("cuda:3", "cuda:4", "cuda:5")]
    assert groups(2, devices=("cuda:5", "cuda:1")) == [("cuda:5", "cuda:1")]
    with pytest.raises(ConfigError, match=r"= 4 does not divide the 6 devices"):
        groups(4)
    with pytest.raises(ConfigError, match=r"= 8 does not divide the 6 devices"):
        groups(8)
    with pytest.raises(ConfigError, match="expected different GPUs, found cuda:0, cuda:0"):
        groups(2, devices=("cuda:0", "cuda:0"))
    with pytest.raises(ConfigError, match="expected different GPUs, found cpu"):
        groups(2, devices="cpu")
    config = WorkersConfig(devices_per_worker=3, num_workers=3)
    picked = devices.pick_devices(config, num_shards=9, target_path=Path())
    assert [devices.describe_devices(own) for own in picked] == [
        "cuda:0+cuda:1+cuda:2",
        "cuda:3+cuda:4+cuda:5",
        "cuda:0+cuda:1+cuda:2",
    ]


def test_the_report_shows_every_worker_and_its_time(
    make: MakeBuild, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    report = build(make(tmp_path / "cache"))
    lines = [record.getMessage() for record in caplog.records if "progress" in record.name]
    lines = [line for line in lines if line]  # the others are for programs
    (row,) = [line for line in lines if line.startswith("worker 0 (cpu)") and ": " not in line]
    name, shards, tokens = row[:20].strip(), *row[20:].split()[:2]
    assert name == "worker 0 (cpu)"
    assert int(shards) == report.num_new_shards
    assert int(tokens.replace(",", "")) == report.manifest.totals.num_tokens
    assert "on the critical path of the forward" in lines[-1]


def test_progress_without_a_terminal_is_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from cache_builder import progress as module

    caplog.set_level("INFO")
    monkeypatch.setattr(module, "LINE_SECONDS", math.inf)
    with Progress({"a": 600, "b": 400}, raw_bytes_per_token=1) as progress:
        progress.joined("worker 0 (cpu)")
        progress.joined("worker 1 (cpu)")
        progress.started("worker 0 (cpu)", "a")
        progress.advanced("worker 0 (cpu)", 300)
        progress.advanced("worker 1 (cpu)", 100)
        progress.tick()
        assert not [record for record in caplog.records if record.getMessage()]
        assert "captured 400 of 1,000 tokens (40.0 %), 40 tokens/s" in progress.line(10.0)
        assert "15 s left" in progress.line(10.0)
        progress.died("worker 0 (cpu)", "died with exit code -9")
        assert progress.num_tokens == 100
        monkeypatch.setattr(module, "LINE_SECONDS", 0.0)
        progress.tick()
    assert "captured 100 of 1,000 tokens" in caplog.text
