"""Whole samples into micro-batches under a token budget."""

from bisect import bisect_left, bisect_right, insort
from collections import deque

import numpy as np

RESERVE_SAMPLES = 64
"""Samples held back to close the gaps of micro-batches."""


def fill_batches(length: np.ndarray, budget: int) -> tuple[np.ndarray, np.ndarray]:
    """Order (indices into the shuffled `length`) and sizes of batches of at most `budget` tokens.

    A micro-batch starts with the sample held longest in the reserve, goes on with the run of
    samples next in order that fits, and is topped up with the longest of the reserve that fit.
    Starting with the oldest keeps the reserve from filling with samples that never fit.
    """
    num_samples = len(length)
    tokens = length.tolist()
    total = [0, *np.cumsum(length).tolist()]
    upcoming = min(num_samples, RESERVE_SAMPLES)
    # One integer per sample that sorts by length, then by position.
    reserve = sorted(tokens[i] * num_samples + i for i in range(upcoming))
    by_age = deque(range(upcoming))
    is_held = bytearray(b"\1" * num_samples)
    order: list[int] = []
    size: list[int] = []
    while reserve:
        start = len(order)
        while not is_held[by_age[0]]:
            by_age.popleft()
        oldest = by_age.popleft()
        del reserve[bisect_left(reserve, tokens[oldest] * num_samples + oldest)]
        order.append(oldest)
        left = budget - tokens[oldest]
        stop = bisect_right(total, total[upcoming] + left, lo=upcoming) - 1
        order.extend(range(upcoming, stop))
        left -= total[stop] - total[upcoming]
        upcoming = stop
        while fitting := bisect_left(reserve, (left + 1) * num_samples):
            held = reserve.pop(fitting - 1) % num_samples
            is_held[held] = 0
            order.append(held)
            left -= tokens[held]
        while len(reserve) < RESERVE_SAMPLES and upcoming < num_samples:
            insort(reserve, tokens[upcoming] * num_samples + upcoming)
            by_age.append(upcoming)
            upcoming += 1
        size.append(len(order) - start)
    return np.array(order, dtype=np.int64), np.array(size, dtype=np.int64)
