"""From the data to a plan: what is new is tokenized once and written down."""

import logging
from dataclasses import replace
from pathlib import Path

from tqdm import tqdm

from cache_builder.commit import committed_shards, read_record
from cache_builder.config import BuildConfig
from cache_builder.corpus import CorpusReader, read_corpus
from cache_builder.plan import Plan, PlanWriter, find_plans, next_plan_id
from cache_builder.quarantine import quarantined_samples
from cache_builder.report import UNKNOWN_MODEL, CorpusReport
from cache_builder.sources import find_files
from cache_builder.template import ChatTemplate
from shared import config as configs
from shared.cache import DESCRIPTION, PLANS, read_description
from shared.files import canonical_json, sha256_bytes, sha256_file
from shared.shard_reader import ShardReader
from shared.spec import CaptureSpec
from shared.storage import LocalStorage

logger = logging.getLogger(__name__)


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
    plans = config.cache.path / PLANS
    sources = config.data.tagged_sources
    files = [(source.tag, file) for source in sources for file in find_files(source.path)]
    key = sha256_bytes(
        canonical_json(
            {
                "fingerprint": spec.fingerprint,
                "data": configs.to_dict(replace(config.data, sources=("-",))),
                "files": [[tag, sha256_file(file)] for tag, file in files],
                "shard_mib": config.plan.shard_mib,
                # With others, what is missing is planned anew: a plan's shards are all alike.
                "forward": configs.to_dict(config.forward),
            }
        )
    )
    if retry_quarantined:
        known, quarantined = committed_samples(config.cache.path)
        if quarantined:
            logger.info("%d quarantined samples are tried again", len(quarantined))
            return make_plan(config, spec, template, plans=plans, key=key, known=known)
    committed = committed_shards(config.cache.path)
    for age, directory in enumerate(reversed(find_plans(plans))):
        plan = Plan(directory)
        # What an older plan left undone, a newer one may have done under other shards.
        if plan.key == key and (age == 0 or committed.issuperset(plan.shard_ids)):
            return plan
    known, quarantined = committed_samples(config.cache.path)
    if quarantined:
        logger.warning(
            "%d quarantined samples are left out; --retry-quarantined tries them again",
            len(quarantined),
        )
        known |= {bytes.fromhex(sample_id) for sample_id in quarantined}
    return make_plan(config, spec, template, plans=plans, key=key, known=known)


def make_plan(
    config: BuildConfig,
    spec: CaptureSpec,
    template: ChatTemplate,
    *,
    plans: Path,
    key: str,
    known: set[bytes],
) -> Plan:
    """Tokenize the data and write a plan of the samples that are not in `known`."""
    corpus = open_corpus(config, spec, template)
    writer = PlanWriter(plans, next_plan_id(plans))
    try:
        num_known = 0
        for sample in tqdm(corpus, desc="tokenize", unit="sample", disable=None):
            if bytes.fromhex(sample.sample_id) in known:
                num_known += 1
            else:
                writer.add(sample)
        _log_corpus(corpus.report, template)
        logger.info("%d samples are new, %d are in the cache already", len(writer), num_known)
        return writer.commit(
            key=key,
            forward=config.forward,
            shard_tokens=max(1, int(config.plan.shard_mib * 2**20) // spec.raw_bytes_per_token),
            report={**corpus.report.to_dict(), "already_cached": num_known},
        )
    finally:
        writer.discard()


def open_corpus(config: BuildConfig, spec: CaptureSpec, template: ChatTemplate) -> CorpusReader:
    """The samples that `config` asks for, tokenized one by one while they are read."""
    return read_corpus(
        config.data.tagged_sources,
        template,
        vocab_size=spec.target.vocab_size,
        max_length=config.data.max_length,
        truncation=config.data.truncation,
        cut_off_answers=config.data.cut_off_answers,
        on_bad_row=config.data.on_bad_row,
        supervise_text=config.data.supervise_text,
    )


def committed_samples(path: Path) -> tuple[set[bytes], dict[str, str]]:
    """What the committed shards of the cache at `path` hold, published or not.

    Returns:
        The ids of the samples in them, and id to reason of those that are quarantined.
    """
    shard_ids = committed_shards(path)
    if not shard_ids:
        return set(), {}
    storage = LocalStorage(path)
    spec = CaptureSpec.from_dict(read_description(storage)["spec"], f"{path}/{DESCRIPTION}")
    known: set[bytes] = set()
    records = [read_record(path, spec, shard_id)[0] for shard_id in sorted(shard_ids)]
    for record in records:
        reader = ShardReader(storage, record, spec)
        known |= {row.tobytes() for row in reader.arrays["sample_ids"]}
    return known, quarantined_samples(records, known)


def _log_corpus(report: CorpusReport, template: ChatTemplate) -> None:
    """Say what became of the rows, and what in them may cost acceptance later."""
    for line in report.describe():
        logger.info("%s", line)
    for writer, count in report.generated_by.items():
        if writer == UNKNOWN_MODEL:
            logger.warning(
                "%d of %d samples do not say which model wrote their answers. A drafter learns "
                "from the target's own answers best. Name it in the rows' `generated_by`.",
                count,
                report.num_kept,
            )
        else:
            logger.info("%d samples answered by %s", count, writer)
    if report.num_unthinking:
        logger.warning(
            "%d answers have no think block although the template arguments ask for one.",
            report.num_unthinking,
        )
    if report.num_straddling_tokens:
        logger.info("%d tokens across the edge of an answer", report.num_straddling_tokens)
    if report.num_unsupervised_turns:
        logger.info(
            "%d earlier answers unsupervised: the template leaves out their reasoning",
            report.num_unsupervised_turns,
        )
    if template.reads_clock:
        logger.warning("the chat template writes today's date: ids will differ on another day.")
