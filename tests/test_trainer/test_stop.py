"""SIGINT and SIGTERM to a real process: what is learned is that of an undisturbed run."""

import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from shared import cli
from trainer import config as training
from trainer.checkpoint import load, newest_valid
from trainer.cli import main
from trainer.config import TrainConfig
from trainer.learner import Learner
from trainer.train import train

MakeTrain = Callable[..., TrainConfig]
SECONDS = 600
"""What is waited for at most; a busy machine takes its time to import torch."""

CONFIG = """
[run]
path = "{run}"
[cache]
path = "{cache}"
heldout_fraction = 0.2
[sampler]
tokens_per_batch = 512
num_buckets = 3
[drafter]
mask_token_id = 3
num_layers = 1
block_size = 8
intermediate_size = 128
num_heads = 4
num_kv_heads = 2
head_dim = 16
rope_theta = 1e4
[anchors]
per_sample = 8
[train]
steps = 30
device = "cpu"
compute_dtype = "float32"
[evaluate]
every_steps = 10
max_samples = 4
tree_budgets = [4, 8]
[checkpoint]
every_steps = 1000
"""


def command_line(config: Path, stderr: Path, pause_step: int | None, pause: Path) -> None:
    """`trainer train` in this process; before `pause_step` it waits until `pause` exists."""
    os.dup2(os.open(stderr, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    train_step = Learner.train_step

    def pausing(self: Learner, batches: Any) -> Any:
        if self.step + 1 == pause_step:
            pause.with_suffix(".reached").touch()
            deadline = time.monotonic() + SECONDS
            while not pause.exists() and time.monotonic() < deadline:
                time.sleep(0.01)
        return train_step(self, batches)

    Learner.train_step = pausing  # type: ignore[method-assign]
    sys.argv = ["trainer", "train", "--config", str(config)]
    cli.run(main)


class Command:
    """Starts `trainer train` on one run, again and again."""

    def __init__(self, directory: Path, cache: Path) -> None:
        self.run = directory / "run"
        self.pause = directory / "pause"
        self.reached = directory / "pause.reached"
        self._stderr = directory / "stderr"
        self._config = directory / "train.toml"
        self._config.write_text(CONFIG.format(run=self.run, cache=cache))
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["trainer.train", "trainer.cli"])

    def start(self, pause_step: int | None = None) -> BaseProcess:
        process = self._context.Process(
            target=command_line, args=(self._config, self._stderr, pause_step, self.pause)
        )
        process.start()
        return process

    def finish(self, process: BaseProcess) -> int | None:
        process.join(SECONDS)
        return process.exitcode

    def stderr(self) -> str:
        return self._stderr.read_text() if self._stderr.exists() else ""


def until(condition: Callable[[], Any], process: BaseProcess) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert process.is_alive()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def learned(run: Path) -> list[dict[str, Any]]:
    """The metrics that are no measurements of time."""
    return [
        {
            name: value
            for name, value in line.items()
            if name.partition("/")[0] in ("step", "train", "heldout")
        }
        for line in lines(run)
    ]


@pytest.fixture(scope="module")
def undisturbed(tiny_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    command = Command(tmp_path_factory.mktemp("undisturbed"), tiny_cache)
    assert command.finish(command.start()) == 0
    return learned(command.run)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_the_step_it_came_in_and_the_same_command_goes_on(
    tiny_cache: Path, tmp_path: Path, undisturbed: list[dict[str, Any]], number: signal.Signals
) -> None:
    command = Command(tmp_path, tiny_cache)
    process = command.start(pause_step=7)
    until(command.reached.exists, process)
    os.kill(process.pid or 0, number)
    until(lambda: number.name in command.stderr(), process)
    command.pause.touch()
    assert command.finish(process) == 128 + number
    assert "step 7 is saved" in command.stderr()
    assert "same command goes on from there" in command.stderr()
    assert [line["step"] for line in lines(command.run)] == list(range(1, 8))
    path = newest_valid(command.run)
    assert path is not None
    assert path.name == "step-00000007"

    assert command.finish(command.start()) == 0
    assert learned(command.run) == undisturbed


def test_a_second_signal_quits_at_once_and_loses_no_checkpoint(
    tiny_cache: Path, tmp_path: Path, undisturbed: list[dict[str, Any]]
) -> None:
    command = Command(tmp_path, tiny_cache)
    process = command.start(pause_step=4)
    until(command.reached.exists, process)
    os.kill(process.pid or 0, signal.SIGTERM)
    until(lambda: "once more quits at once" in command.stderr(), process)
    os.kill(process.pid or 0, signal.SIGTERM)
    assert command.finish(process) == -signal.SIGTERM  # which a shell shows as 143
    assert not command.pause.exists()  # the step had not gone on
    assert newest_valid(command.run) is None

    assert command.finish(command.start()) == 0
    assert learned(command.run) == undisturbed


def stop_after(monkeypatch: pytest.MonkeyPatch, reads: int) -> None:
    """Send this process a SIGTERM when `evaluate` has reported for the `reads`-th time."""
    from trainer import heldout as module

    evaluate, reports = module.evaluate, []

    def evaluating(session: Any, progress: Callable[[int], None]) -> Any:
        def report(done: int) -> None:
            reports.append(done)
            if len(reports) == reads:
                os.kill(os.getpid(), signal.SIGTERM)
            progress(done)

        return evaluate(session, report)

    monkeypatch.setattr(module, "evaluate", evaluating)


def test_a_signal_while_evaluating_gives_the_evaluation_up_until_the_resume(
    tiny_train: MakeTrain, tiny_cache: Path, tmp_path: Path
) -> None:
    evaluating = training.EvaluateConfig(every_steps=3, max_samples=4, tree_budgets=(4,))
    straight = tiny_train(tmp_path / "straight", tiny_cache, steps=6, evaluate=evaluating)
    assert train(straight) is None
    config = replace(straight, run=training.RunConfig(path=tmp_path / "stopped"))
    for reads, step in ((2, None), (6, 3), (2, 3), (7, 6)):  # at the start, in step 3 twice, in 6
        with pytest.MonkeyPatch.context() as patch:
            stop_after(patch, reads)
            assert train(config) is signal.SIGTERM
        path = newest_valid(tmp_path / "stopped")
        assert (None if path is None else load(path).step) == step
    handler = signal.getsignal(signal.SIGTERM)
    assert train(config) is None
    assert signal.getsignal(signal.SIGTERM) is handler
    assert learned(tmp_path / "stopped") == learned(tmp_path / "straight")
    path = newest_valid(tmp_path / "stopped")
    assert path is not None
    assert load(path).score is not None


def test_killed_after_the_evaluation_was_made_up_for_no_line_is_doubled(
    tiny_train: MakeTrain, tiny_cache: Path, tmp_path: Path
) -> None:
    """The checkpoint still says that step 3 is not logged, the file has its line."""
    config = tiny_train(
        tmp_path,
        tiny_cache,
        steps=6,
        evaluate=training.EvaluateConfig(every_steps=3, max_samples=4, tree_budgets=(4,)),
        checkpoint=training.CheckpointConfig(every_steps=100),
    )
    with pytest.MonkeyPatch.context() as patch:
        stop_after(patch, 6)
        assert train(config) is signal.SIGTERM
    with pytest.MonkeyPatch.context() as patch:
        train_step = Learner.train_step

        def dying(self: Learner, batches: Any) -> Any:
            if self.step == 4:
                raise KeyboardInterrupt
            return train_step(self, batches)

        patch.setattr(Learner, "train_step", dying)
        with pytest.raises(KeyboardInterrupt):
            train(config)
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 4]
    assert train(config) is None
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 4, 5, 6]
