"""The publication of a generation: all that is committed, in one manifest and one index."""

import logging
from collections.abc import Iterable, Mapping

import numpy as np

from cache_builder.commit import committed_shards, read_record
from cache_builder.lease import require_lease
from cache_builder.quarantine import quarantined_samples
from cache_builder.retirement import remove_retired
from shared.errors import CacheError, CacheNotFoundError, CaptureError
from shared.files import json_bytes, sha256_bytes
from shared.index import SampleIndex, require_countable
from shared.layout import MANIFEST, generation_key
from shared.location import Location
from shared.manifest import Manifest, ShardRecord, StoredFile, Totals
from shared.metadata import read_index, read_manifest
from shared.quantity import count
from shared.shard_reader import ShardReader
from shared.spec import CaptureSpec
from shared.storage import Storage, open_storage

logger = logging.getLogger(__name__)

_COMPARED_ROWS = 1 << 20
"""Of an index, at a time: the bound on memory."""


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
