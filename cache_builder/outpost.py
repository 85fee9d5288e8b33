"""Work on another machine than the builder's: does it see the same cache and the same target?"""

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from cache_builder.lease import lease_owner, lend
from cache_builder.lock import own_slot, worker_lock
from cache_builder.stored_plans import fetch_plan
from cache_builder.target_files import describe_target, stamp_files
from cache_builder.worker import Job
from cache_builder.workspace import workspace
from shared.errors import CacheError, TargetError
from shared.files import writing
from shared.layout import PLANS, WIP
from shared.location import Location, S3Url
from shared.storage import open_storage


@contextmanager
def beacon(cache: Location) -> Iterator[str]:
    """A sign by which workers elsewhere recognize the cache that this builder holds.

    In a directory it is one of a new name, in a bucket the owner of the lock.
    """
    if isinstance(cache, S3Url):
        yield lease_owner(cache)
        return
    sign = cache / WIP / f"builder.{uuid.uuid4().hex}"
    with writing(sign):
        sign.mkdir()
    try:
        yield sign.name
    finally:
        sign.rmdir()


@contextmanager
def outpost(job: Job, sign: str) -> Iterator[Job]:
    """`job` as it is done on this machine.

    A cache in a directory must be the builder's own, on a file system that both have. For one in a
    bucket the worker gets a workspace of its own with a copy of the plan.

    Raises:
        CacheError: this machine does not see the builder's cache.
        TargetError: it has no target at that path, or another one.
    """
    job = _with_own_target(job)
    if isinstance(job.cache, Path):
        if not (job.cache / WIP / sign).is_dir():
            raise CacheError(
                f"{job.cache}: not the builder's directory. The cache must lie on a file system "
                "that all nodes have at the same path, or in a bucket (s3://)."
            )
        with worker_lock(job.cache):
            yield job
        return
    with own_slot(workspace(job.cache) / "workers" / os.uname().nodename) as slot:
        cache = replace(job.cache, scratch=slot)
        place = workspace(cache)
        (place / WIP).mkdir(parents=True)
        lend(cache, sign)
        plan = fetch_plan(open_storage(cache), job.plan.name, place / PLANS)
        yield replace(job, cache=cache, plan=plan)


def _with_own_target(job: Job) -> Job:
    """With the stamps of this machine's files, after their content was found to be the same."""
    path = job.target_path
    if not path.is_dir():
        raise TargetError(
            f"{path}: no such directory. The target must lie at the same path on all nodes."
        )
    stamps = stamp_files(path)
    if stamps == job.target_stamps:
        return job
    if describe_target(path, job.target) != job.spec.target:
        raise TargetError(
            f"{path}: another model than the builder's, by its config.json or its weights. The "
            "target must be the same on all nodes."
        )
    return replace(job, target_stamps=stamps)
