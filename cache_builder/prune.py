"""Removing samples that are no longer in the data of a configuration."""

import logging
from dataclasses import dataclass, replace

from cache_builder.commit import committed_shards, discard_uncommitted, read_record
from cache_builder.config import BuildConfig
from cache_builder.description import create_directories, describe_capture
from cache_builder.id_set import IdSet
from cache_builder.lock import builder_lock
from cache_builder.planning import open_corpus
from cache_builder.publication import publish
from cache_builder.report import CHOSEN_DROPS
from cache_builder.retirement import retire
from cache_builder.rewrite import write_selection
from cache_builder.selection import (
    Selection,
    plan_selections,
    require_no_missing_shard,
    select,
)
from cache_builder.space import bytes_here, require_fit, require_floor
from cache_builder.target_files import resolve_target
from cache_builder.template import ChatTemplate
from cache_builder.tokens import load_template
from cache_builder.workspace import workspace
from shared.bar import tracked
from shared.cache import Cache
from shared.errors import DataError
from shared.location import Location
from shared.manifest import ShardRecord
from shared.quantity import count, size
from shared.spec import CaptureSpec
from shared.storage import open_storage

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class PruneReport:
    """What one prune removed, or would."""

    num_samples: int
    num_tokens: int
    freed_bytes: int
    """Exact once it is done; before, by the share of tokens."""

    num_removed: int
    """Shards without a wanted sample."""

    num_rewritten: int
    """Shards of which some samples stay."""

    num_kept_samples: int


def prune(
    config: BuildConfig, *, dry_run: bool = False, ignore_bad_rows: bool = False
) -> PruneReport:
    """Remove the samples that the data of `config` do not give any more.

    Shards without a wanted sample go. Shards with some are written anew from what is stored,
    without the target. A new generation is published; older ones that name a shard that went go
    too, and with them every run that started from one.

    Raises:
        DataError: the data cannot be read whole, or nothing that is stored is in them.
        CacheError: the cache is not there, damaged, locked, or built with other settings.
        OutOfSpaceError: no room for the rewritten shards next to the old ones.
    """
    target_path = resolve_target(config.target)
    template = load_template(target_path, config.data)
    spec = describe_capture(config, target_path, template)
    path = config.cache.path
    spec.require_equal(Cache(path).spec, str(path))
    wanted = _wanted_samples(config, spec, template, ignore_bad_rows=ignore_bad_rows)
    if dry_run:
        return _report(_select(path, spec, wanted))
    with builder_lock(path):
        create_directories(path)
        discard_uncommitted(path)
        require_no_missing_shard(path)
        selections = _select(path, spec, wanted)
        report = _report(selections)
        changed = [selection for selection in selections if not selection.is_whole]
        required = {s.record.shard_id for s in selections if s.is_whole}
        if changed:
            written = _replace(config, spec, changed)
            before = sum(selection.record.stored_bytes for selection in changed)
            after = sum(record.stored_bytes for record in written)
            report = replace(report, freed_bytes=before - after)
            required.update(record.shard_id for record in written)
        publish(path, spec, required=required)
    Cache(path)  # a reader must be able to open what was published
    return report


def _wanted_samples(
    config: BuildConfig, spec: CaptureSpec, template: ChatTemplate, *, ignore_bad_rows: bool
) -> IdSet:
    corpus = open_corpus(config, spec.target.vocab_size, template)
    samples = tracked(corpus, "tokenize", "sample")
    wanted = IdSet(bytes.fromhex(sample.sample_id) for sample in samples)
    for line in [corpus.report.describe(), *corpus.report.describe_drops()]:
        logger.info("%s", line)
    bad = [
        f"{dropped.count} {reason} ({dropped.examples[0]})"
        for reason, dropped in corpus.report.dropped.items()
        if reason not in CHOSEN_DROPS
    ]
    if bad and not ignore_bad_rows:
        raise DataError(
            f"{config.cache.path}: rows of the data cannot be used: {'; '.join(bad)}. A stored "
            "sample may be one of them, so nothing is removed. Fix or delete the rows, or say "
            "--ignore-bad-rows."
        )
    return wanted


def _select(path: Location, spec: CaptureSpec, wanted: IdSet) -> list[Selection]:
    storage, taken = open_storage(path), IdSet()
    selections = []

    def takes(sample_id: bytes) -> bool:
        return sample_id in wanted and taken.add(sample_id)  # no sample twice

    for shard_id in sorted(committed_shards(path)):
        selection = select(storage, read_record(path, spec, shard_id)[0], spec, takes)
        still = {
            sample_id: reason
            for sample_id, reason in selection.quarantined.items()
            if bytes.fromhex(sample_id) in wanted
        }
        selections.append(replace(selection, quarantined=still))
    if not any(len(selection.rows) for selection in selections):
        raise DataError(
            f"{path}: none of its samples is in these data ({count(len(wanted), 'sample')}). Look "
            "at data.sources; to give up the cache, delete its directory."
        )
    return selections


def _report(selections: list[Selection]) -> PruneReport:
    changed = [selection for selection in selections if not selection.is_whole]
    num_removed = sum(len(selection.rows) == 0 for selection in changed)
    return PruneReport(
        num_samples=sum(s.record.num_samples - len(s.rows) for s in changed),
        num_tokens=sum(s.record.num_tokens - s.num_tokens for s in changed),
        freed_bytes=sum(s.record.stored_bytes - s.stored_bytes for s in changed),
        num_removed=num_removed,
        num_rewritten=len(changed) - num_removed,
        num_kept_samples=sum(len(selection.rows) for selection in selections),
    )


def _replace(config: BuildConfig, spec: CaptureSpec, changed: list[Selection]) -> list[ShardRecord]:
    """Replace the shards of `changed` by what stays of them; returns the records of that."""
    path = config.cache.path
    partial = [selection for selection in changed if len(selection.rows)]
    sizes = [selection.stored_bytes for selection in partial]
    here = bytes_here(path, sum(sizes), max(sizes, default=0))
    require_fit(workspace(path), here, config.cache.min_free_bytes)
    # A plan even where nothing is rewritten: no later build may take up an older one, whose
    # shards are partly gone.
    plan = plan_selections(path, partial, spec, "prune")
    jobs = list(zip(partial, plan.shard_ids, strict=True))
    retire(path, {selection.record.shard_id: new for selection, new in jobs})
    written = []
    for selection, new in tracked(jobs, "rewrite", "shard", len(jobs)):
        require_floor(workspace(path), config.cache.min_free_bytes)
        written.append(write_selection(path, selection, spec, plan, new))
    # Last: whatever stops this earlier, no shard is lost.
    retire(path, dict.fromkeys(s.record.shard_id for s in changed))
    return written


def rows(report: PruneReport, *, dry_run: bool) -> list[tuple[str, str]]:
    """`report` as a table of names and values."""
    verb = "would go" if dry_run else "gone"
    return [
        (verb, f"{count(report.num_samples, 'sample')}, {count(report.num_tokens, 'token')}"),
        ("bytes", f"{'about ' if dry_run else ''}{size(report.freed_bytes)}"),
        (
            "shards",
            f"{report.num_removed:,} removed, {report.num_rewritten:,} rewritten",
        ),
        ("left", count(report.num_kept_samples, "sample")),
    ]
