"""Making a damaged cache whole: from what is in it where that is enough, else from the target."""

import contextlib
import logging
from collections.abc import Sequence

from cache_builder.build import explaining_interrupts
from cache_builder.commit import committed_shards, discard_uncommitted, read_record
from cache_builder.config import BuildConfig, Forward
from cache_builder.description import (
    create_directories,
    describe_capture,
    read_prepared,
)
from cache_builder.jobs import capture_shards, make_job
from cache_builder.lease import require_lease
from cache_builder.lock import builder_lock
from cache_builder.plan import Plan
from cache_builder.publication import publish
from cache_builder.restoration import (
    restore_copies,
    restore_description,
    restore_from_target,
    restore_manifest,
)
from cache_builder.retirement import retired_shards
from cache_builder.stored_plans import own_plans
from cache_builder.target_files import resolve_target, stamp_files
from cache_builder.tokens import load_template
from cache_builder.verify import Problem, verify_cache, verify_unpublished
from cache_builder.worker import Prepared, Task
from shared.errors import CacheError
from shared.layout import MANIFEST, record_key
from shared.location import Location
from shared.metadata import read_description
from shared.spec import CaptureSpec
from shared.storage import open_storage

logger = logging.getLogger(__name__)

_IRREPLACEABLE = ("description", "manifest")
"""A manifest that could be put back was, before these are asked for."""


def repair(config: BuildConfig, *, drop_lost: bool = False) -> list[str]:
    """Make the newest generation whole, and the committed shards that are in none yet.

    Manifest and index are made again from the rest of the cache, copies of the target's files from
    the target. `cache.json`, head and calibration are made again by the target, and damaged and
    missing shards captured anew, as they were captured before; only for these is it loaded.

    Args:
        drop_lost: let go of damaged shards that cannot be captured here: no plan on disk has
            them, and a build captures their samples from the data again; or they were imported,
            and the same import takes them from its source again.

    Returns:
        The ids of the shards captured anew.

    Raises:
        CacheError: there is no cache, or what is damaged cannot be made again.
        CacheIncompatibleError: shards must be captured, and it was built with other settings.
        CaptureError: shards could not be captured, or too many samples are unusable.
    """
    path = config.cache.path
    if not open_storage(path).exists(MANIFEST):
        read_prepared(path)  # before a lock is put into what is no cache
    with builder_lock(path), explaining_interrupts(path):
        plans = _open_plans(path)
        try:
            spec, prepared = read_prepared(path)
        except CacheError as error:
            restore_description(config, plans, error)
            spec, prepared = read_prepared(path)
        create_directories(path)
        manifest = restore_manifest(path)
        problems = verify_cache(path, deep=True) if manifest is not None else []
        published = set(manifest.records) if manifest is not None else set()
        problems += verify_unpublished(path, spec, committed_shards(path) - published)
        _require_replaceable(problems)
        restore_copies(config, problems)
        if restore_from_target(config, spec, prepared, plans, problems):
            # Without a calibration no shard could be read: what of them is damaged shows now.
            problems = verify_cache(path, deep=True)
            problems += verify_unpublished(path, spec, committed_shards(path) - published)
        # What is on its way out needs no repair: it goes with the publication below.
        shards = {problem.shard for problem in problems if problem.shard is not None}
        damaged = sorted(shards - retired_shards(path))
        source = _imported_from(path)
        known = {i for plan in plans for i in plan.shard_ids} if source is None else set()
        _drop(path, sorted(set(damaged) - known), source, allowed=drop_lost)
        todo = [shard_id for shard_id in damaged if shard_id in known]
        discard_uncommitted(path)
        required = committed_shards(path).union(todo)
        if todo:
            _capture(config, spec, prepared, plans, todo)
        if manifest is not None:
            fraction = config.capture.max_quarantined_fraction
            publish(path, spec, required=required, max_quarantined_fraction=fraction)
        else:
            logger.warning("%s: nothing is published yet: run `cache-builder build`", path)
    return todo


def _capture(
    config: BuildConfig,
    spec: CaptureSpec,
    prepared: Prepared,
    plans: Sequence[Plan],
    todo: Sequence[str],
) -> None:
    path = config.cache.path
    target_path = resolve_target(config.target)
    stamps = stamp_files(target_path)
    template = load_template(target_path, config.data)
    describe_capture(config, target_path, template).require_equal(spec, str(path))
    for plan in plans:
        tasks = [
            Task(
                shard_id,
                _forward(path, spec, plan, shard_id),
                replaces=open_storage(path).version(record_key(shard_id)),
            )
            for shard_id in plan.shard_ids
            if shard_id in todo
        ]
        if tasks:
            job = make_job(config, plan, spec, target_path, stamps)
            capture_shards(config, job, plan, tasks, prepared)


def _forward(path: Location, spec: CaptureSpec, plan: Plan, shard_id: str) -> Forward:
    """How the shard was captured: as its record says, or its plan where that is lost."""
    with contextlib.suppress(CacheError):
        record, _ = read_record(path, spec, shard_id)
        return Forward(
            record.batch_tokens or plan.forward.batch_tokens,
            record.threads or plan.forward.threads,
        )
    return plan.forward


def _require_replaceable(problems: Sequence[Problem]) -> None:
    for problem in problems:
        if problem.piece in _IRREPLACEABLE:
            raise CacheError(f"{problem.message} No shard can replace it: build the cache anew.")


def _open_plans(path: Location) -> list[Plan]:
    """The plans on disk, without those that are damaged: verifying has named them."""
    plans = []
    for directory in own_plans(path):
        with contextlib.suppress(CacheError):
            plans.append(Plan(directory))
    return plans


def _imported_from(path: Location) -> str | None:
    """The tool whose states the cache holds, where a capture would not be known to give them."""
    origin = read_description(open_storage(path)).get("origin")
    return None if origin is None or origin["same_as"] else str(origin["kind"])


def _drop(path: Location, lost: Sequence[str], source: str | None, *, allowed: bool) -> None:
    if lost and not allowed and source is not None:
        raise CacheError(
            f"{path}: shards {', '.join(lost[:8])} are damaged. Their states were imported from "
            f"{source}; a capture would not be known to give the same. Repair with --drop-lost, "
            "which lets go of them, then run the same `cache-builder import` again, which takes "
            "them from its source."
        )
    if lost and not allowed:  # nothing is deleted that cannot come back
        raise CacheError(
            f"{path}: shards {', '.join(lost[:8])} are damaged and no plan on disk has "
            "them. Restore the plans; or repair with --drop-lost, which lets go of them, and "
            "build again, which captures their samples from the data."
        )
    if lost:
        require_lease(path)
        open_storage(path).delete(*(record_key(shard_id) for shard_id in lost))
