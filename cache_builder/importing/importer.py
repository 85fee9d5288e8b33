"""Importing what another tool captured: plan, check, write what is missing, publish.

Resuming and extending are the same, as in a build.
"""

import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from cache_builder.build import explaining_interrupts, require_records
from cache_builder.commit import committed_shards, discard_uncommitted
from cache_builder.config import TargetConfig
from cache_builder.description import open_or_create, write_description
from cache_builder.importing import report as reports
from cache_builder.importing.check import Check, check_states
from cache_builder.importing.config import ImportConfig
from cache_builder.importing.scan import find_shape, plan_import
from cache_builder.importing.shards import ShardImport, read_states
from cache_builder.importing.slots import Slots, resolve_slots
from cache_builder.importing.source import StateSource, StoredShape
from cache_builder.importing.spec import describe_import, describe_origin
from cache_builder.importing.specforge import SpecForgeSource
from cache_builder.importing.speculators import SpeculatorsSource
from cache_builder.lock import builder_lock
from cache_builder.plan import Plan
from cache_builder.planning import find_plan, stored_samples
from cache_builder.publication import publish
from cache_builder.space import bytes_here, require_fit
from cache_builder.stored_plans import share_plan
from cache_builder.target import Target
from cache_builder.target_config import load_config
from cache_builder.target_files import FileStamps, require_unchanged, resolve_target, stamp_files
from cache_builder.worker import CALIBRATION_TOKENS, Job, Prepared
from cache_builder.workspace import workspace
from shared.bar import Bar
from shared.cache import Cache
from shared.config import build as build_config
from shared.errors import CacheIncompatibleError, DataError
from shared.files import canonical_json, sha256_bytes, writing
from shared.layout import HEAD, calibration_key
from shared.location import Location
from shared.manifest import Manifest
from shared.metadata import calibration_to_bytes, read_calibration, read_description
from shared.quantity import count
from shared.spec import CaptureSpec
from shared.storage import open_storage

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportReport:
    """What one import did."""

    manifest: Manifest
    plan: Plan
    slots: Slots
    check: Check | None
    """None if nothing was left to write, or no check was asked for."""

    num_new_shards: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Job:
    """An import whose declarations have been understood."""

    config: ImportConfig
    source: StateSource
    shape: StoredShape
    slots: Slots
    target: TargetConfig
    target_path: Path
    target_stamps: FileStamps
    num_layers: int
    spec: CaptureSpec

    @property
    def cache(self) -> Location:
        return self.config.cache.path


def import_states(config: ImportConfig) -> ImportReport:
    """Import, resume or extend: add to a cache what `config.source` has and it has not.

    Nothing is guessed: what the source does not record must be declared, and is compared with the
    target before a state is written. The source is only read.

    Raises:
        DataError: the source is not of its layout, a fact is not declared, or the states are not
            those that the target gives for the declared blocks.
        CacheIncompatibleError: the cache there was captured, or imported with other declarations.
        CacheLockedError: another builder is at work on it.
        CaptureError: too many samples have unusable states.
    """
    job = _understand(config)
    if isinstance(job.cache, Path):
        with writing(job.cache):
            job.cache.mkdir(parents=True, exist_ok=True)
    with builder_lock(job.cache), explaining_interrupts(job.cache):
        prepared = open_or_create(job.cache, job.spec)
        if prepared is not None:
            _require_origin(job)
        require_records(job.cache, job.spec)
        plan = _find_or_make_plan(job)
        if leftovers := discard_uncommitted(job.cache):
            logger.info("discarded %s that were never committed", count(leftovers, "shard"))
        done = committed_shards(job.cache)
        todo = [shard_id for shard_id in plan.shard_ids if shard_id not in done]
        logger.info(
            "plan %s: %s, %s, %s, %s to write",
            plan.plan_id,
            count(len(plan), "sample"),
            count(plan.num_tokens, "token"),
            count(len(plan.shard_ids), "shard"),
            f"{len(todo):,}",
        )
        check = None
        if todo:
            check, prepared = _check_and_prepare(job, plan, prepared)
            _write(job, plan, todo, prepared)
        manifest = publish(
            job.cache,
            job.spec,
            required=done.union(plan.shard_ids),
            max_quarantined_fraction=config.max_quarantined_fraction,
        )
    Cache(job.cache)  # a reader must be able to open what was published
    return ImportReport(
        manifest=manifest,
        plan=plan,
        slots=job.slots,
        check=check,
        num_new_shards=len(todo),
    )


def _understand(config: ImportConfig) -> _Job:
    target = TargetConfig(path=config.target, revision=config.revision)
    target_path = resolve_target(target)
    stamps = stamp_files(target_path)
    text = load_config(target_path).get_text_config()
    source = _open_source(config, text.hidden_size)
    shape = find_shape(source)
    if shape.hidden_size != text.hidden_size:
        raise DataError(
            f"{config.source}: states of {shape.hidden_size} values, but the target "
            f"{config.target} has hidden size {text.hidden_size}. Name the target that they were "
            "captured from."
        )
    slots = resolve_slots(
        config.declared,
        config.kind,
        num_stored=shape.num_stored,
        num_layers=text.num_hidden_layers,
    )
    dtype = config.dtype or str(shape.dtype).removeprefix("torch.")
    target = build_config(
        TargetConfig, {"path": config.target, "revision": config.revision, "dtype": dtype}
    )
    return _Job(
        config=config,
        source=source,
        shape=shape,
        slots=slots,
        target=target,
        target_path=target_path,
        target_stamps=stamps,
        num_layers=text.num_hidden_layers,
        spec=describe_import(config, target, target_path, slots),
    )


def _open_source(config: ImportConfig, hidden_size: int) -> StateSource:
    if config.kind == "speculators":
        return SpeculatorsSource(config.source, config.states)
    if config.states is not None:
        raise DataError("--states is for speculators; SpecForge keeps states with their tokens.")
    return SpecForgeSource(config.source, hidden_size)


def _require_origin(job: _Job) -> None:
    found = read_description(open_storage(job.cache)).get("origin")
    if found is None:
        raise CacheIncompatibleError(
            f"{job.cache}: its states were captured here. Import into a cache of its own; if "
            "imported with --same-as that one, `cache-builder merge` joins the two."
        )
    if found != (ours := describe_origin(job.config, job.slots)):
        raise CacheIncompatibleError(
            f"{job.cache}: imported from {found}, this would be {ours}. Declare the same, or "
            "import into a cache of its own."
        )


def _find_or_make_plan(job: _Job) -> Plan:
    config = job.config
    key = sha256_bytes(
        canonical_json(
            {
                "fingerprint": job.spec.fingerprint,
                "origin": describe_origin(config, job.slots),
                "files": list(job.source.files()),
                "tag": config.source_tag,
                "on_mismatch": config.on_mismatch,
                "shard_mib": config.plan.shard_mib,
            }
        )
    )
    if plan := find_plan(job.cache, key):
        return plan
    plan = plan_import(
        job.source,
        job.spec,
        job.shape,
        cache=job.cache,
        key=key,
        stored=stored_samples(job.cache),
        tag=config.source_tag,
        on_mismatch=config.on_mismatch,
        shard_mib=config.plan.shard_mib,
    )
    return share_plan(job.cache, plan)


def _check_and_prepare(
    job: _Job, plan: Plan, prepared: Prepared | None
) -> tuple[Check | None, Prepared]:
    """Compare with the target, then write what a new cache needs of it."""
    config = job.config
    check = None
    if config.check.num_samples or prepared is None:
        device = "cuda:0" if torch.cuda.is_available() else "cpu"
        target = Target.load(job.target_path, job.target, range(job.num_layers), "none", device)
        require_unchanged(job.target_path, job.target_stamps)
        if config.check.num_samples:
            check = check_states(job.source, plan, job.slots, target, config.check, config.declared)
        if prepared is None:
            head = target.head(plan.sample(0).token_ids).to_bytes()
            open_storage(job.cache).put(HEAD, head)
            prepared = Prepared(sha256_bytes(head), _calibrate(job, plan))
            write_description(_described(job, plan), prepared, describe_origin(config, job.slots))
    assert prepared is not None
    return check, prepared


def _described(job: _Job, plan: Plan) -> Job:
    """The job as a build would hand it to its workers."""
    return Job(
        cache=job.cache,
        plan=plan.directory,
        spec=job.spec,
        target_path=job.target_path,
        target=job.target,
        target_stamps=job.target_stamps,
        min_free_bytes=job.config.cache.min_free_bytes,
    )


def _calibrate(job: _Job, plan: Plan) -> str | None:
    """Learn the channels from the source's states, if the codec needs them; returns their name."""
    codec = job.spec.build_codec()
    if not codec.needs_calibration:
        return None
    states = [
        read_states(job.source, plan, position, job.slots)[1]
        for position in plan.calibration_positions(CALIBRATION_TOKENS)
    ]
    calibration = codec.calibrate(torch.cat(states))
    assert calibration is not None
    data = calibration_to_bytes(calibration)
    name = sha256_bytes(data)
    open_storage(job.cache).put(calibration_key(name), data)
    return name


def _write(job: _Job, plan: Plan, todo: list[str], prepared: Prepared) -> None:
    tokens = [int(plan.lengths(plan.shard_positions(shard_id)).sum()) for shard_id in todo]
    per_token = job.spec.row_bytes_per_token * job.spec.build_codec().expected_ratio
    here = bytes_here(job.cache, sum(tokens) * per_token, max(tokens) * per_token)
    floor = job.config.cache.min_free_bytes
    require_fit(workspace(job.cache), here, floor)
    shards = ShardImport(
        job.cache,
        plan,
        job.spec,
        job.source,
        job.slots,
        read_calibration(open_storage(job.cache), prepared.calibration, job.spec),
        prepared.calibration,
        floor,
    )
    with Bar("import", "token", sum(tokens)) as bar:
        for shard_id in todo:
            shards.write(shard_id, bar.add)


def rows(report: ImportReport) -> list[tuple[str, str]]:
    """`report` as a table of names and values."""
    blocks, totals = report.slots.target_layer_ids, report.manifest.totals
    table = reports.rows(report.plan.description["report"])
    if report.slots.left_out:
        table.append(("left out", f"states of layer id {report.slots.left_out[0]}, the last block"))
    if report.check is not None:
        table += report.check.rows(blocks)
    return [
        *table,
        (
            "imported",
            f"{count(report.num_new_shards, 'new shard')}; the cache holds "
            f"{count(totals.num_samples, 'sample')} "
            f"({totals.quarantined:,} quarantined)",
        ),
        ("blocks", ", ".join(map(str, blocks))),
        ("generation", str(report.manifest.generation)),
    ]
