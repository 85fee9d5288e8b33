"""What a control group of Linux, that of a container or a job, leaves of a machine's memory.

https://docs.kernel.org/admin-guide/cgroup-v2.html, https://docs.kernel.org/admin-guide/cgroup-v1/
"""

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
    return [found for group, version in _groups() if (found := _read(group, version)) is not None]


def _groups() -> Iterator[tuple[Path, _Version]]:
    try:
        lines = _OWN.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            root, version = _GROUPS, _V2
        elif "memory" in controllers.split(","):
            root, version = _GROUPS / "memory", _V1
        else:
            continue
        # In a container the path may be that of the host, of which only the root is there.
        own = root / path.strip("/")
        yield own, version
        yield from ((group, version) for group in own.parents if group.is_relative_to(root))


def _read(group: Path, version: _Version) -> Allowance | None:
    """None where there is no limit, or no such group."""
    try:
        limit, usage = ((group / name).read_text() for name in (version.limit, version.usage))
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        cached = sum(int(stat[name]) for name in version.cached)
        return Allowance(int(limit), int(limit) - int(usage) + cached)
    except (OSError, ValueError, KeyError):  # "max" is no number
        return None
