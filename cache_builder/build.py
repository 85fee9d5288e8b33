"""Building a cache: plan, capture what is missing, publish. Resuming and extending are the same."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from cache_builder.commit import committed_shards, discard_uncommitted, read_record
from cache_builder.config import BuildConfig
from cache_builder.description import describe_capture, open_or_create
from cache_builder.jobs import capture_shards, make_job, require_workers
from cache_builder.lock import builder_lock
from cache_builder.plan import Plan, find_plans
from cache_builder.planning import find_or_make_plan
from cache_builder.projecting import put_projection
from cache_builder.publication import publish
from cache_builder.retirement import recorded_shards
from cache_builder.taps import warn_of_last_block
from cache_builder.target_files import resolve_target, stamp_files
from cache_builder.tokens import load_template
from cache_builder.worker import Task
from cache_builder.workspace import workspace
from shared.cache import Cache
from shared.errors import CacheError, CacheNotFoundError
from shared.files import writing
from shared.layout import PLANS
from shared.location import Location
from shared.manifest import Manifest
from shared.metadata import read_manifest
from shared.quantity import count
from shared.spec import CaptureSpec
from shared.storage import open_storage

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BuildReport:
    """What one build did."""

    manifest: Manifest
    plan: Plan
    num_new_shards: int
    seconds: float


def build(config: BuildConfig, *, retry_quarantined: bool = False) -> BuildReport:
    """Build, resume or extend the cache that `config` describes.

    Args:
        retry_quarantined: capture again the samples whose states could not be used before.

    Raises:
        CacheIncompatibleError: the cache there was built with other settings.
        CacheLockedError: another builder is at work on it.
        CaptureError: shards are missing at the end, or too many samples are unusable; what is
            committed is kept.
        KeyboardInterrupt: with what is committed so far as its message.
    """
    started = time.perf_counter()
    require_workers(config.workers)  # before the target is hashed and the data are tokenized
    target_path = resolve_target(config.target)
    stamps = stamp_files(target_path)
    template = load_template(target_path, config.data)
    spec = describe_capture(config, target_path, template)
    warn_of_last_block(spec.target_layer_ids, spec.target.num_layers)
    path = config.cache.path
    if isinstance(path, Path):
        with writing(path):
            path.mkdir(parents=True, exist_ok=True)
    with builder_lock(path), explaining_interrupts(path):
        prepared = open_or_create(path, spec)
        if prepared is None:
            put_projection(path, config.capture.projection, spec)
        require_records(path, spec)
        plan = find_or_make_plan(config, spec, template, retry_quarantined=retry_quarantined)
        leftovers = discard_uncommitted(path)
        if leftovers:
            logger.info("discarded %s that were never committed", count(leftovers, "shard"))
        done = committed_shards(path)
        todo = [shard_id for shard_id in plan.shard_ids if shard_id not in done]
        logger.info(
            "plan %s: %s, %s, %s, %s to capture",
            plan.plan_id,
            count(len(plan), "sample"),
            count(plan.num_tokens, "token"),
            count(len(plan.shard_ids), "shard"),
            f"{len(todo):,}",
        )
        if todo or prepared is None:
            tasks = [Task(shard_id, plan.forward) for shard_id in todo]
            job = make_job(config, plan, spec, target_path, stamps)
            capture_shards(config, job, plan, tasks, prepared)
        fraction = config.capture.max_quarantined_fraction
        required = done.union(plan.shard_ids)
        manifest = publish(path, spec, required=required, max_quarantined_fraction=fraction)
    Cache(path)  # a reader must be able to open what was published
    return BuildReport(manifest, plan, len(todo), time.perf_counter() - started)


@contextmanager
def explaining_interrupts(path: Location) -> Iterator[None]:
    """Tell whoever interrupts how much is done, and that nothing of it is lost."""
    try:
        yield
    except KeyboardInterrupt as stop:
        stop.args = (f"{path}: {_state(path)}. The same command goes on from there.",)
        raise


def _state(path: Location) -> str:
    done, tokens, planned, planned_tokens = committed_shards(path), 0, 0, 0
    for directory in find_plans(workspace(path) / PLANS)[-1:]:
        with suppress(CacheError):
            plan = Plan(directory)
            sizes = {i: int(plan.lengths(plan.shard_positions(i)).sum()) for i in plan.shard_ids}
            done &= sizes.keys()
            tokens = sum(sizes[shard_id] for shard_id in done)
            planned, planned_tokens = len(sizes), plan.num_tokens
    return (
        f"{len(done)} of {planned} shards of the newest plan are committed ({tokens:,} of "
        f"{planned_tokens:,} tokens)"
    )


def require_records(path: Location, spec: CaptureSpec) -> None:
    """Refuse to build on while a published shard has no record, or another than was published.

    Raises:
        CacheError: naming the shards.
    """
    try:
        published = read_manifest(open_storage(path)).records
    except CacheNotFoundError:
        return
    recorded = recorded_shards(path)
    wrong = []
    for shard_id, digest in sorted(published.items()):
        try:
            if shard_id not in recorded or read_record(path, spec, shard_id)[1] != digest:
                wrong.append(shard_id)
        except CacheError:
            wrong.append(shard_id)
    if wrong:
        raise CacheError(
            f"{path}: the records of {len(wrong)} published shards are missing or were changed "
            f"({', '.join(wrong[:8])}). Run `cache-builder repair` with this configuration."
        )
