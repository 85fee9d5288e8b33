"""One builder per bucket: an object says who it is, and changes as long as that one lives.

Nobody compares clocks. Who wants a cache that has a holder watches the object: if it does not
change for `LEASE_SECONDS` of his own clock, he puts his name into it, by a conditional put. A
holder that slept that long finds out before its next commit.
"""

import json
import logging
import os
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cache_builder.workspace import workspace
from shared.errors import CacheError, CacheLockedError, ShardCorruptError, StorageError
from shared.files import json_bytes, write_bytes
from shared.location import Location, S3Url
from shared.storage import Storage, open_storage

logger = logging.getLogger(__name__)

LEASE = "builder.lock"
BEAT_SECONDS = 10.0
LEASE_SECONDS = 90.0
_POLL_SECONDS = 1.0
_OWNER = "owner"
_LENT = "lent"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@contextmanager
def lease(cache: S3Url) -> Iterator[None]:
    """Hold the cache against builders of other machines. Those of this one are held off already.

    Raises:
        CacheLockedError: another builder is at work on it.
    """
    storage, holder = open_storage(cache), _Holder(lease_owner(cache))
    version = _take(storage, holder)
    stop = threading.Event()
    beat = threading.Thread(target=_beat, args=(storage, holder, version, stop), daemon=True)
    beat.start()
    try:
        yield
    finally:
        stop.set()
        beat.join()
        try:
            if _read_owner(storage) == holder.owner:
                storage.delete(LEASE)
        except (StorageError, ShardCorruptError) as error:
            logger.warning(
                "%s The lock goes when it has not changed for %g s.", error, LEASE_SECONDS
            )


def require_lease(cache: Location) -> None:
    """Before a commit: this machine's builder must still be the holder. Nothing for a directory.

    Raises:
        CacheLockedError: another one took over.
    """
    if isinstance(cache, Path):
        return
    owner = None
    with suppress(ShardCorruptError):
        owner = _read_owner(open_storage(cache))
    if owner != lease_owner(cache):
        raise CacheLockedError(
            f"{cache}: another builder took over, or {LEASE} was deleted: this one had not "
            f"answered for {LEASE_SECONDS:g} s. What is committed is kept."
        )


class _Holder:
    """What the object says. A new text for every put: its version must change."""

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self._number = 0

    def text(self) -> bytes:
        self._number += 1
        return json_bytes(
            {
                "owner": self.owner,
                "holder": f"process {os.getpid()} on {os.uname().nodename}",
                "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                "beat": self._number,
            }
        )


def _take(storage: Storage, holder: _Holder) -> str:
    seen, since = None, 0.0
    while (version := storage.version(LEASE)) is not None:
        try:
            owner, name = _read_holder(storage)
        except ShardCorruptError:
            if storage.version(LEASE) == version:
                raise
            continue  # let go meanwhile, or another one's by now
        if owner == holder.owner:
            break  # of a builder of this machine that was killed: its workspace is ours now
        if seen is not None and version != seen:
            raise CacheLockedError(
                f"{storage}: another builder is at work ({name}). Wait for it, or stop it."
            )
        if seen is None:
            seen, since = version, time.monotonic()
            logger.info("%s: %s held it last; waiting for a sign of life", storage, name)
        if time.monotonic() - since > LEASE_SECONDS:
            logger.warning("%s: no sign of life from %s: taken over", storage, name)
            break
        time.sleep(_POLL_SECONDS)
    return storage.put_over(LEASE, holder.text(), version)


def _beat(storage: Storage, holder: _Holder, version: str, stop: threading.Event) -> None:
    while not stop.wait(BEAT_SECONDS):
        try:
            version = storage.put_over(LEASE, holder.text(), version)
        except ShardCorruptError:  # deleted, by somebody who wants this builder to end
            logger.error("%s/%s: deleted. The next commit is refused.", storage, LEASE)
            return
        except CacheLockedError as error:
            # Or by a put of ours that was called failed: its answer was lost on its way.
            try:
                own = _own_version(storage, holder)
            except StorageError as fault:
                logger.warning("%s", fault)
                continue
            if own is None:
                logger.error("%s The next commit is refused.", error)
                return
            version = own
        except StorageError as error:
            logger.warning("%s", error)


def _own_version(storage: Storage, holder: _Holder) -> str | None:
    """The version of the lock, if it still is the holder's."""
    version = storage.version(LEASE)  # before its content: replaced in between, no put succeeds
    with suppress(ShardCorruptError):
        if version is not None and _read_owner(storage) == holder.owner:
            return version
    return None


def _read_owner(storage: Storage) -> str | None:
    return _read_holder(storage)[0]


def _read_holder(storage: Storage) -> tuple[str | None, str]:
    try:
        fields = json.loads(storage.read(LEASE))
        return str(fields["owner"]), str(fields["holder"])
    except (ValueError, KeyError, TypeError):
        return None, "unknown"


def lease_owner(cache: S3Url) -> str:
    """The name of this machine's workspace, or of the one that lends its lock to this worker.

    A random one, made once, on this machine since it was started: two machines may have one home
    directory, and locks that each keeps for itself.
    """
    place = workspace(cache)
    with suppress(FileNotFoundError):
        return (place / _LENT).read_text()
    file = place / _OWNER
    if not file.exists():
        if not place.is_dir():
            raise CacheError(f"{place}: missing. It was deleted while a builder was at work in it.")
        write_bytes(file, uuid.uuid4().hex.encode())
    return f"{file.read_text()} {os.uname().nodename} {_boot()}"


def _boot() -> str:
    """What differs from machine to machine and from start to start, where the system says it."""
    with suppress(OSError):
        return _BOOT_ID.read_text().strip()
    return ""


def lend(cache: S3Url, owner: str) -> None:
    """Let this machine's workspace commit for the builder of another, as long as that is the
    holder."""
    write_bytes(workspace(cache) / _LENT, owner.encode())
