"""Capturing one planned shard: the forward, and when it failed for memory, a smaller one."""

import contextlib
import logging
import os
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch

from cache_builder.commit import commit_shard
from cache_builder.config import Forward
from cache_builder.memory import is_out_of_memory
from cache_builder.plan import Plan, PlannedSample, micro_batches
from cache_builder.space import require_floor
from cache_builder.storing import BatchWriter, CapturedBatch, TooLargeError
from cache_builder.target import Target
from cache_builder.workspace import workspace
from shared.codec import Calibration
from shared.errors import CaptureError
from shared.files import remove_tree
from shared.layout import WIP
from shared.location import Location
from shared.manifest import ShardRecord
from shared.projection import Projection
from shared.shard_writer import ShardWriter
from shared.spec import CaptureSpec

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Timing:
    """Where the seconds of a shard went."""

    forward: float = 0.0
    wait: float = 0.0
    """The forward waited for the writer: between two batches, or for the last ones."""

    commit: float = 0.0
    """Index, small arrays, syncing and renaming, after the last batch."""

    pack: float = 0.0
    """Checks, codec and copy to the CPU, in the writer's thread."""

    write: float = 0.0
    """Encoding and writing, in the writer's thread."""

    total: float = 0.0

    def add(self, other: "Timing") -> None:
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))

    @property
    def critical(self) -> float:
        """Seconds that the forward stood still for what happens to its states."""
        return self.wait + self.commit


class ShardCapture:
    """Captures shards of one plan with one loaded target."""

    def __init__(
        self,
        cache: Location,
        plan: Plan,
        spec: CaptureSpec,
        target: Target,
        *,
        projection: Projection | None,
        calibration: Calibration | None,
        calibration_name: str | None,
        min_free_bytes: int,
    ) -> None:
        self._cache = cache
        self._plan = plan
        self._spec = spec
        self._target = target
        self._calibration = calibration.to(target.device) if calibration is not None else None
        self._projection = projection
        self._calibration_name = calibration_name
        self._min_free_bytes = min_free_bytes

    def capture(
        self,
        shard_id: str,
        forward: Forward,
        progress: Callable[[int], None] = lambda tokens: None,
        *,
        replaces: str | None = None,
    ) -> tuple[ShardRecord, Timing]:
        """Capture and commit one shard; `progress` is told the tokens of every micro-batch.

        Where memory does not hold a batch, the whole shard is captured again with half of it, and
        its record says with how much. `progress` is then told what does not count, as a negative
        number.

        Args:
            replaces: as in `commit_shard`.

        Raises:
            CaptureError: a single sample is too large for the memory.
            OutOfSpaceError: less space is free than must stay free.
        """
        while True:
            told = 0

            def tell(tokens: int) -> None:
                nonlocal told
                told += tokens
                progress(tokens)

            try:
                return self._capture(shard_id, forward, tell, replaces)
            except TooLargeError as error:
                progress(-told)
                forward = replace(forward, batch_tokens=self._halve(shard_id, forward, error))
            if self._target.device.type == "cuda":
                torch.cuda.empty_cache()

    def _halve(self, shard_id: str, forward: Forward, error: TooLargeError) -> int:
        tokens = error.padded_tokens
        if len(error.samples) == 1:
            sample = error.samples[0]
            raise CaptureError(
                f"shard {shard_id}, sample {sample.sample_id}: the memory of "
                f"{self._target.device} does not hold the forward of its {tokens:,} tokens alone. "
                "Lower data.max_length, or take a device with more memory."
            ) from error
        half = min(forward.batch_tokens, tokens) // 2
        logger.warning(
            "shard %s: out of memory in a batch of %d samples, %d tokens: captured again with "
            "batches of %d tokens, as its record will say. Lower capture.batch_tokens to plan what "
            "is missing like that.",
            shard_id,
            len(error.samples),
            tokens,
            half,
        )
        return half

    def _capture(
        self,
        shard_id: str,
        forward: Forward,
        progress: Callable[[int], None],
        replaces: str | None,
    ) -> tuple[ShardRecord, Timing]:
        started = time.perf_counter()
        timing = Timing()
        wip = _claim(workspace(self._cache) / WIP, shard_id)
        files = ShardWriter(wip, self._spec, shard_id)
        positions, device = self._plan.shard_positions(shard_id), self._target.device
        try:
            with BatchWriter(
                files, self._spec, shard_id, self._calibration, device, self._projection
            ) as writer:
                for part in micro_batches(self._plan.lengths(positions), forward.batch_tokens):
                    require_floor(workspace(self._cache), self._min_free_bytes)
                    began = time.perf_counter()
                    batch = self._run([self._plan.sample(int(p)) for p in positions[part]])
                    captured = time.perf_counter()
                    writer.put(batch)
                    timing.forward += captured - began
                    timing.wait += time.perf_counter() - captured
                    progress(sum(len(sample.token_ids) for sample in batch.samples))
                    del batch
                draining = time.perf_counter()
            drained = time.perf_counter()
            timing.wait += drained - draining
            timing.pack, timing.write = writer.pack_seconds, writer.write_seconds
            record = files.finish(
                layers=writer.sums.statistics(),
                sources=self._plan.sources,
                calibration=self._calibration_name,
                quarantined=writer.quarantined,
            )
        finally:
            files.close()
        is_cpu = device.type == "cpu"
        record = replace(
            record,
            batch_tokens=forward.batch_tokens,
            threads=forward.threads if is_cpu else None,
        )
        record = commit_shard(self._cache, record, wip, replaces=replaces)
        ended = time.perf_counter()
        timing.commit, timing.total = ended - drained, ended - started
        return record, timing

    def _run(self, samples: list[PlannedSample]) -> CapturedBatch:
        try:
            states = self._target.capture([sample.token_ids for sample in samples])
            if self._target.device.type == "cuda":
                # So that its time is its own. Not the device: the writer's stream goes on.
                torch.cuda.current_stream(self._target.device).synchronize()
        except Exception as error:
            if is_out_of_memory(error):
                raise TooLargeError(samples) from None  # its frames hold the states
            raise
        return CapturedBatch(samples, states)


def _claim(place: Path, shard_id: str) -> Path:
    """A directory for the shard, of a name that no worker had before.

    What others left of it is taken away from them, since one that is called dead may only have
    been cut off: renamed first, so that it can neither write on nor commit.
    """
    for other in place.glob(f"{shard_id}.*"):
        with contextlib.suppress(FileNotFoundError):  # its own worker may just have committed it
            remove_tree(other.rename(place / f"dead.{other.name}"))
    return place / f"{shard_id}.{os.uname().nodename}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
