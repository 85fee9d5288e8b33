"""Which devices the workers of a build get, and how many workers that makes."""

import logging
from pathlib import Path

import torch

from cache_builder.config import WorkersConfig
from shared.cgroup import allowances, num_cores
from shared.errors import ConfigError

logger = logging.getLogger(__name__)

_MEMORY = Path("/proc/meminfo")
_HEADROOM = 1.3
"""Memory of one worker over the size of the weights: activations, and states on their way."""

_WORKER_BYTES = 1 << 30
"""Memory of one worker without the target: libraries, buffers."""


Devices = tuple[str, ...]
"""What one worker has: the CPU, a GPU, or several GPUs that share its target."""


def describe_devices(devices: Devices) -> str:
    return "+".join(devices)


def pick_devices(config: WorkersConfig, *, num_shards: int, target_path: Path) -> list[Devices]:
    """One entry per worker.

    By default every GPU, or every entry of `config.devices`, gets one, or every
    `config.devices_per_worker` of them in their order; on the CPU there are as many as the cores
    hold at `config.threads` each, and as the free memory holds copies of the target. There are
    never more than shards to capture, and always one.
    """
    groups = require_devices(config)
    is_listed = isinstance(config.devices, tuple)
    count = config.num_workers or (
        _cpu_workers(config.threads, target_path)
        if groups == [("cpu",)] and not is_listed
        else len(groups)
    )
    return [groups[i % len(groups)] for i in range(max(1, min(count, num_shards)))]


def require_devices(config: WorkersConfig) -> list[Devices]:
    """The devices that `config` names, each once per mention, by the workers that they make.

    Raises:
        ConfigError: one is not there, or they do not make whole workers.
    """
    names, size = _names(config), config.devices_per_worker
    if size > 1 and ("cpu" in names or len(set(names)) < len(names)):
        raise ConfigError(
            f"workers.devices_per_worker = {size}: expected different GPUs, found "
            f"{', '.join(names)}. Set it to 1, or list GPUs in workers.devices."
        )
    if len(names) % size:
        raise ConfigError(
            f"workers.devices_per_worker = {size} does not divide the {len(names)} devices "
            f"({', '.join(names[:8])}). List a multiple of {size} in workers.devices."
        )
    return [tuple(names[i : i + size]) for i in range(0, len(names), size)]


def _names(config: WorkersConfig) -> list[str]:
    if config.devices == "auto":
        return [f"cuda:{i}" for i in range(torch.cuda.device_count())] or ["cpu"]
    names = ["cpu"] if config.devices == "cpu" else list(config.devices)
    for name in names:
        if name != "cpu" and (torch.device(name).index or 0) >= torch.cuda.device_count():
            raise ConfigError(
                f"workers.devices: {name} is not there; torch sees {torch.cuda.device_count()} "
                "CUDA devices."
            )
    return names


def _cpu_workers(threads: int, target_path: Path) -> int:
    by_cores = max(1, num_cores() // threads)
    free, needed = available_bytes(), cpu_worker_bytes(target_path)
    by_memory = by_cores if free is None else free // needed
    if by_memory < by_cores:
        logger.warning(
            "%d cores would take %d workers, memory only %d: each takes the target and what it "
            "works with (%.1f GB)",
            num_cores(),
            by_cores,
            max(1, by_memory),
            needed / 1e9,
        )
    return max(1, min(by_cores, by_memory))


def cpu_worker_bytes(target_path: Path) -> int:
    """Memory that one worker on a CPU takes, about."""
    weights = sum(file.stat().st_size for file in target_path.glob("*.safetensors"))
    return int(weights * _HEADROOM + _WORKER_BYTES)


def available_bytes() -> int | None:
    """Memory that can be taken without swapping, by the machine and by the container or job; None
    where the system does not say."""
    try:
        lines = _MEMORY.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            machine = int(value.split()[0]) * 1024
            return max(0, min([machine, *(group.free for group in allowances())]))
    return None
