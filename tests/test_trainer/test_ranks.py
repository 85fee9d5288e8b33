"""Two ranks of a run, as torchrun starts them: the same training as one process alone."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shared import config as configs
from shared.errors import ConfigError, RunError
from tests.conftest import REPOSITORY
from tests.test_trainer.test_train import final_weights, metrics, num_lines
from trainer import config as training
from trainer.config import TrainConfig
from trainer.loader import Loader, LoaderStats
from trainer.ranks import Ranks, join
from trainer.recipe import DrafterConfig, NoiseConfig
from trainer.session import check_head, pick_device
from trainer.stop import StopRequest
from trainer.train import Training, train

pytestmark = pytest.mark.slow

MakeTrain = Callable[..., TrainConfig]
Start = Callable[[TrainConfig], "subprocess.Popen[str]"]

SECONDS = 600
"""What is waited for at most; a busy machine takes its time to import torch twice."""

LAUNCHER = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}


def step_config(steps: int, batches_per_step: int = 2) -> training.StepConfig:
    return training.StepConfig(
        steps=steps, batches_per_step=batches_per_step, device="cpu", compute_dtype="float32"
    )


def overrides(config: TrainConfig) -> list[str]:
    """`config` as options of the command line."""
    flat = configs.flatten(configs.to_dict(config)).items()
    return [f"--set={key}={json.dumps(value)}" for key, value in flat if value is not None]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts two ranks by torchrun, in a group of processes of their own."""
    started: list[subprocess.Popen[str]] = []

    def begin(config: TrainConfig) -> "subprocess.Popen[str]":
        path = tmp_path / "empty.toml"
        path.touch()
        command = ["--nproc-per-node=2", "-m", "trainer", "train", "--config", str(path)]
        process = subprocess.Popen(
            [*LAUNCHER, *command, *overrides(config)],
            cwd=REPOSITORY,
            env=ENVIRONMENT,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        for rank in left_over(tmp_path):  # they outlive the launcher, and hold its stderr
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank, signal.SIGKILL)
        process.communicate()


def left_over(run: Path) -> list[int]:
    """Processes, each in a session of its own, whose command line names a place below `run`."""
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"{run}/".encode() in (directory / "cmdline").read_bytes():
                found.append(int(directory.name))
    return found


def finish(process: "subprocess.Popen[str]") -> str:
    _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, err
    return err


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("WORLD_SIZE", "2"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("torch.distributed.is_torchelastic_launched", lambda: True)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    message = "rank 1 of this machine: needs the GPU of number 1, torch sees 1 CUDA device here"
    with pytest.raises(ConfigError, match=message), join("cuda"):
        pass


def torchrun(monkeypatch: pytest.MonkeyPatch, **variables: str) -> list[Any]:
    """As a rank that torchrun started, on a machine of two GPUs; what `set_device` is told."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("torch.distributed.is_torchelastic_launched", lambda: True)
    monkeypatch.setattr("torch.distributed.init_process_group", lambda *_, **__: None)
    monkeypatch.setattr("torch.distributed.destroy_process_group", lambda: None)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: int(variables["LOCAL_RANK"]))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    chosen: list[Any] = []
    monkeypatch.setattr("torch.cuda.set_device", chosen.append)
    return chosen


def test_one_gpu_by_name_for_all_ranks_of_a_machine_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen = torchrun(monkeypatch, WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", LOCAL_RANK="1")
    message = r"train.device 'cuda:0': all 2 ranks of this machine .* Set it to cuda or auto"
    with pytest.raises(ConfigError, match=message), join("cuda:0"):
        pass
    assert chosen == []
    for name in ("cuda", "auto"):
        with join(name) as ranks:
            assert ranks.local_rank == 1
    assert chosen == [1, 1]


def test_one_gpu_by_name_is_fine_for_the_only_rank_of_a_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen = torchrun(monkeypatch, WORLD_SIZE="2", LOCAL_WORLD_SIZE="1", LOCAL_RANK="0")
    with join("cuda:1"):
        pass
    assert chosen == [1]


@pytest.mark.parametrize("name", ["meta", "cuda:1", "cuda:7", "xpu", "xla", "hpu", "opencl"])
def test_a_device_that_is_not_there_or_holds_nothing_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    expected = "holds no values|needs the GPU|is not there"
    with pytest.raises(ConfigError, match=f"--device '{name}': ({expected})"):
        pick_device(name, setting="--device")
    assert pick_device("cuda:0", setting="--device") == torch.device("cuda:0")
    assert pick_device("cuda") == torch.device("cuda:0")


def test_heads_that_the_attention_of_a_gpu_cannot_have_are_refused() -> None:
    drafter = DrafterConfig(
        mask_token_id=3,
        intermediate_size=128,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        rope_theta=1e4,
    )
    check_head(drafter, torch.device("cpu"))
    check_head(replace(drafter, head_dim=16), torch.device("cuda"))
    with pytest.raises(ConfigError, match=r"drafter.head_dim 8: on a GPU heads have 16"):
        check_head(drafter, torch.device("cuda"))


def test_no_thread_of_the_group_outlives_it(tmp_path: Path) -> None:
    """One that frees a tensor while the interpreter ends aborts the process."""
    script = tmp_path / "script.py"
    script.write_text(
        "import contextlib, time\n"
        "from pathlib import Path\n"
        "from trainer.ranks import join\n"
        "def threads():\n"
        "    found = []\n"
        "    for path in Path('/proc/self/task').glob('*/comm'):\n"
        "        with contextlib.suppress(OSError):\n"  # it has ended meanwhile
        "            found.append(path.read_text())\n"
        "    return [name for name in found if 'gloo' in name]\n"
        "with join('cpu') as ranks:\n"
        "    import torch._dynamo\n"
        "    assert ranks.gather(ranks.rank) == [0, 1]\n"
        "    assert threads()\n"
        "deadline = time.monotonic() + 60\n"  # Linux lists one for a while after it was joined
        "while threads():\n"
        "    assert time.monotonic() < deadline, threads()\n"
        "    time.sleep(0.01)\n"
    )
    done = subprocess.run(
        [*LAUNCHER, "--nproc-per-node=2", str(script)],
        cwd=REPOSITORY,
        env=ENVIRONMENT,
        stderr=subprocess.PIPE,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr


def test_two_ranks_learn_what_one_learns_from_the_same_batches(
    start: Start, tiny_train: MakeTrain, tiny_cache: Path, tmp_path: Path
) -> None:
    """Noise included; sums are only added up in another order."""
    settings = {"train": step_config(6), "noise": NoiseConfig(scale=0.3)}
    train(tiny_train(tmp_path / "alone", tiny_cache, **settings))
    both = tiny_train(tmp_path / "both", tiny_cache, **settings)
    err = finish(start(both))
    assert "2 ranks: each takes 1 micro-batches of a step" in err
    found, expected = metrics(tmp_path / "both"), metrics(tmp_path / "alone")
    assert [line["step"] for line in found] == [1, 2, 3, 4, 5, 6]
    for name in ("train/samples", "train/buckets", "train/tokens", "train/anchors", "train/epoch"):
        assert [line[name] for line in found] == [line[name] for line in expected]
    for name in ("train/loss", "train/grad_norm", "train/weight_sum", "train/accuracy"):
        for line, other in zip(found, expected, strict=True):
            assert line[name] == pytest.approx(other[name], rel=1e-4)
    weights = final_weights(tmp_path / "alone")
    for name, tensor in final_weights(tmp_path / "both").items():
        torch.testing.assert_close(tensor, weights[name], rtol=1e-3, atol=1e-4)


def test_a_signal_to_one_rank_stops_both_and_the_step_is_saved(
    start: Start, tiny_train: MakeTrain, tiny_cache: Path, tmp_path: Path
) -> None:
    config = tiny_train(tmp_path / "run", tiny_cache, train=step_config(100_000))
    process = start(config)
    children = wait_for_steps(process, tmp_path / "run", 3)
    os.kill(children[-1], signal.SIGTERM)
    _, err = process.communicate(timeout=SECONDS)
    assert process.returncode != 0
    assert "is saved in" in err
    assert "trainer/train.py" not in err  # the launcher's own traceback is enough
    steps = [line["step"] for line in metrics(tmp_path / "run")]
    assert steps == list(range(1, len(steps) + 1))
    assert (tmp_path / "run" / "checkpoints" / f"step-{steps[-1]:08d}").is_dir()


@dataclass(frozen=True, slots=True)
class LateSignal(Ranks):
    """A rank that is signalled when the votes are in."""

    stop: StopRequest = field(default_factory=StopRequest)

    def gather(self, value: Any) -> list[Any]:
        self.stop.signal = signal.SIGTERM
        return [value, value]


def test_a_signal_after_the_votes_counts_at_the_next_turn(
    tiny_train: MakeTrain, tiny_cache: Path, tmp_path: Path
) -> None:
    """Or one rank leaves the loop while the others wait for its share of a step, for ever."""
    run = Training(tiny_train(tmp_path / "run", tiny_cache))
    run.ranks = late = LateSignal()
    assert run._goes_on(late.stop)
    assert not run._goes_on(late.stop)


@dataclass(frozen=True, slots=True)
class OtherWaits(Ranks):
    """A rank beside one whose loader is behind."""

    def gather(self, value: Any) -> list[Any]:
        return [value, LoaderStats(wait_seconds=0.25, queue_depth=0)]


def test_a_loader_that_is_behind_is_seen_whichever_rank_it_feeds(
    tiny_train: MakeTrain,
    tiny_cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All ranks wait for the one that waits, so its figures are the run's."""
    run = Training(tiny_train(tmp_path / "run", tiny_cache))
    monkeypatch.setattr(Loader, "take_stats", lambda _: LoaderStats(0.0, queue_depth=8))
    with Loader.open(run.session, run.ranks, run.step) as loader:
        batches = iter(loader)
        assert run._timed_step(batches, loader)["data/queue_depth"] == 8
        run.ranks = OtherWaits(size=2)
        found = run._timed_step(batches, loader)
    assert found["data/queue_depth"] == 0
    seconds = found["speed/step_seconds"]
    assert found["data/wait_share"] == pytest.approx(0.25 / seconds)  # may exceed 1


def test_when_a_rank_is_killed_the_run_ends_and_goes_on_from_what_is_saved(
    start: Start, tiny_train: MakeTrain, tiny_cache: Path, tmp_path: Path
) -> None:
    config = tiny_train(tmp_path / "run", tiny_cache, train=step_config(100_000))
    process = start(config)
    children = wait_for_steps(process, tmp_path / "run", 3)
    os.kill(children[-1], signal.SIGKILL)
    process.communicate(timeout=SECONDS)
    assert process.returncode != 0
    steps = [line["step"] for line in metrics(tmp_path / "run")]
    assert steps == list(range(1, len(steps) + 1))
    assert 2 <= Training(config).step <= len(steps)


def wait_for_steps(process: "subprocess.Popen[str]", run: Path, count: int) -> list[int]:
    """The ranks' process ids, by rank, once so many steps are logged."""
    deadline = time.monotonic() + SECONDS
    while num_lines(run) < count:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    ranks = ranks_of(process)
    assert len(ranks) == 2
    return ranks


def ranks_of(process: "subprocess.Popen[str]") -> list[int]:
    """Process ids of the ranks, by rank, as torchrun told it to each."""
    found = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    ranks = {}
    for child in found:
        given = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        ranks |= {int(each[5:]): int(child) for each in given if each.startswith(b"RANK=")}
    return [ranks[rank] for rank in sorted(ranks)]


def test_shares_that_are_not_equal_are_refused(
    tiny_train: MakeTrain, tiny_cache: Path, tmp_path: Path
) -> None:
    config = tiny_train(tmp_path, tiny_cache, train=step_config(6, batches_per_step=3))
    with pytest.raises(ConfigError, match=r"3 micro-batches.* Set it to a multiple of 2\."):
        Training(config, Ranks(rank=0, size=2))


def test_memory_that_is_full_is_not_taken_for_a_rank_that_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(error: Exception) -> Callable[..., None]:
        def all_gather_object(*given: Any) -> None:
            raise error

        return all_gather_object

    ranks = Ranks(rank=1, size=2)
    monkeypatch.setattr(torch.distributed, "all_gather_object", fail(RuntimeError("closed")))
    with pytest.raises(RunError, match=r"rank 1 of 2: another rank is gone \(closed\)"):
        ranks.gather(0)
    full = torch.OutOfMemoryError("CUDA out of memory")
    monkeypatch.setattr(torch.distributed, "all_gather_object", fail(full))
    with pytest.raises(torch.OutOfMemoryError):
        ranks.gather(0)
