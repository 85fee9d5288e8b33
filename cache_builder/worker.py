"""One worker: load the target once, then capture the shards it is given."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cache_builder.capture import ShardCapture, Timing
from cache_builder.config import Forward, TargetConfig
from cache_builder.crew import Message, Request
from cache_builder.devices import Devices
from cache_builder.plan import Plan
from cache_builder.target import Target
from cache_builder.target_files import FileStamps, require_unchanged
from shared.files import sha256_bytes
from shared.layout import HEAD, calibration_key
from shared.location import Location
from shared.manifest import ShardRecord
from shared.metadata import calibration_to_bytes, read_calibration, read_projection
from shared.spec import CaptureSpec
from shared.storage import open_storage

CALIBRATION_TOKENS = 8192
"""500 tokens of one domain move the ratio by under 1 %; this covers a few domains."""


@dataclass(frozen=True, slots=True)
class Task:
    """One shard to capture, and how."""

    shard_id: str
    forward: Forward
    replaces: str | None = None
    """Version of the record of a damaged shard whose place it takes."""


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
    """A loaded target on one device, or spread over several."""

    def __init__(self, job: Job, devices: Devices) -> None:
        self._job = job
        self._plan = Plan(job.plan)
        spec = job.spec
        if devices[0] != "cpu":  # kernels of Triton run on the current one, wherever their data is
            torch.cuda.set_device(devices[0])
        self._target = Target.load(
            job.target_path, job.target, spec.target_layer_ids, spec.last_hidden, *devices
        )
        require_unchanged(job.target_path, job.target_stamps)
        projection = read_projection(open_storage(job.cache), spec)
        self._projection = None if projection is None else projection.to(self._target.device)

    def answer(self, request: Request, progress: Callable[[int], None]) -> Message:
        """Do what a request of `crew` asks for; `progress` is told tokens meanwhile."""
        if request[0] == "prepare":
            return ("prepared", self.prepare())
        _, task, calibration = request
        return ("committed", *self.capture(task, calibration, progress))

    def prepare(self) -> Prepared:
        """Write the frozen head, and learn the channels if the codec needs them."""
        storage, head, calibration = open_storage(self._job.cache), self.head(), self.calibration()
        storage.put(HEAD, head)
        if calibration is None:
            return Prepared(sha256_bytes(head), None)
        name = sha256_bytes(calibration)
        storage.put(calibration_key(name), calibration)
        return Prepared(sha256_bytes(head), name)

    def head(self) -> bytes:
        """The frozen head, as a file."""
        return self._target.head(self._plan.sample(0).token_ids).to_bytes()

    def calibration(self) -> bytes | None:
        """The channels of the plan's samples, as a file; None for a codec that needs none."""
        codec = self._job.spec.build_codec()
        if not codec.needs_calibration:
            return None
        with self._threads(self._plan.forward.threads):
            states = [
                self._rows(self._plan.sample(position).token_ids)
                for position in self._plan.calibration_positions(CALIBRATION_TOKENS)
            ]
            calibration = codec.calibrate(torch.cat(states))
        assert calibration is not None
        return calibration_to_bytes(calibration.to("cpu"))

    def _rows(self, token_ids: npt.NDArray[np.int32]) -> Tensor:
        """What would be stored of one sample, bfloat16 [T, L, width]."""
        states_TLD = self._target.capture([token_ids])[0]
        return states_TLD if self._projection is None else self._projection.rows(states_TLD)

    def capture(
        self, task: Task, calibration: str | None, progress: Callable[[int], None]
    ) -> tuple[ShardRecord, Timing]:
        job = self._job
        capture = ShardCapture(
            job.cache,
            self._plan,
            job.spec,
            self._target,
            projection=self._projection,
            calibration=read_calibration(open_storage(job.cache), calibration, job.spec),
            calibration_name=calibration,
            min_free_bytes=job.min_free_bytes,
        )
        with self._threads(task.forward.threads):
            return capture.capture(task.shard_id, task.forward, progress, replaces=task.replaces)

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
