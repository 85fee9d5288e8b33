"""The order in which samples are trained: a pure function of lengths, config, seed and epoch.

Samples are bucketed by length and shuffled within their bucket; whole samples of one bucket
are packed into micro-batches; the micro-batches of all buckets are interleaved in proportion.
The training stream is the epochs one after another, and no state is kept: resuming at a
micro-batch is asking for the stream from there.

Guarantees: every sample once per epoch, tails included; no micro-batch above the budget; with
k > 1 buckets in use, any window, also across two epochs of equal shares, holds each bucket
within 2 - 1/(k-1) micro-batches of its share. So a bucket of share p is never served more
than (2 - 1/(k-1)) / (1 - p) times in a row.

With `shards_in_flight` the samples of a bucket are drawn from a few shards until these are used
up, then from the next few. What is said above still holds.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from trainer.config import SamplerConfig
from trainer.interleave import interleave
from trainer.packing import fill_batches


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


def bucket_edges(length: np.ndarray, config: SamplerConfig) -> np.ndarray:
    """Edges of the length buckets, int64 [k + 1], ascending.

    Without `config.bucket_edges`, buckets hold equal numbers of *tokens*, so that they make
    about equally many micro-batches; equal edges collapse into one.
    """
    if config.bucket_edges:
        return np.array(config.bucket_edges, dtype=np.int64)
    ordered = np.sort(length).astype(np.int64)
    tokens = np.cumsum(ordered)
    part = np.arange(1, config.num_buckets + 1)
    # Integers: a rounded-up float target could exceed the total and run past the last sample.
    target = -(-tokens[-1] * part // config.num_buckets)
    return np.unique(np.concatenate([[0], ordered[np.searchsorted(tokens, target)]]))


def epoch_batches(
    length: np.ndarray,
    config: SamplerConfig,
    *,
    seed: int,
    epoch: int,
    shard: np.ndarray | None = None,
) -> EpochPlan:
    """Plan of `epoch`.

    Every epoch shuffles anew, so micro-batches differ in their samples and not only in order.

    Args:
        length: int64 [n], the tokens of each sample.
        shard: integers [n], where each of them lies; heeded if `config.shards_in_flight` is set.

    Raises:
        ValueError: there is no sample, one is empty, or one alone exceeds `tokens_per_batch`.
    """
    _check(length, config.tokens_per_batch)
    rng = np.random.default_rng((seed, epoch))
    edge = bucket_edges(length, config)
    bucket = np.clip(np.searchsorted(edge, length) - 1, 0, len(edge) - 2)
    used = np.unique(bucket)
    in_flight = 0 if shard is None else config.shards_in_flight
    if in_flight:
        in_flight = max(1, in_flight // len(used))
    packed, sizes, of_bucket = [], [], []
    for place, j in enumerate(used):
        for group in _groups(np.flatnonzero(bucket == j), shard, in_flight, rng):
            member = rng.permutation(group)
            order, size = fill_batches(length[member], config.tokens_per_batch)
            packed.append(member[order])
            sizes.append(size)
            of_bucket.append(place)
    num_batches = np.array([len(size) for size in sizes])
    label = interleave(np.bincount(of_bucket, num_batches).astype(np.int64), rng)
    # Batches within a group are shuffled too: its last ones are emptier than the others.
    first = np.cumsum(num_batches) - num_batches
    shuffled = [start + rng.permutation(n) for start, n in zip(first, num_batches, strict=True)]
    source = np.empty(len(label), dtype=np.int64)
    source[np.argsort(label, kind="stable")] = np.concatenate(shuffled)
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


def _groups(
    member: np.ndarray, shard: np.ndarray | None, in_flight: int, rng: np.random.Generator
) -> list[np.ndarray]:
    """`member` in groups of at most `in_flight` shards, drawn at random; in one where that is 0."""
    if shard is None or not in_flight:
        return [member]
    shards, number = np.unique(shard[member], return_inverse=True)
    group = (rng.permutation(len(shards)) // in_flight)[number]
    order = np.argsort(group, kind="stable")
    return np.split(member[order], np.cumsum(np.bincount(group))[:-1])


def _check(length: np.ndarray, tokens_per_batch: int) -> None:
    if len(length) == 0:
        raise ValueError("there is no sample to train on. Check the cache's sources and split.")
    shortest, longest = int(length.argmin()), int(length.argmax())
    if length[shortest] < 1:
        raise ValueError(f"sample {shortest} is empty. Repair the cache.")
    if length[longest] > tokens_per_batch:
        raise ValueError(
            f"sample {longest} of {length[longest]} tokens exceeds tokens_per_batch = "
            f"{tokens_per_batch}. Raise it."
        )


def iterate(
    length: np.ndarray,
    config: SamplerConfig,
    *,
    seed: int,
    start_batch: int = 0,
    shard: np.ndarray | None = None,
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
        plan = epoch_batches(length, config, seed=seed, epoch=epoch, shard=shard)
        for i in range(start_batch, len(plan)):
            yield PlannedBatch(epoch, i, int(plan.bucket[i]), plan.batch(i))
        start_batch = max(0, start_batch - len(plan))
        epoch += 1
