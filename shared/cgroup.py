"""What a control group of Linux, that of a container or a job, leaves of a machine: memory, cores.

https://docs.kernel.org/admin-guide/cgroup-v2.html, https://docs.kernel.org/admin-guide/cgroup-v1/
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_GROUPS = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")


@dataclass(frozen=True, slots=True)
class _Version:
    """How the files of a group are called."""

    limit: str
    usage: str
    cached: tuple[str, ...]
    """Of `memory.stat`: what files are cached in, which is given back before memory is full."""


_V1 = _Version(
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_active_file", "total_inactive_file"),
)
_V2 = _Version("memory.max", "memory.current", ("active_file", "inactive_file"))


@dataclass(frozen=True, slots=True)
class Allowance:
    """Memory of one group, bytes."""

    limit: int
    free: int
    """What is left of the limit; caches of files count as left."""


def allowances() -> list[Allowance]:
    """Those of this process: its own group's and those of the groups around it. None elsewhere."""
    groups = ((group, _V2 if is_v2 else _V1) for group, is_v2 in _groups("memory"))
    return [found for group, version in groups if (found := _read(group, version)) is not None]


def num_cores() -> int:
    """CPU cores that this process may use, by its affinity and by its groups."""
    has_affinity = hasattr(os, "sched_getaffinity")
    own = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    # Threads beyond a share of time do run, and are then held up together.
    shares = [_quota(group, is_v2) for group, is_v2 in _groups("cpu")]
    return max(1, min([own, *(int(share) for share in shares if share is not None)]))


def _groups(controller: str) -> Iterator[tuple[Path, bool]]:
    """The group of this process and those around it, and whether they are of version 2."""
    try:
        lines = _OWN.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        is_v2 = number == "0"
        if not is_v2 and controller not in controllers.split(","):
            continue
        root = _GROUPS if is_v2 else _GROUPS / controller
        # In a container the path may be that of the host, of which only the root is there.
        own = root / path.strip("/")
        yield own, is_v2
        yield from ((group, is_v2) for group in own.parents if group.is_relative_to(root))


def _read(group: Path, version: _Version) -> Allowance | None:
    """None where there is no limit, or no such group."""
    try:
        limit, usage = ((group / name).read_text() for name in (version.limit, version.usage))
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        cached = sum(int(stat[name]) for name in version.cached)
        return Allowance(int(limit), int(limit) - int(usage) + cached)
    except (OSError, ValueError, KeyError):  # "max" is no number
        return None


def _quota(group: Path, is_v2: bool) -> float | None:
    """None where there is no limit, or no such group."""
    try:
        if is_v2:
            quota, period = (group / "cpu.max").read_text().split()
        else:
            quota, period = ((group / f"cpu.cfs_{n}_us").read_text() for n in ("quota", "period"))
        share = int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):  # "max" is no number
        return None
    return share if share > 0 else None  # -1: none
