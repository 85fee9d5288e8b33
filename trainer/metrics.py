"""Running acceptance metrics: sums and counts that can be added, merged and summarised.

Everything is kept as (sum, count) pairs and divided once at the end, so the result does not
depend on how the anchors were split over batches or ranks. Shapes as in `trainer.acceptance`:
A anchors, P = K-1 slots, U budgets, R tokens of a response segment.

Source: DFlash, arXiv 2602.06036 (chain), and DDTree, arXiv 2604.12989 (tree).
"""

from collections.abc import Sequence
from typing import Any, Self

import numpy as np

from trainer.acceptance import chain_accepted, walk

RECALL_WIDTHS = (1, 2, 4, 8, 16, 32, 64)


class AcceptanceTotals:
    """Totals over any number of anchors and response segments.

    Args:
        num_slots: P.
        num_ranks: ranks kept of the vocabulary; recall beyond them is unknown, not zero.
        budgets: node budgets of the tree, the columns of `tree_accepted`.
        num_buckets: length buckets of the samples, told apart for loss and chain.
    """

    def __init__(
        self, *, num_slots: int, num_ranks: int, budgets: Sequence[int], num_buckets: int = 1
    ) -> None:
        self.num_ranks = num_ranks
        self.budgets = tuple(budgets)
        shapes = {
            "loss": (num_buckets,),
            "tau_chain": (num_buckets,),
            "tau_tree": (len(self.budgets),),
            "tau_walk": (),
            "tau_walk_tree": (len(self.budgets),),
            "accuracy": (num_slots,),
            "conditional_accuracy": (num_slots,),
            "recall": (len(RECALL_WIDTHS), num_slots),
        }
        self.pairs = {name: np.zeros((*shape, 2)) for name, shape in shapes.items()}
        """float64 [..., 2] each: sum and count. Counts are exact up to 2**53."""

    def add(
        self,
        *,
        gold_rank: np.ndarray,
        num_gold: np.ndarray,
        tree: np.ndarray,
        loss: np.ndarray,
        weight: np.ndarray,
        bucket: np.ndarray,
    ) -> None:
        """Count anchors. One without a gold slot counts for the loss only.

        Args:
            gold_rank: int [A, P].
            num_gold: int [A].
            tree: int [A, U], from `tree_accepted`.
            loss: float [A], weighted cross-entropy summed over the slots.
            weight: float [A], weights summed over the slots.
            bucket: int [A], length bucket of the anchor's sample.
        """
        _accumulate(self.pairs["loss"], loss, weight, bucket)
        is_valid = num_gold > 0
        gold_rank, num_gold, tree = gold_rank[is_valid], num_gold[is_valid], tree[is_valid]
        chain = chain_accepted(gold_rank, num_gold)
        _accumulate(self.pairs["tau_chain"], chain + 1, np.ones(len(chain)), bucket[is_valid])
        self.pairs["tau_tree"] += np.stack(
            [(tree + 1).sum(0), np.full(len(self.budgets), len(tree))], -1
        )
        slot = np.arange(gold_rank.shape[1])
        is_gold = slot < num_gold[:, None]
        self.pairs["accuracy"] += _hits(gold_rank == 0, is_gold)
        is_reached = is_gold & (slot <= chain[:, None])
        self.pairs["conditional_accuracy"] += _hits(gold_rank == 0, is_reached)
        for i, width in enumerate(RECALL_WIDTHS):
            if width <= self.num_ranks:
                self.pairs["recall"][i] += _hits(gold_rank < width, is_gold)

    def add_walk(self, chain: np.ndarray, tree: np.ndarray) -> None:
        """Count the rounds of one response segment, chain int [R] and tree int [R, U]."""
        self.pairs["tau_walk"] += _rounds(chain)
        for i in range(len(self.budgets)):
            self.pairs["tau_walk_tree"][i] += _rounds(tree[:, i])

    def merge(self, other: Self) -> None:
        """Add the totals of `other` to these.

        Raises:
            ValueError: the two count different things.
        """
        mine, theirs = (
            (x.num_ranks, x.budgets, {name: pair.shape for name, pair in x.pairs.items()})
            for x in (self, other)
        )
        if mine != theirs:
            raise ValueError(f"cannot merge totals of {theirs} into totals of {mine}")
        for name, pair in other.pairs.items():
            self.pairs[name] += pair

    def summary(self) -> dict[str, Any]:
        """Metrics by name, ready for JSON: numbers, lists by slot or bucket, dicts by width.

        A metric without data is None, never NaN, and `undefined` lists the keys with one.
        """
        pairs = self.pairs
        recall = dict(zip(map(str, RECALL_WIDTHS), pairs["recall"], strict=True))
        metrics: dict[str, Any] = {
            "loss": _mean(pairs["loss"].sum(0)),
            "tau_chain": _mean(pairs["tau_chain"].sum(0)),
            "tau_walk": _mean(pairs["tau_walk"]),
            "tau_tree": self._by_budget("tau_tree"),
            "tau_walk_tree": self._by_budget("tau_walk_tree"),
            "accuracy_per_slot": _means(pairs["accuracy"]),
            "conditional_accuracy_per_slot": _means(pairs["conditional_accuracy"]),
            "recall_at": {width: _mean(pair.sum(0)) for width, pair in recall.items()},
            "recall_at_per_slot": {width: _means(pair) for width, pair in recall.items()},
            "loss_per_bucket": _means(pairs["loss"]),
            "tau_chain_per_bucket": _means(pairs["tau_chain"]),
        }
        undefined = [name for name, value in metrics.items() if _has_none(value)]
        counts = {
            "num_anchors": int(pairs["tau_chain"][:, 1].sum()),
            "num_anchors_per_slot": pairs["accuracy"][:, 1].astype(int).tolist(),
            "num_anchors_per_bucket": pairs["tau_chain"][:, 1].astype(int).tolist(),
            "num_rounds": int(pairs["tau_walk"][1]),
        }
        return {**metrics, **counts, "undefined": undefined}

    def _by_budget(self, name: str) -> dict[str, float | None]:
        return dict(zip(map(str, self.budgets), _means(self.pairs[name]), strict=True))


def _accumulate(
    pairs: np.ndarray, value: np.ndarray, count: np.ndarray, bucket: np.ndarray
) -> None:
    """Add values [A] and counts [A] to the pairs [buckets, 2] of their buckets."""
    np.add.at(pairs, bucket, np.stack([value, count], axis=-1))


def _hits(is_hit: np.ndarray, is_counted: np.ndarray) -> np.ndarray:
    """Hits and trials per slot, float64 [P, 2], from bool [A, P]."""
    return np.stack([(is_hit & is_counted).sum(0), is_counted.sum(0)], axis=-1).astype(np.float64)


def _rounds(accepted: np.ndarray) -> np.ndarray:
    """Tokens and rounds of the walk over one segment, float64 [2]."""
    produced = walk(accepted)
    return np.array([produced.sum(), len(produced)], dtype=np.float64)


def _mean(pair: np.ndarray) -> float | None:
    return float(pair[0] / pair[1]) if pair[1] else None


def _means(pairs: np.ndarray) -> list[float | None]:
    return [_mean(pair) for pair in pairs]


def _has_none(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_none, value.values()))
    if isinstance(value, list):
        return any(map(_has_none, value))
    return value is None
