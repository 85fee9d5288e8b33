"""Where a loss jumps: eight steps well above what eight steps were before.

Means over a window are compared, not steps: batches of other lengths scatter single steps by more
than a reset of the drafter would.
"""

import math
from dataclasses import dataclass

import numpy as np

from trainer.doctor.view import Column

WINDOW = 8
"""Steps whose mean is compared."""

LEVEL_STEPS = 32
"""Steps before, whose median mean is the level that the loss has reached."""

HISTORY_STEPS = 256
"""Steps before, from which the scatter of such means is taken."""

MIN_HISTORY = 32
_DEVIATIONS = 6.0
_RELATIVE_RISE = 0.1
"""A jump is a rise by this many robust deviations and by this share of the level, both."""


@dataclass(frozen=True, slots=True)
class Jump:
    """A rise of the loss. Positions count lines, not steps."""

    start: int
    stop: int
    """The first line that is back at the level, or the number of lines."""

    before: float
    after: float
    """Mean of the `WINDOW` steps from `start`."""

    @property
    def rise(self) -> float:
        return self.after - self.before


def filled(loss: Column) -> Column:
    """`loss` with the value before in the place of each NaN."""
    known = np.where(np.isfinite(loss), np.arange(len(loss)), -1)
    last = np.maximum.accumulate(known)
    first = np.flatnonzero(known >= 0)
    return loss[np.where(last < 0, first[0] if len(first) else 0, last)]


def find_jumps(loss: Column) -> list[Jump]:
    """The jumps of `loss`, float64 [N], in order and without overlap."""
    loss = filled(loss)
    if len(loss) < MIN_HISTORY + WINDOW or not np.isfinite(loss).all():
        return []
    mean = np.convolve(loss, np.full(WINDOW, 1 / WINDOW), "valid")  # [i] is of i .. i+WINDOW-1
    found: list[Jump] = []
    i = MIN_HISTORY
    while i < len(mean):
        history = mean[max(0, i - HISTORY_STEPS) : i - WINDOW + 1]
        level = float(np.median(history[-LEVEL_STEPS:]))
        # Of differences between neighbouring windows, so that a falling loss does not widen it.
        change = history[WINDOW:] - history[:-WINDOW]
        scatter = float(np.median(np.abs(change - np.median(change)))) * 1.4826 / math.sqrt(2)
        threshold = max(_DEVIATIONS * scatter, _RELATIVE_RISE * abs(level))
        if mean[i] - level <= threshold:
            i += 1
            continue
        # The window touches the jump: it starts where before and after differ most.
        candidates = range(i, min(i + WINDOW, len(mean)))
        start = max(candidates, key=lambda j: mean[j] - mean[j - WINDOW])
        back = np.flatnonzero(mean[start:] - level <= threshold / 2)
        stop = start + int(back[0]) if len(back) else len(loss)
        found.append(Jump(start, stop, level, float(mean[start])))
        i = max(stop, start + 1) + WINDOW
    return found


def level_by_bucket(
    loss: Column, buckets: list[tuple[int, ...]], until: int, history: int = HISTORY_STEPS
) -> dict[int, float]:
    """Loss of each length bucket before line `until`: least squares over its steps' mixtures."""
    begin = max(0, until - history)
    names = sorted({bucket for step in buckets[begin:until] for bucket in step})
    if not names:
        return {}
    mix = np.array(
        [[step.count(name) / max(len(step), 1) for name in names] for step in buckets[begin:until]]
    )
    level, *_ = np.linalg.lstsq(mix, loss[begin:until], rcond=None)
    return dict(zip(names, level.tolist(), strict=True))


def expected(
    levels: dict[int, float], buckets: list[tuple[int, ...]], start: int, stop: int
) -> float:
    """Mean loss that the buckets of lines `start` to `stop` alone explain; NaN for a new one."""
    values = [levels.get(bucket, np.nan) for step in buckets[start:stop] for bucket in step]
    return float(np.mean(values)) if values else float("nan")
