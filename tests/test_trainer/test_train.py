"""A run does what its configuration says, can be killed at any moment, and refuses to lie."""

import itertools
import json
import math
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
import torch

from shared.cache import Cache
from shared.errors import CacheError, ConfigError, DraftCacheError, NonFiniteError, RunError
from tests.test_cache_builder.stored import Killer
from trainer import announce, checkpoint_writer, learner
from trainer import config as training
from trainer.checkpoint import load, newest_valid
from trainer.checkpoint_writer import CheckpointWriter
from trainer.config import TrainConfig
from trainer.loader import Loader
from trainer.run import Run
from trainer.sampler import EpochPlan, epoch_batches
from trainer.snapshot import Snapshot
from trainer.summary import summarize
from trainer.tracking import Tracker
from trainer.train import Training, train

pytestmark = pytest.mark.slow

MakeTrain = Callable[..., TrainConfig]


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def learned(run: Path) -> list[tuple[int, float, float]]:
    """What must be the same, bit for bit, however often a run was interrupted."""
    return [(m["step"], m["train/loss"], m["train/grad_norm"]) for m in metrics(run)]


def num_lines(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def half_saved(run: Path) -> list[Path]:
    return list((run / "checkpoints").glob("*.partial"))


@pytest.fixture
def saving_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every save is done, or has failed, before the next step: whatever else the machine does."""
    submit = CheckpointWriter.submit

    def submit_and_wait(self: CheckpointWriter, snapshot: Snapshot) -> None:
        submit(self, snapshot)
        self._wait()

    monkeypatch.setattr(CheckpointWriter, "submit", submit_and_wait)


def final_weights(run: Path) -> dict[str, torch.Tensor]:
    path = newest_valid(run)
    assert path is not None
    return load(path).drafter


def test_a_run_writes_one_line_per_step_and_ends_with_a_checkpoint(
    tiny_train: MakeTrain, tiny_cache: Path, tmp_path: Path
) -> None:
    config = tiny_train(tmp_path, tiny_cache, steps=5)
    train(config)
    lines = metrics(tmp_path)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert all(line["train/loss"] > 0 for line in lines)
    assert lines[-1]["heldout/tau_walk"] >= 1.0
    for line in lines:
        assert 0 <= line["data/queue_depth"] <= config.loader.queue_batches
        assert 0 <= line["data/wait_share"] <= 1
    assert lines[0]["data/queue_slope"] is None
    assert all(math.isfinite(line["data/queue_slope"]) for line in lines[1:])
    assert "data/queue_seconds_to_empty" in lines[-1]
    assert newest_valid(tmp_path) == tmp_path / "checkpoints" / "step-00000005"
    stored = json.loads((tmp_path / "config.json").read_text())
    assert stored["optimizer"]["betas"] == [0.9, 0.95]


def test_checkpoints_that_cannot_be_the_best_are_announced(
    tiny_train: MakeTrain, tiny_cache: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A score is that of an evaluation at the very step: step 2 has none, 4 and the last do."""
    config = tiny_train(
        tmp_path / "run",
        tiny_cache,
        steps=5,
        evaluate=training.EvaluateConfig(every_steps=4, max_samples=1, tree_budgets=(4,)),
        checkpoint=training.CheckpointConfig(every_steps=2, keep=9),
    )
    train(config)
    paths = sorted((tmp_path / "run" / "checkpoints").iterdir())
    scored = [path.name for path in paths if load(path).score is not None]
    assert [path.name[-1] for path in paths] == ["2", "4", "5"]
    assert [name[-1] for name in scored] == ["4", "5"]
    assert "only every 4th step and the last are evaluated and saved" in caplog.text


def test_a_finished_run_does_nothing_twice(
    tiny_train: MakeTrain, tiny_cache: Path, tmp_path: Path
) -> None:
    config = tiny_train(tmp_path, tiny_cache, steps=3)
    train(config)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")}
    lines = metrics(tmp_path)
    train(config)
    assert metrics(tmp_path) == lines
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")}


def test_the_configured_recipe_is_on_the_live_objects(
    tiny_train: MakeTrain, tiny_cache: Path, tmp_path: Path
) -> None:
    config = tiny_train(tmp_path, tiny_cache, steps=50, block_size=16)
    run = Training(config)
    for group in run.learner.optimizer.param_groups:
        assert group["betas"] == (0.9, 0.95)
        assert group["eps"] == 1e-8
        assert group["weight_decay"] == 0.0
    supervised = torch.ones(1, 16, dtype=torch.bool)
    supervised[0, 0] = False
    weights = run.learner.weigh(torch.zeros(1, 16), supervised)
    assert weights[0, 0] == 0.0
    assert weights[0, 1] == 1.0
    assert weights[0, 15].item() == pytest.approx(0.1353, abs=1e-4)  # gamma 7 at block 16
    rates = []
    with Loader.open(run.session, run.ranks, run.step) as loader:
        batches = iter(loader)
        for _ in range(4):
            rates.append(run.learner.train_step(batches)["train/lr"])
            assert {group["lr"] for group in run.learner.optimizer.param_groups} == {rates[-1]}
    assert rates[:2] == [3e-4, 6e-4]  # 4 % of 50 steps
    assert rates[1] > rates[2] > rates[3]


def test_the_noise_in_force_moves(tiny_train: MakeTrain, tiny_cache: Path, tmp_path: Path) -> None:
    noise = training.NoiseConfig(scale=0.1, warmup_steps=4, hold_steps=1, decay_steps=2)
    train(tiny_train(tmp_path, tiny_cache, steps=8, noise=noise))
    scales = [line["train/noise_scale"] for line in metrics(tmp_path)]
    assert scales == pytest.approx([0.0, 0.025, 0.05, 0.075, 0.1, 0.1, 0.05, 0.0])


def test_only_the_drafter_is_optimized(
    tiny_train: MakeTrain, tiny_cache: Path, tmp_path: Path
) -> None:
    run = Training(tiny_train(tmp_path, tiny_cache, steps=4))
    before = run.session.head.lm_head_VD.clone(), run.session.head.embedding_VD.clone()
    run.train()
    assert torch.equal(run.session.head.lm_head_VD, before[0])
    assert torch.equal(run.session.head.embedding_VD, before[1])
    state = sum(
        value.numel()
        for held in run.learner.optimizer.state.values()
        for key, value in held.items()
        if key != "step"
    )
    assert state == 2 * sum(p.numel() for p in run.session.drafter.parameters())


def test_the_loss_of_a_step_does_not_depend_on_how_it_is_split(
    tiny_train: MakeTrain, tiny_cache: Path, tmp_path: Path
) -> None:
    """Eight samples as one, two and eight micro-batches: the same gradients."""
    gradients = []
    for name, groups in [("one", [8]), ("two", [4, 4]), ("eight", [1] * 8)]:
        run = Training(tiny_train(tmp_path / name, tiny_cache))
        session = run.session
        from trainer.anchors import legal_anchors
        from trainer.batch import collate
        from trainer.optim import scale_and_clip_
        from trainer.step import batch_loss, forward_blocks

        positions = iter(session.split.train[:8].tolist())
        weight_sum = 0.0
        for size in groups:
            samples = [session.cache.read(next(positions)) for _ in range(size)]
            anchors = [legal_anchors(sample.loss_mask.astype(bool))[::5] for sample in samples]
            batch = collate(samples, anchors, epoch=0, bucket=0)
            forward = forward_blocks(
                session.drafter, session.head, batch, session.features.unpack(batch), 3
            )
            loss = batch_loss(forward, session.head, run.learner.weigh, anchors_per_chunk=7)
            loss.loss_sum.backward()
            weight_sum += float(loss.weight_sum)
        scale_and_clip_(session.drafter.parameters(), weight_sum, 1e9)
        gradients.append(
            [p.grad.clone() for p in session.drafter.parameters() if p.grad is not None]
        )
    for other in gradients[1:]:
        for a, b in zip(gradients[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["decay", "dpace"])
def test_how_many_anchors_go_together_changes_rounding_alone(
    tiny_train: MakeTrain, tiny_cache: Path, tmp_path: Path, kind: Literal["decay", "dpace"]
) -> None:
    loss = training.LossConfig(kind=kind)
    runs = []
    for name, per_forward in (("whole", None), ("parts", 3)):
        config = tiny_train(tmp_path / name, tiny_cache, loss=loss)
        anchors = replace(config.anchors, per_forward=per_forward)
        train(replace(config, anchors=anchors))
        runs.append(metrics(tmp_path / name))
    counted = ["train/tokens", "train/anchors", "train/samples", "train/buckets", "train/epoch"]
    for whole, parts in zip(*runs, strict=True):
        assert whole["train/anchors"] > 2 * 3
        assert [parts[name] for name in counted] == [whole[name] for name in counted]
        for name in ("train/loss", "train/weight_sum", "train/grad_norm", "train/accuracy"):
            assert parts[name] == pytest.approx(whole[name], rel=1e-4), name


def test_a_batch_that_memory_does_not_hold_ends_the_run_in_one_line_and_can_be_made_smaller(
    tiny_train: MakeTrain, tiny_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_train(tmp_path / "run", tiny_cache, steps=4)
    forward, calls = learner.forward_blocks, 0

    def run_out(*given: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore.")
        return forward(*given)

    monkeypatch.setattr(learner, "forward_blocks", run_out)
    said = r"step 3: cpu does not hold a micro-batch of \d+ tokens and \d+ anchors \(CUDA out of"
    with pytest.raises(RunError, match=said):
        train(config)
    train(replace(config, anchors=replace(config.anchors, per_forward=4)))
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1, 2, 3, 4]


def test_memory_that_is_full_in_an_update_is_one_line_and_nothing_half_done_is_saved(
    tiny_train: MakeTrain, tiny_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The moments are made in the first step, when the activations have been held already."""
    config = tiny_train(tmp_path / "run", tiny_cache, steps=4)
    config = replace(config, checkpoint=replace(config.checkpoint, every_steps=2))
    update, calls = torch.optim.AdamW.step, 0

    def run_out(self: torch.optim.AdamW, *given: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore.")
        return update(self, *given)

    with monkeypatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", run_out)
        said = (
            r"run: the GPU's memory is full \(CUDA out of memory\. Tried to allocate 2\.00 GiB\.\)"
        )
        with pytest.raises(RunError, match=said):
            train(config)
    assert Run(tmp_path / "run").require_checkpoint().step == 2
    train(config)
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1, 2, 3, 4]


def train_and_die(config: TrainConfig, event: int, seconds: float) -> None:
    """Train, and be killed in the second save from here at this event, which are counted from 1;
    at 0 so many seconds after its begin, wherever that is."""
    saves, save, train_step = itertools.count(1), checkpoint_writer.save, learner.Learner.train_step
    left, may_begin = [event], threading.Semaphore(3)

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def hook(name: str, _: object) -> None:
        if name in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"):
            left[0] -= threading.current_thread().name.startswith("checkpoint")
            if left[0] == 0:
                die()

    def killed(*given: Any, **options: Any) -> Path:
        if next(saves) == 2:
            learner.Learner.train_step = limited  # type: ignore[method-assign]
            if event:
                sys.addaudithook(hook)
            else:
                threading.Timer(seconds, die).start()
        return save(*given, **options)

    def limited(self: learner.Learner, batches: Any) -> dict[str, Any]:
        may_begin.acquire()  # a fast machine must not be done before it is killed
        return train_step(self, batches)

    checkpoint_writer.save = killed
    train(config)


def test_killed_at_random_moments_a_run_learns_the_same(
    tiny_train: MakeTrain, tiny_cache: Path, tmp_path: Path
) -> None:
    """SIGKILL, twenty times in one run, every other time inside a save: losses, norms, weights and
    the lines of the metrics are those of an undisturbed run."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["trainer.train"])

    def ends(target: Callable[..., object], *arguments: object) -> int | None:
        process = context.Process(target=target, args=arguments)
        process.start()
        process.join()
        return process.exitcode

    straight = tiny_train(tmp_path / "straight", tiny_cache, steps=120)
    assert ends(train, straight) == 0
    rng = random.Random(0)
    config = replace(straight, run=training.RunConfig(path=tmp_path / "killed"))
    num_torn, resumed_at = 0, set()
    for number in range(20):
        event, seconds = rng.randint(3, 14) * (number % 2), rng.uniform(0, 0.05)
        assert ends(train_and_die, config, event, seconds) == -signal.SIGKILL
        num_torn += bool(half_saved(tmp_path / "killed"))
        resumed_at.add(newest_valid(tmp_path / "killed"))
    assert num_torn > 4
    assert len(resumed_at) == 20
    assert ends(train, config) == 0
    assert learned(tmp_path / "killed") == learned(tmp_path / "straight")
    assert not half_saved(tmp_path / "killed")
    left, right = final_weights(tmp_path / "killed"), final_weights(tmp_path / "straight")
    assert all(torch.equal(left[name], right[name]) for name in right)


def test_eight_samples_can_be_learned_by_heart(
    tiny_train: MakeTrain, tiny_cache: Path, tmp_path: Path
) -> None:
    """Overfitting: the loss goes under 0.1, which a leak or a shifted label would not allow."""
    config = tiny_train(
        tmp_path,
        tiny_cache,
        steps=700,
        block_size=4,
        loss=training.LossConfig(gamma=4.0),
        optimizer=training.OptimizerConfig(lr=3e-3),
        checkpoint=training.CheckpointConfig(every_steps=1000),
    )
    run = Training(config)
    shortest = run.session.cache.index.num_tokens[run.session.split.train].argsort()[:8]
    object.__setattr__(run.session.split, "train", run.session.split.train[shortest])
    run.train()
    assert metrics(tmp_path)[-1]["train/loss"] < 0.1


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_a_non_finite_step_never_reaches_the_weights(
    tiny_train: MakeTrain, tiny_cache: Path, tmp_path: Path, policy: str
) -> None:
    config = tiny_train(tmp_path, tiny_cache, steps=4)
    config = replace(config, train=replace(config.train, on_nonfinite=policy))
    run = Training(config)
    split, calls = run.session.features.split, []

    def poisoned(batch: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        calls.append(batch)
        states, last_hidden = split(batch)
        # Four held-out samples and the first step came before.
        return states * torch.nan if len(calls) == 6 else states, last_hidden

    object.__setattr__(run.session.features, "split", poisoned)
    if policy == "stop":
        with pytest.raises(NonFiniteError, match=r"step 2.*not applied"):
            run.train()
    else:
        run.train()
        assert metrics(tmp_path)[-1]["train/nonfinite_steps"] == 1
        assert metrics(tmp_path)[1]["train/loss"] is None
    assert all(p.isfinite().all() for p in run.session.drafter.parameters())
    (written,) = tmp_path.glob("nonfinite-*.json")
    assert json.loads(written.read_text())["samples"] == list(calls[5].sample_ids)


def poison(patch: pytest.MonkeyPatch, *steps: int, gradient_only: bool = False) -> None:
    """Make the loss, or only its gradient, of optimizer steps not finite, counted from 1."""
    from trainer import learner

    batch_loss, calls = learner.batch_loss, []

    def poisoned(*arguments: Any, **options: Any) -> Any:
        loss = batch_loss(*arguments, **options)
        calls.append(1)
        if len(calls) in steps:
            if gradient_only:
                loss.loss_sum.register_hook(lambda grad: grad * torch.inf)
            else:
                loss = replace(loss, loss_sum=loss.loss_sum * torch.nan)
        return loss

    patch.setattr(learner, "batch_loss", poisoned)


@pytest.mark.parametrize("gradient_only", [False, True])
def test_after_a_non_finite_step_the_run_goes_on_from_the_step_before_it(
    tiny_train: MakeTrain, tiny_cache: Path, tmp_path: Path, gradient_only: bool
) -> None:
    """Stopped at step 4, the first three are saved; told to skip, the same run goes on."""
    checkpoint = training.CheckpointConfig(every_steps=100)
    config = tiny_train(tmp_path, tiny_cache, steps=6, checkpoint=checkpoint)
    with pytest.MonkeyPatch.context() as patch:
        poison(patch, 4, gradient_only=gradient_only)
        with pytest.raises(NonFiniteError, match=r"step 4.*train.on_nonfinite = 'skip'"):
            train(config)
    assert newest_valid(tmp_path) == tmp_path / "checkpoints" / "step-00000003"
    assert [line["step"] for line in metrics(tmp_path)] == [1, 2, 3]
    before = final_weights(tmp_path)
    skip = replace(config.train, on_nonfinite="skip", max_nonfinite_steps=1, steps=6)
    with pytest.MonkeyPatch.context() as patch:
        poison(patch, 1, 3, gradient_only=gradient_only)  # steps 4 and 6, one too many
        with pytest.raises(NonFiniteError, match="1 steps were left out before it"):
            train(replace(config, train=skip))
    lines = metrics(tmp_path)
    assert [line["train/nonfinite_steps"] for line in lines] == [0, 0, 0, 1, 1]
    assert lines[3]["train/grad_norm"] is None
    weights = final_weights(tmp_path)
    assert all(value.isfinite().all() for value in weights.values())
    assert not all(torch.equal(before[name], weights[name]) for name in before)
    for step in (4, 6):
        written = json.loads((tmp_path / f"nonfinite-{step:08d}.json").read_text())
        assert written["samples"]
    assert (
        json.loads((tmp_path / "nonfinite-00000004.json").read_text())["samples"]
        == (lines[3]["train/samples"])
    )


@pytest.mark.usefixtures("saving_at_once")
def test_a_full_disk_does_not_hide_that_a_loss_is_not_finite(
    tiny_train: MakeTrain, tiny_cache: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing can be written any more: not the samples, not the metrics, not the checkpoint."""
    checkpoint = training.CheckpointConfig(every_steps=2, max_failures=2)
    config = tiny_train(tmp_path, tiny_cache, steps=6, checkpoint=checkpoint)
    run, limits = Training(config), resource.getrlimit(resource.RLIMIT_FSIZE)
    split, calls = run.session.features.split, []

    def poisoned(batch: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        calls.append(batch)
        states, last_hidden = split(batch)
        if len(calls) == 5:  # the first step: four held-out samples came before
            resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
        return states * torch.nan if len(calls) == 8 else states, last_hidden

    object.__setattr__(run.session.features, "split", poisoned)
    try:
        with pytest.raises(NonFiniteError, match=r"step 4: loss nan.*not applied") as error:
            run.train()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert calls[7].sample_ids[0] in str(error.value)
    assert "nonfinite-00000004.json: cannot be written" in caplog.text


def test_a_step_whose_weights_all_vanish_is_left_out(
    tiny_train: MakeTrain, tiny_cache: Path, tmp_path: Path
) -> None:
    """`dpace` with alpha 0 weighs by probabilities, and these can round to zero."""
    config = tiny_train(tmp_path, tiny_cache, steps=2)
    config = replace(config, train=replace(config.train, on_nonfinite="skip"))
    run = Training(config)
    before = {name: p.detach().clone() for name, p in run.session.drafter.named_parameters()}
    run.learner.weigh = lambda ce_AK, supervised_AK: torch.zeros_like(ce_AK)
    run.train()
    assert metrics(tmp_path)[-1]["train/nonfinite_steps"] == 2
    assert all(torch.equal(before[n], p) for n, p in run.session.drafter.named_parameters())


@pytest.mark.usefixtures("saving_at_once")
@pytest.mark.parametrize("is_freed", [True, False])
def test_a_full_disk_costs_checkpoints_until_there_are_too_many(
    tiny_train: MakeTrain,
    tiny_cache: Path,
    tmp_path: Path,
    is_freed: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Files are limited to less than a checkpoint from step 3 on, and freed after step 6."""
    checkpoint = training.CheckpointConfig(every_steps=2, max_failures=3)
    evaluating = training.EvaluateConfig(every_steps=4, max_samples=2, tree_budgets=(4,))
    config = tiny_train(tmp_path, tiny_cache, steps=12, checkpoint=checkpoint, evaluate=evaluating)
    run = Training(config)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    train_step = run.learner.train_step

    def limited(batches: Any) -> dict[str, Any]:
        if run.step == 3:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
        if run.step == 7 and is_freed:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        return train_step(batches)

    run.learner.train_step = limited  # type: ignore[method-assign]
    try:
        if is_freed:
            run.train()
        else:
            with pytest.raises(RunError, match="3 checkpoints in a row could not be written"):
                run.train()
            assert newest_valid(tmp_path) == tmp_path / "checkpoints" / "step-00000002"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "checkpoint of step 4 was not written" in caplog.text
    if not is_freed:
        assert run.step == 9  # as soon as the third one has failed, not an interval later
        assert caplog.text.count("3 checkpoints in a row") == 0  # the error itself is enough
        assert train(config) is None
    assert newest_valid(tmp_path) == tmp_path / "checkpoints" / "step-00000012"
    assert [line["step"] for line in metrics(tmp_path)] == list(range(1, 13))


def test_resuming_with_another_recipe_is_refused_naming_the_key(
    tiny_train: MakeTrain, tiny_cache: Path, tmp_path: Path
) -> None:
    config = tiny_train(tmp_path, tiny_cache, steps=2)
    train(config)
    changed = replace(config, optimizer=replace(config.optimizer, lr=1e-3))
    with pytest.raises(RunError, match=r"optimizer\.lr: 0\.0006 before, 0\.001 now"):
        train(changed)
    # What does not touch learning may change.
    train(replace(config, loader=training.LoaderConfig(num_threads=1)))
    Run(tmp_path).start_afresh()
    train(changed)
    assert len(metrics(tmp_path)) == 2


@pytest.mark.parametrize(
    ("mask_token_id", "message"),
    [
        pytest.param(272, "272 rows", id="outside-the-embedding"),
        pytest.param(2, "ends or pads", id="end-token"),
        pytest.param(0, "ends or pads", id="pad-token"),
    ],
)
def test_a_mask_token_that_cannot_be_right_is_refused(
    tiny_train: MakeTrain, tiny_cache: Path, tmp_path: Path, mask_token_id: int, message: str
) -> None:
    config = tiny_train(tmp_path, tiny_cache)
    config = replace(config, drafter=replace(config.drafter, mask_token_id=mask_token_id))
    with pytest.raises(ConfigError, match=message):
        Training(config)


@pytest.mark.parametrize("scanned_shards", [4, 0], ids=["at-the-start", "in-a-batch"])
def test_a_mask_token_that_occurs_in_the_text_stops_the_run(
    tiny_train: MakeTrain,
    tiny_cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    scanned_shards: int,
) -> None:
    cache = Cache(tiny_cache)
    letter = int(cache.read(0).token_ids[-3])
    config = tiny_train(tmp_path, tiny_cache)
    config = replace(config, drafter=replace(config.drafter, mask_token_id=letter))
    monkeypatch.setattr("trainer.session._MASK_SHARDS", scanned_shards)
    with pytest.raises(ConfigError, match=f"mask_token_id {letter} occurs in the text") as caught:
        train(config)
    words = str(caught.value).replace(",", " ").replace(".", " ").split()
    sample_id, place = words[words.index("sample") + 1], int(words[words.index("position") + 1])
    ids = [cache.index.sample_id(i) for i in range(len(cache.index))]
    assert cache.read(ids.index(sample_id)).token_ids[place] == letter
    monkeypatch.setattr("trainer.session._MASK_SHARDS", 0)
    run = Training(config)
    with (
        Loader.open(run.session, run.ranks, run.step) as loader,
        pytest.raises(ConfigError, match=f"mask_token_id {letter} occurs in the text"),
    ):
        run.learner.train_step(iter(loader))


def test_samples_that_hold_the_mask_token_can_be_left_out(
    tiny_train: MakeTrain, tiny_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.session._MASK_SHARDS", 1000)
    cache = Cache(tiny_cache)
    held: dict[int, list[str]] = {}
    for position in range(len(cache.index)):
        for token in set(cache.read(position).token_ids.tolist()):
            held.setdefault(token, []).append(cache.index.sample_id(position))
    rare, ids = min(held.items(), key=lambda item: len(item[1]))
    assert len(ids) < 24
    config = tiny_train(tmp_path, tiny_cache, steps=12)
    config = replace(config, drafter=replace(config.drafter, mask_token_id=rare))
    for left_out in (ids[1:], ids[:-1]):
        one_left = replace(config, cache=replace(config.cache, exclude=tuple(left_out)))
        with pytest.raises(ConfigError, match=r"cache\.exclude") as caught:
            Training(one_left)
        assert next(i for i in ids if i not in left_out) in str(caught.value)
    train(replace(config, cache=replace(config.cache, exclude=tuple(ids))))
    seen = {sample_id for line in metrics(tmp_path) for sample_id in line["train/samples"]}
    assert len(seen) > 12
    assert not seen & set(ids)


def test_a_run_stays_with_the_generation_it_started_from(
    tiny_train: MakeTrain,
    tiny_build: Callable[..., Any],
    tiny_data: Path,
    tmp_path: Path,
) -> None:
    from cache_builder.build import build
    from tests.conftest import conversations, write_jsonl

    cache = tmp_path / "cache"
    build(tiny_build(cache))
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    train(tiny_train(straight, cache, steps=8))
    half = Training(tiny_train(resumed, cache, steps=8))
    half.config = replace(half.config, train=replace(half.config.train, steps=8))
    stop = half.learner.train_step

    def stopping(batches: Any) -> dict[str, Any]:
        if half.step == 5:
            raise KeyboardInterrupt
        return stop(batches)

    half.learner.train_step = stopping  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        half.train()
    more = write_jsonl(tmp_path / "more.jsonl", conversations(range(50, 70)))
    build(tiny_build(cache, data=[tiny_data, more]))
    train(tiny_train(resumed, cache, steps=8))
    assert learned(resumed) == learned(straight)


def test_another_cache_of_the_same_kind_is_not_resumed_from(
    tiny_train: MakeTrain, tiny_build: Callable[..., Any], tiny_cache: Path, tmp_path: Path
) -> None:
    """Same target and settings, other samples: the fingerprint alone would let it in."""
    from cache_builder.build import build
    from shared.errors import CacheIncompatibleError
    from tests.conftest import conversations, write_jsonl

    other = tmp_path / "other"
    build(tiny_build(other, data=[write_jsonl(tmp_path / "o.jsonl", conversations(range(60, 90)))]))
    train(tiny_train(tmp_path / "run", tiny_cache, steps=2))
    config = tiny_train(tmp_path / "run", other, steps=2)
    before = (tmp_path / "run" / "config.json").read_bytes()
    with pytest.raises(CacheIncompatibleError, match="index_sha256"):
        train(config)
    assert (tmp_path / "run" / "config.json").read_bytes() == before


def test_a_foreign_directory_is_not_taken_for_a_run(
    tiny_train: MakeTrain, tiny_cache: Path, tiny_target: Path, tmp_path: Path
) -> None:
    import shutil

    target = tmp_path / "target"
    shutil.copytree(tiny_target, target)
    before = (target / "config.json").read_bytes()
    for attempt in (
        lambda: train(tiny_train(target, tiny_cache)),
        Run(target).start_afresh,
    ):
        with pytest.raises(RunError, match="not a run and not empty"):
            attempt()
    assert (target / "config.json").read_bytes() == before


def test_a_second_trainer_on_a_run_is_refused(
    tiny_train: MakeTrain, tiny_cache: Path, tmp_path: Path
) -> None:
    with Run(tmp_path).locked(), pytest.raises(RunError, match="another process"):
        train(tiny_train(tmp_path, tiny_cache, steps=1))
    train(tiny_train(tmp_path, tiny_cache, steps=1))


@pytest.mark.parametrize("is_saved", [True, False])
@pytest.mark.parametrize("what", ["moved", "replaced"])
def test_a_run_whose_directory_goes_ends_and_leaves_alone_what_comes_there(
    tiny_train: MakeTrain,
    tiny_cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    what: str,
    is_saved: bool,
) -> None:
    """It went on to its end with exit code 0, its metrics in a file that nobody can open. The save
    of step 2 is done before that, or its thread comes to it only then."""
    path, moved = tmp_path / "run", tmp_path / "moved"
    config = tiny_train(path, tiny_cache, steps=6)
    write, is_written, is_moved = CheckpointWriter._write, threading.Event(), threading.Event()

    def waiting(self: CheckpointWriter, snapshot: Snapshot) -> None:
        assert is_saved or is_moved.wait(600)
        write(self, snapshot)
        is_written.set()

    monkeypatch.setattr(CheckpointWriter, "_write", waiting)
    with Run(path).locked():
        run = Training(config)
        train_step = run.learner.train_step

        def moving(batches: Any) -> dict[str, Any]:
            if run.step == 3:
                assert not is_saved or is_written.wait(600)
                path.rename(moved)
                if what == "replaced":
                    (path / "checkpoints").mkdir(parents=True)
                    (path / "metrics.jsonl").write_text("of another run\n")
                is_moved.set()
            return train_step(batches)

        run.learner.train_step = moving  # type: ignore[method-assign]
        with pytest.raises(RunError, match=r"moved, deleted or replaced.* after 2 are not saved"):
            run.train()
    assert ("checkpoint of step 2 was not written" in caplog.text) is not is_saved
    if what == "replaced":
        assert (path / "metrics.jsonl").read_text() == "of another run\n"
        assert list((path / "checkpoints").iterdir()) == []
    else:
        assert not path.exists()
        train(replace(config, run=training.RunConfig(path=moved)))
        assert [line["step"] for line in metrics(moved)] == [1, 2, 3, 4, 5, 6]


def test_a_resume_with_more_heldout_samples_compares_with_none_of_before(
    tiny_train: MakeTrain, tiny_cache: Path, tmp_path: Path
) -> None:
    def evaluating(max_samples: int) -> TrainConfig:
        evaluate = training.EvaluateConfig(
            every_steps=2, max_samples=max_samples, tree_budgets=(4,)
        )
        checkpoint = training.CheckpointConfig(every_steps=2, keep=9)
        return tiny_train(tmp_path, tiny_cache, steps=6, evaluate=evaluate, checkpoint=checkpoint)

    train(evaluating(1))
    for step in (4, 6):
        shutil.rmtree(tmp_path / "checkpoints" / f"step-{step:08d}")
    train(evaluating(4))
    run = Run(tmp_path)
    evaluations = {each["step"]: each for each in run.evaluations(6)}
    assert sorted(evaluations) == [0, 2, 4, 6]
    for path in (tmp_path / "checkpoints").iterdir():
        held = load(path)
        assert held.state["scored_on"] == evaluations[held.step]["heldout_sha256"]
        assert held.cache["index_sha256"] == evaluations[held.step]["index_sha256"]
    facts = summarize(run, tmp_path)
    assert facts["heldout_loss"] == [evaluations[4]["loss"], evaluations[6]["loss"]]


def test_evaluations_of_an_abandoned_start_are_forgotten(
    tiny_train: MakeTrain, tiny_cache: Path, tmp_path: Path
) -> None:
    """A run stopped before its first checkpoint leaves no figure for the next recipe's card."""
    config = tiny_train(tmp_path, tiny_cache, steps=2)
    Run(tmp_path).begin(config, None)
    Run(tmp_path).write_evaluation(9, {"loss": float("nan"), "tau_walk": 99.0})
    assert Run(tmp_path).evaluations(9)[0]["loss"] is None
    train(config)
    assert [e["step"] for e in Run(tmp_path).evaluations(100)] == [0, 2]


def test_a_damaged_evaluation_says_what_to_do_and_holds_up_no_resume(
    tiny_train: MakeTrain, tiny_cache: Path, tmp_path: Path
) -> None:
    config = tiny_train(tmp_path, tiny_cache, steps=2)
    train(config)
    damaged = tmp_path / "evaluations" / "step-00000000.json"
    damaged.write_text(damaged.read_text()[:30])
    train(config)
    with pytest.raises(CacheError, match=r"step-00000000\.json: not JSON .* Delete it"):
        Run(tmp_path).evaluations(2)


@pytest.mark.parametrize("name", ["checkpoints", "evaluations"])
def test_a_run_whose_other_disk_is_not_there_does_not_begin_anew(
    tiny_train: MakeTrain, tiny_cache: Path, tmp_path: Path, name: str
) -> None:
    """It took the link for an empty directory: step 0 again, and the metrics gone."""
    run, disk = tmp_path / "run", tmp_path / "disk"
    config = tiny_train(run, tiny_cache, steps=2)
    train(config)
    (run / name).rename(disk)
    (run / name).symlink_to(disk)
    train(config)
    before = metrics(run)
    disk.rename(tmp_path / "unmounted")
    with pytest.raises(DraftCacheError, match=rf"{name}: cannot be .*disk"):
        train(config)
    assert metrics(run) == before


def test_metrics_that_cannot_be_written_are_one_line(
    tiny_train: MakeTrain, tiny_cache: Path, tmp_path: Path
) -> None:
    (tmp_path / "evaluations").mkdir()
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(DraftCacheError, match=r"metrics\.jsonl: cannot be written"):
        Tracker(tmp_path, training.TrackingConfig(), {})


def test_a_resume_is_checked_against_the_checkpoint_not_the_file(
    tiny_train: MakeTrain, tiny_cache: Path, tmp_path: Path
) -> None:
    config = tiny_train(tmp_path, tiny_cache, steps=2)
    train(config)
    (tmp_path / "config.json").write_text(json.dumps({"run": {}, "drafter": {}}))
    with pytest.raises(RunError, match=r"train\.seed"):
        train(replace(config, train=replace(config.train, seed=7)))


def test_a_run_of_an_earlier_release_is_resumed_with_the_settings_it_did_not_know_at_their_default(
    tiny_train: MakeTrain, tiny_cache: Path, tmp_path: Path
) -> None:
    config = tiny_train(tmp_path, tiny_cache, steps=2)
    train(config)
    snapshot = Run(tmp_path).require_checkpoint()
    del snapshot.config["cache"]["exclude"], snapshot.config["sampler"]["shards_in_flight"]
    Run(tmp_path).require_same_settings(config, snapshot)
    changed = replace(config, sampler=replace(config.sampler, shards_in_flight=2))
    with pytest.raises(RunError, match=r"sampler\.shards_in_flight: 0 before, 2 now"):
        Run(tmp_path).require_same_settings(changed, snapshot)
    snapshot.config["sampler"]["turns"] = "equal"
    with pytest.raises(RunError, match=r"sampler\.turns: 'equal' before, None now"):
        Run(tmp_path).require_same_settings(config, snapshot)


def test_a_run_does_not_go_on_in_another_order(
    tiny_train: MakeTrain, tiny_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of numpy's random numbers, or of our sampler, may change between two parts of a run."""
    config = tiny_train(tmp_path, tiny_cache, steps=4)
    config = replace(config, checkpoint=replace(config.checkpoint, every_steps=2, keep=2))
    train(config)

    def reversed_epochs(*args: Any, **options: Any) -> EpochPlan:
        plan = epoch_batches(*args, **options)
        return replace(plan, sample=plan.sample[::-1].copy())

    began_with = np.__version__
    with monkeypatch.context() as patch:
        patch.setattr(announce, "epoch_batches", reversed_epochs)
        patch.setattr(np, "__version__", "9.0.0")
        assert train(config) is None  # all is done: there is no order to go on in
        shutil.rmtree(tmp_path / "checkpoints" / "step-00000004")
        refused = rf"step 2: .* another order .* numpy {began_with}, this is 9\.0\.0"
        with pytest.raises(RunError, match=refused):
            train(config)
    assert train(config) is None
    assert Run(tmp_path).require_checkpoint().step == 4


def test_a_run_reads_from_few_shards_at_a_time_and_resumes_so(
    tiny_train: MakeTrain, tiny_cache: Path, tmp_path: Path
) -> None:
    sampler = training.SamplerConfig(tokens_per_batch=256, num_buckets=1, shards_in_flight=1)
    straight = tiny_train(tmp_path / "straight", tiny_cache, steps=8, sampler=sampler)
    train(straight)
    index = Cache(tiny_cache).index
    shard_of = {index.sample_id(n): int(index.shard[n]) for n in range(len(index))}
    read = [shard_of[i] for line in metrics(tmp_path / "straight") for i in line["train/samples"]]
    changes = sum(a != b for a, b in pairwise(read))
    assert changes == len(set(read)) - 1 > 0
    halves = replace(straight, run=training.RunConfig(path=tmp_path / "halves"))
    run = Training(halves)
    train_step = run.learner.train_step

    def dying(batches: Any) -> dict[str, Any]:
        if run.step == 5:
            raise KeyboardInterrupt
        return train_step(batches)

    run.learner.train_step = dying  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        run.train()
    train(halves)
    assert learned(tmp_path / "halves") == learned(tmp_path / "straight")


def test_a_fresh_start_that_is_killed_can_be_made_again(
    tiny_train: MakeTrain, tiny_cache: Path, tmp_path: Path
) -> None:
    run, kept = tmp_path / "run", tmp_path / "kept"
    train(tiny_train(kept, tiny_cache, steps=2))
    for name in ("wandb.json", "nonfinite-00000001.json"):
        (kept / name).write_text("{}")
    killer = Killer(_start_afresh, tmp_path)
    shutil.copytree(kept, run)
    total = killer.count(run)
    for kill_at in range(total - 6, total + 1):
        shutil.rmtree(run)
        shutil.copytree(kept, run)
        assert killer.run(run, kill_at=kill_at) == -9
        _start_afresh(run)
        assert [path.name for path in run.iterdir()] == ["trainer.lock"]


def _start_afresh(path: Path) -> None:
    Run(path).start_afresh()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("default")  # of the compiler, on what it could do better
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float32", 1e-3), ("bfloat16", 3e-2)], ids=["float32", "bfloat16"]
)
def test_a_gpu_learns_what_a_cpu_learns_and_resumes(
    tiny_train: MakeTrain,
    tiny_cache: Path,
    tmp_path: Path,
    dtype: Literal["float32", "bfloat16"],
    tolerance: float,
) -> None:
    sliding: dict[str, Any] = {
        "num_layers": 2,
        "layer_types": ("full_attention", "sliding_attention"),
        "sliding_window": 24,
    }
    on_cpu = tiny_train(
        tmp_path / "cpu",
        tiny_cache,
        train=training.StepConfig(steps=6, batches_per_step=2, device="cpu", compute_dtype=dtype),
    )
    on_cpu = replace(on_cpu, drafter=replace(on_cpu.drafter, **sliding))
    on_gpu = replace(
        on_cpu,
        run=training.RunConfig(path=tmp_path / "gpu"),
        train=replace(on_cpu.train, device="cuda"),
    )
    train(on_cpu)
    halved = Training(on_gpu)
    halved._is_done = lambda: halved.step == 4  # type: ignore[method-assign]
    halved.train()
    train(on_gpu)
    expected, found = metrics(tmp_path / "cpu"), metrics(tmp_path / "gpu")
    assert [line["train/samples"] for line in found] == [line["train/samples"] for line in expected]
    for left, right in zip(found, expected, strict=True):
        for name in ("train/loss", "train/grad_norm"):
            assert left[name] == pytest.approx(right[name], rel=tolerance), name
    assert found[-1]["heldout/loss"] == pytest.approx(expected[-1]["heldout/loss"], rel=tolerance)
    assert found[-1]["memory/peak_bytes"] > 0


def test_the_time_left_is_by_all_steps_so_far_and_not_by_the_last(
    tiny_train: MakeTrain,
    tiny_cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Steps of short and long samples take turns: by one of them the time would jump."""
    train_step, now = learner.Learner.train_step, [0.0]

    def uneven(self: learner.Learner, batches: Any) -> Any:
        now[0] += 2 if self.step == 0 else 0
        return train_step(self, batches)

    monkeypatch.setattr(learner.Learner, "train_step", uneven)
    clock = SimpleNamespace(monotonic=lambda: now[0], perf_counter=time.perf_counter)
    monkeypatch.setattr("trainer.train.time", clock)
    monkeypatch.setattr("trainer.train.LINE_SECONDS", -1.0)
    with caplog.at_level("INFO"):
        train(tiny_train(tmp_path, tiny_cache, steps=20))
    [line] = re.findall(r"step 2 of 20: .* about (\d+) s left", caplog.text)
    assert int(line) == 18  # 18 steps of a second each
