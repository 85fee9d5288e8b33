"""One device: load the target once, then capture the shards it is given."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from cache_builder.capture import ShardCapture, Timing
from cache_builder.config import Forward, TargetConfig
from cache_builder.lock import worker_lock
from cache_builder.plan import Plan
from cache_builder.target import FileStamps, Target, require_unchanged
from shared import log
from shared.cache import HEAD, calibration_key, calibration_to_bytes, read_calibration
from shared.errors import DraftCacheError
from shared.files import sha256_bytes
from shared.location import Location
from shared.manifest import ShardRecord
from shared.memory import keep_freed_memory
from shared.spec import CaptureSpec
from shared.storage import open_storage

_CALIBRATION_TOKENS = 8192
"""500 tokens of one domain move the ratio by under 1 %; this covers a few domains."""

_PARENT_POLL_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Task:
    """One shard to capture, and how."""

    shard_id: str
    forward: Forward


@dataclass(frozen=True, slots=True)
class Job:
    """What every worker of a build needs to know."""

    cache: Location
    plan: Path
    spec: CaptureSpec
    target_path: Path
    target: TargetConfig
    target_stamps: FileStamps
    """Of the files that were hashed."""

    min_free_bytes: int


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a build needs once, from whichever worker has the target first."""

    head_sha256: str
    calibration: str | None


class Worker:
    """A loaded target on one device."""

    def __init__(self, job: Job, device: str) -> None:
        self._job = job
        self._plan = Plan(job.plan)
        spec = job.spec
        self._target = Target.load(
            job.target_path, job.target, spec.target_layer_ids, spec.last_hidden, device
        )
        require_unchanged(job.target_path, job.target_stamps)

    def prepare(self) -> Prepared:
        """Write the frozen head, and learn the channels if the codec needs them."""
        job = self._job
        head = self._target.head(self._plan.sample(0).token_ids).to_bytes()
        open_storage(job.cache).put(HEAD, head)
        codec = job.spec.build_codec()
        name = None
        if codec.needs_calibration:
            with self._threads(self._plan.forward.threads):
                states = [
                    self._target.capture([self._plan.sample(position).token_ids])[0]
                    for position in self._plan.calibration_positions(_CALIBRATION_TOKENS)
                ]
                calibration = codec.calibrate(torch.cat(states))
            assert calibration is not None
            data = calibration_to_bytes(calibration.to("cpu"))
            name = sha256_bytes(data)
            open_storage(job.cache).put(calibration_key(name), data)
        return Prepared(sha256_bytes(head), name)

    def capture(
        self, task: Task, calibration: str | None, progress: Callable[[int], None]
    ) -> tuple[ShardRecord, Timing]:
        job = self._job
        capture = ShardCapture(
            job.cache,
            self._plan,
            job.spec,
            self._target,
            calibration=read_calibration(open_storage(job.cache), calibration, job.spec),
            calibration_name=calibration,
            min_free_bytes=job.min_free_bytes,
        )
        with self._threads(task.forward.threads):
            return capture.capture(task.shard_id, task.forward, progress)

    @contextmanager
    def _threads(self, count: int) -> Iterator[None]:
        """Compute on so many CPU threads, however many the process has otherwise."""
        if self._target.device.type != "cpu":
            yield
            return
        before = torch.get_num_threads()
        torch.set_num_threads(count)
        try:
            yield
        finally:
            torch.set_num_threads(before)


def serve(connection: Connection, job: Job, device: str, name: str) -> None:
    """Main function of a worker process: answer requests until told to stop.

    Requests: `("prepare",)`, `("capture", Task, calibration)`, `("stop",)`.
    Replies: `("ready",)`, `("prepared", Prepared)`, `("progress", tokens)`,
    `("committed", ShardRecord, Timing)`, `("failed", error)`.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what an interrupt means
    threading.Thread(target=_exit_with_parent, args=(os.getppid(),), daemon=True).start()
    log.configure(prefix=f"{name}: ")
    keep_freed_memory()
    with worker_lock(job.cache):
        try:
            worker = Worker(job, device)
            connection.send(("ready",))
            while (request := connection.recv())[0] != "stop":
                connection.send(_answer(worker, request, connection))
        except DraftCacheError as error:
            connection.send(("failed", error))
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return  # the parent is gone


def _answer(worker: Worker, request: tuple[Any, ...], connection: Connection) -> tuple[Any, ...]:
    if request[0] == "prepare":
        return ("prepared", worker.prepare())
    _, task, calibration = request
    record, timing = worker.capture(
        task, calibration, lambda tokens: connection.send(("progress", tokens))
    )
    return ("committed", record, timing)


def _exit_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_PARENT_POLL_SECONDS)
    os._exit(1)
