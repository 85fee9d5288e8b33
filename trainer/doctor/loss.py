"""Checks of the loss: its jumps with what they coincide with, and held-out acceptance that falls
while the training loss does."""

import math
from collections import Counter

import numpy as np

from trainer.doctor.buckets import long_runs
from trainer.doctor.finding import Finding, NotCheckedError
from trainer.doctor.jumps import (
    MIN_HISTORY,
    WINDOW,
    Jump,
    expected,
    filled,
    find_jumps,
    level_by_bucket,
)
from trainer.doctor.view import RunView
from trainer.run import on_same_samples

_NEAR_STEPS = 4
"""How close in steps a save, a restart or the start of an epoch counts as coincident."""

_SPIKE = 5.0
"""A gradient norm this many times the median of the 64 before it is a spike."""

_PEAK = 0.98
"""Share of the peak learning rate that counts as the peak."""

_EXPLAINED = 0.5
"""Share of a rise that the mix of buckets must explain to be its cause."""

_ACCEPTANCE_LOST = 0.03

_ADVICE = {
    "nonfinite": "A step was not finite: look at its samples in RUN/nonfinite-*.json first.",
    "buckets": "The drafter did not get worse: these batches are of another length. Read the "
    "curves per bucket; raise train.batches_per_step, so that a step mixes buckets.",
    "run": "These batches are of one length in a row, and their loss is above what that length "
    "had before: see bucket-runs, and evaluate the checkpoints before and after.",
    "peak": "The steps are too long for the weights: lower optimizer.lr, or raise "
    "optimizer.warmup_fraction; with betas (0.9, 0.999) first go back to the recipe's.",
    "gradient": "A few samples drove it: `train/samples` of these lines in metrics.jsonl has "
    "their ids. Look at them; leave them out (cache.exclude), or lower optimizer.max_grad_norm.",
    "restart": "Another process went on here: compare its settings and cache with those of the "
    "checkpoint that it started from.",
    "epoch": "The order of an epoch starts here: compare the buckets and sources of its first "
    "steps with those before.",
    "checkpoint": "A save must not touch the weights: if the loss is that of earlier steps, "
    "something restored them.",
    "none": "Look at the samples of these lines (`train/samples` in metrics.jsonl), and at the "
    "evaluations before and after.",
}


def loss_jumps(view: RunView) -> list[Finding]:
    """Rises of the training loss, and what happened at the same steps."""
    view.steps.require(MIN_HISTORY + WINDOW)
    loss = view.steps["train/loss"]
    return [_explain(view, jump) for jump in find_jumps(loss)]


def _explain(view: RunView, jump: Jump) -> Finding:
    steps = view.steps
    step = int(steps.step[jump.start])
    last = int(steps.step[min(jump.stop, len(steps)) - 1])
    causes = _causes(view, jump, step)
    elsewhere = [name for name, what in causes.items() if what is None]
    found = {name: what for name, what in causes.items() if what is not None}
    lasted = (
        f"back after {jump.stop - jump.start} steps"
        if jump.stop < len(steps)
        else "not back by the last line"
    )
    evidence = (
        f"loss {jump.before:.3g} -> {jump.after:.3g} (mean of {WINDOW} steps), {lasted}; "
        f"coincides with {' and '.join(found.values()) or 'nothing known'}"
    )
    if elsewhere:
        evidence += f"; not with {', '.join(_NAMES[name] for name in elsewhere)}"
    return Finding(
        severity="warning",
        name="loss-jump",
        steps=((step, max(step, last)),),
        evidence=evidence,
        advice=_ADVICE[next((name for name in _ADVICE if name in found), "none")],
    )


_NAMES = {
    "nonfinite": "a step that was not finite",
    "buckets": "a run of one bucket",
    "peak": "the peak of the learning rate",
    "gradient": "a spike of the gradient norm",
    "restart": "a restart",
    "epoch": "the start of an epoch",
    "checkpoint": "a checkpoint",
}


def _causes(view: RunView, jump: Jump, step: int) -> dict[str, str | None]:
    """What is known to happen at `jump`, and None for what was looked for and is not there."""
    steps = view.steps
    causes: dict[str, str | None] = dict.fromkeys(_NAMES)
    lo, hi = max(0, jump.start - _NEAR_STEPS), min(len(steps), jump.start + WINDOW)

    near = [bad for bad in _nonfinite(view) if -_NEAR_STEPS <= step - bad <= WINDOW]
    if near:
        causes["nonfinite"] = f"step {near[0]}, which was not finite"
    if (bucket_cause := _bucket_cause(view, jump)) is not None:
        del causes["buckets"]
        key, words = bucket_cause
        causes[key] = words
    lr = steps["train/lr"]
    if lr[jump.start] >= _PEAK * view.config.optimizer.lr:
        causes["peak"] = f"the peak of the learning rate ({lr[jump.start]:.3g})"
    norm = steps["train/grad_norm"]
    usual = float(np.nanmedian(norm[max(0, lo - 64) : max(lo, 1)]))
    if math.isfinite(usual) and (worst := float(np.nanmax(norm[lo:hi]))) > _SPIKE * usual:
        at = steps.step[lo + int(np.nanargmax(norm[lo:hi]))]
        causes["gradient"] = (
            f"a gradient norm of {worst:.3g} at step {at} ({worst / usual:.0f} times the median "
            "before)"
        )
    epoch = steps["train/epoch"]
    starts = {
        "epoch": steps.step[1:][np.diff(epoch) > 0].tolist(),
        "restart": view.restarts,
        "checkpoint": [saved + 1 for saved in view.saved_after],
    }
    told = {"epoch": "the start of an epoch", "restart": "a restart", "checkpoint": "a save"}
    for name, places in starts.items():
        nearest = min(places, key=lambda place: abs(place - step), default=None)
        if nearest is not None and abs(nearest - step) <= _NEAR_STEPS:
            causes[name] = f"{told[name]} before step {nearest}"
    return causes


def _nonfinite(view: RunView) -> list[int]:
    count = view.steps.columns["train/nonfinite_steps"]
    return sorted({*view.steps.step[1:][np.diff(count) > 0].tolist(), *view.nonfinite})


def _bucket_cause(view: RunView, jump: Jump) -> tuple[str, str] | None:
    """Key and words, if the steps of `jump` are a run of one bucket, or if the losses that the
    buckets had before explain most of the rise."""
    steps = view.steps
    loss = filled(steps["train/loss"])
    stop = jump.start + WINDOW
    levels = level_by_bucket(loss, steps.buckets, jump.start)
    share = (expected(levels, steps.buckets, jump.start, stop) - jump.before) / jump.rise
    counts = Counter(bucket for step in steps.buckets[jump.start : stop] for bucket in step)
    if not counts:
        return None
    is_explained = share > _EXPLAINED  # False for NaN: a bucket that was not there before
    first, last = steps.step[jump.start], steps.step[min(stop, len(steps)) - 1]
    is_run = any(a <= last and first <= b for _, _, a, b in long_runs(view))
    if not is_run and not is_explained:
        return None
    bucket, count = counts.most_common(1)[0]
    return (
        "buckets" if is_explained else "run",
        f"a run of bucket {bucket} ({count} of {counts.total()} micro-batches, loss "
        f"{levels.get(bucket, math.nan):.3g} before; the mix alone explains {share:.0%} of the "
        "rise)",
    )


def heldout_acceptance(view: RunView) -> list[Finding]:
    """Held-out acceptance that peaked before the end, on the samples of the last evaluation."""
    alike = on_same_samples(view.evaluations)
    tau = [(int(e["step"]), e["tau_walk"]) for e in alike if e.get("tau_walk")]
    if len(tau) < 3:
        others = len(view.evaluations) - len(alike)
        words = f", {others} more on other samples" if others else ""
        raise NotCheckedError(f"{len(tau)} evaluations{words}, it takes 3")
    best_step, best = max(tau, key=lambda pair: pair[1])
    last_step, last = tau[-1]
    if last >= (1 - _ACCEPTANCE_LOST) * best:
        return []
    return [
        Finding(
            severity="warning",
            name="acceptance-fell",
            metric="heldout/tau_walk",
            steps=((best_step, last_step),),
            evidence=f"held-out walk acceptance length {best:.3f} at step {best_step}, {last:.3f} "
            f"at step {last_step}",
            advice="The drafter overfits or was disturbed: `trainer export --checkpoint best` "
            "takes the one that scored best. More data, fewer epochs, or train.steps nearer the "
            "best step.",
        )
    ]
