"""Which stored samples a command keeps or adds, and the plan of the shards they become."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cache_builder.commit import committed_shards
from cache_builder.config import CaptureConfig, Forward, WorkersConfig
from cache_builder.corpus import TokenizedSample
from cache_builder.plan import Plan, next_plan_id
from cache_builder.plan_writer import PlanWriter
from cache_builder.retirement import retired_shards
from cache_builder.stored_plans import readable_plan, share_plan
from cache_builder.workspace import workspace
from shared.errors import CacheError, ShardCorruptError
from shared.layout import PLANS
from shared.location import Location
from shared.manifest import ShardRecord
from shared.metadata import read_manifest
from shared.shard_reader import ShardReader
from shared.spec import CaptureSpec
from shared.storage import Storage, open_storage

logger = logging.getLogger(__name__)

_UNKNOWN_FILE = "unknown"

_PlanKey = tuple[Location, str]
"""A cache and the id of one of its plans."""


@dataclass(frozen=True, eq=False, slots=True)
class Selection:
    """Some samples of one stored shard."""

    storage: Storage
    record: ShardRecord
    rows: npt.NDArray[np.int64]
    """int64 [N]: ascending rows of the shard."""

    num_tokens: int
    """Tokens of those rows."""

    quarantined: dict[str, str]
    """Id to reason of the samples that the shard could not store, and that stay so."""

    @property
    def is_whole(self) -> bool:
        return len(self.rows) == self.record.num_samples

    @property
    def stored_bytes(self) -> int:
        """About what these samples take: their share of the shard by tokens."""
        return round(self.record.stored_bytes * self.num_tokens / max(self.record.num_tokens, 1))


def select(
    storage: Storage, record: ShardRecord, spec: CaptureSpec, takes: Callable[[bytes], bool]
) -> Selection:
    """The samples of a shard that `takes` wants, asked for each id once.

    Raises:
        ShardCorruptError: the shard is damaged.
    """
    arrays = ShardReader(storage, record, spec).arrays
    ids = map(bytes, arrays["sample_ids"])
    chosen = np.array([row for row, i in enumerate(ids) if takes(i)], np.int64)
    num_tokens = int(np.diff(arrays["sample_offsets"])[chosen].sum())
    return Selection(storage, record, chosen, num_tokens, dict(record.quarantined))


def require_no_missing_shard(cache: Location) -> None:
    """Refuse to publish a generation that lost what the newest one has.

    Raises:
        CacheError: a shard of the newest generation has no record.
    """
    published = read_manifest(open_storage(cache)).records.keys()
    if missing := sorted(published - committed_shards(cache) - retired_shards(cache)):
        raise CacheError(
            f"{cache}: {len(missing)} of {len(published)} shards are missing "
            f"({', '.join(missing[:8])}). Run `cache-builder repair` first."
        )


def plan_selections(
    cache: Location, selections: Sequence[Selection], spec: CaptureSpec, command: str
) -> Plan:
    """Write a plan of `selections` into `cache`: its shards are theirs, in this order.

    With it the shards are like any other: `repair` can capture them from the tokens.
    File and row of each sample come from the plan that captured it, where that is still there.

    Raises:
        ShardCorruptError: a shard is damaged, or a sample is not the one its id names.
    """
    plans = workspace(cache) / PLANS
    plan_id = next_plan_id(plans, cache)
    writer = PlanWriter(plans, plan_id)
    stack = ExitStack()
    try:
        origins, captured_by = {}, _open_plans(selections, stack)
        for number, selection in enumerate(selections):
            origins[f"{plan_id}-{number:05d}"] = (
                f"{selection.storage.location.name}/{selection.record.shard_id}"
            )
            captured = captured_by.get(_plan_of(selection))
            for sample in _tokenized(selection, spec, captured):
                writer.add(sample)
        plan = writer.commit(
            key=command,
            forward=_forward(selections, captured_by),
            report={"copied_from": origins},
            shard_sizes=[len(selection.rows) for selection in selections],
        )
        return share_plan(cache, plan)
    finally:
        stack.close()
        writer.discard()


def _tokenized(
    selection: Selection, spec: CaptureSpec, plan: Plan | None
) -> Iterator[TokenizedSample]:
    record = selection.record
    arrays = ShardReader(selection.storage, record, spec).arrays
    known = {}
    if plan is not None and record.shard_id in plan.shard_ids:
        for position in plan.shard_positions(record.shard_id).tolist():
            file, number, _ = plan.provenance(position)
            known[plan.sample(position).sample_id] = file, number
    for row in selection.rows.tolist():
        begin, end = (int(value) for value in arrays["sample_offsets"][row : row + 2])
        sample_id = bytes(arrays["sample_ids"][row]).hex()
        file, number = known.get(sample_id, (_UNKNOWN_FILE, 0))
        sample = TokenizedSample(
            arrays["token_ids"][begin:end],
            arrays["loss_mask"][begin:end],
            source=record.sources[int(arrays["sample_sources"][row])],
            file=file,
            row=number,
            generated_by=None,
        )
        if sample.sample_id != sample_id:
            raise ShardCorruptError(
                f"{selection.storage}: shard {record.shard_id}, sample {row}: its id is "
                f"{sample_id}, its tokens have {sample.sample_id}. Run `cache-builder repair`."
            )
        yield sample


def _forward(selections: Sequence[Selection], plans: Mapping[_PlanKey, Plan]) -> Forward:
    """How these samples were captured, where a plan still says so: what a repair should do."""
    for selection in selections:
        if (plan := plans.get(_plan_of(selection))) is not None:
            return plan.forward
    return Forward(CaptureConfig().batch_tokens, WorkersConfig().threads)


def _open_plans(selections: Sequence[Selection], stack: ExitStack) -> dict[_PlanKey, Plan]:
    """The plans that captured the shards, until `stack` closes; without those that are damaged."""
    plans = {}
    for location in dict.fromkeys(selection.storage.location for selection in selections):
        for plan_id in sorted({key[1] for key in map(_plan_of, selections) if key[0] == location}):
            try:
                directory = stack.enter_context(readable_plan(location, plan_id))
                plans[location, plan_id] = Plan(directory)
            except CacheError as error:
                logger.warning("%s Its samples are kept without file and row.", error)
    return plans


def _plan_of(selection: Selection) -> _PlanKey:
    return selection.storage.location, selection.record.shard_id.partition("-")[0]
