"""How a round drafts, and what of it the target accepts.

N rows under test, the root included   P drafted slots   V vocabulary
"""

from typing import Protocol

import torch
from torch import Tensor

from trainer.decoding.draft import Draft, draft_tree


class Strategy(Protocol):
    """Decides tokens. One object serves one text."""

    def choose(self, logits_V: Tensor) -> int:
        """The next token where nothing is drafted."""

    def draft(self, logits_PV: Tensor) -> Draft:
        """What to test, from the drafter's logits."""

    def accept(self, draft: Draft, logits_NV: Tensor) -> tuple[list[int], int]:
        """Accepted rows, the root first, and the target's own token behind the last of them."""


class GreedyChain:
    """The drafter's first choices, kept as long as they are the target's."""

    def choose(self, logits_V: Tensor) -> int:
        return int(logits_V.argmax())

    def draft(self, logits_PV: Tensor) -> Draft:
        return Draft.chain(logits_PV.argmax(-1).tolist())

    def accept(self, draft: Draft, logits_NV: Tensor) -> tuple[list[int], int]:
        choices = logits_NV.argmax(-1).tolist()
        path = draft.follow(choices)
        return path, choices[path[-1]]


class GreedyTree(GreedyChain):
    """A tree of the drafter's likeliest continuations; the target's choices pick a branch."""

    def __init__(self, budget: int) -> None:
        self._budget = budget

    def draft(self, logits_PV: Tensor) -> Draft:
        return draft_tree(logits_PV, self._budget)


class SampledChain:
    """Drafts drawn from the drafter, accepted so that the text is distributed as the target's.

    A draft x is kept with probability min(1, p(x) / q(x)), p being the target's distribution and q
    the drafter's. Behind the first one that is not, the target's token is drawn from max(0, p - q),
    normed; behind the last one from p.

    Source: Leviathan et al., arXiv 2211.17192.
    """

    def __init__(self, temperature: float, generator: torch.Generator) -> None:
        """Draw by `generator`, which is on the CPU: the same numbers on every device."""
        self._temperature = temperature
        self._generator = generator

    def choose(self, logits_V: Tensor) -> int:
        return self._draw(self._probabilities(logits_V))

    def draft(self, logits_PV: Tensor) -> Draft:
        q_PV = self._probabilities(logits_PV)
        return Draft.chain([self._draw(q_V) for q_V in q_PV], q_PV)

    def accept(self, draft: Draft, logits_NV: Tensor) -> tuple[list[int], int]:
        assert draft.probabilities_PV is not None
        p_NV = self._probabilities(logits_NV)
        for slot, token in enumerate(draft.token_ids):
            p_V, q_V = p_NV[slot], draft.probabilities_PV[slot]
            if not self._uniform() * float(q_V[token]) < float(p_V[token]):  # NaN rejects
                rest_V = (p_V - q_V).clamp_min(0.0)
                # All zero only where rounding made p and q one: then p is right.
                return list(range(slot + 1)), self._draw(rest_V if bool(rest_V.any()) else p_V)
        return list(range(len(draft.token_ids) + 1)), self._draw(p_NV[-1])

    def _probabilities(self, logits: Tensor) -> Tensor:
        """In float64: a cumulated sum over the vocabulary must not lose the unlikely ones."""
        return torch.softmax(logits.double() / self._temperature, dim=-1)

    def _draw(self, weight_V: Tensor) -> int:
        """A token, as likely as its weight says."""
        reached_V = weight_V.cumsum(0)
        at = self._uniform() * reached_V[-1]
        # `right`: a weight of zero is never drawn.
        return min(int(torch.searchsorted(reached_V, at, right=True)), len(weight_V) - 1)

    def _uniform(self) -> float:
        """From [0, 1)."""
        return float(torch.rand((), dtype=torch.float64, generator=self._generator))
