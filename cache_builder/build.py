"""Building a cache: plan, capture what is missing, publish. Resuming and extending are the same."""

import logging
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from cache_builder.capture import Timing
from cache_builder.commit import (
    committed_shards,
    discard_uncommitted,
    publish,
    read_record,
)
from cache_builder.config import BuildConfig
from cache_builder.decoder import default_layer_ids
from cache_builder.lock import builder_lock
from cache_builder.plan import Plan, find_plans
from cache_builder.planning import find_or_make_plan
from cache_builder.pool import Events, Outcome, run_inline, run_processes
from cache_builder.retirement import recorded_shards, retired_shards
from cache_builder.space import require_fit
from cache_builder.target import (
    FileStamps,
    describe_target,
    load_config,
    resolve_target,
    stamp_files,
)
from cache_builder.template import ChatTemplate
from cache_builder.tokens import describe_tokens, load_template
from cache_builder.verify import verify_cache
from cache_builder.worker import Job, Prepared
from shared.cache import (
    CALIBRATIONS,
    DESCRIPTION,
    FORMAT,
    GENERATIONS,
    HEAD,
    PLANS,
    RECORDS,
    TARGET,
    WIP,
    Cache,
    read_description,
    read_manifest,
    record_key,
)
from shared.codec import PRESETS, check_chunk_bytes
from shared.errors import CacheError, CacheNotFoundError, CaptureError, ConfigError, DataError
from shared.files import (
    sync_directory,
    sync_file,
    write_json,
    writing,
)
from shared.manifest import Manifest, ShardRecord
from shared.shard import GROUP
from shared.spec import CaptureSpec
from shared.storage import LocalStorage

logger = logging.getLogger(__name__)

_TARGET_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)


_DIRECTORIES = (PLANS, RECORDS, GENERATIONS, CALIBRATIONS, WIP, TARGET, GROUP)
_OWN_NAMES = {*_DIRECTORIES, "builder.lock", "workers.lock", HEAD}


@dataclass(frozen=True, slots=True)
class BuildReport:
    """What one build did."""

    manifest: Manifest
    plan: Plan
    num_new_shards: int
    seconds: float


def build(config: BuildConfig) -> BuildReport:
    """Build, resume or extend the cache that `config` describes.

    Raises:
        CacheIncompatibleError: the cache there was built with other settings.
        CacheLockedError: another builder is at work on it.
        CaptureError: shards are missing at the end; what is committed is kept.
    """
    started = time.perf_counter()
    pick_devices(config)
    target_path = resolve_target(config.target)
    stamps = stamp_files(target_path)
    template = load_template(target_path, config.data)
    spec = describe_capture(config, target_path, template)
    path = config.cache.path
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)
    with builder_lock(path):
        prepared = _open_or_create(path, spec)
        _require_records(path)
        plan = find_or_make_plan(config, spec, template)
        leftovers = discard_uncommitted(path)
        if leftovers:
            logger.info("discarded %d shards that were never committed", leftovers)
        done = committed_shards(path)
        todo = [shard_id for shard_id in plan.shard_ids if shard_id not in done]
        logger.info(
            "plan %s: %d samples, %d tokens, %d shards, %d to capture",
            plan.plan_id,
            len(plan),
            plan.num_tokens,
            len(plan.shard_ids),
            len(todo),
        )
        if todo or prepared is None:
            _capture(config, _job(config, plan, spec, target_path, stamps), plan, todo, prepared)
        _require_usable(config, plan)
        manifest = publish(path, spec)
    Cache(path)  # a reader must be able to open what was published
    return BuildReport(manifest, plan, len(todo), time.perf_counter() - started)


def repair(config: BuildConfig, *, drop_lost: bool = False) -> list[str]:
    """Capture the damaged and missing shards of the newest generation anew, and nothing else.

    Args:
        drop_lost: let go of damaged shards that no plan on disk has; a build captures their
            samples from the data again.

    Returns:
        The ids of the shards captured anew.

    Raises:
        CacheError: the cache itself cannot be opened, or what is damaged is not in a shard.
        CacheIncompatibleError: it was built with other settings.
    """
    target_path = resolve_target(config.target)
    stamps = stamp_files(target_path)
    spec = describe_capture(config, target_path, load_template(target_path, config.data))
    path = config.cache.path
    read_manifest(LocalStorage(path))
    with builder_lock(path):
        prepared = _open_or_create(path, spec)
        problems = verify_cache(path, deep=True)
        if lost := [problem for problem in problems if problem.shard is None]:
            raise CacheError(f"{lost[0].message} No shard can replace it: build the cache anew.")
        # What is on its way out needs no repair: it goes with the publication below.
        damaged = sorted({str(problem.shard) for problem in problems} - retired_shards(path))
        plans = [Plan(directory) for directory in find_plans(path / PLANS)]
        known = {shard_id for plan in plans for shard_id in plan.shard_ids}
        lost_ids = sorted(set(damaged) - known)
        if lost_ids and not drop_lost:  # nothing is deleted that cannot come back
            raise CacheError(
                f"{path}: shards {', '.join(lost_ids[:8])} are damaged and no plan on disk has "
                "them. Restore the plans; or repair with --drop-lost, which lets go of them, and "
                "build again, which captures their samples from the data."
            )
        for shard_id in damaged:
            (path / record_key(shard_id)).unlink(missing_ok=True)
        discard_uncommitted(path)
        for plan in plans:
            done = committed_shards(path)
            todo = [i for i in plan.shard_ids if i in damaged and i not in done]
            if todo:
                _capture(
                    config, _job(config, plan, spec, target_path, stamps), plan, todo, prepared
                )
        publish(path, spec)
    return [shard_id for shard_id in damaged if shard_id in known]


def describe_capture(config: BuildConfig, target_path: Path, template: ChatTemplate) -> CaptureSpec:
    """Everything that decides what will be stored.

    Raises:
        TargetError: a tap is out of range.
    """
    target = describe_target(target_path, config.target)
    layer_ids = config.capture.target_layer_ids or default_layer_ids(
        target.num_layers, config.capture.num_layers
    )
    codec = PRESETS[config.codec.preset]
    check_chunk_bytes(codec, len(layer_ids), target.hidden_size)
    tokens = describe_tokens(target_path, config.data, template, load_config(target_path))
    try:
        return CaptureSpec(
            target=target, tokens=tokens, target_layer_ids=layer_ids, codec=codec.to_dict()
        )
    except ValueError as error:
        raise DataError(f"capture: {error}") from None


def _open_or_create(path: Path, spec: CaptureSpec) -> Prepared | None:
    """Check the cache at `path` against `spec`; None if it must still be prepared."""
    storage = LocalStorage(path)
    if storage.exists(DESCRIPTION):
        description = read_description(storage)
        stored = CaptureSpec.from_dict(description["spec"], f"{path}/{DESCRIPTION}")
        create_directories(path)  # copies of a cache may lack the empty ones
        spec.require_equal(stored, str(path))
        return Prepared(description["head_sha256"], description["calibration"])
    foreign = [p.name for p in path.iterdir() if p.name not in _OWN_NAMES]
    if foreign:
        raise DataError(
            f"{path}: not a cache and not empty (it has {', '.join(sorted(foreign)[:8])}). "
            "Choose an empty directory."
        )
    create_directories(path)
    return None


def _require_records(path: Path) -> None:
    """Refuse to build on while a published shard has no record: it would be lost without a word.

    Raises:
        CacheError: naming the shards.
    """
    try:
        published = set(read_manifest(LocalStorage(path)).records)
    except CacheNotFoundError:
        return
    if missing := sorted(published - recorded_shards(path)):
        raise CacheError(
            f"{path}: the records of {len(missing)} published shards are missing "
            f"({', '.join(missing[:8])}). Run `cache-builder repair` with this configuration."
        )


def create_directories(path: Path) -> None:
    """The skeleton of a cache; harmless if it is there."""
    with writing(path):
        for name in _DIRECTORIES:
            (path / name).mkdir(exist_ok=True)
        write_json(
            path / GROUP / "zarr.json",
            {"zarr_format": 3, "node_type": "group", "attributes": {"format": FORMAT}},
        )


def _job(
    config: BuildConfig, plan: Plan, spec: CaptureSpec, target_path: Path, stamps: FileStamps
) -> Job:
    return Job(
        cache=config.cache.path,
        plan=plan.directory,
        spec=spec,
        target_path=target_path,
        target=config.target,
        target_stamps=stamps,
        batch_tokens=config.capture.batch_tokens,
        min_free_bytes=config.cache.min_free_bytes,
    )


def _capture(
    config: BuildConfig, job: Job, plan: Plan, todo: list[str], prepared: Prepared | None
) -> None:
    devices = pick_devices(config)
    total = sum(int(plan.lengths(plan.shard_positions(shard_id)).sum()) for shard_id in todo)
    needed = total * job.spec.raw_bytes_per_token * job.spec.build_codec().expected_ratio
    require_fit(job.cache, needed, job.min_free_bytes)
    logger.info("capturing %d tokens on %s, about %.2f GB", total, ", ".join(devices), needed / 1e9)
    with tqdm(total=total, desc="capture", unit="tok", unit_scale=True, disable=None) as bar:
        events = Events(
            on_prepared=lambda ready: _describe_cache(job, ready),
            on_progress=lambda name, tokens: bar.update(tokens) and None,
            on_committed=lambda name, record, timing: _log_shard(name, record, timing, job.spec),
        )
        if len(devices) == 1:
            outcome = run_inline(job, devices[0], todo, prepared, events)
        else:
            outcome = run_processes(job, devices, todo, prepared, events)
    _report_missing(outcome, plan)


def _describe_cache(job: Job, prepared: Prepared) -> None:
    """Write `cache.json`: from now on this directory is a cache of this fingerprint."""
    with writing(job.cache):
        for name in _TARGET_FILES:
            if (job.target_path / name).is_file():
                shutil.copyfile(job.target_path / name, job.cache / TARGET / name)
                sync_file(job.cache / TARGET / name)
        sync_directory(job.cache / TARGET)
    write_json(
        job.cache / DESCRIPTION,
        {
            "format": FORMAT,
            "format_version": job.spec.format_version,
            "fingerprint": job.spec.fingerprint,
            "spec": job.spec.to_dict(),
            "head_sha256": prepared.head_sha256,
            "calibration": prepared.calibration,
            "target_name": job.target.path,
            "target_revision": job.target.revision,
        },
    )


def pick_devices(config: BuildConfig) -> list[str]:
    """One entry per worker process."""
    devices = config.workers.devices
    if devices == "auto":
        names = [f"cuda:{i}" for i in range(torch.cuda.device_count())] or ["cpu"]
    else:
        names = ["cpu"] if devices == "cpu" else list(devices)
    for name in names:  # before the target is hashed and the data are tokenized
        if name != "cpu" and (torch.device(name).index or 0) >= torch.cuda.device_count():
            raise ConfigError(
                f"workers.devices: {name} is not there; torch sees {torch.cuda.device_count()} "
                "CUDA devices."
            )
    count = config.workers.num_workers or len(names)
    return [names[i % len(names)] for i in range(count)]


def _log_shard(name: str, record: ShardRecord, timing: Timing, spec: CaptureSpec) -> None:
    per_token = record.stored_bytes / max(record.num_tokens, 1)
    logger.info(
        "%s: shard %s, %d samples, %d tokens, %.0f bytes/token (%.3f of bf16), %.0f tokens/s, "
        "forward %.0f %%, pack %.0f %%, waited for the writer %.0f %%",
        name,
        record.shard_id,
        record.num_samples,
        record.num_tokens,
        per_token,
        per_token / spec.raw_bytes_per_token,
        record.num_tokens / timing.total,
        100 * timing.forward / timing.total,
        100 * timing.pack / timing.total,
        100 * timing.wait / timing.total,
    )


def _report_missing(outcome: Outcome, plan: Plan) -> None:
    if not outcome.missing:
        return
    samples = sum(len(plan.shard_positions(shard_id)) for shard_id in outcome.missing)
    reasons = "; ".join(f"{shard_id}: {reason}" for shard_id, reason in outcome.missing.items())
    raise CaptureError(
        f"{len(outcome.missing)} shards with {samples} samples were not captured ({reasons}). "
        "What is committed is kept: run the same command again."
    )


def _require_usable(config: BuildConfig, plan: Plan) -> None:
    """Fail, and publish nothing, if more samples were quarantined than the configuration allows."""
    path = config.cache.path
    quarantined: dict[str, str] = {}
    for shard_id in plan.shard_ids:
        quarantined |= read_record(path, shard_id)[0].quarantined
    if len(quarantined) > config.capture.max_quarantined_fraction * len(plan):
        examples = "; ".join(f"{key}: {why}" for key, why in list(quarantined.items())[:8])
        raise CaptureError(
            f"{path}: {len(quarantined)} of {len(plan)} samples have unusable states ({examples}). "
            f"More than capture.max_quarantined_fraction allows "
            f"({config.capture.max_quarantined_fraction:g})."
        )
