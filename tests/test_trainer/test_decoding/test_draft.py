"""Trees hold the best prefixes in the order that the metrics reckon with."""

from itertools import product

import numpy as np
import pytest
import torch

from trainer.acceptance import tree_accepted
from trainer.decoding.draft import Draft, best_prefixes, draft_tree
from trainer.ranking import best_tokens


def made_log_p(seed: int, num_slots: int, num_ranks: int, *, has_ties: bool) -> np.ndarray:
    rng = np.random.default_rng(seed)
    log_p = -rng.exponential(1.0, (num_slots, num_ranks))
    if has_ties:  # halves are exact in float: sums tie too
        log_p = np.round(2 * log_p) / 2
    return -np.sort(-log_p, axis=1)


def prefixes(nodes: list[tuple[int, int, int]]) -> list[tuple[int, ...]]:
    """Ranks along the path to each node."""
    found: list[tuple[int, ...]] = [()]
    for parent, slot, rank in nodes:
        assert len(found[parent]) == slot
        found.append((*found[parent], rank))
    return found[1:]


@pytest.mark.parametrize("has_ties", [False, True])
@pytest.mark.parametrize("budget", [1, 7, 40, 500])
def test_the_tree_is_the_best_prefixes_in_order(budget: int, has_ties: bool) -> None:
    for seed in range(5):
        log_p = made_log_p(seed, 4, 3, has_ties=has_ties)
        every = [ranks for depth in range(1, 5) for ranks in product(range(3), repeat=depth)]

        def place(ranks: tuple[int, ...]) -> tuple[float, int, tuple[int, ...]]:
            score = 0.0
            for slot, rank in enumerate(ranks):
                score += log_p[slot, rank]  # noqa: B023
            return -score, len(ranks), ranks

        expected = sorted(every, key=place)[:budget]
        assert prefixes(best_prefixes(log_p, budget)) == expected


@pytest.mark.parametrize("has_ties", [False, True])
def test_a_tree_reaches_as_deep_as_the_metric_says(has_ties: bool) -> None:
    rng = np.random.default_rng(0)
    reached = []
    for seed in range(60):
        log_p = made_log_p(seed, 5, 6, has_ties=has_ties)
        gold = rng.integers(0, 3, 5)
        for budget in (1, 4, 16, 64):
            tree = set(prefixes(best_prefixes(log_p, budget)))
            depth = max((d for d in range(1, 6) if tuple(gold[:d]) in tree), default=0)
            expected = tree_accepted(log_p[None], gold[None], np.array([5]), [budget])
            assert depth == expected[0, 0], (seed, budget)
            reached.append(depth)
    assert set(reached) >= {0, 1, 2, 3, 4}


def test_a_row_sees_itself_and_its_ancestors() -> None:
    draft = Draft(token_ids=[7, 8, 9, 7], parents=[0, 0, 1, 3])
    assert draft.depths == [0, 1, 1, 2, 3]
    assert draft.ancestors().int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 0, 1, 0, 0],
        [1, 1, 0, 1, 0],
        [1, 1, 0, 1, 1],
    ]
    assert not draft.is_chain
    assert draft.follow([7, 9, 0, 7, 3]) == [0, 1, 3, 4]
    assert draft.follow([8, 9, 7, 7, 3]) == [0, 2]
    assert draft.follow([9, 0, 0, 0, 0]) == [0]


def test_a_tree_of_one_token_is_the_chains_first() -> None:
    logits = torch.randn((4, 32), generator=torch.Generator().manual_seed(0))
    logits[0, 20] = logits[0, 9] = 50.0  # a tie: the lower id
    assert draft_tree(logits, 1).token_ids == [9] == logits[:1].argmax(-1).tolist()


def test_ties_are_ranked_by_id() -> None:
    log_p, token = best_tokens(torch.tensor([[0.0, 2.0, 1.0, 2.0, 1.0]]), 4)
    assert token.tolist() == [[1, 3, 2, 4]]
    np.testing.assert_allclose(log_p[0].exp().sum() + log_p[0, 0].exp() / np.e**2, 1.0, rtol=1e-6)
