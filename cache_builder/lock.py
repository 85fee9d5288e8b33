"""One builder per cache, and one writer per file of answers. Locks of processes that died are gone
with them."""

import fcntl
import itertools
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from cache_builder.lease import lease
from cache_builder.workspace import workspace
from shared.errors import CacheLockedError
from shared.files import remove_tree, writing
from shared.location import Location, S3Url

_BUILDER = "builder.lock"
_WORKERS = "workers.lock"
_ORPHAN_SECONDS = 30.0
"""How long a new builder waits for workers whose own builder was killed."""


@contextmanager
def builder_lock(cache: Location) -> Iterator[None]:
    """Hold the cache against other builders, of this machine and of others.

    Raises:
        CacheLockedError: another builder, or a worker that outlived its builder, is at work.
    """
    place = workspace(cache)
    with writing(place):
        if isinstance(cache, S3Url):
            place.mkdir(parents=True, exist_ok=True)
    with _open(place / _BUILDER) as descriptor:
        if not try_lock(descriptor, place / _BUILDER):
            holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
            raise CacheLockedError(
                f"{cache}: another builder is at work ({holder or 'unknown'}). Wait for it, or "
                "stop it; its lock goes with its process."
            )
        with writing(place):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {os.uname().nodename}".encode(), 0)
        _wait_for_orphans(place)
        with lease(cache) if isinstance(cache, S3Url) else nullcontext():
            yield


@contextmanager
def worker_lock(cache: Location) -> Iterator[None]:
    """Held by each worker process, so that a later builder can see that it still writes."""
    path = workspace(cache) / _WORKERS
    with _open(path) as descriptor:
        with writing(path):
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield


def try_lock(descriptor: int, path: Path) -> bool:
    """Hold the open file `path` alone until it is closed; False if another process holds it.

    Raises:
        DraftCacheError: its file system knows no locks.
    """
    with writing(path):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


@contextmanager
def _open(path: Path) -> Iterator[int]:
    with writing(path):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def own_slot(place: Path) -> Iterator[Path]:
    """A directory below `place` that no other process has: emptied, and again in the end."""
    with writing(place):
        place.mkdir(parents=True, exist_ok=True)
    for number in itertools.count():
        slot = place / str(number)
        lock = slot.with_suffix(".lock")
        with _open(lock) as descriptor:
            if try_lock(descriptor, lock):
                remove_tree(slot)
                slot.mkdir()
                yield slot
                remove_tree(slot)
                return


def _wait_for_orphans(place: Path) -> None:
    with _open(place / _WORKERS) as descriptor:
        deadline = time.monotonic() + _ORPHAN_SECONDS
        while not try_lock(descriptor, place / _WORKERS):
            if time.monotonic() > deadline:
                raise CacheLockedError(
                    f"{place}: workers of a builder that was killed still write. Stop them."
                )
            time.sleep(0.1)
