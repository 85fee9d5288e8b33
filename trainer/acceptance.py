"""How many drafted tokens a target would accept, from the drafter's log-probabilities.

For an anchor, slot k (1..K-1) predicts the k-th token after it; the gold token is what the
target itself produced there. Shapes: A anchors, P = K-1 slots, T ranks kept of the vocabulary,
U budgets, R tokens of a response segment. Ranks count from 0 in order of falling
log-probability, ties by rising token id. Only the first `num_gold` slots of an anchor lie
inside its response; no definition here looks further.

All results count *accepted* drafts; acceptance length tau is one more, the target's own token.

Source: DDTree, arXiv 2604.12989, for the tree; the walk is the accepted length of greedy
speculative decoding when gold is the target's greedy continuation.
"""

from collections.abc import Sequence

import numpy as np

NOT_RANKED = int(np.iinfo(np.int32).max)
"""Rank of a gold token that is not among the ranks kept."""

ANCHORS_PER_CHUNK = 1024


def rank_of_gold(topk_token: np.ndarray, gold: np.ndarray) -> np.ndarray:
    """Rank of each gold token [A, P] among `topk_token` [A, P, T], or `NOT_RANKED`; int32."""
    is_gold = topk_token == gold[..., None]
    rank: np.ndarray = np.where(is_gold.any(-1), is_gold.argmax(-1), NOT_RANKED)
    return rank.astype(np.int32)


def covered(gold_rank: np.ndarray, num_gold: np.ndarray, width: int) -> np.ndarray:
    """Largest d with the gold tokens of slots 1..d all among the `width` best, int64 [A].

    An upper bound for any tree of that width.
    """
    slot = np.arange(gold_rank.shape[1])
    is_covered = (gold_rank < width) & (slot < num_gold[:, None])
    depth: np.ndarray = np.logical_and.accumulate(is_covered, axis=1).sum(axis=1)
    return depth


def chain_accepted(gold_rank: np.ndarray, num_gold: np.ndarray) -> np.ndarray:
    """Largest d with the drafter's first choice right in slots 1..d, int64 [A]."""
    return covered(gold_rank, num_gold, 1)


def tree_accepted(
    topk_logprob: np.ndarray,
    gold_rank: np.ndarray,
    num_gold: np.ndarray,
    budgets: Sequence[int],
) -> np.ndarray:
    """Depth that a DDTree of each budget reaches along the gold tokens, int64 [A, U].

    The tree of budget B holds the B token prefixes with the largest sum of log-probabilities
    over all P slots, ties by depth, then by ranks. Exact if T is at least the largest budget
    or the vocabulary; otherwise the tree is limited to T tokens per slot. Sums run from slot 1
    on in float64, and log-probabilities that rounding made positive count as 0.

    Instead of a heap, this counts the prefixes that come before the gold prefix of depth
    1, 2, ... and drops an anchor at the first count that exceeds the largest budget.

    Args:
        topk_logprob: float [A, P, T], falling along T.
        gold_rank: int [A, P], `NOT_RANKED` where gold is not among the T.
        num_gold: int [A].
    """
    budget = np.asarray(budgets)
    accepted = np.zeros((len(gold_rank), len(budget)), dtype=np.int64)
    limit = covered(gold_rank, num_gold, topk_logprob.shape[2])
    for start in range(0, len(gold_rank), ANCHORS_PER_CHUNK):
        chunk = slice(start, start + ANCHORS_PER_CHUNK)
        logprob = np.minimum(topk_logprob[chunk].astype(np.float64), 0.0)
        tree = _Tree(logprob, gold_rank[chunk], int(budget.max()))
        anchor = np.arange(len(logprob))
        for depth in range(1, logprob.shape[1] + 1):
            anchor = anchor[limit[chunk][anchor] >= depth]
            if not len(anchor):
                break
            place = tree.place(anchor, depth)
            accepted[start + anchor] += place[:, None] <= budget
            anchor = anchor[place < tree.max_place]
    return accepted


class _Tree:
    """All prefixes of a chunk of anchors, in the order in which budgets admit them."""

    def __init__(self, logprob: np.ndarray, gold_rank: np.ndarray, max_place: int) -> None:
        self.num_slots, self.num_ranks = logprob.shape[1:]
        self.flat = logprob.ravel()
        self.gold_rank = gold_rank
        kept = np.minimum(gold_rank, self.num_ranks - 1)
        gold = np.take_along_axis(logprob, kept[..., None], axis=2)[..., 0]
        self.gold_score = np.cumsum(gold, axis=1)
        self.max_place = max_place

    def place(self, anchor: np.ndarray, depth: int) -> np.ndarray:
        """Place of the gold prefix of `depth` slots in each tree [a], 1 for the first.

        Exact up to `max_place`; beyond it only known to be beyond.

        Prefixes that come before are counted slot by slot. Scores never rise with depth or
        rank, so the children that come before are the first few of their parent, and no prefix
        is visited whose parent does not come before.
        """
        place = np.zeros(len(anchor), dtype=np.int64)
        bound = self.gold_score[anchor, depth - 1]
        query = np.arange(len(anchor))
        score = np.zeros(len(anchor))
        # Whether the ranks so far sort before (-1), as (0) or after (1) gold's: breaks ties.
        order = np.zeros(len(anchor), dtype=np.int8)
        for slot in range(self.num_slots):
            base = (anchor[query] * self.num_slots + slot) * self.num_ranks
            gold = self.gold_rank[anchor[query], slot]
            # A prefix with gold's score comes before if it is shorter, after if it is longer.
            if slot + 1 < depth:
                children = before = self._count(base, score, bound[query], or_equal=True)
            else:
                children = before = self._count(base, score, bound[query], or_equal=False)
            if slot + 1 == depth:
                equal = self._count(base, score, bound[query], or_equal=True)
                by_rank = np.clip(gold + 1, children, equal)
                before = np.where(order < 0, equal, np.where(order > 0, children, by_rank))
            place += np.bincount(query, before, len(anchor)).astype(np.int64)
            if slot + 1 == self.num_slots:
                break
            children = np.where(place[query] <= self.max_place, children, 0)
            parent = np.repeat(np.arange(len(query)), children)
            rank = np.arange(len(parent)) - np.repeat(np.cumsum(children) - children, children)
            score = score[parent] + self.flat[base[parent] + rank]
            query = query[parent]
            best = score + self.flat[base[parent] + self.num_ranks]
            reach = best >= bound[query] if slot + 2 <= depth else best > bound[query]
            order = order[parent]
            order = np.where(order, order, np.sign(rank - gold[parent])).astype(np.int8)[reach]
            query, score = query[reach], score[reach]
        return place

    def _count(
        self, base: np.ndarray, score: np.ndarray, bound: np.ndarray, *, or_equal: bool
    ) -> np.ndarray:
        """Number of children of each prefix with a score above (or equal to) `bound`."""
        compare = np.greater_equal if or_equal else np.greater
        count = np.zeros(len(base), dtype=np.int64)
        step = 1 << (self.num_ranks.bit_length() - 1)
        while step:
            last = np.minimum(count + step, self.num_ranks) - 1
            above = compare(score + self.flat[base + last], bound)
            count = np.where(above & (count + step <= self.num_ranks), count + step, count)
            step >>= 1
        return count


def segments(loss_mask: np.ndarray) -> list[tuple[int, int]]:
    """Response segments of a sample: maximal runs [start, stop) of supervised positions."""
    edge = np.flatnonzero(np.diff(np.concatenate([[0], loss_mask != 0, [0]])))
    return list(zip(edge[::2].tolist(), edge[1::2].tolist(), strict=True))


def walk(accepted: np.ndarray) -> np.ndarray:
    """Tokens produced per round when a response segment is decoded as in serving, int64.

    The segment's first token comes with the target's prefill; each round drafts from the last
    token, produces the accepted drafts and the target's own token, and stops at the end of the
    segment. The sum is R - 1 and tau is the sum over the number of rounds.

    Args:
        accepted: int [R], drafts accepted if a block were anchored at each position.
    """
    at_position = accepted.tolist()
    last = len(at_position) - 1
    produced: list[int] = []
    position = 0
    while position < last:
        tokens = min(at_position[position] + 1, last - position)
        produced.append(tokens)
        position += tokens
    return np.array(produced, dtype=np.int64)
