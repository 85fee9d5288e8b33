"""The order in which samples are trained: a pure function of lengths, config, seed and epoch.

Samples are bucketed by length and shuffled within their bucket; whole samples of one bucket
are packed into micro-batches; the micro-batches of all buckets are interleaved in proportion.
The training stream is the epochs one after another, and no state is kept: resuming at a
micro-batch is asking for the stream from there.

Guarantees: every sample once per epoch, tails included; no micro-batch above the budget; with
k > 1 buckets in use, any window, also across two epochs of equal shares, holds each bucket
within 2 - 1/(k-1) micro-batches of its share. So a bucket of share p is never served more
than (2 - 1/(k-1)) / (1 - p) times in a row.
"""

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from trainer.config import SamplerConfig

RESERVE_SAMPLES = 64
"""Samples that a bucket holds back to close the gaps of its micro-batches."""

REPORT_WINDOW_BATCHES = 32


@dataclass(frozen=True, eq=False, slots=True)
class EpochPlan:
    """One epoch in training order."""

    sample: np.ndarray
    """int64 [n]: indices of the samples, every one once."""

    offset: np.ndarray
    """int64 [m + 1]: micro-batch i is `sample[offset[i] : offset[i + 1]]`."""

    bucket: np.ndarray
    """int16 [m]: bucket of each micro-batch, an index into the intervals of `edge`."""

    edge: np.ndarray
    """int64 [k + 1]: bucket j holds lengths in (edge[j], edge[j + 1]]; the outermost take all."""

    tokens_per_batch: int

    def __len__(self) -> int:
        return len(self.bucket)

    def batch(self, index: int) -> np.ndarray:
        """Indices of the samples of micro-batch `index`, int64."""
        if not 0 <= index < len(self):
            raise IndexError(f"micro-batch {index} of an epoch of {len(self)}")
        return self.sample[self.offset[index] : self.offset[index + 1]]


class PlannedBatch(NamedTuple):
    """One micro-batch of the stream."""

    epoch: int
    position: int
    """Place within the epoch."""

    bucket: int
    sample: np.ndarray


@dataclass(frozen=True, slots=True)
class OrderReport:
    """What an epoch's order looks like, to be printed before training."""

    num_samples: int
    num_tokens: int
    num_batches: int
    longest_run: int
    """Most micro-batches of one bucket in a row."""

    window_kl: float
    """Mean divergence (nats) of the buckets of a sliding window from those of the epoch."""

    fill: float
    """Tokens over the tokens that all micro-batches could hold; the rest is padding."""

    share: tuple[float, ...]
    """Share of each bucket in the micro-batches."""

    def __str__(self) -> str:
        return (
            f"{self.num_samples} samples, {self.num_tokens} tokens in {self.num_batches} "
            f"micro-batches, {self.fill:.1%} full; longest run of a bucket {self.longest_run}, "
            f"window divergence {self.window_kl:.4f} nats"
        )


def bucket_edges(length: np.ndarray, config: SamplerConfig) -> np.ndarray:
    """Edges of the length buckets, int64 [k + 1], ascending.

    Without `config.bucket_edges`, buckets hold equal numbers of *tokens*, so that they make
    about equally many micro-batches; equal edges collapse into one.

    Raises:
        ValueError: `config.bucket_edges` has a single edge.
    """
    if len(config.bucket_edges) == 1:
        raise ValueError(
            f"bucket_edges needs a lower and an upper edge, got {list(config.bucket_edges)}"
        )
    if config.bucket_edges:
        return np.array(config.bucket_edges, dtype=np.int64)
    ordered = np.sort(length).astype(np.int64)
    tokens = np.cumsum(ordered)
    part = np.arange(1, config.num_buckets + 1)
    # Integers: a rounded-up float target could exceed the total and run past the last sample.
    target = -(-tokens[-1] * part // config.num_buckets)
    return np.unique(np.concatenate([[0], ordered[np.searchsorted(tokens, target)]]))


def epoch_batches(length: np.ndarray, config: SamplerConfig, *, seed: int, epoch: int) -> EpochPlan:
    """Plan of `epoch`; `length` is int64 [n], the tokens of each sample.

    Every epoch shuffles anew, so micro-batches differ in their samples and not only in order.

    Raises:
        ValueError: there is no sample, one is empty, or one alone exceeds `tokens_per_batch`.
    """
    _check(length, config.tokens_per_batch)
    rng = np.random.default_rng((seed, epoch))
    edge = bucket_edges(length, config)
    bucket = np.clip(np.searchsorted(edge, length) - 1, 0, len(edge) - 2)
    used = np.unique(bucket)
    packed, sizes = [], []
    for j in used:
        member = rng.permutation(np.flatnonzero(bucket == j))
        order, size = _fill(length[member], config.tokens_per_batch)
        packed.append(member[order])
        sizes.append(size)
    num_batches = np.array([len(size) for size in sizes])
    label = interleave(num_batches, rng)
    # Batches within a bucket are shuffled too: its last ones are emptier than the others.
    source = np.empty(len(label), dtype=np.int64)
    first = np.cumsum(num_batches) - num_batches
    for j, count in enumerate(num_batches):
        source[label == j] = first[j] + rng.permutation(count)
    size = np.concatenate(sizes)
    start = np.cumsum(size) - size
    offset = np.concatenate([[0], np.cumsum(size[source])])
    gather = np.repeat(start[source] - offset[:-1], size[source]) + np.arange(len(length))
    return EpochPlan(
        sample=np.concatenate(packed)[gather],
        offset=offset,
        bucket=used[label].astype(np.int16),
        edge=edge,
        tokens_per_batch=config.tokens_per_batch,
    )


def _check(length: np.ndarray, tokens_per_batch: int) -> None:
    if len(length) == 0:
        raise ValueError("there is no sample to train on. Check the cache's sources and split.")
    for index, what in (
        (int(length.argmin()), "is empty. Repair the cache"),
        (int(length.argmax()), f"exceeds tokens_per_batch = {tokens_per_batch}. Raise it"),
    ):
        if not 1 <= length[index] <= tokens_per_batch:
            raise ValueError(f"sample {index} of {length[index]} tokens {what}.")


def _fill(length: np.ndarray, budget: int) -> tuple[np.ndarray, np.ndarray]:
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


def iterate(
    length: np.ndarray, config: SamplerConfig, *, seed: int, start_batch: int = 0
) -> Iterator[PlannedBatch]:
    """The endless stream of micro-batches from `start_batch` on, counted over all epochs.

    Epochs follow without a gap. Optimizer step t takes micro-batches t*G..(t+1)*G-1, so
    resuming at step t is `start_batch=t * G`. Epochs before it are planned, since the number of
    micro-batches may differ by a few between epochs; no data is read.

    Raises:
        ValueError: `start_batch` is negative, or see `epoch_batches`.
    """
    if start_batch < 0:
        raise ValueError(f"start_batch must not be negative, got {start_batch}")
    epoch = 0
    while True:
        plan = epoch_batches(length, config, seed=seed, epoch=epoch)
        for i in range(start_batch, len(plan)):
            yield PlannedBatch(epoch, i, int(plan.bucket[i]), plan.batch(i))
        start_batch = max(0, start_batch - len(plan))
        epoch += 1


def window_kl(label: np.ndarray, window: int) -> float:
    """Mean over all windows of KL(labels of the window || labels of the whole), in nats.

    An independent shuffle of k labels measures about (k - 1) / (2 * window).
    """
    window = min(window, len(label))
    divergence = np.zeros(len(label) - window + 1)
    for value in np.unique(label):
        seen = np.concatenate([[0], np.cumsum(label == value)])
        share = (seen[window:] - seen[:-window]) / window
        ratio = share * len(label) / seen[-1]
        divergence += share * np.log(ratio, where=share > 0, out=np.zeros_like(share))
    return float(divergence.mean())


def order_report(plan: EpochPlan, length: np.ndarray) -> OrderReport:
    """Measure `plan`; `length` is what it was made from."""
    run = np.diff(np.flatnonzero(np.diff(plan.bucket, prepend=-1, append=-1)))
    num_tokens = int(length[plan.sample].sum())
    share = np.bincount(plan.bucket, minlength=len(plan.edge) - 1) / len(plan)
    return OrderReport(
        num_samples=len(plan.sample),
        num_tokens=num_tokens,
        num_batches=len(plan),
        longest_run=int(run.max()),
        window_kl=window_kl(plan.bucket, REPORT_WINDOW_BATCHES),
        fill=num_tokens / (len(plan) * plan.tokens_per_batch),
        share=tuple(share.tolist()),
    )
