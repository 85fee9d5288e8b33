"""What a container or a job leaves of the memory and cores of its machine."""

from pathlib import Path

import pytest
import torch

from cache_builder import devices
from shared import cgroup
from shared.cgroup import Allowance, allowances, num_cores
from trainer.footprint import memory_of
from trainer.session import enter_device, pick_device

GB = 10**9


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(cgroup, "_GROUPS", tmp_path)
    monkeypatch.setattr(cgroup, "_OWN", tmp_path / "own")
    return tmp_path


def put(group: Path, files: dict[str, object]) -> None:
    group.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (group / name).write_text(f"{value}\n")


def version_2(limit: object) -> dict[str, object]:
    stat = f"anon 5\nfile 9\nactive_file {GB}\ninactive_file {2 * GB}\nshmem 1"
    return {"memory.max": limit, "memory.current": 6 * GB, "memory.stat": stat}


def test_groups_around_ones_own_limit_it_too(groups: Path) -> None:
    (groups / "own").write_text("0::/job/step\n")
    put(groups / "job" / "step", version_2("max"))
    put(groups / "job", version_2(8 * GB))
    assert allowances() == [Allowance(8 * GB, 5 * GB)]


def test_in_a_container_its_group_is_the_root(groups: Path) -> None:
    """Docker without a namespace for groups names the host's path, which is not there."""
    (groups / "own").write_text("0::/system.slice/docker-12.scope\n")
    put(groups, version_2(8 * GB))
    assert allowances() == [Allowance(8 * GB, 5 * GB)]


def test_version_1(groups: Path) -> None:
    (groups / "own").write_text("9:name=systemd:/a\n5:cpu,memory:/job\n4:cpuset:/\n0::/\n")
    stat = f"active_file 7\ntotal_active_file {GB}\ntotal_inactive_file {2 * GB}"
    files = {
        "memory.limit_in_bytes": 8 * GB,
        "memory.usage_in_bytes": 6 * GB,
        "memory.stat": stat,
    }
    put(groups / "memory" / "job", files)
    put(groups / "memory", files | {"memory.limit_in_bytes": 2**63 - 4096})  # none
    assert allowances()[0] == Allowance(8 * GB, 5 * GB)
    assert allowances()[1].limit > 2**62


def test_elsewhere_there_are_none(groups: Path) -> None:
    assert allowances() == []
    (groups / "own").write_text("0::/\n")
    assert allowances() == []


def test_workers_and_runs_are_measured_by_the_smallest(
    groups: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine, available = memory_of(pick_device("cpu")), devices.available_bytes()
    assert available is not None
    (groups / "own").write_text("0::/\n")
    put(groups, version_2(6 * GB - 3 * GB + 12345))
    assert memory_of(pick_device("cpu")) == 3 * GB + 12345
    assert devices.available_bytes() == 12345
    put(groups, version_2(2**60))
    assert memory_of(pick_device("cpu")) == machine
    assert devices.available_bytes() > 12345  # type: ignore[operator]


@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        pytest.param(
            "0::/job/step\n",
            {"job/step": {"cpu.max": "max 100000"}, "job": {"cpu.max": "250000 100000"}},
            2,
            id="version-2",
        ),
        pytest.param(
            "4:cpu,cpuacct:/job\n0::/\n",
            {"cpu/job": {"cpu.cfs_quota_us": 300000, "cpu.cfs_period_us": 100000}}
            | {"cpu": {"cpu.cfs_quota_us": -1, "cpu.cfs_period_us": 100000}},
            3,
            id="version-1",
        ),
        pytest.param("0::/\n", {".": {"cpu.max": "max 100000"}}, 16, id="no-limit"),
        pytest.param("0::/\n", {}, 16, id="no-file"),
    ],
)
def test_share_of_cores(
    groups: Path,
    monkeypatch: pytest.MonkeyPatch,
    own: str,
    files: dict[str, dict[str, object]],
    expected: int,
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(16)), raising=False)
    (groups / "own").write_text(own)
    for group, content in files.items():
        put(groups / group, content)
    assert num_cores() == expected


@pytest.mark.parametrize(("quota", "expected"), [(50, 1), (290, 2), (6400, 3)])
def test_a_cpu_gets_no_more_threads_than_its_share(
    groups: Path, monkeypatch: pytest.MonkeyPatch, quota: int, expected: int
) -> None:
    """torch counts the cores of the machine, or takes OMP_NUM_THREADS."""
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(16)), raising=False)
    (groups / "own").write_text("0::/\n")
    put(groups, {"cpu.max": f"{quota}000 100000"})
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        enter_device(torch.device("cpu"))
        assert torch.get_num_threads() == expected
    finally:
        torch.set_num_threads(before)
