"""Shards on their way out of a cache, so that a sample is never in two shards or in none.

`retired.json` maps a shard to the one that takes its place, or to null. It is written before the
first replacement is. From then on a shard in it is retired as soon as its replacement has a record
(or at once, where there is none): committing the new shard and retiring the old one are one step.
Retired shards stay on disk until a generation without them is published.
"""

import logging
from collections.abc import Mapping
from pathlib import Path

from shared.cache import GENERATIONS, RECORDS, generation_key, read_manifest, record_key
from shared.errors import CacheError
from shared.files import read_json, remove_tree, sync_directory, write_json, writing
from shared.manifest import Manifest, check_shard_id, is_shard_id
from shared.shard import GROUP
from shared.storage import LocalStorage

logger = logging.getLogger(__name__)

RETIRED = "retired.json"


def recorded_shards(cache: Path) -> set[str]:
    """Ids of the shards that have a record, retired or not."""
    return {path.stem for path in (cache / RECORDS).glob("*.json") if _is_record(path)}


def foreign_records(cache: Path) -> list[Path]:
    """What lies among the records and is none: no command reads it or removes it."""
    if not (cache / RECORDS).is_dir():
        return []
    return sorted(
        path
        for path in (cache / RECORDS).iterdir()
        if not _is_record(path) and path.suffix != ".partial"
    )


def _is_record(path: Path) -> bool:
    return path.suffix == ".json" and is_shard_id(path.stem) and path.is_file()


def retired_shards(cache: Path) -> set[str]:
    """Ids of the shards that no later generation may hold.

    Raises:
        CacheError: `retired.json` is damaged.
    """
    recorded = recorded_shards(cache)
    return {old for old, new in _read(cache).items() if new is None or new in recorded}


def retire(cache: Path, replacements: Mapping[str, str | None]) -> None:
    """Retire each shard of `replacements` once what it maps to is committed; at once for None."""
    fields = {**dict.fromkeys(retired_shards(cache)), **replacements}
    write_json(cache / RETIRED, fields)


def remove_retired(cache: Path, published: Manifest) -> None:
    """Delete the retired shards and the older generations that name one.

    `published` is the newest manifest: it names none of them. The generations go first, so that
    whoever asks for one is told so; `retired.json` goes last, so that a kill at any point leaves
    what the next call needs.
    """
    if not (cache / RETIRED).exists():
        return
    retired = retired_shards(cache)
    assert not retired & published.records.keys()
    with writing(cache):
        removed = [
            generation
            for generation in range(1, published.generation)
            if _names_any(cache, generation, retired)
        ]
        for generation in removed:
            (cache / generation_key(generation, "json")).unlink(missing_ok=True)
            (cache / generation_key(generation, "index.safetensors")).unlink(missing_ok=True)
        sync_directory(cache / GENERATIONS)
        for shard_id in sorted(retired):
            (cache / record_key(shard_id)).unlink(missing_ok=True)
        sync_directory(cache / RECORDS)  # lost, the shards would be part of the cache again
        for shard_id in sorted(retired):
            remove_tree(cache / GROUP / shard_id)
        sync_directory(cache / GROUP)
        (cache / RETIRED).unlink()
        sync_directory(cache)
    if removed:
        logger.info(
            "generation %d replaces %s: shards of theirs are gone",
            published.generation,
            ", ".join(map(str, removed)),
        )


def _names_any(cache: Path, generation: int, shards: set[str]) -> bool:
    if not (cache / generation_key(generation, "json")).exists():
        # A kill may have come between its two files.
        return (cache / generation_key(generation, "index.safetensors")).exists()
    try:
        return not shards.isdisjoint(read_manifest(LocalStorage(cache), generation).records)
    except CacheError:
        return False  # damaged: it opens for nobody, and says why


def _read(cache: Path) -> dict[str, str | None]:
    path = cache / RETIRED
    if not path.exists():
        return {}
    fields = read_json(path)
    try:
        for old, new in fields.items():
            check_shard_id(old)
            if new is not None:
                check_shard_id(new)
    except (AttributeError, TypeError, ValueError) as error:
        raise CacheError(
            f"{path}: expected shard ids, found {error}. The file is damaged: delete it, then run "
            "`cache-builder prune` again."
        ) from None
    return dict(fields)
