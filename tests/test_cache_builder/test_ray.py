"""Workers as actors of a real Ray cluster of three nodes on this machine: the same cache."""

import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cache_builder import build as builder
from cache_builder import ray_cluster, ray_crew
from cache_builder.build import build
from cache_builder.commit import committed_shards
from cache_builder.config import BuildConfig, WorkersConfig
from cache_builder.estimate import estimate
from cache_builder.progress import Progress
from cache_builder.workspace import workspace
from shared.errors import CacheError, ConfigError
from shared.location import Location, S3Url
from tests.conftest import conversations, write_jsonl
from tests.test_cache_builder.stored import assert_clean

MakeBuild = Callable[..., BuildConfig]
RAY = WorkersConfig(launcher="ray", devices="cpu")


@pytest.fixture(scope="module")
def environment(s3_server: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What the processes of the nodes inherit."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith(("AWS_", "RAY_"))]:
            patch.delenv(name)
        patch.setenv("AWS_ENDPOINT_URL", s3_server)
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        patch.setenv("AWS_REGION", "us-east-1")
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("scratch")))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_worker_niceness", "0")  # 15 by default, and the machine may be busy
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # else Ray warns of its change
        patch.setenv("RAY_memory_monitor_refresh_ms", "0")  # it kills workers where others take all
        patch.setenv("RAY_gcs_server_port_wait_time_s", "300")
        yield


@pytest.fixture(scope="module")
def nodes(environment: None) -> Iterator[Any]:
    """Three nodes: a head that has no room for workers, since it must not be killed, and two."""
    from ray.cluster_utils import Cluster

    before = signal.getsignal(signal.SIGTERM)  # a node of Ray puts its own there
    node = {"object_store_memory": 80_000_000, "memory": 8 * 10**9, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **node})
    try:
        for _ in range(2):
            cluster.add_node(wait=False, num_cpus=1, **node)
        cluster.wait_for_nodes(600)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RAY_ADDRESS", cluster.address)
            yield cluster
    finally:
        cluster.shutdown()
        signal.signal(signal.SIGTERM, before)


@pytest.fixture
def cluster(nodes: Any) -> Any:
    """As Ray sees it too: of a node that another test killed, it hears ten seconds later."""
    nodes.wait_for_nodes(600)
    return nodes


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("data") / "data.jsonl", conversations(range(100)))


@pytest.fixture(scope="module")
def make(tiny_build: MakeBuild, data: Path) -> MakeBuild:
    """Six shards of a dozen batches, in bfloat16, where other batches would give other bits."""

    def config(cache: Location, workers: WorkersConfig = RAY) -> BuildConfig:
        made = tiny_build(cache, dtype="bfloat16", data=[data])
        return replace(
            made,
            capture=replace(made.capture, batch_tokens=200),
            plan=replace(made.plan, shard_mib=0.6),
            workers=workers,
        )

    return config


@pytest.fixture(scope="module")
def local(make: MakeBuild, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Digests of the records that one process of this machine makes."""
    path = tmp_path_factory.mktemp("caches") / "local"
    return build(make(path, WorkersConfig(devices="cpu", num_workers=1))).manifest.records


def test_a_bucket_is_filled_from_a_workspace_of_the_nodes_own(
    cluster: Any,
    make: MakeBuild,
    local: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its copy of the target has other times and inodes: its content is compared."""
    caplog.set_level("INFO")
    monkeypatch.setattr(ray_crew, "_STOP_SECONDS", 300.0)
    monkeypatch.setattr(builder, "stamp_files", lambda path: {})
    url = S3Url("caches", "by/ray")
    report = build(make(url, replace(RAY, num_workers=1)))
    assert report.manifest.records == local
    own = workspace(url) / "workers" / os.uname().nodename
    assert [path.name for path in own.iterdir()] == ["0.lock"]
    (line,) = [text for text in caplog.messages if "cpu): hashing" in text]
    assert line.startswith(f"worker 0 ({os.uname().nodename} cpu): hashing 1 weight file")


def test_a_worker_that_does_not_see_the_cache_names_its_node(
    cluster: Any, make: MakeBuild, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from contextlib import contextmanager

    @contextmanager
    def another(cache: Location) -> Iterator[str]:
        yield "builder.another"

    monkeypatch.setattr(ray_cluster, "beacon", another)
    with pytest.raises(CacheError, match=rf"node {os.uname().nodename}: .* not the builder's dir"):
        build(make(tmp_path / "cache", replace(RAY, num_workers=1)))
    assert committed_shards(tmp_path / "cache") == set()


def test_more_is_asked_for_than_the_cluster_has(
    cluster: Any, make: MakeBuild, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(**changes: Any) -> str:
        with pytest.raises(ConfigError) as caught:
            ray_cluster.require_cluster(replace(RAY, **changes))
        return str(caught.value)

    assert "holds a worker of 5 CPU" in refused(threads=5)
    message = refused(devices="auto", devices_per_worker=2)
    assert "expected GPUs, the Ray cluster has none to give" in message
    ray_cluster.require_cluster(replace(RAY, num_workers=9))
    assert "workers.num_workers = 9, but the Ray cluster holds" in caplog.text
    facts = estimate(make(tmp_path / "cache"))
    assert set(facts["devices"]) == {"cpu"}
    assert len(facts["devices"]) == len(cluster.list_all_nodes()) - 1


@pytest.mark.slow
def test_a_node_killed_midway_costs_no_shard_and_no_bit(
    cluster: Any, make: MakeBuild, local: dict[str, str], tmp_path: Path
) -> None:
    """A node dies by SIGKILL of its processes, while its worker is inside a shard."""
    crews: list[Any] = []
    begun: Counter[str] = Counter()
    victims: list[str] = []
    deaths: list[str] = []
    run_crew, started = ray_cluster.run_crew, Progress.started
    advanced, died = Progress.advanced, Progress.died

    def keep_crew(crew: Any, *arguments: Any) -> Any:
        crews.append(crew)
        return run_crew(crew, *arguments)

    def count(self: Progress, name: str, shard_id: str) -> None:
        started(self, name, shard_id)
        begun[shard_id] += 1

    def kill_one(self: Progress, name: str, tokens: int) -> None:
        advanced(self, name, tokens)
        number = int(name.split()[1])
        if not victims:
            kill_node_of(cluster, crews[0].members[number].actor)
            victims.append(name)

    def note(self: Progress, name: str, how: str) -> None:
        died(self, name, how)
        deaths.append(name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray_cluster, "run_crew", keep_crew)
        patch.setattr(Progress, "started", count)
        patch.setattr(Progress, "advanced", kill_one)
        patch.setattr(Progress, "died", note)
        report = build(make(tmp_path / "cache"))
    assert len(crews[0].members) == 2
    assert deaths == victims
    assert victims[0].endswith(f"({os.uname().nodename} cpu)")
    assert sorted(begun) == report.plan.shard_ids
    assert sorted(begun.values()) == [1] * (len(local) - 1) + [2]
    assert report.manifest.records == local
    assert_clean(tmp_path / "cache")


def kill_node_of(cluster: Any, actor: Any) -> None:
    import ray

    state = ray._private.state.actors(actor._actor_id.hex())
    (node,) = [n for n in cluster.list_all_nodes() if n.node_id == state["Address"]["NodeID"]]
    os.kill(state["Pid"], signal.SIGKILL)
    cluster.remove_node(node, allow_graceful=False)


@pytest.mark.parametrize(
    ("node", "need", "expected"),
    [
        pytest.param({"CPU": 8, "GPU": 8}, {"GPU": 1}, 8, id="a-gpu-each"),
        pytest.param({"CPU": 8, "GPU": 7}, {"GPU": 2}, 3, id="two-gpus-each"),
        pytest.param({"CPU": 8, "memory": 30e9}, {"CPU": 2, "memory": 8e9}, 3, id="memory"),
        pytest.param({"CPU": 0}, {"CPU": 1}, 0, id="a-head-without-cores"),
        pytest.param({}, {"GPU": 1}, 0, id="no-gpus"),
    ],
)
def test_workers_that_a_node_holds(
    node: dict[str, float], need: dict[str, float], expected: int
) -> None:
    assert ray_cluster._holds(node, need) == expected


def test_without_ray_or_its_cluster_the_build_does_not_begin(
    make: MakeBuild, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make(tmp_path / "cache")
    monkeypatch.setenv("RAY_ADDRESS", "ray://10.0.0.1:10001")
    with pytest.raises(ConfigError, match="do not go through Ray's client"):
        build(config)
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(ConfigError, match=r"no Ray cluster .*ray start --head"):
        build(config)
    assert signal.getsignal(signal.SIGTERM) is before
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'draftcache\[ray\]'"):
        build(config)
    assert not (tmp_path / "cache").exists()
