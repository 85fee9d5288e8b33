"""Acceptance definitions against enumeration and by hand."""

from heapq import heappop, heappush
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.acceptance import (
    NOT_RANKED,
    chain_accepted,
    covered,
    rank_of_gold,
    segments,
    tree_accepted,
    walk,
)

BUDGETS = (1, 5, 17, 60, 200)
quick = settings(max_examples=60, deadline=None)


def marginals(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Normalised log-probabilities, falling along the last axis, float32."""
    logit = rng.normal(scale=1.5, size=shape)
    logprob = logit - np.log(np.exp(logit).sum(-1, keepdims=True))
    return -np.sort(-logprob, axis=-1).astype(np.float32)


def enumerate_tree(logprob_PT: np.ndarray) -> list[tuple[int, ...]]:
    """All prefixes as rank tuples, by falling score, then depth, then ranks."""
    num_slots, num_ranks = logprob_PT.shape
    prefixes = [
        ranks for d in range(1, num_slots + 1) for ranks in product(range(num_ranks), repeat=d)
    ]

    def score(ranks: tuple[int, ...]) -> float:
        return sum(float(logprob_PT[slot, rank]) for slot, rank in enumerate(ranks))

    return sorted(prefixes, key=lambda ranks: (-score(ranks), len(ranks), ranks))


def search_tree(logprob_PT: np.ndarray, budget: int) -> list[tuple[int, ...]]:
    """The best prefixes by the published best-first search."""
    num_slots, num_ranks = logprob_PT.shape
    heap: list[tuple[float, int, tuple[int, ...]]] = [(-float(logprob_PT[0, 0]), 1, (0,))]
    best: list[tuple[int, ...]] = []
    while heap and len(best) < budget:
        cost, depth, ranks = heappop(heap)
        best.append(ranks)
        if ranks[-1] + 1 < num_ranks:
            sibling = (*ranks[:-1], ranks[-1] + 1)
            total = sum(float(logprob_PT[i, r]) for i, r in enumerate(sibling))
            heappush(heap, (-total, depth, sibling))
        if depth < num_slots:
            heappush(heap, (cost - float(logprob_PT[depth, 0]), depth + 1, (*ranks, 0)))
    return best


def depth_in(tree: list[tuple[int, ...]], gold: np.ndarray, num_gold: int) -> int:
    nodes = set(tree)
    inside = [d for d in range(1, num_gold + 1) if tuple(gold[:d].tolist()) in nodes]
    return max(inside, default=0)


@st.composite
def tied_anchors(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Anchors whose scores tie often: log-probabilities are few multiples of 1/2."""
    num_slots, num_ranks = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    halves = rng.integers(0, draw(st.integers(1, 4)), (3, num_slots, num_ranks))
    gold_rank = rng.integers(0, num_ranks, (3, num_slots)).astype(np.int32)
    gold_rank[rng.random(gold_rank.shape) < 0.1] = NOT_RANKED
    logprob = -np.sort(halves, axis=-1).astype(np.float32) / 2
    return logprob, gold_rank, rng.integers(0, num_slots + 1, 3)


def test_rank_of_gold_finds_it_or_says_not_ranked() -> None:
    topk = np.array([[[7, 3, 9], [1, 2, 0]]])
    assert rank_of_gold(topk, np.array([[9, 1]])).tolist() == [[2, 0]]
    assert rank_of_gold(topk, np.array([[8, 2]])).tolist() == [[NOT_RANKED, 1]]


def test_chain_and_coverage_by_hand() -> None:
    gold_rank = np.array([[0, 0, 2, 0], [1, 0, 0, 0], [0, 0, 0, 0], [0, NOT_RANKED, 0, 0]])
    num_gold = np.array([4, 4, 3, 4])
    assert chain_accepted(gold_rank, num_gold).tolist() == [2, 0, 3, 1]
    assert covered(gold_rank, num_gold, 2).tolist() == [2, 4, 3, 1]
    assert covered(gold_rank, num_gold, 3).tolist() == [4, 4, 3, 1]


def test_tree_equals_enumeration() -> None:
    rng = np.random.default_rng(0)
    logprob = marginals(rng, 60, 4, 4)
    gold_rank = rng.integers(0, 4, (60, 4)) * (rng.random((60, 4)) < 0.6)
    num_gold = rng.integers(0, 5, 60)
    accepted = tree_accepted(logprob, gold_rank, num_gold, BUDGETS)
    for i in range(60):
        order = enumerate_tree(logprob[i])
        expected = [depth_in(order[:budget], gold_rank[i], num_gold[i]) for budget in BUDGETS]
        assert accepted[i].tolist() == expected


@quick
@given(tied_anchors())
def test_ties_go_by_depth_then_ranks(
    anchors: tuple[np.ndarray, np.ndarray, np.ndarray],
) -> None:
    logprob, gold_rank, num_gold = anchors
    budgets = (1, 2, 3, 5, 9, 20, 60, 400)
    accepted = tree_accepted(logprob, gold_rank, num_gold, budgets)
    for i in range(len(logprob)):
        order = enumerate_tree(logprob[i])
        expected = [depth_in(order[:budget], gold_rank[i], num_gold[i]) for budget in budgets]
        assert accepted[i].tolist() == expected


def test_tree_of_a_long_block_equals_best_first_search() -> None:
    rng = np.random.default_rng(3)
    logprob = marginals(rng, 40, 15, 64)
    gold_rank = np.minimum(rng.geometric(0.55, (40, 15)) - 1, 63)
    num_gold = np.full(40, 15)
    budgets = (8, 64, 256)
    accepted = tree_accepted(logprob, gold_rank, num_gold, budgets)
    for i in range(40):
        order = search_tree(logprob[i], 256)
        assert accepted[i].tolist() == [
            depth_in(order[:budget], gold_rank[i], 15) for budget in budgets
        ]


def test_result_does_not_depend_on_the_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(4)
    logprob = marginals(rng, 23, 5, 8)
    gold_rank = rng.integers(0, 3, (23, 5))
    num_gold = rng.integers(0, 6, 23)
    whole = tree_accepted(logprob, gold_rank, num_gold, (4, 32))
    monkeypatch.setattr("trainer.acceptance.ANCHORS_PER_CHUNK", 7)
    assert np.array_equal(tree_accepted(logprob, gold_rank, num_gold, (4, 32)), whole)


def test_tree_bounds() -> None:
    rng = np.random.default_rng(5)
    logprob = marginals(rng, 200, 6, 8)
    gold_rank = rng.integers(0, 8, (200, 6)) * (rng.random((200, 6)) < 0.4)
    num_gold = rng.integers(0, 7, 200)
    budgets = (1, 2, 4, 8, 300_000)
    accepted = tree_accepted(logprob, gold_rank, num_gold, budgets)
    assert (np.diff(accepted, axis=1) >= 0).all(), "a larger tree reaches at least as deep"
    assert np.array_equal(accepted[:, 0], (gold_rank[:, 0] == 0) & (num_gold > 0))
    assert np.array_equal(accepted[:, -1], num_gold), "the whole tree holds every prefix"
    for i, budget in enumerate(budgets[:-1]):
        assert (covered(gold_rank, num_gold, budget) >= accepted[:, i]).all()


def test_sure_drafter_spends_one_node_per_slot() -> None:
    logprob = np.full((1, 15, 4), -20.0, dtype=np.float32)
    logprob[..., 0] = 0.0
    accepted = tree_accepted(logprob, np.zeros((1, 15), int), np.array([15]), (1, 8, 15, 16))
    assert accepted.tolist() == [[1, 8, 15, 15]]


def test_impossible_tokens_and_rounded_up_certainty_are_harmless() -> None:
    logprob = np.array([[[1e-7, -np.inf], [1e-7, -np.inf]]], dtype=np.float32)
    for gold, expected in (([0, 0], [1, 2]), ([1, 0], [0, 0])):
        assert tree_accepted(logprob, np.array([gold]), np.array([2]), (1, 2)).tolist() == [
            expected
        ]


def test_no_anchor_gives_no_row() -> None:
    none = np.zeros((0, 3), dtype=np.int32)
    logprob = np.zeros((0, 3, 4), dtype=np.float32)
    assert tree_accepted(logprob, none, np.zeros(0, int), (1, 8)).shape == (0, 2)


@pytest.mark.parametrize("seed", range(3))
def test_expectation_under_the_drafter_is_the_probability_of_the_tree(seed: int) -> None:
    """Over all 256 gold paths of V = 4, L = 4: what a DDTree is the best of."""
    logprob = marginals(np.random.default_rng(seed), 1, 4, 4)
    paths = np.array(list(product(range(4), repeat=4)))
    probability = np.exp(logprob[0, np.arange(4), paths].astype(np.float64).sum(1))
    accepted = tree_accepted(np.repeat(logprob, 256, 0), paths, np.full(256, 4), BUDGETS)
    tree = enumerate_tree(logprob[0])
    reach = np.exp([logprob[0, np.arange(len(r)), r].astype(np.float64).sum() for r in tree])
    expected = [reach[:budget].sum() for budget in BUDGETS]
    assert probability @ accepted == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        ([], []),
        ([0, 0], []),
        ([1, 1, 1], [(0, 3)]),
        ([0, 1, 1, 0, 1], [(1, 3), (4, 5)]),
    ],
)
def test_segments_are_maximal_runs(mask: list[int], expected: list[tuple[int, int]]) -> None:
    assert segments(np.array(mask, dtype=np.uint8)) == expected


@pytest.mark.parametrize(
    ("accepted", "produced"),
    [
        pytest.param([3], [], id="prefill-alone"),
        pytest.param([0, 0, 0, 0], [1, 1, 1], id="nothing-accepted"),
        pytest.param([2, 9, 9, 1, 9, 0, 0], [3, 2, 1], id="skips-positions"),
        pytest.param([4, 3, 2, 1, 0], [4], id="no-bonus-after-the-end"),
        pytest.param([15, 0, 0], [2], id="clipped"),
    ],
)
def test_walk_by_hand(accepted: list[int], produced: list[int]) -> None:
    assert walk(np.array(accepted)).tolist() == produced


@quick
@given(st.lists(st.integers(0, 15), min_size=1, max_size=60))
def test_walk_produces_the_segment(accepted: list[int]) -> None:
    assert walk(np.array(accepted)).sum() == len(accepted) - 1
