"""What happens to captured states: checks, projection, codec, copy, encoding; beside the next
forward.

T tokens of one sample   L captured layers   D hidden size
"""

import logging
import queue
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType

import torch
from torch import Tensor

from cache_builder.memory import is_out_of_memory
from cache_builder.plan import PlannedSample
from cache_builder.quality import LayerSums, find_fault
from shared.codec import Calibration, Packed
from shared.projection import Projection
from shared.shard import CapturedSample
from shared.shard_writer import ShardWriter
from shared.spec import CaptureSpec

logger = logging.getLogger(__name__)

_QUEUED_BATCHES = 2
"""Micro-batches that may wait for the writer: the bound on memory. Their states are on the device
still, so that neither checks nor codec nor copy hold up the next forward."""

_POLL_SECONDS = 1.0
"""How often whoever waits for the writer looks whether it is alive."""


@dataclass(frozen=True, eq=False, slots=True)
class CapturedBatch:
    samples: list[PlannedSample]
    states: list[Tensor]
    """bfloat16 [T, L, D] of each sample, computed, on the target's device."""


class TooLargeError(Exception):
    """Memory did not hold a batch; carries its samples."""

    def __init__(self, samples: list[PlannedSample]) -> None:
        super().__init__()
        self.samples = samples

    @property
    def padded_tokens(self) -> int:
        return len(self.samples) * max(len(sample.token_ids) for sample in self.samples)


class BatchWriter:
    """Checks, packs, encodes and writes batches in their order, in one thread behind a queue.

    On a GPU the thread has a stream of its own and copies into pinned memory: its kernels and
    copies neither wait for the forward that runs meanwhile nor hold it up.
    """

    def __init__(
        self,
        writer: ShardWriter,
        spec: CaptureSpec,
        shard_id: str,
        calibration: Calibration | None,
        device: torch.device,
        projection: Projection | None = None,
    ) -> None:
        self._writer = writer
        self._spec = spec
        self._shard_id = shard_id
        self._codec = spec.build_codec()
        self._projection = projection
        self._captured_names = spec.unprojected().layer_names
        self._calibration = calibration
        is_cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if is_cuda else None  # type: ignore[no-untyped-call]
        self._queue: queue.Queue[CapturedBatch | None] = queue.Queue(_QUEUED_BATCHES)
        self._error: BaseException | None = None
        self.sums = LayerSums(spec.row_sizes)
        self.quarantined: dict[str, str] = {}
        self.pack_seconds = self.write_seconds = 0.0
        self._thread = threading.Thread(target=self._run, daemon=True, name="shard-writer")

    def __enter__(self) -> "BatchWriter":
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._hand_over(None)
        self._thread.join()
        if self._error is not None and error is None:
            raise self._error

    def put(self, batch: CapturedBatch) -> None:
        """Hand over one batch; waits while two are queued.

        Raises:
            BaseException: what stopped the writer at an earlier one.
        """
        if self._error is None:
            self._hand_over(batch)
        if self._error is not None:
            raise self._error

    def _hand_over(self, batch: CapturedBatch | None) -> None:
        """Wait for room in the queue, as long as there is somebody who makes it."""
        while self._thread.is_alive():
            with suppress(queue.Full):
                self._queue.put(batch, timeout=_POLL_SECONDS)
                return

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # of the device itself: handed over, as below
            error.add_note(f"shard {self._shard_id}")
            self._error = self._error or error

    def _work(self) -> None:
        with torch.cuda.stream(self._stream):  # does nothing where there is none
            while (batch := self._queue.get()) is not None:
                if self._error is not None:
                    continue  # drain, so that `put` never blocks for ever
                for sample, hidden_TLD in zip(batch.samples, batch.states, strict=True):
                    try:
                        self._store(sample, hidden_TLD)
                    except BaseException as error:  # handed to the forward's thread: it raises it
                        error.add_note(f"shard {self._shard_id}, sample {sample.sample_id}")
                        self._error = (
                            TooLargeError(batch.samples) if is_out_of_memory(error) else error
                        )
                        break
                if self._stream is not None:
                    self._stream.synchronize()  # the forward's stream may reuse the memory now
                del batch, hidden_TLD  # must not stay on the device while waiting for the next

    @torch.inference_mode()
    def _store(self, sample: PlannedSample, hidden_TLD: Tensor) -> None:
        began = time.perf_counter()
        fault = find_fault(hidden_TLD, self._captured_names)
        if self._projection is not None and fault is None:
            hidden_TLD = self._projection.rows(hidden_TLD)
            fault = find_fault(hidden_TLD, self._spec.layer_names)
        if fault is not None:
            logger.warning("sample %s: %s; quarantined", sample.sample_id, fault)
            self.quarantined[sample.sample_id] = fault
            return
        packed = self._codec.pack(hidden_TLD, self._calibration)
        self.sums.add(hidden_TLD, self._codec.unpack(packed, self._calibration))
        packed = self._to_host(packed)
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

    def _to_host(self, packed: Packed) -> Packed:
        if self._stream is None:
            return packed
        host = Packed(
            _pinned(packed.planes_PTW),
            _pinned(packed.outlier_position),
            _pinned(packed.outlier_bits),
            packed.values_per_token,
        )
        self._stream.synchronize()
        return host


def _pinned(tensor: Tensor) -> Tensor:
    """A copy in pinned memory, which is there when the current stream has come so far."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
