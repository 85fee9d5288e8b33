"""What makes captured states part of a cache: commit of a shard, publication of a generation."""

import logging
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np

from cache_builder.lease import require_lease
from cache_builder.quarantine import quarantined_samples
from cache_builder.retirement import (
    foreign_records,
    recorded_shards,
    remove_retired,
    retired_shards,
)
from cache_builder.workspace import workspace
from shared.errors import CacheError, CacheLockedError, CacheNotFoundError, CaptureError
from shared.files import json_bytes, parse_json, remove_tree, sha256_bytes
from shared.index import SampleIndex, require_countable
from shared.layout import (
    CALIBRATIONS,
    GENERATIONS,
    MANIFEST,
    PLANS,
    RECORDS,
    TARGET,
    WIP,
    generation_key,
    record_key,
)
from shared.location import Location
from shared.manifest import Manifest, ShardRecord, StoredFile, Totals
from shared.metadata import read_index, read_manifest, require_layers
from shared.quantity import count
from shared.shard import GROUP
from shared.shard_reader import ShardReader
from shared.spec import CaptureSpec
from shared.storage import Storage, open_storage

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 5.0
"""How long a worker takes a shard for its own without looking: few beside those after which it is
taken for dead, many beside those of a request."""

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)

_COMPARED_ROWS = 1 << 20
"""Of an index, at a time: the bound on memory."""


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


def publish(
    cache: Location,
    spec: CaptureSpec,
    *,
    required: Iterable[str] = (),
    max_quarantined_fraction: float | None = None,
) -> Manifest:
    """Publish every committed shard as a new generation, or return the one that already does.

    Retired shards are not in it; they and the generations that name one are deleted afterwards.

    Args:
        required: shards that must be in it.

    Raises:
        CaptureError: a required shard is not committed, or more samples are quarantined than
            `max_quarantined_fraction` allows; nothing is published.
        CacheLockedError: another builder took over, or published in between.
        CacheError: a committed shard is damaged.
    """
    require_lease(cache)
    storage = open_storage(cache)
    versions = {MANIFEST: storage.version(MANIFEST)}
    records, digests = {}, {}
    committed = committed_shards(cache)
    if missing := sorted(set(required) - committed):
        raise CaptureError(
            f"{cache}: {count(len(missing), 'shard')} that should be committed have no record "
            f"({', '.join(missing[:8])}): nothing is published. Run the same command again."
        )
    for shard_id in sorted(committed):
        records[shard_id], digests[shard_id] = read_record(cache, spec, shard_id)
    try:
        previous = read_manifest(storage)
    except CacheNotFoundError:
        previous = None
    if (
        previous is not None
        and previous.records == digests
        and (index := _intact_index(storage, records, spec, previous)) is not None
    ):
        _require_usable(cache, records, index, max_quarantined_fraction)
        remove_retired(cache, previous)
        return previous
    generation = previous.generation + 1 if previous is not None else 1
    index_key = generation_key(generation, "index.safetensors")
    for key in (index_key, generation_key(generation, "json")):
        versions[key] = storage.version(key)  # not None after a kill before the manifest
    sources = list(previous.sources) if previous is not None else []
    for record in records.values():
        sources += [tag for tag in record.sources if tag not in sources]
    require_countable(sources, str(cache))
    index = build_index(storage, records, spec, sources)
    _require_usable(cache, records, index, max_quarantined_fraction)
    data = index.to_bytes()
    manifest = Manifest(
        generation=generation,
        fingerprint=spec.fingerprint,
        records=digests,
        index=StoredFile(size=len(data), sha256=sha256_bytes(data)),
        sources=tuple(sources),
        totals=Totals(
            num_shards=len(records),
            num_samples=sum(record.num_samples for record in records.values()),
            num_tokens=sum(record.num_tokens for record in records.values()),
            num_supervised=sum(record.num_supervised for record in records.values()),
            stored_bytes=sum(record.stored_bytes for record in records.values()),
            quarantined=len(_quarantined(records, index)),
        ),
    )
    storage.put_over(index_key, data, versions[index_key])
    for key in (generation_key(generation, "json"), MANIFEST):
        storage.put_over(key, json_bytes(manifest.to_dict()), versions[key])
    remove_retired(cache, manifest)
    return manifest


def build_index(
    storage: Storage, records: Mapping[str, ShardRecord], spec: CaptureSpec, sources: list[str]
) -> SampleIndex:
    """The index of a generation with these shards, from what the shards themselves hold.

    Raises:
        ShardCorruptError: one is damaged.
    """
    return SampleIndex.concatenate(
        SampleIndex.of_shard(ShardReader(storage, records[shard_id], spec), position, sources)
        for position, shard_id in enumerate(sorted(records))
    )


def _intact_index(
    storage: Storage, records: Mapping[str, ShardRecord], spec: CaptureSpec, manifest: Manifest
) -> SampleIndex | None:
    """The index that `manifest` names; where its file is lost or damaged, made again and put back.

    Returns:
        None if the one made again is not the same bytes: a new generation must be published.

    Raises:
        ShardCorruptError: it is damaged, and a shard too.
    """
    try:
        return read_index(storage, manifest)
    except CacheError as error:
        index = build_index(storage, records, spec, list(manifest.sources))
        data = index.to_bytes()
        if sha256_bytes(data) != manifest.index.sha256:
            return None
        key = generation_key(manifest.generation, "index.safetensors")
        storage.put(key, data)
        logger.warning("%s The file was made again from the shards.", error)
        return index


def _quarantined(records: Mapping[str, ShardRecord], index: SampleIndex) -> dict[str, str]:
    """As `quarantined_samples`. Only ids that some record names are looked for in the index: a set
    of all that it has would take 120 bytes each."""
    named = {i for record in records.values() for i in map(bytes.fromhex, record.quarantined)}
    stored: set[bytes] = set()
    if named:
        for start in range(0, len(index), _COMPARED_ROWS):
            ids = np.ascontiguousarray(index.sample_ids[start : start + _COMPARED_ROWS])
            found = np.isin(ids.view("S16").ravel(), np.array(sorted(named), "S16"))
            stored.update(row.tobytes() for row in ids[found])
    return quarantined_samples(records.values(), stored)


def _require_usable(
    cache: Location, records: Mapping[str, ShardRecord], index: SampleIndex, fraction: float | None
) -> None:
    if fraction is None:
        return
    quarantined = _quarantined(records, index)
    total = len(index) + len(quarantined)
    if len(quarantined) > fraction * total:
        examples = "; ".join(f"{key}: {why}" for key, why in list(quarantined.items())[:8])
        raise CaptureError(
            f"{cache}: {len(quarantined)} of {total} samples have unusable states ({examples}). "
            f"More than capture.max_quarantined_fraction allows ({fraction:g}): nothing is "
            "published. Look at the samples; after a fault of the machine, build with "
            "--retry-quarantined, or import again once their files are replaced; to do without "
            "them, raise the fraction."
        )
