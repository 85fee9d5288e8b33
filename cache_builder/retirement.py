"""Shards on their way out of a cache, so that a sample is never in two shards or in none.

The `shards` of `retired.json` map a shard to the one that takes its place, or to null. It is
written before the first replacement is. From then on a shard in it is retired as soon as its
replacement has a record (or at once, where there is none): committing the new shard and retiring
the old one are one step. Retired shards stay on disk until a generation without them is published.
"""

import logging
from collections.abc import Mapping

from cache_builder.lease import require_lease
from shared.errors import CacheError
from shared.files import canonical_json, parse_json, sha256_bytes
from shared.layout import RECORDS, generation_key, record_key
from shared.location import Location
from shared.manifest import Manifest, check_shard_id, is_shard_id
from shared.metadata import read_manifest
from shared.shard import GROUP
from shared.storage import Storage, open_storage, put_json

logger = logging.getLogger(__name__)

RETIRED = "retired.json"
_SHARDS, _OWN_DIGEST = "shards", "sha256"


def recorded_shards(cache: Location) -> set[str]:
    """Ids of the shards that have a record, retired or not."""
    names = open_storage(cache).names(RECORDS)
    return {name.removesuffix(".json") for name in names if _is_record(name)}


def foreign_records(cache: Location) -> list[str]:
    """Names of what lies among the records and is none: no command reads it or removes it."""
    names = open_storage(cache).names(RECORDS)
    return [name for name in names if not _is_record(name) and not name.endswith(".partial")]


def _is_record(name: str) -> bool:
    return name.endswith(".json") and is_shard_id(name.removesuffix(".json"))


def retired_shards(cache: Location) -> set[str]:
    """Ids of the shards that no later generation may hold.

    Raises:
        CacheError: `retired.json` is damaged.
    """
    recorded = recorded_shards(cache)
    return {
        old for old, new in _read(open_storage(cache)).items() if new is None or new in recorded
    }


def retire(cache: Location, replacements: Mapping[str, str | None]) -> None:
    """Retire each shard of `replacements` once what it maps to is committed; at once for None."""
    fields = {**dict.fromkeys(retired_shards(cache)), **replacements}
    digest = sha256_bytes(canonical_json(fields))
    put_json(open_storage(cache), RETIRED, {_SHARDS: fields, _OWN_DIGEST: digest})


def remove_retired(cache: Location, published: Manifest) -> None:
    """Delete the retired shards and the older generations that name one.

    `published` is the newest manifest: it names none of them. The generations go first, so that
    whoever asks for one is told so; `retired.json` goes last, so that a kill at any point leaves
    what the next call needs.

    Raises:
        CacheLockedError: another builder took over.
    """
    storage = open_storage(cache)
    if not storage.exists(RETIRED):
        return
    require_lease(cache)
    retired = retired_shards(cache)
    assert not retired & published.records.keys()
    removed = [
        generation
        for generation in range(1, published.generation)
        if _names_any(storage, generation, retired)
    ]
    suffixes = ("json", "index.safetensors")
    storage.delete(*(generation_key(number, suffix) for number in removed for suffix in suffixes))
    # Durable before the groups go: lost, the shards would be part of the cache again.
    storage.delete(*(record_key(shard_id) for shard_id in sorted(retired)))
    storage.delete_trees(*(f"{GROUP}/{shard_id}" for shard_id in sorted(retired)))
    storage.delete(RETIRED)
    if removed:
        logger.info(
            "generation %d replaces %s: shards of theirs are gone",
            published.generation,
            ", ".join(map(str, removed)),
        )


def _names_any(storage: Storage, generation: int, shards: set[str]) -> bool:
    if not storage.exists(generation_key(generation, "json")):
        # A kill may have come between its two files.
        return storage.exists(generation_key(generation, "index.safetensors"))
    try:
        return not shards.isdisjoint(read_manifest(storage, generation).records)
    except CacheError:
        return False  # damaged: it opens for nobody, and says why


def _read(storage: Storage) -> dict[str, str | None]:
    if not storage.exists(RETIRED):
        return {}
    where = f"{storage}/{RETIRED}"
    journal = parse_json(storage.read(RETIRED), where)
    try:
        fields, digest = journal[_SHARDS], journal[_OWN_DIGEST]
        if (found := sha256_bytes(canonical_json(fields))) != digest:
            raise ValueError(f"sha256 {found[:16]} where it states {str(digest)[:16]}")
        for old, new in fields.items():
            check_shard_id(old)
            if new is not None:
                check_shard_id(new)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise CacheError(
            f"{where}: expected shard ids under their digest, found {error}. The file is damaged: "
            "delete it, then run `cache-builder prune` again."
        ) from None
    return dict(fields)
