"""What two variants differ by, and how sure that is.

Runs of one seed share first weights (but for the fit to the cache's own states), order, anchors
and noise, and all runs share the held-out samples: so differences are taken pair by pair.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

METRICS = ("loss", "chain", "walk", "tree 16", "tree 64", "tree 256")

SURE = 3.0
"""Standard errors that a difference must have to be more than noise."""

Record = dict[str, Any]


def value(record: Record, metric: str) -> float:
    """A metric of one run over all of its held-out samples."""
    heldout = record["heldout"]
    if metric.startswith("tree "):
        return float(heldout["tau_tree"][metric.partition(" ")[2]])
    return float(heldout[metric if metric == "loss" else f"tau_{metric}"])


@dataclass(frozen=True, slots=True)
class Difference:
    """Variant less baseline, of the mean over the seeds."""

    mean: float
    over_seeds: float
    """Standard error of the mean over the seeds; 0 with one seed, where it is not known."""

    over_samples: float
    """Standard error that the choice of the held-out samples leaves."""

    num_seeds: int

    @property
    def error(self) -> float:
        return float(np.hypot(self.over_seeds, self.over_samples))

    @property
    def is_sure(self) -> bool:
        """Whether it is more than noise. With one seed nothing is."""
        return self.num_seeds > 1 and abs(self.mean) > SURE * self.error


def difference(
    ours: dict[int, Record], baseline: dict[int, Record], metric: str
) -> Difference | None:
    """Compare the seeds that both have; None without one.

    Raises:
        ValueError: they were asked on other samples.
    """
    seeds = sorted(ours.keys() & baseline.keys())
    if not seeds:
        return None
    asked = {r["heldout"]["heldout_sha256"] for seed in seeds for r in (ours[seed], baseline[seed])}
    if len(asked) > 1:
        raise ValueError(f"the held-out samples differ: {sorted(asked)}")
    by_seed = np.array([value(ours[s], metric) - value(baseline[s], metric) for s in seeds])
    parts = [
        (np.array(ours[s]["samples"][metric]), np.array(baseline[s]["samples"][metric]))
        for s in seeds
    ]
    left_out = np.mean([_without_each(a) - _without_each(b) for a, b in parts], axis=0)
    return Difference(
        mean=float(by_seed.mean()),
        over_seeds=float(by_seed.std(ddof=1) / len(seeds) ** 0.5) if len(seeds) > 1 else 0.0,
        over_samples=_jackknife_error(left_out),
        num_seeds=len(seeds),
    )


def _without_each(pairs: np.ndarray) -> np.ndarray:
    """The metric without each of the samples, [n], from their sums and counts [n, 2]."""
    total = pairs.sum(0) - pairs
    return total[:, 0] / total[:, 1]


def _jackknife_error(left_out: np.ndarray) -> float:
    """Standard error of an estimate from its values without each of n samples."""
    n = len(left_out)
    return float(np.sqrt((n - 1) / n * np.square(left_out - left_out.mean()).sum()))


def largest_gap(ours: Record, baseline: Record) -> dict[str, float]:
    """Largest absolute difference of two runs: step by step, and of the held-out metrics."""

    def gap(a: Sequence[float], b: Sequence[float]) -> float:
        if len(a) != len(b):
            raise ValueError(f"{len(a)} values against {len(b)}")
        return float(np.abs(np.array(a) - np.array(b)).max())

    heldout = [[value(record, metric) for metric in METRICS] for record in (ours, baseline)]
    return {
        "training loss": gap(ours["losses"], baseline["losses"]),
        "gradient norm": gap(ours["grad_norms"], baseline["grad_norms"]),
        "held-out metrics": gap(*heldout),
    }
