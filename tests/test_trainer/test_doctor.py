"""Each fault of a run is named with its steps; a run without one passes in silence."""

import itertools
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.test_trainer.runs import (
    BUCKET_LOSS,
    STEP_SECONDS,
    Line,
    evaluation,
    make_config,
    make_run,
)
from trainer import checkpoint as checkpoints
from trainer import config as training
from trainer.config import TrainConfig
from trainer.doctor.diagnosis import CHECKS, Diagnosis, diagnose, lines
from trainer.doctor.finding import Finding, format_steps, ranges
from trainer.doctor.jumps import find_jumps
from trainer.doctor.view import NAMES, RunView
from trainer.run import Run
from trainer.train import train

PEAK = 20
"""Step of the peak learning rate where 500 steps are configured."""


def look(run: Run) -> Diagnosis:
    return diagnose(RunView.read(run))


def the_fault(run: Run, name: str) -> Finding:
    """The one fault there is."""
    faults = [finding for finding in look(run).findings if finding.is_fault]
    assert [fault.name for fault in faults] == [name]
    return faults[0]


def test_a_healthy_run_passes_in_silence(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    diagnosis = look(run)
    assert diagnosis.findings == []
    assert diagnosis.not_checked == {}
    assert diagnosis.checked == list(CHECKS)
    (line,) = lines(RunView.read(run), diagnosis)
    assert "step 200 of 200, 2 checkpoints, 3 evaluations: no fault found. Checked: " in line


def test_a_real_run_is_healthy(
    tiny_train: Callable[..., TrainConfig],
    tiny_cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """End to end: what the trainer writes is what the doctor reads. By a clock of its own: on a
    busy machine a run does stand still for longer than a healthy one."""
    ticks = itertools.count()
    clock = SimpleNamespace(
        **dict.fromkeys(("perf_counter", "monotonic", "time"), lambda: next(ticks) / 100)
    )
    for module in ("train", "loader", "pauses"):
        monkeypatch.setattr(f"trainer.{module}.time", clock)
    config = tiny_train(
        tmp_path,
        tiny_cache,
        steps=80,
        evaluate=training.EvaluateConfig(every_steps=40, max_samples=2, tree_budgets=(4,)),
        checkpoint=training.CheckpointConfig(every_steps=30, keep=5),
        noise=training.NoiseConfig(scale=0.1, warmup_steps=10),
    )
    train(config)
    view = RunView.read(Run(tmp_path))
    assert set(NAMES) - view.steps.present == {"tracking/wandb_dropped"}
    assert view.saved_after == [30, 60, 80]
    evaluated = view.steps.step[view.steps["time/evaluate_seconds"] > 0]
    assert evaluated.tolist() == [41]  # the line after; the last one has none after it
    held = view.checkpoints[-1].payload["state"]
    assert held["optimizer"]["groups"][0]["betas"] == [0.9, 0.95]
    assert held["epoch"] == view.steps["train/epoch"][-1]
    diagnosis = diagnose(view)
    assert [f for f in diagnosis.findings if f.is_fault] == []
    assert set(diagnosis.not_checked) == set()


def test_a_real_run_with_the_faults_of_the_seeds(
    tiny_train: Callable[..., TrainConfig],
    tiny_cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bucket after bucket, gamma and betas of another recipe, a noise schedule without a scale."""

    def in_turn(count: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        return np.repeat(np.arange(len(count)), count)

    monkeypatch.setattr("trainer.sampler.interleave", in_turn)
    config = tiny_train(
        tmp_path,
        tiny_cache,
        steps=40,
        block_size=16,
        sampler=training.SamplerConfig(tokens_per_batch=260, num_buckets=3),
        loss=training.LossConfig(gamma=4.0),
        optimizer=training.OptimizerConfig(betas=(0.9, 0.999)),
        noise=training.NoiseConfig(warmup_steps=10),
    )
    train(config)
    names = {f.name for f in look(Run(tmp_path)).findings if f.is_fault}
    assert names >= {
        *("bucket-runs", "gamma-of-another-block-size", "default-betas", "noise-never-moves")
    }


def test_a_run_of_one_bucket(tmp_path: Path) -> None:
    """The seeds' fault: steps of long samples in a row, and a loss that seems to reset."""

    def change(step: int, line: Line) -> Line:
        if 130 <= step < 150:
            line["train/loss"] += (
                BUCKET_LOSS[2] * 0.65 - BUCKET_LOSS[line["train/buckets"][0]] * 0.65
            )
            line["train/buckets"] = [2]
        return line

    faults = {f.name: f for f in look(make_run(tmp_path, change=change)).findings}
    assert set(faults) == {"bucket-runs", "loss-jump"}
    runs, jump = faults["bucket-runs"], faults["loss-jump"]
    ((first, last),) = runs.steps
    assert 127 <= first <= 130
    assert 149 <= last <= 152
    assert "of bucket 2 in a row (share 0.5" in runs.evidence
    assert "at most 3 in proportion" in runs.evidence
    ((first, last),) = jump.steps
    assert 126 <= first <= 132
    assert "coincides with a run of bucket 2 (8 of 8 micro-batches" in jump.evidence
    assert "not with" in jump.evidence
    assert "another length" in jump.advice


def test_a_jump_in_a_run_of_one_bucket_that_its_length_does_not_explain(tmp_path: Path) -> None:
    def change(step: int, line: Line) -> Line:
        if 130 <= step < 150:
            line |= {"train/loss": 9.0, "train/buckets": [2]}
        return line

    faults = {f.name: f for f in look(make_run(tmp_path, change=change)).findings}
    assert set(faults) == {"bucket-runs", "loss-jump"}
    evidence = faults["loss-jump"].evidence
    assert "coincides with a run of bucket 2 (8 of 8 micro-batches" in evidence
    assert "explains 1" in evidence  # between 10 and 19 % of the rise
    assert "see bucket-runs" in faults["loss-jump"].advice


def test_gamma_of_another_block_size(tmp_path: Path) -> None:
    config = make_config(tmp_path, loss=training.LossConfig(gamma=4.0))
    fault = the_fault(make_run(tmp_path, config=config), "gamma-of-another-block-size")
    assert fault.evidence == (
        "gamma 4 at block size 16, published is 7: slots 8-15 carry 15.4% of the weight instead "
        "of 28.4%"
    )
    assert "7" in fault.advice


@pytest.mark.parametrize(("block_size", "gamma"), [(16, 7.0), (10, 5.0), (8, 4.0)])
def test_the_published_gamma_is_fine(tmp_path: Path, block_size: int, gamma: float) -> None:
    config = make_config(tmp_path, loss=training.LossConfig(gamma=gamma))
    config = replace(config, drafter=replace(config.drafter, block_size=block_size))
    assert look(make_run(tmp_path, config=config)).findings == []


def test_a_gamma_that_is_not_used_is_a_note(tmp_path: Path) -> None:
    config = make_config(tmp_path, loss=training.LossConfig(kind="dpace", gamma=4.0))
    diagnosis = look(make_run(tmp_path, config=config))
    assert [(f.severity, f.name) for f in diagnosis.findings] == [("note", "gamma-unused")]
    assert diagnosis.is_healthy


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"betas": (0.9, 0.999)}, ["default-betas"]),
        ({"weight_decay": 0.01}, ["default-weight-decay"]),
        ({"warmup_fraction": 0.0}, ["no-warm-up"]),
        ({"betas": (0.9, 0.999), "weight_decay": 0.01}, ["default-betas", "default-weight-decay"]),
    ],
)
def test_settings_that_are_not_the_recipe(
    tmp_path: Path, settings: dict[str, Any], names: list[str]
) -> None:
    config = make_config(tmp_path, optimizer=training.OptimizerConfig(**settings))
    diagnosis = look(make_run(tmp_path, config=config))
    assert sorted(f.name for f in diagnosis.findings) == names
    for finding in diagnosis.findings:
        assert "recipe" in finding.evidence + finding.advice or "Set" in finding.advice


def test_a_chosen_learning_rate_is_a_note(tmp_path: Path) -> None:
    config = make_config(tmp_path, optimizer=training.OptimizerConfig(lr=2e-3, eps=1e-7))
    diagnosis = look(make_run(tmp_path, config=config))
    (note,) = diagnosis.findings
    assert note.severity == "note"
    assert note.evidence == "lr 0.002 (recipe: 0.0006), eps 1e-07 (recipe: 1e-08)"


def test_an_optimizer_that_is_not_as_configured(tmp_path: Path) -> None:
    """What the live parameter groups said at the checkpoint, not what the file asks for."""
    live = {"groups": [{"betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}]}
    diagnosis = look(make_run(tmp_path, state={"optimizer": live}, saved=[200]))
    (fault,) = diagnosis.findings
    assert (fault.severity, fault.name) == ("error", "optimizer-not-as-configured")
    assert fault.steps == ((200, 200),)
    assert "betas [0.9, 0.999] in force, [0.9, 0.95] configured" in fault.evidence
    assert "weight_decay 0.01 in force, 0.0 configured" in fault.evidence


def test_a_noise_warm_up_that_never_moves(tmp_path: Path) -> None:
    noise = training.NoiseConfig(scale=0.1, warmup_steps=50)

    def change(step: int, line: Line) -> Line:
        return line | {"train/noise_scale": 0.0}

    run = make_run(tmp_path, config=make_config(tmp_path, noise=noise), change=change)
    fault = the_fault(run, "noise-never-moves")
    assert fault.severity == "error"
    assert fault.steps == ((2, 200),)
    assert "from 0 to 0.1 is due by now, and the scale in force is 0 throughout" in fault.evidence


def test_a_noise_schedule_without_a_scale(tmp_path: Path) -> None:
    config = make_config(tmp_path, noise=training.NoiseConfig(warmup_steps=50))
    fault = the_fault(make_run(tmp_path, config=config), "noise-never-moves")
    assert "noise.warmup_steps = 50" in fault.evidence


def test_noise_in_force_that_nobody_asked_for(tmp_path: Path) -> None:
    def change(step: int, line: Line) -> Line:
        return line | {"train/noise_scale": 0.2 if step > 150 else 0.0}

    fault = the_fault(make_run(tmp_path, change=change), "noise-not-as-configured")
    assert (fault.severity, fault.steps) == ("error", ((151, 200),))
    assert "at 50 steps, by up to 0.2" in fault.evidence


def test_a_noise_schedule_that_moves_is_fine(tmp_path: Path) -> None:
    config = make_config(tmp_path, noise=training.NoiseConfig(scale=0.1, warmup_steps=50))
    assert look(make_run(tmp_path, config=config)).findings == []


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nonfinite_weights_in_a_checkpoint(tmp_path: Path, value: float) -> None:
    def poison(step: int, tensors: dict[str, torch.Tensor]) -> None:
        if step == 200:
            tensors["0.weight"][1, :2] = value

    fault = the_fault(make_run(tmp_path, weights=poison), "nonfinite-weights")
    assert fault.steps == ((200, 200),)
    counts = "(2 NaN, 0 Inf)" if value != value else "(0 NaN, 2 Inf)"
    assert f"drafter.safetensors: 0.weight {counts}" in fault.evidence
    assert "checkpoint of step 100" in fault.advice


def test_a_damaged_checkpoint(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    path = tmp_path / "checkpoints" / "step-00000100" / "drafter.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    fault = the_fault(run, "damaged-checkpoint")
    assert fault.steps == ((100, 100),)
    assert "drafter.safetensors: expected sha256" in fault.evidence


def test_a_checkpoint_that_is_rotated_away_meanwhile_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path)
    read = checkpoints.describe

    def describe(path: Path) -> dict[str, Any]:
        if path.name == "step-00000100":
            shutil.rmtree(path)
        return read(path)

    monkeypatch.setattr(checkpoints, "describe", describe)
    view = RunView.read(run)
    assert [held.step for held in view.checkpoints] == [200]
    assert diagnose(view).findings == []


def test_weights_that_do_not_move(tmp_path: Path) -> None:
    def freeze(step: int, tensors: dict[str, torch.Tensor]) -> None:
        for tensor in tensors.values():
            tensor.fill_(1.0)

    fault = the_fault(make_run(tmp_path, weights=freeze), "unmoved-weights")
    assert fault.steps == ((100, 200),)


@pytest.mark.parametrize("saved", [(199, 200), (198, 200)])
def test_a_last_step_whose_learning_rate_is_zero_moves_nothing_by_right(
    tmp_path: Path, saved: tuple[int, int]
) -> None:
    config = make_config(tmp_path)
    config = replace(config, optimizer=replace(config.optimizer, min_lr_fraction=0.0))

    def freeze(step: int, tensors: dict[str, torch.Tensor]) -> None:
        for tensor in tensors.values():
            tensor.fill_(1.0)

    findings = look(make_run(tmp_path, config=config, weights=freeze, saved=saved)).findings
    unmoved = [finding.steps for finding in findings if finding.name == "unmoved-weights"]
    assert unmoved == [((198, 200),)] * (saved[0] == 198)


@pytest.mark.parametrize(("left_out", "is_fault"), [(99, False), (98, True)])
def test_steps_that_were_all_left_out_move_nothing_by_right(
    tmp_path: Path, left_out: int, is_fault: bool
) -> None:
    """The last of the hundred steps has the learning rate 0."""

    def freeze(step: int, tensors: dict[str, torch.Tensor]) -> None:
        for tensor in tensors.values():
            tensor.fill_(1.0)

    run = make_run(tmp_path, weights=freeze, saved=[100])
    make_run(tmp_path, weights=freeze, saved=[200], state={"nonfinite_steps": left_out})
    names = [finding.name for finding in look(run).findings]
    assert ("unmoved-weights" in names) is is_fault


def test_an_optimizer_that_lost_count(tmp_path: Path) -> None:
    """As after a resume that restored the weights and not the moments."""
    run = make_run(tmp_path, state={"nonfinite_steps": 7}, saved=[200])
    fault = the_fault(run, "optimizer-step-count")
    assert fault.evidence == "AdamW counts 200 updates, the run 193"


def test_steps_that_were_not_finite(tmp_path: Path) -> None:
    def change(step: int, line: Line) -> Line:
        if step == 150:
            line |= {"train/loss": float("nan"), "train/grad_norm": float("nan")}
        return line | {"train/nonfinite_steps": int(step >= 150)}

    run = make_run(tmp_path, change=change, saved=[100])
    run.write_nonfinite(150, float("nan"), float("nan"), ["feed" * 8])
    fault = the_fault(run, "nonfinite-steps")
    assert fault.steps == ((150, 150),)
    assert "150: " + "feed" * 8 in fault.evidence


def test_a_step_that_is_finite_when_done_again_is_no_fault(tmp_path: Path) -> None:
    """The run stopped at it; the cache was repaired, and the run resumed."""
    config = make_config(tmp_path)
    run = make_run(tmp_path, until=100, saved=[100], taus=[])
    for step in (90, 101):
        run.write_nonfinite(step, float("nan"), float("nan"), ["feed" * 8])
    run.begin(config, run.require_checkpoint())
    assert the_fault(run, "nonfinite-steps").steps == ((90, 90),)


def at_peak(tmp_path: Path) -> TrainConfig:
    return make_config(tmp_path, steps=1000)  # 40 steps of warm-up


def test_a_jump_at_the_peak_of_the_learning_rate(tmp_path: Path) -> None:
    def change(step: int, line: Line) -> Line:
        if step == 47:
            line["train/grad_norm"] = 60.0
        if 48 <= step < 80:
            line["train/loss"] += 4.0 * float(np.exp(-(step - 48) / 15))
        return line

    run = make_run(tmp_path, config=at_peak(tmp_path), change=change, until=200)
    fault = the_fault(run, "loss-jump")
    ((first, last),) = fault.steps
    assert 46 <= first <= 49
    assert 55 <= last <= 80
    assert "the peak of the learning rate (0.0006)" in fault.evidence
    assert "a gradient norm of 60 at step 47" in fault.evidence
    assert "not with a step that was not finite, a run of one bucket, a restart" in fault.evidence
    assert "lower optimizer.lr" in fault.advice


@pytest.mark.parametrize(
    ("step", "extra", "words", "absent"),
    [
        (101, {}, "the start of an epoch before step 101", "a checkpoint"),
        (151, {}, "a save before step 151", "the start of an epoch"),
        (130, {}, "coincides with nothing known", "a checkpoint"),
    ],
)
def test_a_jump_is_told_with_what_it_coincides(
    tmp_path: Path, step: int, extra: Line, words: str, absent: str
) -> None:
    config = replace(
        at_peak(tmp_path),
        checkpoint=training.CheckpointConfig(every_steps=75 if step == 151 else 60),
    )

    def change(now: int, line: Line) -> Line:
        line["time/checkpoint_seconds"] = 0.0
        if now == 151:
            line["time/checkpoint_seconds"] = 0.01
        if step <= now < step + 20:
            line["train/loss"] += 3.0
        return line | {"train/lr": line["train/lr"]}

    config = replace(config, optimizer=replace(config.optimizer, warmup_fraction=0.5))
    run = make_run(tmp_path, config=config, change=change, until=200, saved=[])
    jumps = [f for f in look(run).findings if f.name == "loss-jump"]
    ((first, last),) = (jump.steps[0] for jump in jumps)
    assert abs(first - step) <= 1
    assert abs(last - step - 19) <= 3
    assert words in jumps[0].evidence
    assert absent in jumps[0].evidence.partition("not with")[2]


def test_a_restart_is_seen(tmp_path: Path) -> None:
    def change(step: int, line: Line) -> Line:
        if step > 120:
            line["time/uptime_seconds"] = STEP_SECONDS * (step - 120)
        return line

    run = make_run(tmp_path, change=change)
    assert RunView.read(run).restarts == [121]
    assert look(run).findings == []


def test_a_falling_queue_is_told_before_it_is_empty(tmp_path: Path) -> None:
    """Of the seeds: 300 -> 220 at constant throughput."""
    config = replace(
        make_config(tmp_path, steps=2000), loader=training.LoaderConfig(queue_batches=300)
    )

    def change(step: int, line: Line) -> Line:
        return line | {"data/queue_depth": 300 - round(80 * step / 200)}

    run = make_run(tmp_path, config=config, change=change, until=200)
    fault = the_fault(run, "queue-falling")
    assert fault.severity == "warning"
    assert fault.steps == ((101, 200),)
    assert "queue depth 260 -> 220 of 300 micro-batches, -48 a minute" in fault.evidence
    assert "empty in 5 min, the run ends in 15 min" in fault.evidence
    assert "1,000 -> 1,000 tokens/s" in fault.evidence


def test_a_queue_that_lasts_to_the_end_is_a_note(tmp_path: Path) -> None:
    config = replace(make_config(tmp_path), loader=training.LoaderConfig(queue_batches=300))

    def change(step: int, line: Line) -> Line:
        return line | {"data/queue_depth": 300 - step}

    diagnosis = look(make_run(tmp_path, config=config, change=change))
    assert [(f.severity, f.name) for f in diagnosis.findings] == [("note", "queue-falling")]


def test_a_queue_that_swings_is_not_called_falling(tmp_path: Path) -> None:
    """A line through its depth falls too, by a small part of what it swings by."""
    config = replace(make_config(tmp_path), loader=training.LoaderConfig(queue_batches=300))

    def change(step: int, line: Line) -> Line:
        return line | {"data/queue_depth": 200 + 90 * (-1) ** step - step // 2}

    assert look(make_run(tmp_path, config=config, change=change)).findings == []


def test_steps_that_wait_for_data(tmp_path: Path) -> None:
    def change(step: int, line: Line) -> Line:
        return line | {"data/queue_depth": 0, "data/wait_share": 0.3}

    fault = the_fault(make_run(tmp_path, change=change), "waiting-for-data")
    assert "28% of the time of all steps, 28 s" in fault.evidence


def test_a_save_that_holds_up_training(tmp_path: Path) -> None:
    """Of the seeds: 167 seconds, every 50 steps here."""

    def change(step: int, line: Line) -> Line:
        late = 167.0 * max(0, (step - 1) // 50)
        line["time/uptime_seconds"] = STEP_SECONDS * step + late
        if line["time/checkpoint_seconds"]:
            line["time/checkpoint_seconds"] = 167.0
        return line

    fault = the_fault(make_run(tmp_path, change=change), "checkpoint-stall")
    assert fault.steps == ((51, 51), (101, 101), (151, 151))
    assert "3 of 3 saves cost more than 5.0 s" in fault.evidence
    assert "the loop stood still for 167.0 s" in fault.evidence


def test_steps_that_are_slow_beside_a_save(tmp_path: Path) -> None:
    def change(step: int, line: Line) -> Line:
        if 101 <= step <= 104:
            line["speed/step_seconds"] = 3.0
        if step >= 101:
            line["time/uptime_seconds"] += 2.5 * min(step - 100, 4)
        return line

    fault = the_fault(make_run(tmp_path, change=change), "checkpoint-stall")
    assert fault.steps == ((101, 101),)
    assert "with the slower steps after it 10.0 s" in fault.evidence


def test_lines_that_are_missing_after_a_save(tmp_path: Path) -> None:
    """Of the seeds: 27 steps were not logged after a save."""
    run = make_run(tmp_path, change=lambda step, line: None if 101 <= step <= 127 else line)
    fault = the_fault(run, "missing-lines")
    assert fault.steps == ((101, 127),)
    assert "27 steps have no line in metrics.jsonl" in fault.evidence
    assert "right after a checkpoint: 101-127" in fault.evidence


@pytest.mark.parametrize(("unlogged", "last"), [(None, 200), ({"train/loss": 1.0}, 199)])
def test_lines_that_are_missing_before_the_newest_checkpoint(
    tmp_path: Path, unlogged: dict[str, float] | None, last: int
) -> None:
    """A save comes after the lines of its steps, but for one that is still to be evaluated."""
    run = make_run(
        tmp_path,
        change=lambda step, line: line if step <= 180 else None,
        state={"unlogged": unlogged},
    )
    assert the_fault(run, "missing-lines").steps == ((181, last),)
    (tmp_path / "metrics.jsonl").unlink()
    assert the_fault(run, "missing-lines").steps == ((1, last),)


def test_broken_lines_and_one_that_is_being_written(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    path = tmp_path / "metrics.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"step": 201, "train/lo')
    assert look(run).findings == []
    data = whole.splitlines(keepends=True)
    data[99] = data[99][:50] + b"\n"
    path.write_bytes(b"".join(data))
    fault = the_fault(run, "missing-lines")
    assert fault.steps == ((100, 100),)
    assert "1 lines are broken" in fault.evidence


def test_a_log_that_falls_silent(tmp_path: Path) -> None:
    def change(step: int, line: Line) -> Line:
        line["time/uptime_seconds"] += 90.0 if step >= 170 else 0.0
        return line

    fault = the_fault(make_run(tmp_path, change=change), "silent-gap")
    assert fault.steps == ((170, 170),)
    assert "before step 170 90 s passed that neither" in fault.evidence
    assert "1 such gaps, 0 of them beside a save" in fault.evidence


def test_a_save_behind_missing_lines(tmp_path: Path) -> None:
    """Of the seeds: the monitor stood still for 167 s, and training went on without lines."""

    def change(step: int, line: Line) -> Line | None:
        line["time/uptime_seconds"] += 167.0 if step > 100 else 0.0
        return None if 101 <= step <= 127 else line

    silent, missing = sorted(
        look(make_run(tmp_path, change=change)).findings, key=lambda f: f.steps
    )[::-1]
    assert (silent.name, missing.name) == ("silent-gap", "missing-lines")
    assert "before step 128 167 s passed" in silent.evidence
    assert "1 such gaps, 1 of them beside a save" in silent.evidence


def test_points_that_wandb_missed(tmp_path: Path) -> None:
    def change(step: int, line: Line) -> Line:
        return line | {"tracking/wandb_dropped": max(0, min(step - 180, 5))}

    fault = the_fault(make_run(tmp_path, change=change), "wandb-gaps")
    assert fault.steps == ((181, 185),)
    assert "W&B missed 5 steps" in fault.evidence


def test_a_learning_rate_that_was_restarted(tmp_path: Path) -> None:
    def change(step: int, line: Line) -> Line:
        return line | ({"train/lr": 1e-5} if step > 150 else {})

    fault = the_fault(make_run(tmp_path, change=change), "learning-rate-not-as-configured")
    assert fault.steps[0][0] == 151


def test_acceptance_that_peaked_early(tmp_path: Path) -> None:
    run = make_run(tmp_path, taus=[(0, 1.0), (100, 1.8), (200, 1.6)])
    fault = the_fault(run, "acceptance-fell")
    assert fault.steps == ((100, 200),)


def test_acceptance_on_other_samples_is_not_compared(tmp_path: Path) -> None:
    """`evaluate.max_samples` may change when a run is resumed."""
    run = make_run(tmp_path, taus=[(0, 1.0), (100, 1.8), (200, 1.6)])
    for step, tau in [(0, 1.0), (100, 1.8)]:
        run.write_evaluation(step, evaluation(tau, num_samples=4, heldout_sha256="cd" * 32))
    diagnosis = look(run)
    assert diagnosis.findings == []
    assert (
        diagnosis.not_checked["held-out acceptance"]
        == "1 evaluations, 2 more on other samples, it takes 3"
    )
    for step in (50, 150):
        run.write_evaluation(step, evaluation(1.6))
    assert look(run).findings == []


def test_a_young_run_says_what_it_could_not_check(tmp_path: Path) -> None:
    diagnosis = look(make_run(tmp_path, until=5, taus=[]))
    assert diagnosis.findings == []
    assert diagnosis.not_checked["loss jumps"] == "5 steps, it takes 40"
    assert diagnosis.not_checked["checkpoint files"] == "no checkpoint yet"


def test_a_run_before_its_first_step(tmp_path: Path) -> None:
    Run(tmp_path).begin(make_config(tmp_path), None)
    diagnosis = look(Run(tmp_path))
    assert diagnosis.findings == []
    assert "gamma" in diagnosis.checked
    assert "gaps in the log" in diagnosis.not_checked


def test_falling_and_noisy_losses_do_not_jump() -> None:
    rng = np.random.default_rng(0)
    for scatter in (0.1, 1.0):
        loss = 3 + 20 * np.exp(-np.arange(5000) / 400) + scatter * rng.standard_normal(5000)
        assert find_jumps(loss) == []


def test_jumps_are_found_where_they_are() -> None:
    rng = np.random.default_rng(1)
    loss = 3 + 0.3 * rng.standard_normal(2000)
    loss[700:760] += 2
    loss[1500:] += 4
    loss[300] = np.nan
    first, second = find_jumps(loss)
    assert (first.start, second.start) == (700, 1500)
    assert 755 <= first.stop <= 765
    assert second.stop == 2000
    assert first.rise == pytest.approx(2, abs=0.4)


def test_steps_are_told_as_ranges() -> None:
    assert ranges([1, 2, 3, 7]) == ((1, 3), (7, 7))
    assert format_steps(ranges([1, 2, 3, 7])) == "steps 1-3, 7"
    assert format_steps(((4, 4),)) == "step 4"
    assert format_steps(()) == "whole run"
    assert format_steps(ranges(range(0, 40, 2))).endswith("and 14 more")


def test_a_finding_is_json(tmp_path: Path) -> None:
    config = make_config(tmp_path, loss=training.LossConfig(gamma=4.0))
    found = json.loads(json.dumps(look(make_run(tmp_path, config=config)).to_dict()))
    assert found["ok"] is False
    assert found["findings"][0]["name"] == "gamma-of-another-block-size"
