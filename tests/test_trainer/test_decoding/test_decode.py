"""Whatever is drafted, the text is the target's own, and nothing of a rejected draft remains."""

from typing import Any

import numpy as np
import pytest
import torch

from shared.errors import TargetError
from tests.test_trainer.test_decoding.targets import Oracle, llama, sizes, target_of
from trainer.acceptance import chain_accepted, rank_of_gold, tree_accepted, walk
from trainer.decoding.decode import decode_plain, decode_speculatively
from trainer.decoding.strategy import GreedyChain, GreedyTree, Strategy
from trainer.decoding.target import Target
from trainer.ranking import best_tokens

PROMPT = [5, 9, 2, 30, 11]
NEW = 40
BUDGETS = (3, 12, 40)


@pytest.fixture(scope="module")
def target() -> Target:
    return target_of(llama())


@pytest.fixture(scope="module")
def text(target: Target) -> list[int]:
    return decode_plain(target, PROMPT, GreedyChain(), NEW).token_ids


def test_plain_decoding_is_that_of_transformers(target: Target, text: list[int]) -> None:
    out = llama().generate(torch.tensor([PROMPT]), max_new_tokens=NEW, do_sample=False)
    assert text == out[0, len(PROMPT) :].tolist()
    assert len(set(text)) > 8, "a text that loops tests nothing"


@pytest.mark.parametrize("strategy", [GreedyChain(), *map(GreedyTree, BUDGETS)])
def test_the_text_and_the_states_are_those_of_the_target_alone(
    target: Target, text: list[int], strategy: Strategy
) -> None:
    oracle: Any = Oracle(len(PROMPT), text)
    decoded = decode_speculatively(target, oracle, PROMPT, strategy, NEW)
    assert decoded.token_ids == text
    assert 0 < sum(decoded.accepted) < NEW
    assert any(accepted == 0 for accepted in decoded.accepted)
    features = torch.cat(oracle.features)
    expected = target.forward(PROMPT + text, target.new_cache()).features_NF
    torch.testing.assert_close(features, expected[: len(features)], rtol=1e-4, atol=1e-4)


def test_accepted_lengths_are_those_that_the_trainer_reckons(
    target: Target, text: list[int]
) -> None:
    """Walk of `trainer.acceptance` over the same log-probabilities: equal, round by round."""
    oracle: Any = Oracle(len(PROMPT), text)
    num_slots = oracle.logits_TPV.shape[1]
    log_p, token = best_tokens(oracle.logits_TPV.flatten(0, 1), oracle.logits_TPV.shape[2])
    log_p_APT = log_p.unflatten(0, (-1, num_slots)).numpy()
    padded = np.array([*text, *[-1] * num_slots])
    gold_AP = np.stack([padded[a + 1 : a + 1 + num_slots] for a in range(NEW)])
    rank_AP = rank_of_gold(token.unflatten(0, (-1, num_slots)).numpy(), gold_AP)
    num_gold_A = np.minimum(NEW - 1 - np.arange(NEW), num_slots)
    accepted = {0: chain_accepted(rank_AP, num_gold_A)}
    by_budget = tree_accepted(log_p_APT, rank_AP, num_gold_A, BUDGETS)
    accepted |= dict(zip(BUDGETS, by_budget.T, strict=True))
    taus = []
    for budget, accepted_A in accepted.items():
        strategy = GreedyTree(budget) if budget else GreedyChain()
        drafting: Any = Oracle(len(PROMPT), text)
        decoded = decode_speculatively(target, drafting, PROMPT, strategy, NEW)
        assert decoded.produced == walk(accepted_A).tolist(), budget
        taus.append(np.mean(decoded.produced))
    assert taus[0] < taus[2] < taus[3], "trees must accept more for this test to mean anything"


class Quantised(torch.nn.Module):
    """A linear layer whose weight is stored as levels of 8 bits."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        scale = float(linear.weight.detach().abs().max()) / 127
        levels = (linear.weight.detach() / scale).round().to(torch.int8)
        self.weight = torch.nn.Parameter(levels, requires_grad=False)
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight.to(x.dtype) * self.scale)


def test_a_target_of_quantised_blocks_computes_in_the_type_of_its_embedding() -> None:
    model = llama()
    attention = model.model.layers[0].self_attn
    attention.q_proj = Quantised(attention.q_proj)
    target = target_of(model)
    assert next(target.decoder.layers[0].parameters()).dtype == torch.int8
    assert target.dtype == torch.float32
    text = decode_plain(target, PROMPT, GreedyChain(), NEW).token_ids
    oracle: Any = Oracle(len(PROMPT), text)
    assert decode_speculatively(target, oracle, PROMPT, GreedyTree(12), NEW).token_ids == text


@pytest.mark.parametrize("stop", [7, 20])
def test_a_text_ends_with_the_token_that_ends_it(text: list[int], stop: int) -> None:
    ending = target_of(llama(eos_token_id=text[stop]))
    expected = text[: text.index(text[stop]) + 1]
    assert decode_plain(ending, PROMPT, GreedyChain(), NEW).token_ids == expected
    for strategy in (GreedyChain(), GreedyTree(12)):
        oracle: Any = Oracle(len(PROMPT), text)
        decoded = decode_speculatively(ending, oracle, PROMPT, strategy, NEW)
        assert decoded.token_ids == expected
        assert sum(decoded.produced) == len(expected) - 1


def test_the_limit_cuts_the_last_round(target: Target, text: list[int]) -> None:
    for limit in range(2, 12):
        oracle: Any = Oracle(len(PROMPT), text)
        decoded = decode_speculatively(target, oracle, PROMPT, GreedyTree(40), limit)
        assert decoded.token_ids == text[:limit]
        assert sum(decoded.produced) == limit - 1


@pytest.mark.parametrize("is_right", [False, True])
def test_a_window_is_rolled_back_too_but_takes_no_tree(is_right: bool) -> None:
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    model = MistralForCausalLM(MistralConfig(**sizes(sliding_window=9)))
    out = model.generate(torch.tensor([PROMPT]), max_new_tokens=NEW, do_sample=False)
    target = target_of(model)
    text = decode_plain(target, PROMPT, GreedyChain(), NEW).token_ids
    assert text == out[0, len(PROMPT) :].tolist()
    oracle: Any = Oracle(len(PROMPT), text, is_right=is_right)
    decoded = decode_speculatively(target, oracle, PROMPT, GreedyChain(), NEW)
    assert decoded.token_ids == text
    assert decoded.accepted == [7, 7, 7, 7, 7] if is_right else sum(decoded.accepted) > 5
    with pytest.raises(TargetError, match=r"layer 0 \(DynamicSlidingWindowLayer\) is not plain"):
        target.require_plain_attention()


def test_a_recurrent_target_is_refused() -> None:
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    config = Qwen3NextConfig(
        **sizes(num_hidden_layers=4),
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=0,
        mlp_only_layers=[0, 1, 2, 3],
    )
    with pytest.raises(TargetError, match="cannot be rolled back"):
        target_of(Qwen3NextForCausalLM(config))


def test_a_target_without_the_tapped_blocks_is_refused() -> None:
    with pytest.raises(TargetError, match=r"it has blocks 0\.\.2, the drafter taps \[1, 3\]"):
        target_of(llama(), (1, 3))
