"""What a repair makes again but shards: metadata, copies, and what the first build made once."""

import contextlib
import logging
from collections.abc import Sequence

from cache_builder.commit import read_record
from cache_builder.config import BuildConfig
from cache_builder.description import (
    copy_target_file,
    describe_capture,
    read_prepared,
    write_description,
)
from cache_builder.devices import pick_devices
from cache_builder.jobs import make_job
from cache_builder.plan import Plan
from cache_builder.projecting import put_projection
from cache_builder.target_files import resolve_target, stamp_files
from cache_builder.tokens import load_template
from cache_builder.verify import Problem
from cache_builder.worker import Job, Prepared, Worker
from shared.errors import CacheError, CacheIncompatibleError, CacheNotFoundError
from shared.files import sha256_bytes, sha256_file
from shared.layout import DESCRIPTION, GENERATIONS, HEAD, MANIFEST, calibration_key, generation_key
from shared.location import Location
from shared.manifest import Manifest
from shared.metadata import read_description, read_manifest
from shared.spec import CaptureSpec
from shared.storage import open_storage, put_json

logger = logging.getLogger(__name__)

_FROM_TARGET = ("head", "calibration")
"""What the first build made of target and data. Digests say whether it is made again."""


def restore_description(config: BuildConfig, plans: Sequence[Plan], error: CacheError) -> None:
    """Write `cache.json`, which is damaged or lost, anew for the configuration of its build.

    Args:
        error: what is wrong with it.

    Raises:
        CacheError: the newest manifest is of another fingerprint, or there is none, or the states
            were imported: no other file says as what.
    """
    path = config.cache.path
    manifest = restore_manifest(path)
    if manifest is None or not plans:
        raise error
    # `error` of a missing file says that there is no cache; the manifest says that there is one.
    what = f"{path}/{DESCRIPTION}: missing." if isinstance(error, CacheNotFoundError) else error
    if any("imported_from" in plan.description["report"] for plan in plans):
        raise CacheError(
            f"{what} Its states were imported, and what was declared of them stands in this file "
            "alone. Restore it from a copy, or import them again into an empty directory."
        )
    target_path = resolve_target(config.target)
    stamps = stamp_files(target_path)
    spec = describe_capture(config, target_path, load_template(target_path, config.data))
    if spec.fingerprint != manifest.fingerprint:
        raise CacheError(
            f"{what} It can be made again by configuration and target of the build alone: "
            f"expected fingerprint {manifest.fingerprint[:16]}, these give "
            f"{spec.fingerprint[:16]}. Correct them."
        )
    first, _ = read_record(path, spec, min(manifest.records))
    job = make_job(config, plans[0], spec, target_path, stamps)
    head = _worker(config, job).head()
    open_storage(path).put(HEAD, head)
    write_description(job, Prepared(sha256_bytes(head), first.calibration))
    logger.warning("%s It was made again from configuration and target.", what)


def _worker(config: BuildConfig, job: Job) -> Worker:
    return Worker(job, pick_devices(config.workers, num_shards=1, target_path=job.target_path)[0])


def restore_manifest(path: Location) -> Manifest | None:
    """The newest manifest, put back from the copy of its generation if it is damaged or lost.

    Raises:
        CacheIncompatibleError: it is of another format version.
        CacheError: it is damaged and so is every copy.
    """
    storage = open_storage(path)
    try:
        return read_manifest(storage)
    except CacheError as error:
        names = {name.partition(".")[0] for name in storage.names(GENERATIONS)}
        for generation in sorted(int(n) for n in names if n.isascii() and n.isdigit())[::-1]:
            with contextlib.suppress(CacheError):
                manifest = read_manifest(storage, generation)
                put_json(storage, MANIFEST, manifest.to_dict())
                logger.warning("%s It was put back from generation %d.", error, generation)
                return manifest
        if isinstance(error, CacheNotFoundError):
            return None
        if isinstance(error, CacheIncompatibleError):
            raise  # every copy says so: it is whole, and of another format version
        raise CacheError(
            f"{error} No copy of it is left: delete it and build again: what is committed is kept."
        ) from None


def restore_copies(config: BuildConfig, problems: Sequence[Problem]) -> None:
    """Put back what is a copy of something else: generation manifests, files of the target, the
    projection."""
    path = config.cache.path
    for problem in problems:
        if problem.piece == "generation":
            manifest = read_manifest(open_storage(path))
            put_json(
                open_storage(path), generation_key(manifest.generation, "json"), manifest.to_dict()
            )
            logger.warning("%s It was written again.", problem.message)
        elif problem.piece == "target":
            _restore_target_file(config, problem)
        elif problem.piece == "projection":
            _restore_projection(config, problem)
        elif problem.piece in ("plan", "records"):
            logger.warning("%s", problem.message)


def restore_from_target(
    config: BuildConfig,
    spec: CaptureSpec,
    prepared: Prepared,
    plans: Sequence[Plan],
    problems: Sequence[Problem],
) -> bool:
    """Have head and calibration made again where they are damaged or lost; whether any was.

    Raises:
        CacheError: the target does not give the same bytes.
    """
    lost = [problem for problem in problems if problem.piece in _FROM_TARGET]
    if not lost:
        return False
    if not plans:
        raise CacheError(
            f"{lost[0].message} It is made from target and plan, and no plan is left: restore the "
            "file, or build the cache anew."
        )
    target_path = resolve_target(config.target)
    job = make_job(config, plans[0], spec, target_path, stamp_files(target_path))
    worker = _worker(config, job)
    storage = open_storage(config.cache.path)
    for problem in lost:
        if problem.piece == "head":
            key, data, digest = HEAD, worker.head(), prepared.head_sha256
        else:
            digest = str(prepared.calibration)
            key, data = calibration_key(digest), worker.calibration() or b""
        if sha256_bytes(data) != digest:
            raise CacheError(
                f"{problem.message} {target_path} and plan {plans[0].plan_id} give other "
                "bytes: name the target, settings and kind of device that the cache was built "
                "with; where that does not help, restore the file or build the cache anew."
            )
        storage.put(key, data)
        logger.warning("%s It was made again from the target.", problem.message)
    return True


def _restore_target_file(config: BuildConfig, problem: Problem) -> None:
    path, target_path = config.cache.path, resolve_target(config.target)
    expected = read_description(open_storage(path))["target_files"][problem.name]
    source = target_path / problem.name
    if not source.is_file() or sha256_file(source) != expected:
        raise CacheError(
            f"{problem.message} {source} is not that file: name the target that the cache was "
            "built from."
        )
    copy_target_file(target_path, path, problem.name)
    logger.warning("%s It was copied from the target again.", problem.message)


def _restore_projection(config: BuildConfig, problem: Problem) -> None:
    path, source = config.cache.path, config.capture.projection
    if source is None:
        raise CacheError(
            f"{problem.message} Name the file that the cache was built with in capture.projection: "
            "it is copied from there."
        )
    put_projection(path, source, read_prepared(path)[0])
    logger.warning("%s It was copied from %s again.", problem.message, source)
