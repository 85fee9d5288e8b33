"""Decoding one text: token by token, or in rounds of draft and verification."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from trainer.decoding.draft import Draft
from trainer.decoding.drafting import Drafting
from trainer.decoding.kv_cache import KeyValueCache
from trainer.decoding.strategy import Strategy
from trainer.decoding.target import Output, Target


@dataclass(frozen=True, slots=True)
class Decoded:
    """A text, and the rounds that made it."""

    token_ids: list[int]
    """Behind the prompt, with the token that ended it, if one did."""

    accepted: list[int]
    """Drafts accepted in each round, within the text. The first token came with the prefill."""

    prefill_seconds: float
    seconds: float
    """From the first token to the last."""

    @property
    def produced(self) -> list[int]:
        """Tokens of each round: the accepted ones and the target's own, within the text."""
        remaining, produced = len(self.token_ids) - 1, []
        for accepted in self.accepted:
            produced.append(min(accepted + 1, remaining))
            remaining -= produced[-1]
        return produced


def decode_plain(
    target: Target, prompt_ids: Sequence[int], strategy: Strategy, max_new_tokens: int
) -> Decoded:
    """The target alone: one forward a token."""
    cache, begin = target.new_cache(), time.perf_counter()
    tokens = [strategy.choose(_prefill(target, cache, prompt_ids).logits_NV[-1])]
    first = time.perf_counter()
    while len(tokens) < max_new_tokens and tokens[-1] not in target.eos_token_ids:
        output = target.forward(tokens[-1:], cache, last_only=True)
        tokens.append(strategy.choose(output.logits_NV[-1]))
    end = time.perf_counter()
    return Decoded(tokens, [0] * (len(tokens) - 1), first - begin, end - first)


def decode_speculatively(
    target: Target,
    drafting: Drafting,
    prompt_ids: Sequence[int],
    strategy: Strategy,
    max_new_tokens: int,
) -> Decoded:
    """In rounds: the drafter proposes, one forward of the target tests all of it.

    Args:
        drafting: with an empty context.
    """
    cache, begin = target.new_cache(), time.perf_counter()
    output = _prefill(target, cache, prompt_ids)
    tokens = [strategy.choose(output.logits_NV[-1])]
    first = time.perf_counter()
    features = output.features_NF
    accepted: list[int] = []
    while len(tokens) < max_new_tokens and tokens[-1] not in target.eos_token_ids:
        drafting.extend(features)
        draft = strategy.draft(drafting.logits(tokens[-1]))
        begin_row = len(cache)
        output = _verify(target, cache, tokens[-1], draft)
        path, own = strategy.accept(draft, output.logits_NV)
        cache.keep(begin_row, path)
        features = output.features_NF[path]
        drafted = [draft.token_ids[row - 1] for row in path[1:]]
        new = _within([*drafted, own], target.eos_token_ids, max_new_tokens - len(tokens))
        accepted.append(min(len(drafted), len(new)))
        tokens += new
    return Decoded(tokens, accepted, first - begin, time.perf_counter() - first)


def _prefill(target: Target, cache: KeyValueCache, prompt_ids: Sequence[int]) -> Output:
    return target.forward(prompt_ids, cache, last_only=True)


def _verify(target: Target, cache: KeyValueCache, root: int, draft: Draft) -> Output:
    token_ids = [root, *draft.token_ids]
    if draft.is_chain:
        return target.forward(token_ids, cache)
    return target.forward(token_ids, cache, depths=draft.depths, visible_NN=draft.ancestors())


def _within(tokens: list[int], eos_token_ids: frozenset[int], room: int) -> list[int]:
    """`tokens` up to the first that ends the text, and no more than there is room for."""
    tokens = tokens[:room]
    ends = [i for i, token in enumerate(tokens) if token in eos_token_ids]
    return tokens[: ends[0] + 1] if ends else tokens
