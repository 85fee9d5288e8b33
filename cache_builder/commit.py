"""What makes captured states part of a cache: commit of a shard, publication of a generation."""

import logging
from collections.abc import Mapping
from pathlib import Path

from cache_builder.quarantine import quarantined_samples
from cache_builder.retirement import (
    foreign_records,
    recorded_shards,
    remove_retired,
    retired_shards,
)
from shared.cache import (
    CALIBRATIONS,
    GENERATIONS,
    MANIFEST,
    PLANS,
    RECORDS,
    WIP,
    generation_key,
    read_index,
    read_manifest,
    record_key,
    require_layers,
)
from shared.errors import CacheError, CacheNotFoundError, CaptureError
from shared.files import (
    commit_directory,
    parse_json,
    remove_partials,
    remove_tree,
    sha256_bytes,
    sync_directory,
    write_bytes,
    write_json,
    writing,
)
from shared.index import SampleIndex
from shared.manifest import Manifest, ShardRecord, StoredFile, Totals
from shared.shard import GROUP
from shared.shard_reader import ShardReader
from shared.spec import CaptureSpec
from shared.storage import LocalStorage

logger = logging.getLogger(__name__)


def commit_shard(cache: Path, record: ShardRecord) -> None:
    """Move the finished shard into place, then write its record: that is the commit."""
    group, key = cache / GROUP / record.shard_id, cache / record_key(record.shard_id)
    with writing(group):
        if key.exists():  # of a worker that committed it and died before it could say so
            key.unlink()
            sync_directory(key.parent)
        remove_tree(group)  # of a builder that died between the rename and the record
        commit_directory(cache / WIP / record.shard_id, group)
        write_json(key, record.to_dict())


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
    if foreign := foreign_records(cache):
        names = ", ".join(path.name for path in foreign[:8])
        logger.warning("%s: %s: not records of this cache; ignored", cache / RECORDS, names)
    for leftover in (*leftovers, *(cache / PLANS).glob("*.wip")):
        remove_tree(leftover)
    for directory in (cache, *(cache / name for name in (RECORDS, GENERATIONS, CALIBRATIONS))):
        remove_partials(directory)
    sync_directory(cache / GROUP)
    return len(leftovers)


def read_record(cache: Path, spec: CaptureSpec, shard_id: str) -> tuple[ShardRecord, str]:
    """The record of a committed shard and its digest.

    Raises:
        CacheError: it is missing, damaged, or of another shard, layout or fingerprint.
    """
    key = record_key(shard_id)
    where = f"{cache}/{key}"
    data = LocalStorage(cache).read(key)
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
    cache: Path, spec: CaptureSpec, *, max_quarantined_fraction: float | None = None
) -> Manifest:
    """Publish every committed shard as a new generation, or return the one that already does.

    Retired shards are not in it; they and the generations that name one are deleted afterwards.

    Raises:
        CaptureError: more samples are quarantined than `max_quarantined_fraction` allows; nothing
            is published.
        CacheError: a committed shard is damaged.
    """
    storage = LocalStorage(cache)
    records, digests = {}, {}
    for shard_id in sorted(committed_shards(cache)):
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
        stored = {row.tobytes() for row in index.sample_ids}
        _require_usable(cache, records, stored, max_quarantined_fraction)
        remove_retired(cache, previous)
        return previous
    sources = list(previous.sources) if previous is not None else []
    for record in records.values():
        sources += [tag for tag in record.sources if tag not in sources]
    index = build_index(storage, records, spec, sources)
    stored = {row.tobytes() for row in index.sample_ids}
    _require_usable(cache, records, stored, max_quarantined_fraction)
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
            quarantined=len(quarantined_samples(records.values(), stored)),
        ),
    )
    write_bytes(cache / generation_key(generation, "index.safetensors"), data)
    write_json(cache / generation_key(generation, "json"), manifest.to_dict())
    write_json(cache / MANIFEST, manifest.to_dict())
    remove_retired(cache, manifest)
    return manifest


def build_index(
    storage: LocalStorage, records: Mapping[str, ShardRecord], spec: CaptureSpec, sources: list[str]
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
    storage: LocalStorage, records: Mapping[str, ShardRecord], spec: CaptureSpec, manifest: Manifest
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
        write_bytes(storage.path(key), data)
        logger.warning("%s The file was made again from the shards.", error)
        return index


def _require_usable(
    cache: Path, records: Mapping[str, ShardRecord], stored: set[bytes], fraction: float | None
) -> None:
    if fraction is None:
        return
    quarantined = quarantined_samples(records.values(), stored)
    total = len(stored) + len(quarantined)
    if len(quarantined) > fraction * total:
        examples = "; ".join(f"{key}: {why}" for key, why in list(quarantined.items())[:8])
        raise CaptureError(
            f"{cache}: {len(quarantined)} of {total} samples have unusable states ({examples}). "
            f"More than capture.max_quarantined_fraction allows ({fraction:g}): nothing is "
            "published. Look at the samples; after a fault of the machine, build with "
            "--retry-quarantined, or import again once their files are replaced; to do without "
            "them, raise the fraction."
        )
