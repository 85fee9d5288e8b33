"""Labels spread in proportion: no bucket runs, none is late."""

from heapq import heappop, heappush
from itertools import pairwise

import numpy as np


def interleave(count: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Labels 0..k-1, label j `count[j]` times, spread in proportion, int64 [sum of counts].

    After t labels, label j has appeared t * p_j times with an error of at most
    1 - 1/(2k - 2) for every t and j, where p_j is its share. Ties are broken at random.

    The i-th of label j may come from slot ceil((i - 1 + d) / p_j) to slot
    floor((i - d) / p_j) + 1, d = 1/(2k - 2), which is the bound spelt out. Tijdeman shows that
    some order meets all of these, and then serving the earliest deadline does, whatever the
    ties. The bound is symmetric, so half of the seeds read the order backwards.

    Source: R. Tijdeman, The chairman assignment problem, Discrete Mathematics 32 (1980).
    """
    num_labels, total = len(count), int(count.sum())
    if num_labels == 1:
        return np.zeros(total, dtype=np.int64)
    scale = 2 * num_labels - 2
    label = np.repeat(np.arange(num_labels), count)
    ordinal = np.arange(1, total + 1) - np.repeat(np.cumsum(count) - count, count)
    per_label = scale * count[label]
    release = -(-((ordinal - 1) * scale + 1) * total // per_label)
    deadline = (ordinal * scale - 1) * total // per_label + 1
    key = (deadline * total + rng.permutation(total)) * num_labels + label
    by_release = np.argsort(release, kind="stable")
    released = np.searchsorted(release[by_release], np.arange(1, total + 1), side="right")
    keys = key[by_release].tolist()
    waiting: list[int] = []
    served: list[int] = []
    for start, stop in pairwise([0, *released.tolist()]):
        for entry in keys[start:stop]:
            heappush(waiting, entry)
        served.append(heappop(waiting) % num_labels)
    step = -1 if rng.integers(2) else 1
    return np.array(served, dtype=np.int64)[::step]
