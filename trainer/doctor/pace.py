"""Checks of time: the loader's queue, stalls beside a save, and a log that fell silent."""

from itertools import pairwise

import numpy as np

from shared.quantity import duration
from trainer.doctor.finding import Finding, NotCheckedError, ranges
from trainer.doctor.view import Column, RunView

_MIN_STEPS = 64
_FILL_STEPS = 16
"""First steps, in which the queue is being filled."""

_QUEUE_FIT = 0.6
"""Share of the depth's variance that a straight line must explain to be called a trend."""

_QUEUE_DROP = 0.1
"""Share of the queue's capacity that the trend must have cost, and two micro-batches at least."""

_WAIT_SHARE = 0.05
_WAIT_SECONDS = 10.0
_STALL_STEPS = 2.0
_STALL_SECONDS = 5.0
_STALL_WINDOW = 8
"""Steps after a save that may be slowed down by it."""

_SILENT_STEPS = 10.0
_SILENT_SECONDS = 30.0


def queue(view: RunView) -> list[Finding]:
    """A queue of the loader that is being drained, and steps that had to wait for data."""
    steps = view.steps
    steps.require(_MIN_STEPS)
    depth, seconds = steps["data/queue_depth"], steps["speed/step_seconds"]
    return [*_falling(view, depth, seconds), *_waiting(view, seconds)]


def _falling(view: RunView, depth: Column, seconds: Column) -> list[Finding]:
    steps, capacity = view.steps, view.config.loader.queue_batches
    begin = max(_FILL_STEPS, len(steps) // 2)
    time = np.cumsum(seconds)[begin:]
    late = depth[begin:]
    spread = np.ptp(time)
    if spread == 0 or np.ptp(late) == 0:
        return []
    slope, level = np.polyfit(time - time[0], late, 1)
    residual = late - (level + slope * (time - time[0]))
    fit = 1 - residual.var() / late.var()
    drop = -slope * spread
    if drop < max(_QUEUE_DROP * capacity, 2.0) or fit < _QUEUE_FIT:
        return []
    left = float(level + slope * spread)
    to_empty = max(left, 0.0) / -slope
    to_end = (view.config.train.steps - view.last_step) * float(np.median(seconds))
    starves = to_empty < to_end
    speed = steps["speed/tokens_per_second"][begin:]
    quarter = max(1, len(speed) // 4)
    before, after = (float(np.median(part)) for part in (speed[:quarter], speed[-quarter:]))
    return [
        Finding(
            severity="warning" if starves else "note",
            name="queue-falling",
            metric="data/queue_depth",
            steps=((int(steps.step[begin]), int(steps.step[-1])),),
            evidence=f"queue depth {level:.0f} -> {left:.0f} of {capacity} micro-batches, "
            f"{slope * 60:.2g} a minute: empty in {duration(to_empty)}, the run ends in "
            f"{duration(to_end)}. Meanwhile {before:,.0f} -> {after:,.0f} tokens/s: throughput "
            "falls only once the queue is empty",
            advice="The loader reads more slowly than the step consumes: raise "
            "loader.num_threads, or put the cache on faster storage"
            + ("." if starves else "; this run ends before it matters."),
        )
    ]


def _waiting(view: RunView, seconds: Column) -> list[Finding]:
    steps = view.steps
    share = steps["data/wait_share"]
    waited = np.where(np.isfinite(share), share, 0.0) * seconds
    waited[:_FILL_STEPS] = 0
    total, overall = float(waited.sum()), float(waited.sum() / seconds.sum())
    if overall < _WAIT_SHARE or total < _WAIT_SECONDS:
        return []
    return [
        Finding(
            severity="warning",
            name="waiting-for-data",
            metric="data/wait_share",
            steps=ranges(steps.step[share > _WAIT_SHARE].tolist()),
            evidence=f"{overall:.0%} of the time of all steps, {duration(total)}, was spent "
            f"waiting; the queue was empty at {(steps['data/queue_depth'] == 0).mean():.0%} of "
            "the steps",
            advice="Raise loader.num_threads and loader.queue_batches, or put the cache on "
            "faster storage: the device is idle meanwhile.",
        )
    ]


def checkpoint_stalls(view: RunView) -> list[Finding]:
    """Time that saves took from training: the loop held up, and steps slowed down after it."""
    steps = view.steps
    held, seconds = steps["time/checkpoint_seconds"], steps["speed/step_seconds"]
    if not (held > 0).any():
        raise NotCheckedError("no line of a step right after a save")
    usual = float(np.median(seconds))
    limit = max(_STALL_STEPS * usual, _STALL_SECONDS)
    stalls = {}
    for i in np.flatnonzero(held > 0).tolist():
        slowed = seconds[i : i + _STALL_WINDOW] - usual
        stall = held[i] + float(slowed[slowed > usual].sum())
        if stall > limit:
            stalls[int(steps.step[i])] = (held[i], stall)
    if not stalls:
        return []
    worst = max(stalls, key=lambda step: stalls[step][1])
    return [
        Finding(
            severity="warning",
            name="checkpoint-stall",
            metric="time/checkpoint_seconds",
            steps=ranges(stalls),
            evidence=f"{len(stalls)} of {int((held > 0).sum())} saves cost more than {limit:.1f} s "
            f"(a step takes {usual:.2f} s); worst before step {worst}: the loop stood still for "
            f"{stalls[worst][0]:.1f} s, with the slower steps after it {stalls[worst][1]:.1f} s",
            advice="A save runs in the background unless the one before it is unfinished: raise "
            "checkpoint.every_steps, or put the run on a faster disk.",
        )
    ]


def silence(view: RunView) -> list[Finding]:
    """Steps without a line, and time between lines that nothing accounts for."""
    steps = view.steps
    saves = set(view.saved_after)
    findings = []
    ends = [0, *steps.step.tolist()]
    if (logged := _logged_until(view)) > ends[-1]:
        ends.append(logged + 1)
    missing = [(before + 1, after - 1) for before, after in pairwise(ends) if after - before > 1]
    if missing or steps.num_broken:
        after_save = [f"{a}-{b}" for a, b in missing if saves & {a - 2, a - 1, a, a + 1}]
        count = sum(b - a + 1 for a, b in missing)
        findings.append(
            Finding(
                severity="error",
                name="missing-lines",
                steps=tuple(missing),
                evidence=f"{count} steps have no line in metrics.jsonl, {steps.num_broken} lines "
                f"are broken; right after a checkpoint: {', '.join(after_save[:6]) or 'none'}",
                advice="Curves over these steps hide what happened there. Look at the disk; "
                "do not read a jump beside a gap as a change of the model.",
            )
        )
    findings += _dropped(view)
    if "time/uptime_seconds" not in steps.present:
        if findings:
            return findings
        raise NotCheckedError("metrics.jsonl has no time/uptime_seconds")
    uptime, seconds = steps["time/uptime_seconds"], steps["speed/step_seconds"]
    accounted = seconds + steps["time/evaluate_seconds"] + steps["time/checkpoint_seconds"]
    usual = float(np.median(seconds)) if len(steps) else 0.0
    gap = np.diff(uptime) - accounted[1:] - usual * (np.diff(steps.step) - 1)
    silent = np.flatnonzero(gap > max(_SILENT_STEPS * usual, _SILENT_SECONDS)) + 1
    if len(silent):
        worst = int(silent[np.argmax(gap[silent - 1])])
        spans = [(int(steps.step[i - 1]), int(steps.step[i])) for i in silent.tolist()]
        beside = sum(any(a <= saved < b for saved in saves) for a, b in spans)
        findings.append(
            Finding(
                severity="warning",
                name="silent-gap",
                steps=tuple((b, b) for _, b in spans),
                evidence=f"before step {steps.step[worst]} {gap[worst - 1]:.0f} s passed that "
                f"neither steps nor a logged evaluation or save account for; {len(spans)} such "
                f"gaps, {beside} of them beside a save",
                advice="Was the process suspended, or the disk of metrics.jsonl blocked? Beside "
                "a save, it is the save that holds things up.",
            )
        )
    return findings


def _logged_until(view: RunView) -> int:
    """The last step of which there must be a line: a save comes after the lines of its steps."""
    return max(
        (
            held.step - (held.payload["state"].get("unlogged") is not None)
            for held in view.checkpoints
            if held.payload
        ),
        default=0,
    )


def _dropped(view: RunView) -> list[Finding]:
    if "tracking/wandb_dropped" not in view.steps.present:
        return []
    dropped = view.steps["tracking/wandb_dropped"]
    more = np.flatnonzero(np.diff(dropped, prepend=0.0) > 0)
    if not len(more):
        return []
    return [
        Finding(
            severity="warning",
            name="wandb-gaps",
            steps=ranges(view.steps.step[more].tolist()),
            evidence=f"W&B missed {np.nanmax(dropped):.0f} steps",
            advice="metrics.jsonl has all of them: read curves from there, or from --html.",
        )
    ]
