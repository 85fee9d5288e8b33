"""Capturing one planned shard: forward, checks, codec, and a writer that never blocks the forward.

T tokens of one sample   L captured layers   D hidden size
"""

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from types import TracebackType

import torch
from torch import Tensor

from cache_builder.commit import commit_shard
from cache_builder.config import Forward
from cache_builder.memory import is_out_of_memory
from cache_builder.plan import Plan, PlannedSample, micro_batches
from cache_builder.quality import LayerSums, find_fault
from cache_builder.space import require_floor
from cache_builder.target import Target
from cache_builder.workspace import workspace
from shared.cache import WIP
from shared.codec import Calibration
from shared.errors import CaptureError
from shared.files import remove_tree
from shared.location import Location
from shared.manifest import ShardRecord
from shared.shard import CapturedSample
from shared.shard_writer import ShardWriter
from shared.spec import CaptureSpec

logger = logging.getLogger(__name__)

_QUEUED_BATCHES = 2
"""Micro-batches that may wait for the writer: the bound on memory. Their states are on the device
still, so that neither checks nor codec nor copy hold up the next forward."""


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


@dataclass(frozen=True, eq=False, slots=True)
class _Batch:
    samples: list[PlannedSample]
    states: list[Tensor]
    """bfloat16 [T, L, D] of each sample, on the target's device."""


class _TooLargeError(Exception):
    """Memory did not hold a batch; carries its samples."""

    def __init__(self, samples: list[PlannedSample]) -> None:
        super().__init__()
        self.samples = samples

    @property
    def padded_tokens(self) -> int:
        return len(self.samples) * max(len(sample.token_ids) for sample in self.samples)


class _Writer:
    """Checks, packs, encodes and writes batches in their order, in one thread behind a queue."""

    def __init__(
        self,
        writer: ShardWriter,
        spec: CaptureSpec,
        shard_id: str,
        calibration: Calibration | None,
    ) -> None:
        self._writer = writer
        self._spec = spec
        self._shard_id = shard_id
        self._codec = spec.build_codec()
        self._calibration = calibration
        self._queue: queue.Queue[_Batch | None] = queue.Queue(_QUEUED_BATCHES)
        self._error: BaseException | None = None
        self.sums = LayerSums(spec.num_captured)
        self.quarantined: dict[str, str] = {}
        self.pack_seconds = self.write_seconds = 0.0
        self._thread = threading.Thread(target=self._run, daemon=True, name="shard-writer")

    def __enter__(self) -> "_Writer":
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._queue.put(None)
        self._thread.join()
        if self._error is not None and error is None:
            raise self._error

    def put(self, batch: _Batch) -> None:
        """Hand over one batch; waits while two are queued.

        Raises:
            BaseException: what stopped the writer at an earlier one.
        """
        if self._error is not None:
            raise self._error
        self._queue.put(batch)

    def _run(self) -> None:
        while (batch := self._queue.get()) is not None:
            if self._error is not None:
                continue  # drain, so that `put` never blocks for ever
            for sample, hidden_TLD in zip(batch.samples, batch.states, strict=True):
                try:
                    self._store(sample, hidden_TLD)
                except BaseException as error:  # handed to the forward's thread, which raises it
                    error.add_note(f"shard {self._shard_id}, sample {sample.sample_id}")
                    self._error = (
                        _TooLargeError(batch.samples) if is_out_of_memory(error) else error
                    )
                    break
            del batch  # its states must not stay on the device while waiting for the next

    @torch.inference_mode()
    def _store(self, sample: PlannedSample, hidden_TLD: Tensor) -> None:
        began = time.perf_counter()
        fault = find_fault(hidden_TLD, self._spec.layer_names)
        if fault is not None:
            logger.warning("sample %s: %s; quarantined", sample.sample_id, fault)
            self.quarantined[sample.sample_id] = fault
            return
        packed = self._codec.pack(hidden_TLD, self._calibration)
        self.sums.add(hidden_TLD, self._codec.unpack(packed, self._calibration))
        packed = packed.to("cpu")
        packed_at = time.perf_counter()
        self._writer.add(
            CapturedSample(
                sample.sample_id,
                sample.split_key,
                sample.source,
                sample.token_ids,
                sample.loss_mask,
                packed,
            )
        )
        self.pack_seconds += packed_at - began
        self.write_seconds += time.perf_counter() - packed_at


class ShardCapture:
    """Captures shards of one plan with one loaded target."""

    def __init__(
        self,
        cache: Location,
        plan: Plan,
        spec: CaptureSpec,
        target: Target,
        *,
        calibration: Calibration | None,
        calibration_name: str | None,
        min_free_bytes: int,
    ) -> None:
        self._cache = cache
        self._plan = plan
        self._spec = spec
        self._target = target
        self._calibration = calibration.to(target.device) if calibration is not None else None
        self._calibration_name = calibration_name
        self._min_free_bytes = min_free_bytes

    def capture(
        self,
        shard_id: str,
        forward: Forward,
        progress: Callable[[int], None] = lambda tokens: None,
    ) -> tuple[ShardRecord, Timing]:
        """Capture and commit one shard; `progress` is told the tokens of every micro-batch.

        Where memory does not hold a batch, the whole shard is captured again with half of it, and
        its record says with how much. `progress` is then told what does not count, as a negative
        number.

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
                return self._capture(shard_id, forward, tell)
            except _TooLargeError as error:
                progress(-told)
                forward = replace(forward, batch_tokens=self._halve(shard_id, forward, error))
            if self._target.device.type == "cuda":
                torch.cuda.empty_cache()

    def _halve(self, shard_id: str, forward: Forward, error: _TooLargeError) -> int:
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
        self, shard_id: str, forward: Forward, progress: Callable[[int], None]
    ) -> tuple[ShardRecord, Timing]:
        started = time.perf_counter()
        timing = Timing()
        wip = workspace(self._cache) / WIP / shard_id
        remove_tree(wip)
        files = ShardWriter(wip, self._spec, shard_id)
        positions = self._plan.shard_positions(shard_id)
        try:
            with _Writer(files, self._spec, shard_id, self._calibration) as writer:
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
        is_cpu = self._target.device.type == "cpu"
        record = replace(
            record,
            batch_tokens=forward.batch_tokens,
            threads=forward.threads if is_cpu else None,
        )
        commit_shard(self._cache, record)
        ended = time.perf_counter()
        timing.commit, timing.total = ended - drained, ended - started
        return record, timing

    def _run(self, samples: list[PlannedSample]) -> _Batch:
        try:
            states = self._target.capture([sample.token_ids for sample in samples])
            if self._target.device.type == "cuda":
                torch.cuda.synchronize(self._target.device)  # so that its time is its own
        except Exception as error:
            if is_out_of_memory(error):
                raise _TooLargeError(samples) from None  # its frames hold the states
            raise
        return _Batch(samples, states)
