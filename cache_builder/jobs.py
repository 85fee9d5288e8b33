"""Having shards of a plan captured: by whom, with how much room, and what to say meanwhile."""

import logging
from collections.abc import Sequence
from pathlib import Path

from cache_builder.config import BuildConfig, WorkersConfig
from cache_builder.description import write_description
from cache_builder.devices import Devices, describe_devices, pick_devices, require_devices
from cache_builder.plan import Plan
from cache_builder.pool import Events, Outcome, run_inline
from cache_builder.processes import run_processes
from cache_builder.progress import Progress
from cache_builder.space import bytes_here, require_fit
from cache_builder.target_files import FileStamps
from cache_builder.worker import Job, Prepared, Task
from cache_builder.workspace import workspace
from shared.errors import CaptureError
from shared.quantity import count, size
from shared.spec import CaptureSpec

logger = logging.getLogger(__name__)


def make_job(
    config: BuildConfig, plan: Plan, spec: CaptureSpec, target_path: Path, stamps: FileStamps
) -> Job:
    return Job(
        cache=config.cache.path,
        plan=plan.directory,
        spec=spec,
        target_path=target_path,
        target=config.target,
        target_stamps=stamps,
        min_free_bytes=config.cache.min_free_bytes,
    )


def capture_shards(
    config: BuildConfig, job: Job, plan: Plan, tasks: Sequence[Task], prepared: Prepared | None
) -> None:
    """Capture and commit the shards of `tasks`, all of `plan`.

    Raises:
        CaptureError: some were not; it names them. The others are committed.
        OutOfSpaceError: they will not fit, or did not.
    """
    tokens = {
        task.shard_id: int(plan.lengths(plan.shard_positions(task.shard_id)).sum())
        for task in tasks
    }
    total = sum(tokens.values())
    workers = config.workers
    is_ray = workers.launcher == "ray"
    devices = (
        []  # every node has its own, and its own disk beside a bucket
        if is_ray
        else pick_devices(workers, num_shards=len(tasks), target_path=job.target_path)
    )
    per_token = job.spec.row_bytes_per_token * job.spec.build_codec().expected_ratio
    needed, largest = total * per_token, max(tokens.values(), default=0) * per_token
    here = bytes_here(job.cache, needed, largest, len(devices))
    require_fit(workspace(job.cache), here, job.min_free_bytes)
    logger.info(
        "capturing %s %s, about %s",
        count(total, "token"),
        "on the Ray cluster"
        if is_ray
        else f"with {count(len(devices), 'worker')} on {_list(devices)}",
        size(needed),
    )
    progress = Progress(tokens, raw_bytes_per_token=job.spec.raw_bytes_per_token)
    events = Events(
        on_prepared=lambda ready: write_description(job, ready),
        on_joined=progress.joined,
        on_started=progress.started,
        on_progress=progress.advanced,
        on_committed=progress.committed,
        on_died=progress.died,
        on_tick=progress.tick,
    )
    try:
        with progress:
            if is_ray:
                from cache_builder.ray_cluster import run_ray  # an extra

                outcome = run_ray(job, workers, tasks, prepared, events)
            elif len(devices) == 1:
                outcome = run_inline(job, devices[0], tasks, prepared, events)
            else:
                outcome = run_processes(job, devices, tasks, prepared, events)
    finally:  # whoever interrupts a build wants to know how fast it was
        progress.log_report()
    _require_all(outcome, plan)


def require_workers(config: WorkersConfig) -> None:
    """Refuse early what no capture could begin with.

    Raises:
        ConfigError: a device is not there, or no Ray cluster.
    """
    if config.launcher == "ray":
        from cache_builder.ray_cluster import require_cluster  # an extra

        require_cluster(config)
    else:
        require_devices(config)


def _list(devices: Sequence[Devices]) -> str:
    return ", ".join(sorted(map(describe_devices, set(devices))))


def _require_all(outcome: Outcome, plan: Plan) -> None:
    if not outcome.missing:
        return
    samples = sum(len(plan.shard_positions(shard_id)) for shard_id in outcome.missing)
    reasons = "; ".join(f"{shard_id}: {reason}" for shard_id, reason in outcome.missing.items())
    raise CaptureError(
        f"{len(outcome.missing)} shards with {samples} samples were not captured ({reasons}). "
        "What is committed is kept: run the same command again."
    )
