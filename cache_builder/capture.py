"""Capturing one planned shard: forward, checks, codec, and a writer that never blocks the forward.

T tokens of one sample   L captured layers   D hidden size
"""

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from torch import Tensor

from cache_builder.commit import commit_shard
from cache_builder.plan import Plan, PlannedSample, micro_batches
from cache_builder.quality import LayerSums, find_fault
from cache_builder.space import require_floor
from cache_builder.target import Target
from shared.cache import WIP
from shared.codec import Calibration
from shared.files import remove_tree
from shared.manifest import ShardRecord
from shared.shard import CapturedSample, ShardWriter
from shared.spec import CaptureSpec

logger = logging.getLogger(__name__)

_QUEUED_SAMPLES = 16
"""Packed samples that may wait for the writer: the bound on memory."""


@dataclass(slots=True)
class Timing:
    """Where the seconds of a shard went."""

    forward: float = 0.0
    pack: float = 0.0
    wait: float = 0.0
    """The forward waited for the writer."""

    write: float = 0.0
    """Encoding and writing, in the background."""

    total: float = 0.0


class _BackgroundWriter:
    """Encodes and writes samples in their order, in one thread behind a bounded queue."""

    def __init__(self, writer: ShardWriter) -> None:
        self._writer = writer
        self._queue: queue.Queue[CapturedSample | None] = queue.Queue(_QUEUED_SAMPLES)
        self._error: BaseException | None = None
        self.seconds = 0.0
        self._thread = threading.Thread(target=self._run, daemon=True, name="shard-writer")

    def __enter__(self) -> "_BackgroundWriter":
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

    def put(self, sample: CapturedSample) -> None:
        if self._error is not None:
            raise self._error
        self._queue.put(sample)

    def _run(self) -> None:
        while (sample := self._queue.get()) is not None:
            if self._error is not None:
                continue  # drain, so that `put` never blocks for ever
            started = time.perf_counter()
            try:
                self._writer.add(sample)
            except BaseException as error:  # handed to the forward's thread, which raises it
                self._error = error
            self.seconds += time.perf_counter() - started


class ShardCapture:
    """Captures shards of one plan with one loaded target."""

    def __init__(
        self,
        cache: Path,
        plan: Plan,
        spec: CaptureSpec,
        target: Target,
        *,
        calibration: Calibration | None,
        calibration_name: str | None,
        batch_tokens: int,
        min_free_bytes: int,
    ) -> None:
        self._cache = cache
        self._plan = plan
        self._spec = spec
        self._codec = spec.build_codec()
        self._target = target
        self._calibration = calibration.to(target.device) if calibration is not None else None
        self._calibration_name = calibration_name
        self._batch_tokens = batch_tokens
        self._min_free_bytes = min_free_bytes

    def capture(
        self, shard_id: str, progress: Callable[[int], None] = lambda tokens: None
    ) -> tuple[ShardRecord, Timing]:
        """Capture and commit one shard; `progress` is told the tokens of every micro-batch.

        Raises:
            OutOfSpaceError: less space is free than must stay free.
        """
        started = time.perf_counter()
        timing, quarantined = Timing(), dict[str, str]()
        sums = LayerSums(self._spec.num_captured)
        wip = self._cache / WIP / shard_id
        remove_tree(wip)
        writer = ShardWriter(wip, self._spec, shard_id)
        positions = self._plan.shard_positions(shard_id)
        try:
            with _BackgroundWriter(writer) as background:
                for part in micro_batches(self._plan.lengths(positions), self._batch_tokens):
                    require_floor(self._cache, self._min_free_bytes)
                    samples = [self._plan.sample(int(p)) for p in positions[part]]
                    began = time.perf_counter()
                    states = self._target.capture([sample.token_ids for sample in samples])
                    timing.forward += time.perf_counter() - began
                    for sample, hidden_TLD in zip(samples, states, strict=True):
                        self._pack(sample, hidden_TLD, background, sums, quarantined, timing)
                    progress(sum(len(sample.token_ids) for sample in samples))
            timing.write = background.seconds
            record = writer.finish(
                layers=sums.statistics(),
                sources=self._plan.sources,
                calibration=self._calibration_name,
                quarantined=quarantined,
            )
        finally:
            writer.close()
        commit_shard(self._cache, record)
        timing.total = time.perf_counter() - started
        return record, timing

    def _pack(
        self,
        sample: PlannedSample,
        hidden_TLD: Tensor,
        background: _BackgroundWriter,
        sums: LayerSums,
        quarantined: dict[str, str],
        timing: Timing,
    ) -> None:
        began = time.perf_counter()
        fault = find_fault(hidden_TLD, self._spec.target_layer_ids)
        if fault is not None:
            logger.warning("sample %s: %s; quarantined", sample.sample_id, fault)
            quarantined[sample.sample_id] = fault
            return
        packed = self._codec.pack(hidden_TLD, self._calibration)
        sums.add(hidden_TLD, self._codec.unpack(packed, self._calibration))
        packed = packed.to("cpu")
        waiting = time.perf_counter()
        timing.pack += waiting - began
        background.put(
            CapturedSample(
                sample.sample_id,
                sample.split_key,
                sample.source,
                sample.token_ids,
                sample.loss_mask,
                packed,
            )
        )
        timing.wait += time.perf_counter() - waiting
