"""Micro-batches read ahead: one bounded queue in sampler order, filled by whoever is free.

Threads, not processes: reading and decoding release the interpreter lock, nothing is pickled,
and no shared memory is needed for states of hundreds of megabytes. A slow sample delays its own
micro-batch only; the threads go on with the ones behind it up to the bound.
"""

import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Self

import numpy as np
import numpy.typing as npt

from shared.errors import CacheError, DraftCacheError, RunError
from trainer.anchors import draw_anchors
from trainer.batch import Batch, collate
from trainer.caches import Caches
from trainer.config import LoaderConfig
from trainer.ranks import Ranks
from trainer.recipe import AnchorConfig
from trainer.sampler import PlannedBatch, iterate
from trainer.session import Session


@dataclass(slots=True)
class LoaderStats:
    """How well the loader keeps up, since the last time it was asked."""

    wait_seconds: float = 0.0
    """The consumer waited this long for a micro-batch."""

    queue_depth: int = 0
    """Micro-batches ready when the last one was taken."""

    @classmethod
    def worst(cls, of_ranks: list["LoaderStats"]) -> "LoaderStats":
        """Of the rank that is worst off: all wait for it when they add up their gradients."""
        return cls(
            max(stats.wait_seconds for stats in of_ranks),
            min(stats.queue_depth for stats in of_ranks),
        )


class Loader:
    """Iterate over the micro-batches of `stream`, in its order."""

    def __init__(
        self,
        cache: Caches,
        positions: npt.NDArray[np.int64],
        stream: Iterator[PlannedBatch],
        *,
        config: LoaderConfig,
        anchors: AnchorConfig,
        seed: int,
        pin: bool = False,
    ) -> None:
        """Start reading when it is iterated.

        Args:
            positions: maps the sampler's sample numbers to positions in the cache's index.
            pin: put micro-batches where a GPU reads them fastest.
        """
        self._cache = cache
        self._positions = positions
        self._stream = stream
        self._config = config
        self._anchors = anchors
        self._seed = seed
        self._pin = pin
        self._pool = ThreadPoolExecutor(config.num_threads, thread_name_prefix="loader")
        self._pending: deque[Future[Batch]] = deque()
        self._stats = LoaderStats()

    @classmethod
    def open(cls, session: Session, ranks: Ranks, step: int) -> "Loader":
        """The micro-batches of a run that this rank takes after optimizer step `step`."""
        config, train = session.config, session.split.train
        stream = iterate(
            session.cache.index.num_tokens[train].astype("int64"),
            config.sampler,
            seed=config.train.seed,
            start_batch=step * config.train.batches_per_step,
            shard=session.cache.shard_numbers()[train],
        )
        return cls(
            session.cache,
            train,
            islice(stream, ranks.rank, None, ranks.size),
            config=config.loader,
            anchors=config.anchors,
            seed=config.train.seed,
            pin=session.device.type == "cuda",
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def __iter__(self) -> Iterator[Batch]:
        """Raises what reading a sample raised, with its place."""
        while True:
            self._fill()
            if not self._pending:
                return
            began = time.perf_counter()
            self._stats.queue_depth = sum(future.done() for future in self._pending)
            batch = self._pending.popleft().result()
            self._stats.wait_seconds += time.perf_counter() - began
            self._fill()
            yield batch

    def take_stats(self) -> LoaderStats:
        """The figures since the last call; counting starts anew."""
        stats, self._stats = self._stats, LoaderStats(queue_depth=self._stats.queue_depth)
        return stats

    def _fill(self) -> None:
        while len(self._pending) < self._config.queue_batches:
            planned = next(self._stream, None)
            if planned is None:
                return
            self._pending.append(self._pool.submit(self._load, planned))

    def _load(self, planned: PlannedBatch) -> Batch:
        samples, anchors = [], []
        for number in planned.sample:
            position = int(self._positions[number])
            sample_id = self._cache.index.sample_id(position)
            try:
                sample = self._cache.read(position)
            except DraftCacheError as error:
                raise type(error)(f"sample {sample_id}: {error}") from error
            except (OSError, ValueError, MemoryError) as error:
                raise CacheError(
                    f"{self._cache}: sample {sample_id} cannot be read ({error})."
                ) from error
            except Exception as error:  # a bug, which keeps its traceback
                error.add_note(f"while sample {sample_id} of {self._cache} was read")
                raise
            drawn = draw_anchors(
                sample.loss_mask.astype(bool),
                seed=self._seed,
                epoch=planned.epoch,
                sample_id=sample_id,
                limit=self._anchors.per_sample,
            )
            if not len(drawn):
                raise RunError(f"sample {sample_id} has no anchor although the index counts some.")
            samples.append(sample)
            anchors.append(drawn)
        batch = collate(samples, anchors, epoch=planned.epoch, bucket=planned.bucket)
        return batch.pin() if self._pin else batch
