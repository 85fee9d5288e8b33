"""What a round puts before the target: drafted tokens as a chain or as a tree.

Row 0 is the text's newest token, the root; every drafted token is a row behind its parent.

N rows, the root included   P drafted slots   V vocabulary   T ranks kept
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trainer.ranking import NUM_RANKS, best_tokens


@dataclass(frozen=True, eq=False, slots=True)
class Draft:
    """Tokens under test, parents before children."""

    token_ids: list[int]
    """Of the rows from 1 on."""

    parents: list[int]
    """Row of each one's parent."""

    probabilities_PV: Tensor | None = None
    """What the tokens of a chain were drawn from; None where they were chosen."""

    @classmethod
    def chain(cls, token_ids: Sequence[int], probabilities_PV: Tensor | None = None) -> "Draft":
        """One token behind the other."""
        return cls(list(token_ids), list(range(len(token_ids))), probabilities_PV)

    @property
    def is_chain(self) -> bool:
        return self.parents == list(range(len(self.parents)))

    @property
    def depths(self) -> list[int]:
        """Of every row, 0 for the root."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return depths

    def ancestors(self) -> Tensor:
        """bool [N, N]: each row sees itself and the rows above it, up to the root."""
        num_rows = len(self.parents) + 1
        ancestors = np.eye(num_rows, dtype=bool)
        for row, parent in enumerate(self.parents, 1):
            ancestors[row] |= ancestors[parent]
        return torch.from_numpy(ancestors)

    def follow(self, choices: Sequence[int]) -> list[int]:
        """Rows that the target agrees with, the root first.

        Args:
            choices: the target's own next token after each row.
        """
        child = {
            (parent, token): row
            for row, (parent, token) in enumerate(zip(self.parents, self.token_ids, strict=True), 1)
        }
        path = [0]
        while (row := child.get((path[-1], choices[path[-1]]))) is not None:
            path.append(row)
        return path


def draft_tree(logits_PV: Tensor, budget: int) -> Draft:
    """The DDTree of `budget` tokens: what `trainer.acceptance.tree_accepted` reckons with.

    Source: DDTree, arXiv 2604.12989.
    """
    own_PV = logits_PV.to(torch.float32, copy=True)
    log_p_PT, token_PT = best_tokens(own_PV, min(NUM_RANKS, own_PV.shape[1]))
    nodes = best_prefixes(log_p_PT.cpu().numpy(), budget)
    tokens = token_PT.tolist()
    return Draft(
        [tokens[slot][rank] for _, slot, rank in nodes], [parent for parent, _, _ in nodes]
    )


def best_prefixes(log_p_PT: np.ndarray, budget: int) -> list[tuple[int, int, int]]:
    """The `budget` prefixes with the largest sum of log-probabilities, best first.

    Ties by depth, then by ranks; sums run from slot 1 on in float64, and log-probabilities that
    rounding made positive count as 0. Fewer where there are no more.

    Args:
        log_p_PT: falling along T.

    Returns:
        Parent's row, slot and rank of each; the prefix of no token has row 0.
    """
    log_p = np.minimum(log_p_PT.astype(np.float64), 0.0).tolist()
    num_slots, num_ranks = log_p_PT.shape
    # Less is better: cost, depth, ranks; then the parent's row and score, which decide nothing.
    waiting: list[tuple[float, int, tuple[int, ...], int, float]] = [
        (-log_p[0][0], 1, (0,), 0, 0.0)
    ]
    nodes: list[tuple[int, int, int]] = []
    while waiting and len(nodes) < budget:
        cost, depth, ranks, parent, above = heapq.heappop(waiting)
        nodes.append((parent, depth - 1, ranks[-1]))
        if (sibling := ranks[-1] + 1) < num_ranks:
            score = above + log_p[depth - 1][sibling]
            heapq.heappush(waiting, (-score, depth, (*ranks[:-1], sibling), parent, above))
        if depth < num_slots:
            score = -cost + log_p[depth][0]
            heapq.heappush(waiting, (-score, depth + 1, (*ranks, 0), len(nodes), -cost))
    return nodes
