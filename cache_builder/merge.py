"""Adding the shards of other caches of the same fingerprint."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cache_builder.commit import committed_shards, discard_uncommitted
from cache_builder.description import create_directories
from cache_builder.lock import builder_lock
from cache_builder.planning import stored_samples
from cache_builder.publication import publish
from cache_builder.rewrite import write_selection
from cache_builder.selection import (
    Selection,
    plan_selections,
    require_no_missing_shard,
    select,
)
from cache_builder.space import bytes_here, require_fit
from cache_builder.workspace import workspace
from shared.bar import tracked
from shared.cache import Cache
from shared.config import differences
from shared.errors import CacheError, CacheIncompatibleError
from shared.files import sha256_bytes
from shared.index import require_countable
from shared.layout import calibration_key
from shared.location import Location
from shared.manifest import Manifest, ShardRecord
from shared.quantity import count, size


@dataclass(frozen=True, kw_only=True, slots=True)
class MergeReport:
    """What one merge added."""

    manifest: Manifest
    num_samples: int
    num_tokens: int
    num_duplicates: int
    """Samples of the other caches that were there already, or in two of them."""

    num_copied: int
    """Shards added whole."""

    num_rewritten: int
    """Shards added without the samples that were there already."""

    stored_bytes: int


def merge(into: Location, sources: Sequence[Location]) -> MergeReport:
    """Add to the cache `into` what the newest generations of `sources` have and it has not.

    Nothing is captured or encoded anew, and `sources` are only read. Files that are copied are
    compared with their digests, rewritten shards by the checksums of their chunks, before anything
    is committed. Killed, the same call goes on.

    Raises:
        CacheNotFoundError: one of them is not a published cache.
        CacheIncompatibleError: another fingerprint or head.
        CacheError: one of them is damaged, or the same as another.
        CacheLockedError: a builder is at work on `into`.
        OutOfSpaceError: there is no room for what would be added.
    """
    cache = Cache(into)
    others = [Cache(source) for source in sources]
    _require_distinct([into, *sources])
    for other in others:
        _require_mergeable(cache, other)
    with builder_lock(into):
        create_directories(into)
        discard_uncommitted(into)
        require_no_missing_shard(into)
        selections, num_duplicates = _select(cache, others)
        required = committed_shards(into)
        added = _add(cache, selections) if selections else []
        required.update(record.shard_id for record in added)
        manifest = publish(into, cache.spec, required=required)
    Cache(into)  # a reader must be able to open what was published
    return MergeReport(
        manifest=manifest,
        num_samples=sum(len(selection.rows) for selection in selections),
        num_tokens=sum(selection.num_tokens for selection in selections),
        num_duplicates=num_duplicates,
        num_copied=sum(selection.is_whole for selection in selections),
        num_rewritten=sum(not selection.is_whole for selection in selections),
        stored_bytes=sum(record.stored_bytes for record in added),
    )


def _require_distinct(paths: Sequence[Location]) -> None:
    seen: set[Location] = set()
    for path in paths:
        if (real := path.resolve() if isinstance(path, Path) else path) in seen:
            raise CacheError(f"{path}: named twice. Name every cache once.")
        seen.add(real)


def _require_mergeable(cache: Cache, other: Cache) -> None:
    lines = differences(other.spec.to_settings(), cache.spec.to_settings(), names=("there", "here"))
    if lines:
        raise CacheIncompatibleError(
            f"{other.path}: its states are not those of {cache.path} ({'; '.join(lines)}). Only "
            "caches of equal fingerprint can be merged: build one of them anew."
        )
    for each in (cache, other):
        each.head()  # its bytes have the digest that is compared below
    ours, theirs = (str(each.description["head_sha256"]) for each in (cache, other))
    if ours != theirs:
        raise CacheIncompatibleError(
            f"{other.path}: expected a head with sha256 {ours[:16]} as in {cache.path}, found "
            f"{theirs[:16]}. The weights are equal, so one was written by another version: build "
            "one of them anew."
        )


def _select(cache: Cache, others: Sequence[Cache]) -> tuple[list[Selection], int]:
    """What is new in `others`, shard by shard, and how many samples are not."""
    known = stored_samples(cache.path).ids
    selections, num_seen = [], 0
    for other in others:
        num_seen += len(other.index)
        for shard_id in other.shard_ids:
            selection = select(other.storage, other.record(shard_id), other.spec, known.add)
            if len(selection.rows):
                selections.append(selection)
    return selections, num_seen - sum(len(selection.rows) for selection in selections)


def _add(cache: Cache, selections: Sequence[Selection]) -> list[ShardRecord]:
    """Commit `selections` as shards of a plan of their own; returns their records."""
    tags = {tag for selection in selections for tag in selection.record.sources}
    require_countable(list(tags.union(cache.manifest.sources)), str(cache.path))
    sizes = [selection.stored_bytes for selection in selections]
    require_fit(workspace(cache.path), bytes_here(cache.path, sum(sizes), max(sizes)), 0)
    for selection in selections:
        _copy_calibration(cache, selection)
    plan = plan_selections(cache.path, selections, cache.spec, "merge")
    jobs = list(zip(selections, plan.shard_ids, strict=True))
    return [
        write_selection(cache.path, selection, cache.spec, plan, shard_id)
        for selection, shard_id in tracked(jobs, "merge", "shard", len(jobs))
    ]


def _copy_calibration(cache: Cache, selection: Selection) -> None:
    name = selection.record.calibration
    if name is None or cache.storage.exists(calibration_key(name)):
        return
    data = selection.storage.read(calibration_key(name))
    if (found := sha256_bytes(data)) != name:
        raise CacheError(
            f"{selection.storage}/{calibration_key(name)}: expected sha256 {name[:16]}, found "
            f"{found[:16]}. It was changed or damaged; no command can make it again."
        )
    cache.storage.put(calibration_key(name), data)


def rows(report: MergeReport) -> list[tuple[str, str]]:
    """`report` as a table of names and values."""
    return [
        ("added", f"{count(report.num_samples, 'sample')}, {count(report.num_tokens, 'token')}"),
        ("bytes", size(report.stored_bytes)),
        ("shards", f"{report.num_copied:,} copied, {report.num_rewritten:,} rewritten"),
        ("there already", count(report.num_duplicates, "sample")),
        ("generation", str(report.manifest.generation)),
    ]
