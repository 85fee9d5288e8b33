"""Checks of the checkpoints, and of what never reached the weights."""

from itertools import pairwise

import numpy as np

from trainer.checkpoint import DRAFTER, OPTIMIZER
from trainer.doctor.finding import Finding, NotCheckedError, ranges
from trainer.doctor.view import CheckpointView, RunView
from trainer.optim import learning_rate
from trainer.tensors import TensorFacts

_FEW_TENSORS = 3


def damaged_checkpoints(view: RunView) -> list[Finding]:
    """Files that do not match their digests."""
    _require_checkpoints(view)
    return [
        Finding(
            severity="error",
            name="damaged-checkpoint",
            steps=((held.step, held.step),),
            evidence=held.damage,
            advice="A resume falls back to the checkpoint before it. Delete this one, and look at "
            "the disk it lies on.",
        )
        for held in view.checkpoints
        if held.damage is not None
    ]


def nonfinite_weights(view: RunView) -> list[Finding]:
    """NaN and infinity in the weights or the moments of any checkpoint."""
    _require_checkpoints(view)
    whole_until = 0
    findings = []
    for held in view.checkpoints:
        bad = {
            DRAFTER: [facts for facts in held.drafter if facts.num_nonfinite],
            OPTIMIZER: [facts for facts in held.optimizer if facts.num_nonfinite],
        }
        if not any(bad.values()):
            if held.damage is None:
                whole_until = held.step
            continue
        back = (
            f"go back to the checkpoint of step {whole_until}, the last one without"
            if whole_until
            else "no earlier checkpoint is there: begin anew with --fresh"
        )
        findings.append(
            Finding(
                severity="error",
                name="nonfinite-weights",
                steps=((held.step, held.step),),
                evidence="; ".join(
                    f"{file}: {_named(facts)}" for file, facts in bad.items() if facts
                ),
                advice=f"Nothing trained from here on is of use: {back}. Look for the first step "
                f"after {whole_until} whose gradient norm jumps, and at its samples.",
            )
        )
    return findings


def unmoved_weights(view: RunView) -> list[Finding]:
    """Neighbouring checkpoints that hold the same weights, and optimizers that lost count."""
    _require_checkpoints(view)
    findings = []
    whole = [held for held in view.checkpoints if held.damage is None]
    for before, after in pairwise(whole):
        first, second = (held.payload["files"][DRAFTER]["sha256"] for held in (before, after))
        if first == second and _num_moves(view, before, after) > 0:
            findings.append(
                Finding(
                    severity="error",
                    name="unmoved-weights",
                    steps=((before.step, after.step),),
                    evidence=f"the checkpoints of steps {before.step} and {after.step} hold the "
                    "same weights, bit for bit",
                    advice="The optimizer does not reach the drafter: look at the learning rate "
                    "in force and at train/nonfinite_steps.",
                )
            )
    for held in whole:
        expected = held.step - held.payload["state"].get("nonfinite_steps", 0)
        counted = [facts.largest for facts in held.optimizer if facts.name.startswith("step.")]
        if counted and max(counted) != expected:
            findings.append(
                Finding(
                    severity="error",
                    name="optimizer-step-count",
                    steps=((held.step, held.step),),
                    evidence=f"AdamW counts {max(counted):g} updates, the run {expected}",
                    advice="The moments are not those of this run, so their bias correction is "
                    "wrong: begin anew, or resume from a checkpoint where the two agree.",
                )
            )
    return findings


def _num_moves(view: RunView, before: CheckpointView, after: CheckpointView) -> int:
    """Steps between two checkpoints that should have moved the weights."""
    config = view.config
    is_still = [
        learning_rate(step, config.train.steps, config.optimizer) == 0.0
        for step in range(before.step, after.step)
    ]
    left_out = [int(held.payload["state"].get("nonfinite_steps", 0)) for held in (before, after)]
    return len(is_still) - sum(is_still) - (left_out[1] - left_out[0])


def nonfinite_steps(view: RunView) -> list[Finding]:
    """Steps whose loss or gradient was not finite; they never reached the weights."""
    steps = view.steps
    is_null = ~np.isfinite(steps["train/loss"]) | ~np.isfinite(steps["train/grad_norm"])
    bad = sorted({*steps.step[is_null].tolist(), *view.nonfinite})
    if not bad:
        return []
    named = [f"{step}: {', '.join(ids[:4])}" for step, ids in list(view.nonfinite.items())[:3]]
    return [
        Finding(
            severity="error",
            name="nonfinite-steps",
            steps=ranges(bad),
            evidence=f"loss or gradient norm not finite at {len(bad)} steps, which were not "
            f"applied; samples of step {'; '.join(named) if named else 'unknown'}",
            advice="Look at these samples (RUN/nonfinite-*.json has all ids) and at the gradient "
            "norm before them; train.on_nonfinite = 'skip' leaves such steps out.",
        )
    ]


def _require_checkpoints(view: RunView) -> None:
    if not view.checkpoints:
        raise NotCheckedError("no checkpoint yet")


def _named(bad: list[TensorFacts]) -> str:
    shown = [f"{facts.name} ({facts.num_nan} NaN, {facts.num_inf} Inf)" for facts in bad]
    more = f" and {len(bad) - _FEW_TENSORS} more tensors" if len(bad) > _FEW_TENSORS else ""
    return ", ".join(shown[:_FEW_TENSORS]) + more
