"""Running totals: by hand, merged, and empty."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.acceptance import NOT_RANKED
from trainer.metrics import AcceptanceTotals


def totals(num_buckets: int = 2, num_ranks: int = 64) -> AcceptanceTotals:
    return AcceptanceTotals(
        num_slots=3, num_ranks=num_ranks, budgets=(8, 16), num_buckets=num_buckets
    )


def by_hand() -> AcceptanceTotals:
    result = totals()
    result.add(
        gold_rank=np.array([[0, 0, 5], [1, 0, 0], [0, NOT_RANKED, 0], [0, 0, 0]]),
        num_gold=np.array([3, 3, 2, 0]),
        tree=np.array([[2, 3], [1, 1], [1, 1], [0, 0]]),
        loss=np.array([1.0, 4.0, 3.0, 0.0]),
        weight=np.array([2.0, 2.0, 1.0, 0.0]),
        bucket=np.array([0, 1, 1, 1]),
    )
    result.add_walk(np.array([2, 0, 0, 0, 0]), np.array([[2, 3], [0, 0], [0, 0], [0, 0], [0, 0]]))
    result.add_walk(np.array([0]), np.array([[0, 0]]))
    return result


def test_summary_by_hand() -> None:
    summary = by_hand().summary()
    assert summary["loss"] == pytest.approx(8 / 5)
    assert summary["loss_per_bucket"] == pytest.approx([1 / 2, 7 / 3])
    assert summary["tau_chain"] == pytest.approx(1 + (2 + 0 + 1) / 3)
    assert summary["tau_chain_per_bucket"] == pytest.approx([3, 1.5])
    assert summary["tau_tree"] == pytest.approx({"8": 1 + 4 / 3, "16": 1 + 5 / 3})
    assert summary["tau_walk"] == pytest.approx(4 / 2)
    assert summary["tau_walk_tree"] == pytest.approx({"8": 2, "16": 4})
    assert summary["accuracy_per_slot"] == pytest.approx([2 / 3, 2 / 3, 1 / 2])
    assert summary["conditional_accuracy_per_slot"] == pytest.approx([2 / 3, 1 / 2, 0])
    assert summary["recall_at"] == pytest.approx(
        {"1": 5 / 8, "2": 6 / 8, "4": 6 / 8, "8": 7 / 8, "16": 7 / 8, "32": 7 / 8, "64": 7 / 8}
    )
    assert summary["recall_at_per_slot"]["2"] == pytest.approx([1, 2 / 3, 1 / 2])
    assert summary["num_anchors"] == 3
    assert summary["num_anchors_per_slot"] == [3, 3, 2]
    assert summary["num_anchors_per_bucket"] == [1, 2]
    assert summary["num_rounds"] == 2
    assert summary["undefined"] == []


def test_no_data_gives_none_and_names_it() -> None:
    summary = totals().summary()
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary
    assert summary["loss"] is None
    assert summary["accuracy_per_slot"] == [None, None, None]
    assert summary["tau_tree"] == {"8": None, "16": None}
    assert summary["num_anchors"] == summary["num_rounds"] == 0
    assert {"loss", "tau_chain", "tau_walk", "tau_tree", "recall_at"} <= set(summary["undefined"])


def test_recall_beyond_the_ranks_kept_is_unknown() -> None:
    result = totals(num_buckets=1, num_ranks=4)
    one = np.ones(1)
    result.add(
        gold_rank=np.array([[3, NOT_RANKED, 0]]),
        num_gold=np.array([3]),
        tree=np.zeros((1, 2), int),
        loss=one,
        weight=one,
        bucket=np.zeros(1, int),
    )
    summary = result.summary()
    assert summary["recall_at"]["4"] == pytest.approx(2 / 3)
    assert summary["recall_at"]["8"] is None
    assert "recall_at" in summary["undefined"]


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(0, 20), st.integers(0, 20))
def test_merge_equals_one_pass(seed: int, num_anchors: int, cut: int) -> None:
    rng = np.random.default_rng(seed)
    data = {
        "gold_rank": rng.integers(0, 3, (num_anchors, 3)),
        "num_gold": rng.integers(0, 4, num_anchors),
        "tree": rng.integers(0, 4, (num_anchors, 2)),
        "loss": rng.integers(0, 64, num_anchors) / 8,
        "weight": rng.integers(1, 64, num_anchors) / 8,
        "bucket": rng.integers(0, 2, num_anchors),
    }
    whole, first, second = totals(), totals(), totals()
    whole.add(**data)
    first.add(**{name: value[:cut] for name, value in data.items()})
    second.add(**{name: value[cut:] for name, value in data.items()})
    for part in (first, second):
        for num_tokens in rng.integers(1, 20, 2):
            chain, tree = rng.integers(0, 4, num_tokens), rng.integers(0, 4, (num_tokens, 2))
            part.add_walk(chain, tree)
            whole.add_walk(chain, tree)
    first.merge(second)
    assert first.summary() == whole.summary()


def test_merge_refuses_other_budgets() -> None:
    other = AcceptanceTotals(num_slots=3, num_ranks=64, budgets=(8, 32), num_buckets=2)
    with pytest.raises(ValueError, match="cannot merge"):
        totals().merge(other)
