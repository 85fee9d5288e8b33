"""What a cache will cost, measured on a sample of the data: bytes, hours, and whether it fits."""

import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from cache_builder.config import BuildConfig, Forward, WorkersConfig
from cache_builder.corpus import TokenizedSample
from cache_builder.description import create_directories, describe_capture, read_prepared
from cache_builder.devices import Devices, describe_devices, pick_devices
from cache_builder.plan import Plan
from cache_builder.plan_writer import PlanWriter
from cache_builder.planning import make_plan, stored_samples
from cache_builder.projecting import put_projection
from cache_builder.space import bytes_here, free_bytes
from cache_builder.taps import warn_of_last_block
from cache_builder.target_files import resolve_target, stamp_files
from cache_builder.tokens import load_template
from cache_builder.worker import Job, Task, Worker
from cache_builder.workspace import workspace
from shared.errors import ConfigError
from shared.files import writing
from shared.layout import DESCRIPTION
from shared.quantity import count, size
from shared.storage import open_storage

logger = logging.getLogger(__name__)

_SAMPLE_TOKENS = 8192
"""Enough for the ratio, which varies by a percent or two; and for the rate on a CPU."""


def estimate(config: BuildConfig) -> dict[str, Any]:
    """Bytes per token, total bytes, free space and hours of the build that `config` describes.

    Counts only samples that are not in the cache yet. Tokenizes all the data and captures a
    sample of them on one device, in a directory that is removed again.

    Raises:
        CacheIncompatibleError: the cache there was built with other settings.
        DataError: the data cannot be used.
        TargetError: the target cannot be loaded.
    """
    target_path = resolve_target(config.target)
    stamps = stamp_files(target_path)
    template = load_template(target_path, config.data)
    spec = describe_capture(config, target_path, template)
    warn_of_last_block(spec.target_layer_ids, spec.target.num_layers)
    path = config.cache.path
    if open_storage(path).exists(DESCRIPTION):
        spec.require_equal(read_prepared(path)[0], str(path))  # as a build does
    stored = stored_samples(path)
    known = stored.ids
    known.update(map(bytes.fromhex, stored.quarantined))  # as a build does
    parent = next(p for p in workspace(path).absolute().parents if p.is_dir())
    with _room(parent) as scratch:
        create_directories(scratch)
        put_projection(scratch, config.capture.projection, spec)
        plan = make_plan(config, spec, template, plans=scratch / "all", key="estimate", known=known)
        if not len(plan):
            return {
                "num_samples": 0,
                "num_tokens": 0,
                "needed_bytes": 0,
                "bytes_here": 0,
                "fits": True,
            }
        lengths = [plan.lengths(plan.shard_positions(i)) for i in plan.shard_ids]
        sample = _sample_plan(plan, scratch / "some", config.forward)
        devices = _workers(config.workers, len(plan.shard_ids), target_path)
        job = Job(
            cache=scratch,
            plan=sample.directory,
            spec=spec,
            target_path=target_path,
            target=config.target,
            target_stamps=stamps,
            min_free_bytes=0,
        )
        logger.info(
            "capturing %s on %s, to measure",
            count(sample.num_tokens, "token"),
            describe_devices(devices[0]),
        )
        worker = Worker(job, devices[0])
        prepared = worker.prepare()
        done = [
            worker.capture(
                Task(shard_id, sample.forward), prepared.calibration, lambda tokens: None
            )
            for shard_id in sample.shard_ids
        ]
    sampled = sum(record.num_tokens for record, _ in done)
    bytes_per_token = sum(record.stored_bytes for record, _ in done) / sampled
    rate = sampled / sum(timing.total for _, timing in done) * len(devices)
    needed = bytes_per_token * plan.num_tokens
    free = free_bytes(workspace(path))
    largest = max(int(plan_lengths.sum()) for plan_lengths in lengths) * bytes_per_token
    is_here = config.workers.launcher == "local"
    here = bytes_here(path, needed, largest, len(devices) if is_here else 0)
    return {
        "num_samples": len(plan),
        "num_tokens": plan.num_tokens,
        "already_cached": len(known),
        "target_layer_ids": list(spec.target_layer_ids),
        "last_hidden": spec.last_hidden,
        "projection": spec.to_dict().get("projection"),
        "sampled_tokens": sampled,
        "bytes_per_token": bytes_per_token,
        "raw_bytes_per_token": spec.raw_bytes_per_token,
        "stored_over_raw": bytes_per_token / spec.raw_bytes_per_token,
        "needed_bytes": needed,
        "bytes_here": here,
        "free_bytes": free,
        "min_free_bytes": config.cache.min_free_bytes,
        "fits": here + config.cache.min_free_bytes <= free,
        "tokens_per_second": rate,
        "hours": plan.num_tokens / rate / 3600,
        "devices": [describe_devices(own) for own in devices],
    }


@contextmanager
def _room(parent: Path) -> Iterator[Path]:
    """A new directory in `parent`, which is removed again."""
    with writing(parent):
        directory = tempfile.TemporaryDirectory(prefix=".estimate-", dir=parent)
    with directory as name:
        scratch = Path(name) / "cache"
        with writing(scratch):
            scratch.mkdir()
        yield scratch


def _workers(config: WorkersConfig, num_shards: int, target_path: Path) -> list[Devices]:
    """The devices of every worker. Under Ray, as many as the cluster holds, each like the first of
    this machine."""
    if config.launcher == "local":
        return pick_devices(config, num_shards=num_shards, target_path=target_path)
    from cache_builder.ray_cluster import cluster_workers  # an extra

    number, has_gpus = cluster_workers(config, target_path)
    (own,) = pick_devices(replace(config, num_workers=1), num_shards=1, target_path=target_path)
    if has_gpus != (own != ("cpu",)):
        raise ConfigError(
            f"estimate: the cluster's workers have {'GPUs' if has_gpus else 'no GPUs'}, but it is "
            f"measured here, on {describe_devices(own)}. Run it on a node like those that capture."
        )
    return [own] * min(number, num_shards)


def _sample_plan(plan: Plan, plans: Path, forward: Forward) -> Plan:
    """A plan of some samples of `plan`, spread evenly over the lengths."""
    writer = PlanWriter(plans, "0001")
    try:
        for position in plan.calibration_positions(_SAMPLE_TOKENS):
            planned = plan.sample(position)
            file, row, source = plan.provenance(position)
            writer.add(
                TokenizedSample(planned.token_ids, planned.loss_mask, source, file, row, None)
            )
        return writer.commit(key="sample", forward=forward, shard_tokens=_SAMPLE_TOKENS, report={})
    finally:
        writer.discard()


def rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """`facts` as a table of names and values."""
    if not facts["num_tokens"]:
        return [("new samples", "0: everything is in the cache already")]
    return [
        ("new samples", f"{facts['num_samples']:,} ({facts['already_cached']:,} in the cache)"),
        ("new tokens", f"{facts['num_tokens']:,}"),
        (
            "stored",
            f"blocks {facts['target_layer_ids']}{_projected(facts['projection'])}, last hidden "
            f"state: {facts['last_hidden']}",
        ),
        (
            "bytes per token",
            f"{facts['bytes_per_token']:,.0f} stored, {facts['raw_bytes_per_token']:,} as bf16 "
            f"({facts['stored_over_raw']:.3f}), from {count(facts['sampled_tokens'], 'token')}",
        ),
        ("needed", size(facts["needed_bytes"])),
        (
            "free",
            f"{size(facts['free_bytes'])}, of which {size(facts['min_free_bytes'])} "
            f"must stay free: it {'fits' if facts['fits'] else 'DOES NOT FIT'}",
        ),
        (
            "time",
            f"{facts['hours']:,.2f} hours at {facts['tokens_per_second']:,.0f} tokens/s on "
            f"{len(facts['devices'])} x {facts['devices'][0]}",
        ),
    ]


def _projected(projection: dict[str, Any] | None) -> str:
    return "" if projection is None else f" projected to {projection['rank']:,} values"
