"""Every prompt decoded by every method, one after the other, and compared."""

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from trainer.decoding.decode import Decoded, decode_plain, decode_speculatively
from trainer.decoding.drafting import Drafting
from trainer.decoding.lossless import TIE, Difference, find_difference
from trainer.decoding.prompts import Prompt
from trainer.decoding.strategy import GreedyChain, GreedyTree, SampledChain, Strategy
from trainer.decoding.target import Target
from trainer.decoding.totals import MethodTotals
from trainer.drafter import Drafter

_WARM_UP_TOKENS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodingConfig:
    max_new_tokens: int
    tree_budgets: tuple[int, ...]
    temperature: float
    """0 takes the likeliest token."""

    seed: int

    @property
    def methods(self) -> list[tuple[str, int | None]]:
        """Names, and the budget of trees; the first one is the target alone."""
        trees = [(f"tree {budget}", budget) for budget in self.tree_budgets]
        return [("plain", None), ("chain", None), *trees]


class Evaluation:
    """A target and a drafter at work on prompts.

    The methods take turns on each prompt, so that a machine that slows down slows all of them.
    """

    def __init__(self, target: Target, drafter: Drafter, config: DecodingConfig) -> None:
        """Set up the methods of `config`.

        Args:
            drafter: on the device and of the type of the target.

        Raises:
            TargetError: trees are asked for, and the target's attention is not plain.
        """
        if config.tree_budgets:
            target.require_plain_attention()
        self.target = target
        self.config = config
        self._drafter = drafter
        num_slots = drafter.config.block_size - 1
        self.totals = [MethodTotals(name, num_slots, budget) for name, budget in config.methods]
        self.differences: list[Difference] = []
        self.num_compared = 0

    def run(self, prompts: list[Prompt], progress: Callable[[], None] = lambda: None) -> None:
        """Decode `prompts`; `progress` is called after each text."""
        for _ in self._texts(prompts[0], _WARM_UP_TOKENS):  # the first forwards are slow ones
            pass
        for prompt in prompts:
            texts = self._texts(prompt, self.config.max_new_tokens)
            for number, (totals, decoded) in enumerate(zip(self.totals, texts, strict=True)):
                totals.add(decoded)
                if number == 0:
                    plain = decoded
                elif not self.config.temperature:
                    self._compare(prompt, plain, decoded, totals.name)
                progress()

    def summary(self) -> dict[str, Any]:
        """Figures of every method; and whether the texts are those of plain decoding.

        `lossless` is None where texts are drawn, and says nothing of a single one.
        """
        num_ties = sum(difference.is_tie for difference in self.differences)
        num_wrong = len(self.differences) - num_ties
        return {
            "methods": [totals.summary(self.totals[0]) for totals in self.totals],
            "lossless": None if self.config.temperature else not num_wrong,
            "num_compared": self.num_compared,
            "num_ties": num_ties,
            "num_different": num_wrong,
            "tie_margin": self._tie,
            "differences": [difference.to_dict() for difference in self.differences],
        }

    @property
    def _tie(self) -> float:
        return TIE[str(self.target.dtype).removeprefix("torch.")]

    def _texts(self, prompt: Prompt, max_new_tokens: int) -> Iterator[Decoded]:
        target, ids = self.target, prompt.token_ids
        for name, budget in self.config.methods:
            strategy = self._strategy(prompt, name, budget)
            if name == "plain":
                yield decode_plain(target, ids, strategy, max_new_tokens)
                continue
            drafting = Drafting(self._drafter, target.decoder)
            yield decode_speculatively(target, drafting, ids, strategy, max_new_tokens)

    def _strategy(self, prompt: Prompt, name: str, budget: int | None) -> Strategy:
        if budget is not None:
            return GreedyTree(budget)
        if not self.config.temperature:
            return GreedyChain()
        # Of the prompt's ids, so that its text does not depend on which prompts came before.
        text = f"{self.config.seed} {name} {prompt.token_ids}"
        generator = torch.Generator().manual_seed(zlib.crc32(text.encode()))
        return SampledChain(self.config.temperature, generator)

    def _compare(self, prompt: Prompt, plain: Decoded, other: Decoded, method: str) -> None:
        self.num_compared += 1
        difference = find_difference(
            self.target, prompt, plain.token_ids, other.token_ids, method, self._tie
        )
        if difference is not None:
            self.differences.append(difference)
