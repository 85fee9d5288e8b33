"""What an experiment changes in the trainer that no setting of the product does.

Each change is a context: inside it, `trainer.train.train` behaves otherwise.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

import trainer.evaluate
import trainer.learner
import trainer.loader
import trainer.sampler
from cache_builder.config import TargetConfig
from cache_builder.target import Target
from cache_builder.target_files import describe_target
from shared.codec import Packed
from shared.shard import StoredSample
from tests.experiments.projections import PILOT
from trainer.anchors import draw_anchors
from trainer.batch import Batch, Features
from trainer.caches import Caches
from trainer.drafter import Drafter, fit_start_
from trainer.metrics import AcceptanceTotals
from trainer.run import Run
from trainer.train import Training

RUN_LENGTH = 16


@dataclass(frozen=True, slots=True)
class Places:
    """Where a change finds what it needs."""

    target: Path
    caches: Path


@contextmanager
def fixed_anchors(places: Places) -> Iterator[None]:
    """Every epoch drafts from the anchors of the first."""

    def draw(mask: npt.NDArray[np.bool_], *, epoch: int, **named: Any) -> npt.NDArray[np.int64]:
        return draw_anchors(mask, epoch=0, **named)

    with patch.object(trainer.loader, "draw_anchors", draw):
        yield


@contextmanager
def iid_order(places: Places) -> Iterator[None]:
    """The micro-batches of all buckets in an independent shuffle."""

    def shuffled(count: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        return rng.permutation(np.repeat(np.arange(len(count)), count))

    with patch.object(trainer.sampler, "interleave", shuffled):
        yield


@contextmanager
def runs_order(places: Places) -> Iterator[None]:
    """Up to `RUN_LENGTH` micro-batches of one bucket in a row, the runs shuffled."""

    def in_runs(count: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        parts = [
            np.full(min(RUN_LENGTH, size - start), label)
            for label, size in enumerate(count.tolist())
            for start in range(0, size, RUN_LENGTH)
        ]
        return np.concatenate([parts[i] for i in rng.permutation(len(parts))])

    with patch.object(trainer.sampler, "interleave", in_runs):
        yield


@contextmanager
def live(places: Places) -> Iterator[None]:
    """States come from a forward of the target, a sample at a time, when they are used.

    What is read from the cache is blanked, so that no stored state can be trained on.
    """
    read = Caches.read
    models: list[Target] = []

    def blank(self: Caches, position: int) -> StoredSample:
        sample = read(self, position)
        packed = Packed(
            torch.zeros_like(sample.packed.planes_PTW),
            torch.zeros(0, dtype=torch.int64),
            torch.zeros(0, dtype=torch.int16),
            sample.packed.values_per_token,
        )
        return replace(sample, packed=packed)

    def capture(cache: Caches, token_ids: npt.NDArray[np.int32]) -> Tensor:
        if not models:
            models.append(_same_target(places.target, cache))
        return models[0].capture([token_ids])[0].clone()  # out of inference mode

    def unpack(self: Caches, sample: StoredSample) -> Tensor:
        return capture(self, sample.token_ids)

    def unpack_batch(self: Features, batch: Batch) -> Tensor:
        ids = batch.token_ids_S.to(torch.int32).numpy()
        document = batch.document_S.numpy()
        parts = [capture(self._cache, ids[document == n]) for n in range(len(batch.sample_ids))]
        return torch.cat(parts)

    with (
        patch.object(Caches, "read", blank),
        patch.object(Caches, "unpack", unpack),
        patch.object(Features, "_unpack", unpack_batch),
    ):
        yield


def _same_target(path: Path, cache: Caches) -> Target:
    """The target in `path`, loaded and tapped as for the capture of `cache`."""
    spec = cache.spec
    config = TargetConfig(
        path=str(path),
        dtype=spec.target.dtype,  # type: ignore[arg-type]  # the spec has it as text
        attention=spec.target.attention,  # type: ignore[arg-type]
    )
    if (found := describe_target(path, config)) != spec.target:
        raise ValueError(f"{path} is {found}, the cache was captured from {spec.target}")
    return Target.load(path, config, spec.target_layer_ids, spec.last_hidden, "cpu")


@contextmanager
def pilot_fc(places: Places) -> Iterator[None]:
    """The fusion layer starts as the pilot's, as it does behind the pilot's projection."""
    fc_DF = Run(places.caches / PILOT).require_checkpoint().drafter["fc.weight"]

    def fit(drafter: Drafter, *given: Any) -> None:
        fit_start_(drafter, *given)
        with torch.no_grad():
            drafter.fc.weight.copy_(fc_DF)

    with patch.object(trainer.learner, "fit_start_", fit):
        yield


CHANGES: dict[str, Callable[[Places], Any]] = {
    "fixed-anchors": fixed_anchors,
    "iid-order": iid_order,
    "runs-order": runs_order,
    "live": live,
    "pilot-fc": pilot_fc,
}


@contextmanager
def evaluated_at_the_end() -> Iterator[None]:
    """No evaluation before the first step: it says the same for all runs and costs a quarter."""
    evaluate = Training._evaluate

    def at_the_end(self: Training, stop: Any) -> dict[str, Any] | None:
        return evaluate(self, stop) if self.step else {}

    with patch.object(Training, "_evaluate", at_the_end):
        yield


class SampleTotals(AcceptanceTotals):
    """Totals that also know what each held-out sample added to them."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self._before = [self._now()]
        self._is_between = False

    def add(self, **given: Any) -> None:
        if self._is_between:  # its walks end a sample
            self._before.append(self._now())
            self._is_between = False
        super().add(**given)

    def add_walk(self, chain: np.ndarray, tree: np.ndarray) -> None:
        super().add_walk(chain, tree)
        self._is_between = True

    def _now(self) -> np.ndarray:
        """Sums and counts so far, float64 [metrics, 2]."""
        pairs = self.pairs
        single = [pairs["loss"].sum(0), pairs["tau_chain"].sum(0), pairs["tau_walk"]]
        return np.concatenate([single, pairs["tau_tree"]])

    def by_sample(self) -> dict[str, list[list[float]]]:
        """Of each metric, [sum, count] of every sample."""
        names = ["loss", "chain", "walk", *(f"tree {budget}" for budget in self.budgets)]
        part = np.diff([*self._before, self._now()], axis=0)
        return {name: part[:, i].round(4).tolist() for i, name in enumerate(names)}


@contextmanager
def by_sample() -> Iterator[list[SampleTotals]]:
    """The totals of every evaluation made meanwhile."""
    made: list[SampleTotals] = []

    def make(**given: Any) -> SampleTotals:
        made.append(SampleTotals(**given))
        return made[-1]

    with patch.object(trainer.evaluate, "AcceptanceTotals", make):
        yield made
