"""What makes captured states part of a cache: commit of a shard, publication of a generation."""

import logging
from pathlib import Path

from cache_builder.retirement import recorded_shards, remove_retired, retired_shards
from shared.cache import (
    CALIBRATIONS,
    GENERATIONS,
    MANIFEST,
    PLANS,
    RECORDS,
    WIP,
    generation_key,
    read_checked,
    read_manifest,
    record_key,
)
from shared.errors import CacheError, CacheNotFoundError
from shared.files import (
    commit_directory,
    remove_partials,
    remove_tree,
    sha256_bytes,
    sha256_file,
    sync_directory,
    write_bytes,
    write_json,
    writing,
)
from shared.index import SampleIndex
from shared.manifest import Manifest, ShardRecord, StoredFile, Totals
from shared.shard import GROUP, ShardReader
from shared.spec import CaptureSpec
from shared.storage import LocalStorage

logger = logging.getLogger(__name__)


def commit_shard(cache: Path, record: ShardRecord) -> None:
    """Move the finished shard into place, then write its record: that is the commit."""
    group = cache / GROUP / record.shard_id
    with writing(group):
        remove_tree(group)  # of a builder that died between the rename and the record
        commit_directory(cache / WIP / record.shard_id, group)
        write_json(cache / record_key(record.shard_id), record.to_dict())


def committed_shards(cache: Path) -> set[str]:
    """Ids of the shards that have a record and are not retired."""
    return recorded_shards(cache) - retired_shards(cache)


def discard_uncommitted(cache: Path) -> int:
    """Remove what builders that died left behind; returns how many shards that were."""
    leftovers = list((cache / WIP).iterdir())
    recorded = recorded_shards(cache)
    leftovers += [
        group
        for group in (cache / GROUP).iterdir()
        if group.is_dir() and group.name not in recorded
    ]
    for leftover in (*leftovers, *(cache / PLANS).glob("*.wip")):
        remove_tree(leftover)
    for directory in (cache, *(cache / name for name in (RECORDS, GENERATIONS, CALIBRATIONS))):
        remove_partials(directory)
    sync_directory(cache / GROUP)
    return len(leftovers)


def read_record(cache: Path, shard_id: str) -> tuple[ShardRecord, str]:
    """The record of a committed shard and its digest."""
    key = record_key(shard_id)
    digest = sha256_file(cache / key)
    fields = read_checked(LocalStorage(cache), key, digest)
    return ShardRecord.from_dict(fields, f"{cache}/{key}"), digest


def publish(cache: Path, spec: CaptureSpec) -> Manifest:
    """Publish every committed shard as a new generation, or return the one that already does.

    Retired shards are not in it; they and the generations that name one are deleted afterwards.
    """
    storage = LocalStorage(cache)
    records, digests = {}, {}
    for shard_id in sorted(committed_shards(cache)):
        records[shard_id], digests[shard_id] = read_record(cache, shard_id)
        if records[shard_id].fingerprint != spec.fingerprint:
            raise CacheError(
                f"{cache}: shard {shard_id} has fingerprint "
                f"{records[shard_id].fingerprint[:16]}, the cache {spec.fingerprint[:16]}. "
                "Remove the foreign record."
            )
    try:
        previous = read_manifest(storage)
    except CacheNotFoundError:
        previous = None
    if previous is not None and previous.records == digests:
        remove_retired(cache, previous)
        return previous
    sources = list(previous.sources) if previous is not None else []
    for record in records.values():
        sources += [tag for tag in record.sources if tag not in sources]
    index = SampleIndex.concatenate(
        SampleIndex.of_shard(ShardReader(storage, record, spec), position, sources)
        for position, record in enumerate(records.values())
    )
    generation = previous.generation + 1 if previous is not None else 1
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
            quarantined=sum(len(record.quarantined) for record in records.values()),
        ),
    )
    write_bytes(cache / generation_key(generation, "index.safetensors"), data)
    write_json(cache / generation_key(generation, "json"), manifest.to_dict())
    write_json(cache / MANIFEST, manifest.to_dict())
    remove_retired(cache, manifest)
    return manifest
