"""Which Ray cluster the workers of a build run on, and how many of them it holds."""

import logging
import os
import signal
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from cache_builder.config import WorkersConfig
from cache_builder.devices import cpu_worker_bytes
from cache_builder.outpost import beacon
from cache_builder.pool import Events, Outcome, run_crew
from cache_builder.ray_crew import RayCrew, shorten
from cache_builder.worker import Job, Prepared, Task
from shared import log
from shared.errors import ConfigError
from shared.quantity import count

logger = logging.getLogger(__name__)

_CONNECT_SECONDS = 10.0


def run_ray(
    job: Job,
    config: WorkersConfig,
    tasks: Sequence[Task],
    prepared: Prepared | None,
    events: Events,
) -> Outcome:
    """Capture all shards with actors of the Ray cluster.

    Raises:
        ConfigError: Ray is not installed, or there is no cluster, or none that holds a worker.
        DraftCacheError: what the first worker that refused to go on raised.
    """
    job = _absolute(job)
    with _connected(), beacon(job.cache) as sign:
        need = _need(config, job.target_path)
        number = min(count_workers(config, job.target_path), len(tasks) or 1)
        logger.info("%s on %s, %s each", count(number, "worker"), _describe_nodes(), _words(need))
        with RayCrew(job, sign, need, number) as crew:
            return run_crew(crew, tasks, prepared, events)


def require_cluster(config: WorkersConfig) -> None:
    """Refuse early what no capture could begin with.

    Raises:
        ConfigError: as `run_ray`.
    """
    with _connected():
        count_workers(config, None)


def cluster_workers(config: WorkersConfig, target_path: Path) -> tuple[int, bool]:
    """How many workers the cluster holds now, and whether on GPUs.

    Raises:
        ConfigError: as `run_ray`.
    """
    with _connected():
        return count_workers(config, target_path), "GPU" in _need(config, target_path)


def count_workers(config: WorkersConfig, target_path: Path | None) -> int:
    """As many as `config` asks for, or as the resources of the connected cluster hold.

    Raises:
        ConfigError: it holds none.
    """
    need = _need(config, target_path)
    held = sum(_holds(node["Resources"], need) for node in _nodes())
    if config.num_workers:
        if config.num_workers > held:
            logger.warning(
                "workers.num_workers = %d, but the Ray cluster holds %d of %s: the others wait "
                "for nodes",
                config.num_workers,
                held,
                _words(need),
            )
        return config.num_workers
    if not held:
        raise ConfigError(
            f"workers: no node of the Ray cluster holds a worker of {_words(need)} "
            f"({_describe_nodes()}). Add nodes, or change workers.devices_per_worker, "
            "workers.threads or workers.devices."
        )
    return held


def _need(config: WorkersConfig, target_path: Path | None) -> dict[str, float]:
    """Resources of one worker, by Ray's names. GPUs are what is scarce where there are some."""
    has_gpus = any(node["Resources"].get("GPU") for node in _nodes())
    if config.devices != "cpu" and has_gpus:
        return {"GPU": config.devices_per_worker}
    if config.devices_per_worker > 1:
        raise ConfigError(
            f"workers.devices_per_worker = {config.devices_per_worker}: expected GPUs, the Ray "
            f"cluster has none to give ({_describe_nodes()})."
        )
    memory = {} if target_path is None else {"memory": cpu_worker_bytes(target_path)}
    return {"CPU": config.threads, **memory}


def _holds(resources: Mapping[str, float], need: Mapping[str, float]) -> int:
    return min(int(resources.get(name, 0) // share) for name, share in need.items())


def _words(need: Mapping[str, float]) -> str:
    return ", ".join(
        f"{value / 1e9:.1f} GB of memory" if name == "memory" else f"{value:g} {name}"
        for name, value in need.items()
    )


def _nodes() -> list[dict[str, Any]]:
    import ray

    nodes: list[dict[str, Any]] = ray.nodes()
    return [node for node in nodes if node["Alive"]]


def _describe_nodes() -> str:
    nodes = _nodes()
    cpus, gpus = (sum(n["Resources"].get(name, 0) for n in nodes) for name in ("CPU", "GPU"))
    return f"{count(len(nodes), 'node')} with {cpus:g} CPU and {gpus:g} GPU"


def _absolute(job: Job) -> Job:
    """With paths that mean the same in another process."""
    cache = job.cache
    if isinstance(cache, Path):
        cache = cache.absolute()
    elif cache.scratch is not None:
        cache = replace(cache, scratch=cache.scratch.absolute())
    return replace(
        job, cache=cache, plan=job.plan.absolute(), target_path=job.target_path.absolute()
    )


@contextmanager
def _connected() -> Iterator[None]:
    """Within, this process is connected to the cluster that Ray finds.

    Raises:
        ConfigError: Ray is not installed, or there is no cluster. None is started: one of this
            machine alone is not what was asked for.
    """
    try:
        import ray
    except ImportError:
        raise ConfigError(
            "workers.launcher 'ray': Ray is not installed. Run `pip install 'draftcache[ray]'`, "
            "on every node of the cluster."
        ) from None
    if ray.is_initialized():  # the caller's business
        yield
        return
    if (client := os.environ.get("RAY_ADDRESS", "")).startswith("ray://"):
        raise ConfigError(
            f"RAY_ADDRESS={client}: builds do not go through Ray's client. Run the command on a "
            "node of the cluster, with RAY_ADDRESS unset or HOST:PORT."
        )
    log.adopt("ray")
    before = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=_find_address(), log_to_driver=False, configure_logging=False)
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"workers.launcher 'ray': no Ray cluster ({shorten(error)}). Start one by `ray start "
            "--head` here and `ray start --address=HOST:6379` on the other nodes, or set "
            "RAY_ADDRESS=HOST:PORT; or take workers.launcher 'local'."
        ) from None
    finally:
        signal.signal(signal.SIGTERM, before)  # Ray puts its own there, which exits
    try:
        yield
    finally:
        ray.shutdown()


def _find_address() -> str:
    """Of the cluster that Ray itself would take, which answers: Ray would ask for minutes.

    Raises:
        OSError: none is running, or it does not answer.
        ValueError: RAY_ADDRESS is not HOST:PORT.
    """
    from ray._private.services import canonicalize_bootstrap_address  # there is no public one

    address: str | None = canonicalize_bootstrap_address("auto")
    if address is None:
        raise ValueError("RAY_ADDRESS asks for one of this machine alone")
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()
    except OSError as error:
        raise OSError(f"{address} does not answer: {error}") from None
    return address
