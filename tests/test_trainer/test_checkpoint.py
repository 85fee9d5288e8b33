import errno
import json
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import trainer.checkpoint
from shared.errors import RunError
from shared.files import canonical_json, sha256_bytes, write_json
from trainer.checkpoint import load, newest_valid, save
from trainer.checkpoint_writer import CheckpointWriter
from trainer.config import CheckpointConfig
from trainer.optim import build_optimizer, learning_rate, scale_and_clip_, set_learning_rate
from trainer.recipe import OptimizerConfig
from trainer.run import Run
from trainer.snapshot import Snapshot, restore, take_snapshot

CONFIG = OptimizerConfig(lr=0.05, weight_decay=0.1)


def drafter(seed: int = 0, width: int = 5) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, width), nn.RMSNorm(width), nn.Linear(width, 2))


def train(model: nn.Module, optimizer: torch.optim.AdamW, steps: range) -> list[float]:
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        loss = model(torch.randn(3, 4, generator=generator)).square().sum()
        loss.backward()
        scale_and_clip_(model.parameters(), 3.0, max_norm=1.0)
        set_learning_rate(optimizer, learning_rate(step, 20, CONFIG))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    return losses


def snapshot_of(
    model: nn.Module, optimizer: torch.optim.AdamW, step: int = 0, **fields: Any
) -> Snapshot:
    return take_snapshot(
        step=step,
        batch_position=fields.pop("batch_position", 3 * step),
        drafter=model,
        optimizer=optimizer,
        config={"betas": (0.9, 0.95)},
        cache={"fingerprint": "abc", "generation": 1},
        **fields,
    )


def filled(step: int, **fields: Any) -> Snapshot:
    """A snapshot whose weights all equal `step`."""
    model = drafter()
    for parameter in model.parameters():
        parameter.data.fill_(float(step))
    optimizer = build_optimizer(model.named_parameters(), CONFIG)
    return snapshot_of(model, optimizer, step, **fields)


def clones(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in tensors.items()}


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        first[name].dtype == second[name].dtype and torch.equal(first[name], second[name])
        for name in first
    )


def steps_on_disk(run_dir: Path) -> list[int]:
    return sorted(int(path.name.split("-")[1]) for path in (run_dir / "checkpoints").iterdir())


def test_round_trip_is_bit_exact(tmp_path: Path) -> None:
    model = drafter()
    optimizer = build_optimizer(model.named_parameters(), CONFIG)
    train(model, optimizer, range(7))
    taken = snapshot_of(model, optimizer, 7, state={"epoch": 2, "seen": (1, 2)}, score=1.5)
    path = save(tmp_path, taken, keep=2)
    assert path == tmp_path / "checkpoints" / "step-00000007"
    loaded = load(path)
    assert same(loaded.drafter, model.state_dict())
    assert same(loaded.optimizer, taken.optimizer)
    assert loaded.optimizer["step.1.weight"] == 7
    assert (loaded.step, loaded.batch_position, loaded.score) == (7, 21, 1.5)
    assert loaded.state == {"epoch": 2, "seen": [1, 2]}
    assert loaded.config == {"betas": [0.9, 0.95]}
    assert loaded.cache == {"fingerprint": "abc", "generation": 1}

    other = drafter(seed=1)
    other_optimizer = build_optimizer(other.named_parameters(), CONFIG)
    restore(loaded, other, other_optimizer)
    assert same(snapshot_of(other, other_optimizer).drafter, taken.drafter)
    assert same(snapshot_of(other, other_optimizer).optimizer, taken.optimizer)


def test_files_are_plain_safetensors_and_json(tmp_path: Path) -> None:
    path = save(tmp_path, filled(3), keep=1)
    assert sorted(file.name for file in path.iterdir()) == [
        "drafter.safetensors",
        "optimizer.safetensors",
        "state.json",
    ]
    assert load_file(path / "drafter.safetensors").keys() == drafter().state_dict().keys()
    state = json.loads((path / "state.json").read_text())
    assert (state["format_version"], state["step"]) == (1, 3)
    assert state["files"].keys() == {"drafter.safetensors", "optimizer.safetensors"}


@pytest.mark.parametrize("stop", [0, 1, 10, 19])
def test_interrupted_equals_uninterrupted_bit_for_bit(tmp_path: Path, stop: int) -> None:
    straight = drafter()
    straight_optimizer = build_optimizer(straight.named_parameters(), CONFIG)
    losses = train(straight, straight_optimizer, range(20))

    first = drafter()
    optimizer = build_optimizer(first.named_parameters(), CONFIG)
    resumed_losses = train(first, optimizer, range(stop))
    save(tmp_path, snapshot_of(first, optimizer, stop), keep=1)

    second = drafter(seed=9)
    optimizer = build_optimizer(second.named_parameters(), CONFIG)
    path = newest_valid(tmp_path)
    assert path is not None
    loaded = load(path, verify=False)
    restore(loaded, second, optimizer)
    resumed_losses += train(second, optimizer, range(loaded.step, 20))

    assert resumed_losses == losses
    assert same(second.state_dict(), straight.state_dict())
    assert same(
        snapshot_of(second, optimizer).optimizer,
        snapshot_of(straight, straight_optimizer).optimizer,
    )


def test_a_snapshot_does_not_follow_training_and_restoring_shares_no_memory() -> None:
    model = drafter()
    optimizer = build_optimizer(model.named_parameters(), CONFIG)
    train(model, optimizer, range(2))
    taken = snapshot_of(model, optimizer, 2)
    weights, moments = clones(taken.drafter), clones(taken.optimizer)
    train(model, optimizer, range(2, 4))
    assert same(taken.drafter, weights)
    assert same(taken.optimizer, moments)
    restore(taken, model, optimizer)
    train(model, optimizer, range(2, 4))
    assert same(taken.drafter, weights)
    assert same(taken.optimizer, moments)


def test_a_state_that_json_cannot_hold_is_refused_in_the_training_thread() -> None:
    with pytest.raises(ValueError, match="JSON"):
        filled(1, state={"best": float("nan")})
    assert filled(1, score=float("nan")).score is None


def test_compile_prefixes_never_reach_a_file(tmp_path: Path) -> None:
    whole = torch.compile(drafter(), backend="eager")
    inner = drafter()
    inner[0] = torch.compile(inner[0], backend="eager")  # type: ignore[index, operator]  # a Sequential
    for step, model in enumerate((whole, inner)):
        assert any("_orig_mod." in name for name in model.state_dict())  # type: ignore[attr-defined]
        optimizer = build_optimizer(model.named_parameters(), CONFIG)  # type: ignore[attr-defined]
        path = save(tmp_path, snapshot_of(model, optimizer, step), keep=9)  # type: ignore[arg-type]
        plain = drafter(seed=1)
        assert load(path).drafter.keys() == plain.state_dict().keys()
        assert not any("_orig_mod" in name for name in load(path).optimizer)
        restore(load(path), plain, build_optimizer(plain.named_parameters(), CONFIG))
        assert same(plain.state_dict(), drafter().state_dict())
        restore(filled(5), model, optimizer)  # type: ignore[arg-type]  # and back into the wrapper
        assert all((value == 5).all() for value in model.state_dict().values())  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(
            lambda tensors: tensors.pop("2.bias"),
            r"2.bias \(expected float32\[2\], found nothing\)",
            id="missing",
        ),
        pytest.param(
            lambda tensors: tensors.update(fc=torch.zeros(1)),
            r"fc \(expected nothing, found float32\[1\]\)",
            id="unknown",
        ),
        pytest.param(
            lambda tensors: tensors.update({"2.bias": torch.zeros(3)}),
            r"2.bias \(expected float32\[2\], found float32\[3\]\)",
            id="shape",
        ),
        pytest.param(
            lambda tensors: tensors.update({"2.bias": torch.zeros(2, dtype=torch.bfloat16)}),
            r"2.bias \(expected float32\[2\], found bfloat16\[2\]\)",
            id="dtype",
        ),
    ],
)
def test_restore_refuses_other_tensors_and_changes_nothing(change: Any, message: str) -> None:
    model = drafter()
    optimizer = build_optimizer(model.named_parameters(), CONFIG)
    train(model, optimizer, range(1))
    before = snapshot_of(model, optimizer)

    sick = filled(4)
    change(sick.drafter)
    with pytest.raises(RunError, match="step 4: the drafter does not fit.*" + message):
        restore(sick, model, optimizer)

    sick = filled(4)
    tensors = {name: sick.optimizer.pop(f"exp_avg.{name}") for name in sick.drafter}
    change(tensors)
    sick.optimizer.update({f"exp_avg.{name}": value for name, value in tensors.items()})
    with pytest.raises(RunError, match="step 4: the optimizer does not fit.*" + message):
        restore(sick, model, optimizer)

    assert same(snapshot_of(model, optimizer).drafter, before.drafter)
    assert same(snapshot_of(model, optimizer).optimizer, before.optimizer)


def test_restore_names_eight_differences_at_most() -> None:
    other = nn.Sequential(*(nn.Linear(1, 1) for _ in range(10)))
    with pytest.raises(RunError, match=r"nothing\) and 12 more\. Resume with the configuration"):
        restore(filled(1), other)


def test_other_format_version_is_refused_not_passed_over(tmp_path: Path) -> None:
    save(tmp_path, filled(1), keep=2)
    path = save(tmp_path, filled(2), keep=2)
    state = json.loads((path / "state.json").read_text())
    del state["digest"]
    state["format_version"] = 7
    write_json(path / "state.json", state | {"digest": sha256_bytes(canonical_json(state))})
    for act in (lambda: load(path), lambda: newest_valid(tmp_path)):
        with pytest.raises(RunError, match="expected a checkpoint of format version 1, found 7"):
            act()


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def flip_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) * 2 // 3] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [truncate, flip_bit, Path.unlink])
@pytest.mark.parametrize("name", ["drafter.safetensors", "optimizer.safetensors", "state.json"])
def test_a_damaged_newest_checkpoint_is_named_and_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Any, name: str
) -> None:
    good = save(tmp_path, filled(1), keep=2)
    bad = save(tmp_path, filled(2), keep=2)
    damage(bad / name)
    assert newest_valid(tmp_path) == good
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert str(bad / name) in caplog.text
    with pytest.raises(RunError, match=name):
        load(bad)


def test_a_changed_step_in_the_state_is_noticed(tmp_path: Path) -> None:
    path = save(tmp_path, filled(2), keep=2)
    text = (path / "state.json").read_text()
    (path / "state.json").write_text(text.replace('"step": 2', '"step": 3'))
    with pytest.raises(RunError, match="does not match its digest"):
        load(path)


def test_no_checkpoint_is_none_and_only_damaged_ones_are_an_error(tmp_path: Path) -> None:
    assert newest_valid(tmp_path) is None
    (tmp_path / "checkpoints").mkdir()
    assert newest_valid(tmp_path) is None
    truncate(save(tmp_path, filled(1), keep=1) / "drafter.safetensors")
    with pytest.raises(RunError, match="none of 1 checkpoints is whole"):
        newest_valid(tmp_path)


def test_rotation_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    scores = {1: 0.5, 2: 3.0, 3: 1.0, 4: None, 5: 2.0, 6: 1.5}
    for step, score in scores.items():
        save(tmp_path, filled(step, score=score), keep=2)
    assert steps_on_disk(tmp_path) == [2, 5, 6]
    assert load(tmp_path / "checkpoints" / "step-00000002").score == 3.0
    save(tmp_path, filled(7, score=3.0), keep=2)  # as good, newer
    assert steps_on_disk(tmp_path) == [6, 7]


def test_a_run_gives_the_newest_the_best_or_the_checkpoint_of_a_step(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for step, score in {10: 1.5, 20: 3.0, 30: 3.0, 40: 2.0}.items():
        save(tmp_path, filled(step, score=score), keep=4)
    assert run.require_checkpoint().step == 40
    assert run.require_checkpoint("best").step == 30
    assert run.require_checkpoint("10").step == 10
    for wrong in ("15", "-1", "newer"):
        with pytest.raises(RunError, match=f"no checkpoint '{wrong}'. .* steps 10, 20, 30, 40"):
            run.require_checkpoint(wrong)
    truncate(tmp_path / "checkpoints" / "step-00000030" / "drafter.safetensors")
    for damaged in ("best", "30"):  # asked for by name: no other takes its place
        with pytest.raises(RunError, match="step-00000030"):
            run.require_checkpoint(damaged)
    save(tmp_path / "unscored", filled(1), keep=1)
    with pytest.raises(RunError, match="no checkpoint has a score"):
        Run(tmp_path / "unscored").require_checkpoint("best")


def test_scores_on_other_samples_than_the_newest_do_not_compete(tmp_path: Path) -> None:
    """`evaluate.max_samples` may change when a run is resumed."""
    few, many = {"scored_on": "few"}, {"scored_on": "many"}
    for step, (score, state) in {1: (9.0, few), 2: (2.0, many), 3: (1.0, many)}.items():
        save(tmp_path, filled(step, score=score, state=state), keep=1)
    assert steps_on_disk(tmp_path) == [2, 3]
    assert Run(tmp_path).require_checkpoint("best").step == 2


def test_rotation_without_scores_keeps_the_newest(tmp_path: Path) -> None:
    for step in range(5):
        save(tmp_path, filled(step), keep=2)
    assert steps_on_disk(tmp_path) == [3, 4]


def test_a_save_behind_a_damaged_checkpoint_survives_and_replaces_it(tmp_path: Path) -> None:
    for step in (10, 20):
        save(tmp_path, filled(step), keep=1)
    truncate(tmp_path / "checkpoints" / "step-00000020" / "drafter.safetensors")
    save(tmp_path, filled(15), keep=1)
    assert newest_valid(tmp_path) == tmp_path / "checkpoints" / "step-00000015"
    path = save(tmp_path, filled(20), keep=1)
    assert newest_valid(tmp_path) == path
    assert steps_on_disk(tmp_path) == [20]


def test_the_same_step_again_updates_its_state_and_other_weights_are_refused(
    tmp_path: Path,
) -> None:
    save(tmp_path, filled(5), keep=1)
    path = save(tmp_path, filled(5, score=2.0), keep=1)
    assert load(path).score == 2.0
    other = drafter(seed=3)
    with pytest.raises(RunError, match="with other weights"):
        save(
            tmp_path,
            snapshot_of(other, build_optimizer(other.named_parameters(), CONFIG), 5),
            keep=1,
        )
    assert load(path).score == 2.0
    assert steps_on_disk(tmp_path) == [5]


def test_looking_changes_nothing_and_starting_removes_leftovers(tmp_path: Path) -> None:
    save(tmp_path, filled(1), keep=1)
    partial = tmp_path / "checkpoints" / "step-00000002.123.partial"
    partial.mkdir()
    (partial / "drafter.safetensors").write_bytes(b"half")
    newest_valid(tmp_path)
    assert partial.exists()
    CheckpointWriter(tmp_path, CheckpointConfig()).close()
    assert steps_on_disk(tmp_path) == [1]


def fail_saves(monkeypatch: pytest.MonkeyPatch, num_failures: int) -> None:
    """Let the disk be full for the first `num_failures` files."""
    left = [num_failures]

    def save_file(tensors: dict[str, Tensor], path: Path, **options: Any) -> None:
        if left[0] > 0:
            left[0] -= 1
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        safetensors.torch.save_file(tensors, path, **options)

    monkeypatch.setattr("trainer.checkpoint.save_file", save_file)


def test_two_refused_saves_cost_two_warnings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fail_saves(monkeypatch, 2)
    with CheckpointWriter(tmp_path, CheckpointConfig(max_failures=3)) as writer:
        for step in (1, 2, 3):
            writer.submit(filled(step))
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    assert "checkpoint of step 1 was not written ([Errno 28] No space left" in caplog.text
    assert steps_on_disk(tmp_path) == [3]
    assert newest_valid(tmp_path) is not None
    assert writer.num_failures == 0


def test_too_many_refused_saves_in_a_row_end_the_run_and_keep_the_old_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, filled(1), keep=1)
    fail_saves(monkeypatch, 100)
    writer = CheckpointWriter(tmp_path, CheckpointConfig(keep=1, max_failures=2))
    writer.submit(filled(2))
    writer.submit(filled(3))
    with pytest.raises(RunError, match="2 checkpoints in a row could not be written"):
        writer.submit(filled(4))
    with pytest.raises(RunError, match="2 checkpoints in a row"):
        writer.close()
    assert steps_on_disk(tmp_path) == [1]
    assert newest_valid(tmp_path) is not None


@pytest.mark.parametrize("num_failures", [2, 3])
def test_the_last_save_is_tried_again_as_often_as_saves_may_fail(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    num_failures: int,
) -> None:
    """None comes after it that could be written instead."""
    monkeypatch.setattr("trainer.checkpoint_writer._FIRST_PAUSE_SECONDS", 0.01)
    fail_saves(monkeypatch, num_failures)
    writer = CheckpointWriter(tmp_path, CheckpointConfig(max_failures=3))
    writer.submit(filled(1))
    if num_failures < 3:
        writer.close()
        assert steps_on_disk(tmp_path) == [1]
    else:
        with pytest.raises(RunError, match="3 checkpoints in a row could not be written"):
            writer.close()
        assert steps_on_disk(tmp_path) == []
    assert [record.levelname for record in caplog.records] == ["WARNING"] * num_failures


@pytest.mark.parametrize("num_refused", [0, 1])
def test_a_bug_in_a_save_is_raised_in_the_training_thread_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_refused: int
) -> None:
    """Also after a save that the disk refused: it is not tried again."""

    def save_file(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("bug")

    writer = CheckpointWriter(tmp_path, CheckpointConfig())
    fail_saves(monkeypatch, num_refused)
    if num_refused:
        writer.submit(filled(1))
        writer._wait()
    monkeypatch.setattr("trainer.checkpoint.save_file", save_file)
    writer.submit(filled(2))
    with pytest.raises(ZeroDivisionError):
        writer.close()


def test_a_file_that_the_system_refuses_is_an_oserror_and_leaves_nothing(tmp_path: Path) -> None:
    large = filled(1)
    large.drafter["0.weight"] = torch.zeros(200_000)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, limits[1]))
    try:
        with pytest.raises(OSError, match=r"drafter\.safetensors.*File too large"):
            save(tmp_path, large, keep=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert steps_on_disk(tmp_path) == []


def test_a_slow_save_does_not_hold_up_steps_and_only_the_next_one_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk_is_ready = threading.Event()

    def save_file(tensors: dict[str, Tensor], path: Path, **options: Any) -> None:
        assert disk_is_ready.wait(600)
        safetensors.torch.save_file(tensors, path, **options)

    monkeypatch.setattr("trainer.checkpoint.save_file", save_file)
    model = drafter()
    optimizer = build_optimizer(model.named_parameters(), CONFIG)
    with CheckpointWriter(tmp_path, CheckpointConfig()) as writer:
        train(model, optimizer, range(3))
        weights = clones(dict(model.state_dict()))
        writer.submit(snapshot_of(model, optimizer, 3))
        train(model, optimizer, range(3, 9))  # would never end if it waited for the disk
        writer.check()
        assert writer.wait_seconds == 0.0
        assert newest_valid(tmp_path) is None
        waits = []

        def wait(saves: list[Any]) -> Any:
            waits.append([save.done() for save in saves])
            disk_is_ready.set()
            return futures.wait(saves)

        monkeypatch.setattr("trainer.checkpoint_writer.wait", wait)
        writer.submit(snapshot_of(model, optimizer, 9))
        assert waits == [[False]]
        assert writer.wait_seconds > 0
        loaded = load(tmp_path / "checkpoints" / "step-00000003")
    assert same(loaded.drafter, weights)
    assert loaded.optimizer["step.0.weight"] == 3
    assert steps_on_disk(tmp_path) == [3, 9]


def test_an_error_of_the_loop_is_not_replaced_by_one_of_the_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_saves(monkeypatch, 1)

    def loop() -> None:
        with CheckpointWriter(tmp_path, CheckpointConfig()) as writer:
            writer.submit(filled(1))
            raise KeyError("loop")

    with pytest.raises(KeyError, match="loop"):
        loop()


CHILDREN = """
import os, signal, sys
from pathlib import Path
import torch
from trainer.checkpoint import load, newest_valid, save
from trainer.checkpoint_writer import CheckpointWriter
from trainer.config import CheckpointConfig
from trainer.snapshot import Snapshot

def snapshot(step):
    tensors = {name: torch.full((30_000,), float(step)) for name in "abc"}
    return Snapshot(step=step, batch_position=step, drafter=tensors, optimizer=tensors,
                    config={}, cache={}, state={})

def next_step(run_dir):
    newest = newest_valid(run_dir)
    return load(newest).step + 1 if newest else 1

def save_forever(run_dir, progress):
    step = next_step(run_dir)
    writer = CheckpointWriter(run_dir, CheckpointConfig(keep=2))
    while True:
        writer.submit(snapshot(step))
        os.pwrite(progress, b"%08d" % (step - 1), 0)  # submit has seen the save before finish
        step += 1

def die_at_call(left):
    # Die before the left-th change to the file system.
    def counted(name, real):
        def call(*args, **kwargs):
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)
        setattr(os, name, call)
    for name in ("fsync", "rename", "replace", "unlink", "rmdir", "mkdir"):
        counted(name, getattr(os, name))

def save_once(run_dir, call):
    CheckpointWriter(run_dir, CheckpointConfig()).close()
    step = next_step(run_dir)
    die_at_call(call)
    save(run_dir, snapshot(step), keep=2)

run_dir = Path(sys.argv[1])
progress = os.open(run_dir / "progress", os.O_CREAT | os.O_RDWR)
for line in sys.stdin:
    if (child := os.fork()) == 0:
        call = int(line)
        save_once(run_dir, call) if call else save_forever(run_dir, progress)
        os._exit(0)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Children:
    """Starts processes that save, from one that has imported torch already."""

    def __init__(self, run_dir: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHILDREN, str(run_dir)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(trainer.checkpoint.__file__).parents[1],
        )

    def start(self, call: int) -> int:
        """Save until killed, or for a `call` above 0 once, dying before that system call."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{call}\n")
        self.process.stdin.flush()
        return self._number()

    def wait(self) -> int:
        """Exit code of the last one; negative is a signal."""
        return self._number()

    def _number(self) -> int:
        assert self.process.stdout is not None
        return int(self.process.stdout.readline())


@pytest.fixture
def children(tmp_path: Path) -> Iterator[Children]:
    started = Children(tmp_path)
    with started.process:
        yield started


def saved_step(run_dir: Path) -> int:
    """Step of the newest checkpoint, after checking that a kill has spoilt none of them."""
    for path in (run_dir / "checkpoints").glob("step-????????"):
        snapshot = load(path)
        tensors = [*snapshot.drafter.values(), *snapshot.optimizer.values()]
        assert all((value == snapshot.step).all() for value in tensors)
    CheckpointWriter(run_dir, CheckpointConfig()).close()
    newest = newest_valid(run_dir)
    if newest is None:
        return 0
    assert steps_on_disk(run_dir)[-1] == load(newest).step  # no name that is not a step's
    return load(newest).step


def test_sigkill_at_random_moments_loses_nothing_that_was_saved(
    tmp_path: Path, children: Children, caplog: pytest.LogCaptureFixture
) -> None:
    rng = random.Random(0)
    num_kills = num_torn = 0

    def progress() -> int:
        """Step of the last save that has ended, as far as the child has got to say so."""
        path = tmp_path / "progress"
        return int(path.read_text() or 0) if path.exists() else 0

    # On a machine under load it takes more of them until one has hit a save.
    while num_kills < 20 or not num_torn:
        assert num_kills < 200, "the kills hit no save"
        due = progress() + rng.randint(0, 3)  # by saves, which on a slow disk take their time
        child = children.start(0)
        while progress() < due:
            os.kill(child, 0)  # an error where it is gone
            time.sleep(0.002)
        time.sleep(rng.uniform(0, 0.05))
        os.kill(child, signal.SIGKILL)
        assert children.wait() == -signal.SIGKILL
        num_kills += 1
        num_torn += len(list(tmp_path.glob("checkpoints/*.partial")))
        assert saved_step(tmp_path) >= progress()
    assert saved_step(tmp_path) > 5
    # Each kill between a save and its rotation leaves one more, and the next rotation takes all.
    children.start(1000)
    assert children.wait() == 0
    assert len(steps_on_disk(tmp_path)) == 2
    assert caplog.text == ""


def test_sigkill_before_each_change_of_a_save_leaves_whole_checkpoints_only(
    tmp_path: Path, children: Children, caplog: pytest.LogCaptureFixture
) -> None:
    for call in (1000, 1000, 1000):  # enough for a rotation from the first kill on
        children.start(call)
        assert children.wait() == 0
    call, results = 0, list[int]()
    while not results or results[-1] != 0:
        call += 1
        before = saved_step(tmp_path)
        children.start(call)
        results.append(children.wait())
        assert before <= saved_step(tmp_path) <= before + 1
    # At least: a directory, five syncs, two renames, the rotation.
    assert results[:-1] == [-signal.SIGKILL] * (len(results) - 1)
    assert len(results) > 12
    assert caplog.text == ""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_snapshot_of_a_cuda_run_is_whole_when_taken() -> None:
    place = f"cuda:{torch.cuda.device_count() - 1}"  # not the current one, where there are several
    model = nn.Linear(4096, 4096).to(place)
    optimizer = build_optimizer(model.named_parameters(), CONFIG)
    for _ in range(3):
        model(torch.ones(8, 4096, device=place)).square().mean().backward()
        optimizer.step()
    expected = {name: value.cpu() for name, value in model.state_dict().items()}
    taken = snapshot_of(model, optimizer, 3)
    for parameter in model.parameters():
        parameter.data.zero_()
    assert same(taken.drafter, expected)
    assert {value.device.type for value in taken.optimizer.values()} == {"cpu"}
    restore(taken, model, optimizer)
    assert same({name: value.cpu() for name, value in model.state_dict().items()}, expected)
    assert same(snapshot_of(model, optimizer).optimizer, taken.optimizer)
    model(torch.ones(8, 4096, device=place)).square().mean().backward()
    optimizer.step()
