"""From the data to a plan: what is new is tokenized once and written down."""

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from cache_builder.commit import committed_shards, read_record
from cache_builder.config import BuildConfig, TargetConfig
from cache_builder.conversation import Drop
from cache_builder.corpus import CorpusReader, read_corpus
from cache_builder.id_set import IdSet
from cache_builder.plan import DROPPED, Plan, next_plan_id
from cache_builder.plan_writer import PlanWriter
from cache_builder.quarantine import quarantined_samples
from cache_builder.report import MAX_EXAMPLES, UNKNOWN_MODEL, CorpusReport
from cache_builder.rows import digest_file
from cache_builder.sources import find_files
from cache_builder.stored_plans import own_plans, share_plan
from cache_builder.target_files import target_name
from cache_builder.template import ChatTemplate
from cache_builder.workspace import workspace
from shared import config as configs
from shared.bar import tracked
from shared.files import canonical_json, sha256_bytes
from shared.layout import DESCRIPTION, PLANS
from shared.location import Location
from shared.metadata import read_description
from shared.quantity import count
from shared.shard_reader import ShardReader
from shared.spec import CaptureSpec
from shared.storage import open_storage

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False, slots=True)
class StoredSamples:
    """What the committed shards of a cache hold, published or not."""

    ids: IdSet
    quarantined: dict[str, str]
    """Id to reason of the samples that could not be used."""

    shard_ids: tuple[str, ...]
    """The shards."""


def find_or_make_plan(
    config: BuildConfig,
    spec: CaptureSpec,
    template: ChatTemplate,
    *,
    retry_quarantined: bool = False,
) -> Plan:
    """The plan for these data: the one on disk if they have not changed, else a new one.

    A new plan holds the samples that are not committed yet, but for the quarantined ones;
    `retry_quarantined` makes a new plan if there are any, and puts them in it.

    Raises:
        DataError: the data cannot be used.
        CacheError: a plan on disk is damaged.
    """
    cache = config.cache.path
    sources = config.data.tagged_sources
    files = [(source, file) for source in sources for file in find_files(source.path)]
    digests = {file.path: digest_file(file.path) for _, file in files}
    key = sha256_bytes(
        canonical_json(
            {
                "fingerprint": spec.fingerprint,
                "data": configs.to_dict(replace(config.data, sources=("-",))),
                "files": [
                    [source.tag, source.weight, source.limit, digests[file.path]]
                    for source, file in files
                ],
                "shard_mib": config.plan.shard_mib,
                # With others, what is missing is planned anew: a plan's shards are all alike.
                "forward": configs.to_dict(config.forward),
            }
        )
    )
    plan = find_plan(cache, key)
    if plan is not None and not retry_quarantined:
        return plan
    stored = stored_samples(cache)
    if retry_quarantined and stored.quarantined:
        logger.info("%d quarantined samples are tried again", len(stored.quarantined))
    elif plan is not None:
        return plan
    elif stored.quarantined:
        logger.warning(
            "%s left out; --retry-quarantined tries them again",
            count(len(stored.quarantined), "quarantined sample"),
        )
        stored.ids.update(map(bytes.fromhex, stored.quarantined))
    plan = make_plan(
        config,
        spec,
        template,
        key=key,
        known=stored.ids,
        relies_on=stored.shard_ids,
        digests=digests,
        known_tags=committed_tags(cache, spec),
    )
    if (plan.directory / DROPPED).stat().st_size:
        logger.warning("every dropped row is listed in %s", plan.directory / DROPPED)
    return share_plan(cache, plan)


def find_plan(cache: Location, key: str) -> Plan | None:
    """The plan of `key` in the cache, if it can still be followed.

    One that left samples out since they were stored cannot, once a shard is gone that was there
    then: it may be the one that had them.
    """
    committed = committed_shards(cache)
    for age, directory in enumerate(reversed(own_plans(cache))):
        plan = Plan(directory)
        if plan.key != key or plan.relies_on is None or not plan.relies_on <= committed:
            continue
        # What an older plan left undone, a newer one may have done under other shards.
        if age == 0 or committed.issuperset(plan.shard_ids):
            return plan
    return None


def make_plan(
    config: BuildConfig,
    spec: CaptureSpec,
    template: ChatTemplate,
    *,
    key: str,
    known: IdSet,
    relies_on: Collection[str] = (),
    plans: Path | None = None,
    digests: Mapping[Path, str] | None = None,
    known_tags: Collection[str] = (),
) -> Plan:
    """Tokenize the data and write a plan of the samples that are not in `known`.

    Args:
        relies_on: the shards that `known` is of.
        plans: where; None for where the builder of the cache works.

    Raises:
        DataError: the data cannot be used, or are not as `digests` says.
    """
    cache = config.cache.path
    number = next_plan_id(plans or workspace(cache) / PLANS, cache)
    writer = PlanWriter(plans or workspace(cache) / PLANS, number)
    try:
        corpus = open_corpus(
            config,
            spec.target.vocab_size,
            template,
            digests=digests,
            known_tags=known_tags,
            on_drop=writer.note_drop,
        )
        num_known = 0
        for sample in tracked(corpus, "tokenize", "sample"):
            if bytes.fromhex(sample.sample_id) in known:
                num_known += 1
            else:
                writer.add(sample)
        log_corpus(corpus.report, template, config.target)
        logger.info(
            "%s to add, %s in the cache already", count(len(writer), "sample"), f"{num_known:,}"
        )
        return writer.commit(
            key=key,
            forward=config.forward,
            shard_tokens=max(1, int(config.plan.shard_mib * 2**20) // spec.row_bytes_per_token),
            relies_on=relies_on if num_known else (),
            report={**corpus.report.to_dict(), "already_cached": num_known},
        )
    finally:
        writer.discard()


def open_corpus(
    config: BuildConfig,
    vocab_size: int,
    template: ChatTemplate,
    *,
    digests: Mapping[Path, str] | None = None,
    known_tags: Collection[str] = (),
    on_drop: Callable[[str, int, Drop], None] | None = None,
) -> CorpusReader:
    """The samples that `config` asks for, tokenized one by one while they are read."""
    return read_corpus(
        config.data.tagged_sources,
        template,
        vocab_size=vocab_size,
        max_length=config.data.max_length,
        truncation=config.data.truncation,
        cut_off_answers=config.data.cut_off_answers,
        on_bad_row=config.data.on_bad_row,
        supervise_text=config.data.supervise_text,
        digests=digests,
        known_tags=known_tags,
        on_drop=on_drop,
        num_processes=config.workers.num_tokenizers,
    )


def stored_samples(path: Location) -> StoredSamples:
    """What the committed shards of the cache at `path` hold."""
    shard_ids = tuple(sorted(committed_shards(path)))
    if not shard_ids:
        return StoredSamples(IdSet(), {}, ())
    storage = open_storage(path)
    spec = CaptureSpec.from_dict(read_description(storage)["spec"], f"{path}/{DESCRIPTION}")
    known = IdSet()
    records = [read_record(path, spec, shard_id)[0] for shard_id in shard_ids]
    for record in records:
        reader = ShardReader(storage, record, spec)
        known.update(row.tobytes() for row in reader.arrays["sample_ids"])
    return StoredSamples(known, quarantined_samples(records, known), shard_ids)


def committed_tags(path: Location, spec: CaptureSpec) -> set[str]:
    """Source tags of the committed shards of the cache at `path`."""
    records = (read_record(path, spec, shard_id)[0] for shard_id in committed_shards(path))
    return {tag for record in records for tag in record.sources}


def log_corpus(report: CorpusReport, template: ChatTemplate, target: TargetConfig) -> None:
    """Say what became of the rows, and what in them may cost acceptance later."""
    logger.info("%s", report.describe())
    for line in report.describe_drops():
        logger.warning("%s", line)
    if line := describe_writers(report, target):
        logger.warning("%s", line)
    if report.num_unthinking:
        logger.warning(
            "%s without a think block although the template arguments ask for one",
            count(report.num_unthinking, "answer"),
        )
    if report.num_straddling_tokens:
        logger.info("%s across the edge of an answer", count(report.num_straddling_tokens, "token"))
    if report.num_unsupervised_turns:
        logger.info(
            "%s unsupervised: the template leaves out their reasoning",
            count(report.num_unsupervised_turns, "earlier answer"),
        )
    if template.reads_clock:
        logger.warning("the chat template writes today's date: ids will differ on another day.")


def describe_writers(report: CorpusReport, target: TargetConfig) -> str:
    """How many samples the target did not answer itself, by what the rows say; else nothing."""
    own = _model_name(target_name(target))
    others = {
        name: number
        for name, number in report.generated_by.items()
        if name == UNKNOWN_MODEL or _model_name(name) != own
    }
    if not others:
        return ""
    parts = sorted(others.items(), key=lambda item: -item[1])
    named = [f"{number:,} by {name}" for name, number in parts if name != UNKNOWN_MODEL]
    if len(named) > MAX_EXAMPLES:
        named = [*named[:MAX_EXAMPLES], f"{len(named) - MAX_EXAMPLES:,} other models"]
    if unknown := others.get(UNKNOWN_MODEL):
        named.append(f"{unknown:,} do not say by which model")
    return (
        f"{sum(others.values()):,} of {count(report.num_kept, 'sample')} not answered by the "
        f"target {own!r}, by their `generated_by`: {', '.join(named)}. A drafter learns best from "
        "the target's own answers: `cache-builder regenerate` makes them. (Set target.name if the "
        "target has another name there.)"
    )


def _model_name(text: str) -> str:
    """The last part of a path or hub name, without a remark in brackets or a digest."""
    return text.partition(" (")[0].partition("@")[0].rstrip("/").rpartition("/")[2].casefold()
