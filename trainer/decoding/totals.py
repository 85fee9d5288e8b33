"""What the rounds of a method add up to."""

from typing import Any

import numpy as np

from trainer.decoding.decode import Decoded


class MethodTotals:
    """Sums over all prompts of one way to decode."""

    def __init__(self, name: str, num_slots: int, budget: int | None = None) -> None:
        """Begin at zero.

        Args:
            num_slots: that a round may accept.
            budget: of a tree.
        """
        self.name = name
        self.budget = budget
        self._accepted = np.zeros(num_slots, np.int64)
        self._reached = np.zeros(num_slots, np.int64)
        self._num_texts = self._num_tokens = self._num_rounds = self._num_produced = 0
        self._seconds = self._prefill_seconds = 0.0

    def add(self, decoded: Decoded) -> None:
        """Count a text."""
        slot = np.arange(len(self._accepted))
        remaining = len(decoded.token_ids) - 1
        for accepted, produced in zip(decoded.accepted, decoded.produced, strict=True):
            self._accepted += slot < accepted
            self._reached += slot < remaining
            remaining -= produced
        self._num_texts += 1
        self._num_tokens += len(decoded.token_ids)
        self._num_rounds += len(decoded.accepted)
        self._num_produced += sum(decoded.produced)
        self._seconds += decoded.seconds
        self._prefill_seconds += decoded.prefill_seconds

    @property
    def seconds_per_token(self) -> float | None:
        """Without the prefill and the token that it gives."""
        return self._seconds / self._num_produced if self._num_produced else None

    def summary(self, plain: "MethodTotals") -> dict[str, Any]:
        """Figures of the method.

        `tau` is the acceptance length: tokens of a round, the target's own included.
        `tokens_per_forward` counts the prefills too. `accepted_by_slot` is the share of rounds
        that accepted the drafts of slots 1 to k, among those with k tokens of the text to come.

        Args:
            plain: of the same prompts, for the speed-up.
        """
        ours, theirs = self.seconds_per_token, plain.seconds_per_token
        return {
            "method": self.name,
            "budget": self.budget,
            "num_texts": self._num_texts,
            "num_tokens": self._num_tokens,
            "num_rounds": self._num_rounds,
            "tau": self._num_produced / self._num_rounds if self._num_rounds else None,
            "tokens_per_forward": self._num_tokens / (self._num_rounds + self._num_texts),
            "seconds": self._seconds,
            "prefill_seconds": self._prefill_seconds,
            "tokens_per_second": 1 / ours if ours else None,
            "speedup": theirs / ours if ours and theirs else None,
            "accepted_by_slot": [
                float(a / n) if n else None
                for a, n in zip(self._accepted, self._reached, strict=True)
            ],
            "rounds_by_slot": self._reached.tolist(),
        }
