"""Where the loader's queue is heading: a falling one starves the trainer sooner or later."""

import math
from collections import deque

import numpy as np

WINDOW_STEPS = 64
"""Steps that the slope is fitted to."""


class QueueTrend:
    """A straight line through the queue's depth over the last `WINDOW_STEPS` steps."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=WINDOW_STEPS)
        self._depth: deque[int] = deque(maxlen=WINDOW_STEPS)

    def add(self, seconds: float, depth: int) -> None:
        """Note the depth, in micro-batches, at a time that only rises."""
        self._seconds.append(seconds)
        self._depth.append(depth)

    @property
    def slope(self) -> float:
        """Micro-batches per second, negative while it drains; NaN before the second step."""
        seconds = np.array(self._seconds) - np.mean(self._seconds)
        spread = float(seconds @ seconds)
        # Around its mean: rounding would give a steady queue a slope, and millions of years.
        depth = np.array(self._depth) - np.mean(self._depth)
        return float(seconds @ depth) / spread if spread > 0 else math.nan

    @property
    def seconds_to_empty(self) -> float:
        """Seconds until nothing is left if it goes on like this; NaN while it does not drain."""
        slope = self.slope
        return self._depth[-1] / -slope if slope < 0 else math.nan
