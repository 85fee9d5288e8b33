"""Writing one planned shard from the states in the source.

T tokens of one sample   S stored states per token   L imported blocks   D hidden size
"""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cache_builder.commit import commit_shard
from cache_builder.importing.slots import Slots
from cache_builder.importing.source import Place, SampleSkippedError, StateSource
from cache_builder.plan import Plan, PlannedSample
from cache_builder.quality import LayerSums, find_fault
from cache_builder.space import require_floor
from cache_builder.workspace import workspace
from shared.codec import Calibration
from shared.errors import DataError
from shared.files import remove_tree
from shared.layout import WIP
from shared.location import Location
from shared.manifest import ShardRecord
from shared.shard import CapturedSample
from shared.shard_writer import ShardWriter
from shared.spec import CaptureSpec

_READ_AHEAD = 4
"""Samples that are read while one is encoded: the bound on memory."""


@dataclass(frozen=True, eq=False, slots=True)
class ShardImport:
    """Writes shards of one plan into one cache."""

    cache: Location
    plan: Plan
    spec: CaptureSpec
    source: StateSource
    slots: Slots
    calibration: Calibration | None
    calibration_name: str | None
    min_free_bytes: int

    def write(self, shard_id: str, progress: Callable[[int], None]) -> ShardRecord:
        """Write and commit one shard; `progress` is told the tokens of every sample.

        States that are not finite, all zero or constant are quarantined.

        Raises:
            DataError: a file of the source is not what was planned any more.
            OutOfSpaceError: less space is free than must stay free.
        """
        codec, quarantined = self.spec.build_codec(), dict[str, str]()
        sums = LayerSums(self.spec.row_sizes)
        place = workspace(self.cache)
        wip = place / WIP / shard_id
        remove_tree(wip)
        writer = ShardWriter(wip, self.spec, shard_id)
        try:
            for sample, hidden_TLD in self._samples(shard_id):
                require_floor(place, self.min_free_bytes)
                if fault := find_fault(hidden_TLD, self.spec.layer_names):
                    quarantined[sample.sample_id] = fault
                else:
                    packed = codec.pack(hidden_TLD, self.calibration)
                    sums.add(hidden_TLD, codec.unpack(packed, self.calibration))
                    writer.add(
                        CapturedSample(
                            sample.sample_id,
                            sample.split_key,
                            sample.source,
                            sample.token_ids,
                            sample.loss_mask,
                            packed,
                        )
                    )
                progress(len(sample.token_ids))
            record = writer.finish(
                layers=sums.statistics(),
                sources=self.plan.sources,
                calibration=self.calibration_name,
                quarantined=quarantined,
            )
        finally:
            writer.close()
        return commit_shard(self.cache, record)

    def _samples(self, shard_id: str) -> Iterator[tuple[PlannedSample, Tensor]]:
        """The samples of a shard and their states, the next ones read meanwhile."""
        reading: deque[Future[tuple[PlannedSample, Tensor]]] = deque()
        with ThreadPoolExecutor(1, "import-reader") as reader:
            try:
                for position in self.plan.shard_positions(shard_id).tolist():
                    reading.append(
                        reader.submit(read_states, self.source, self.plan, position, self.slots)
                    )
                    if len(reading) > _READ_AHEAD:
                        yield reading.popleft().result()
                while reading:
                    yield reading.popleft().result()
            finally:
                for future in reading:
                    future.cancel()


def read_states(
    source: StateSource, plan: Plan, position: int, slots: Slots
) -> tuple[PlannedSample, Tensor]:
    """One planned sample and its states in the order of the cache's blocks, bfloat16 [T, L, D].

    Raises:
        DataError: the source is not what was planned any more.
    """
    sample = plan.sample(position)
    pattern, number, _ = plan.provenance(position)
    place = Place(pattern, number)
    try:
        ids, stored_TSD = source.states(place)
    except SampleSkippedError as error:
        raise DataError(
            f"{error.detail}. It could be read a moment ago: restore it and run the same command "
            "again."
        ) from None
    if not np.array_equal(ids, sample.token_ids) or len(stored_TSD) != len(ids):
        raise DataError(
            f"{source.root / place.name}: it was changed since it was planned. Run the same "
            "command again."
        )
    return sample, stored_TSD[:, list(slots.columns)].to(torch.bfloat16)
