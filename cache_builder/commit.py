"""The commit of a shard, which makes it part of a cache; and what never came to it."""

import logging
import threading
import time
from contextlib import suppress
from pathlib import Path

from cache_builder.lease import require_lease
from cache_builder.retirement import (
    foreign_records,
    recorded_shards,
    retired_shards,
)
from cache_builder.workspace import workspace
from shared.errors import CacheError, CacheLockedError
from shared.files import json_bytes, parse_json, remove_tree, sha256_bytes
from shared.layout import (
    CALIBRATIONS,
    GENERATIONS,
    PLANS,
    RECORDS,
    TARGET,
    WIP,
    record_key,
)
from shared.location import Location
from shared.manifest import ShardRecord
from shared.metadata import require_layers
from shared.shard import GROUP
from shared.spec import CaptureSpec
from shared.storage import open_storage

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 5.0
"""How long a worker takes a shard for its own without looking: few beside those after which it is
taken for dead, many beside those of a request."""

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def commit_shard(
    cache: Location,
    record: ShardRecord,
    finished: Path | None = None,
    *,
    replaces: str | None = None,
) -> ShardRecord:
    """Move the finished shard into place, then write its record: that is the commit.

    A record that is there stays, and what was finished here goes: whoever wrote it died before it
    could say so, or took this worker for dead. No record is ever deleted here, since it may be in
    a generation by now.

    Args:
        finished: the directory with its files; None for `wip/<shard id>` of the workspace.
        replaces: version of the record of a damaged shard whose place this one takes.

    Returns:
        The record that the cache has now.

    Raises:
        CacheLockedError: another builder took over, or another worker of this one.
        CacheError: another worker committed the shard, and its files are not what it wrote.
    """
    began = _now()
    require_lease(cache)
    finished = finished or workspace(cache) / WIP / record.shard_id
    if not finished.is_dir():  # before anything of the other one's is touched
        raise CacheLockedError(
            f"{finished}: removed by another worker, which captures the shard anew: this one was "
            "taken for dead."
        )
    storage, key = open_storage(cache), record_key(record.shard_id)
    version = storage.version(key)
    if version is None or version == replaces:
        with suppress(_OvertakenError):
            watch = _Watch(cache, key, version, began)
            storage.put_tree(finished, f"{GROUP}/{record.shard_id}", watch.look)
            with suppress(CacheLockedError):
                storage.put_over(key, json_bytes(record.to_dict()), version)
                return record
    return _adopt(cache, record, finished)


class _OvertakenError(Exception):
    """Another worker wrote the record."""


class _Watch:
    """Looks while a shard goes up whether it is this worker's still: one that was suspended and
    taken for dead must not write over what came from its replacement. Thread-safe."""

    def __init__(self, cache: Location, key: str, version: str | None, began: float) -> None:
        self._cache, self._key, self._version = cache, key, version
        self._looked = began
        self._lock = threading.Lock()

    def look(self) -> None:
        """
        Raises:
            CacheLockedError: another builder took over.
            _OvertakenError: another worker of this one committed the shard.
        """
        with self._lock:
            now = _now()
            if now - self._looked < _LOOK_SECONDS:
                return
            require_lease(self._cache)
            if open_storage(self._cache).version(self._key) != self._version:
                raise _OvertakenError
            self._looked = now


def _now() -> float:
    """Seconds of a clock that goes on while the machine is suspended."""
    return time.clock_gettime(_CLOCK)


def _adopt(cache: Location, record: ShardRecord, finished: Path) -> ShardRecord:
    """The record that another worker wrote in the place of `record`; `finished` goes.

    Raises:
        CacheError: its files are not what it says.
    """
    storage, key = open_storage(cache), record_key(record.shard_id)
    where, group = f"{cache}/{key}", f"{GROUP}/{record.shard_id}"
    there = ShardRecord.from_dict(parse_json(storage.read(key), where), where)
    sizes = storage.sizes(group)
    wrong = [
        name
        for name, file in there.files.items()
        if sizes.get(name) != file.size or storage.sha256(f"{group}/{name}") != file.sha256
    ]
    if wrong or (there.shard_id, there.fingerprint) != (record.shard_id, record.fingerprint):
        raise CacheError(
            f"{where}: another worker committed the shard meanwhile, and its files are not what "
            f"it wrote ({', '.join(wrong[:8]) or there.shard_id}). Run `cache-builder repair`."
        )
    logger.info("shard %s: another worker committed it meanwhile", record.shard_id)
    remove_tree(finished)
    return there


def committed_shards(cache: Location) -> set[str]:
    """Ids of the shards that have a record and are not retired."""
    return recorded_shards(cache) - retired_shards(cache)


def discard_uncommitted(cache: Location) -> int:
    """Remove what builders that died left behind; returns how many shards that were.

    Raises:
        CacheLockedError: another builder took over: it may be writing just that.
    """
    storage, place = open_storage(cache), workspace(cache)
    wip, groups = list((place / WIP).glob("*")), uncommitted_groups(cache)
    if foreign := foreign_records(cache):
        names = ", ".join(foreign[:8])
        logger.warning("%s/%s: %s: not records of this cache; ignored", cache, RECORDS, names)
    if groups:
        require_lease(cache)
        storage.delete_trees(*(f"{GROUP}/{name}" for name in groups))
    for leftover in (*wip, *(place / PLANS).glob("*.wip")):
        remove_tree(leftover)
    storage.remove_partials(None, RECORDS, GENERATIONS, CALIBRATIONS, TARGET, GROUP)
    return len(wip) + len(groups)


def uncommitted_groups(cache: Location) -> list[str]:
    """Names of the groups without a record: of shards that are just being written, or never were
    committed."""
    storage, recorded = open_storage(cache), recorded_shards(cache)
    return [
        name
        for name in storage.names(GROUP)
        if name not in recorded and not storage.exists(f"{GROUP}/{name}")
    ]


def read_record(cache: Location, spec: CaptureSpec, shard_id: str) -> tuple[ShardRecord, str]:
    """The record of a committed shard and its digest.

    Raises:
        CacheError: it is missing, damaged, or of another shard, layout or fingerprint.
    """
    key = record_key(shard_id)
    where = f"{cache}/{key}"
    data = open_storage(cache).read(key)
    record = ShardRecord.from_dict(parse_json(data, where), where)
    if record.shard_id != shard_id or record.fingerprint != spec.fingerprint:
        raise CacheError(
            f"{where}: a record of shard {record.shard_id} with fingerprint "
            f"{record.fingerprint[:16]}, expected {shard_id} with {spec.fingerprint[:16]}. Remove "
            "the foreign record."
        )
    require_layers(record, spec, where)
    return record, sha256_bytes(data)
