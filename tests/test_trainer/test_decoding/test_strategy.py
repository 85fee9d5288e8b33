"""Texts drawn by drafting and rejection are distributed as the target's own."""

from collections import Counter
from itertools import product

import numpy as np
import pytest
import torch

from shared.errors import NonFiniteError
from tests.test_trainer.test_decoding.targets import llama, target_of
from trainer.decoding.decode import decode_plain, decode_speculatively
from trainer.decoding.draft import Draft
from trainer.decoding.drafting import Drafting
from trainer.decoding.strategy import SampledChain
from trainer.drafter import Drafter
from trainer.recipe import DrafterConfig

VOCAB = 4
PROMPT = [1, 3, 0]
TEMPERATURE = 0.8
DRAWS = 700


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    assert expected.min() >= 4, "too few draws for the smallest cell"
    return float(((counts - expected) ** 2 / expected).sum())


def limit(degrees: int) -> float:
    """Of chi-square at about p = 1e-4, by the cube approximation of Wilson and Hilferty."""
    a = 2 / (9 * degrees)
    return degrees * (1 - a + 3.72 * a**0.5) ** 3


def small_drafter() -> Drafter:
    config = DrafterConfig(
        mask_token_id=2,
        intermediate_size=16,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        rope_theta=1e4,
        num_layers=1,
        block_size=3,
        initializer_range=0.2,
    )
    return Drafter(config, 32, 2 * 32, torch.Generator().manual_seed(3))


def test_the_rule_gives_p_whatever_q_is() -> None:
    generator = torch.Generator().manual_seed(0)
    p_logits = torch.tensor([[2.0, 1.0, 0.0, -1.0], [0.0, 0.5, 1.0, 0.0]])
    q_logits = torch.tensor([[-1.0, 1.5, 0.5, 1.0]])
    strategy = SampledChain(TEMPERATURE, generator)
    first: Counter[int] = Counter()
    second: Counter[int] = Counter()
    num_accepted = 0
    for _ in range(6000):
        draft = strategy.draft(q_logits)
        path, own = strategy.accept(draft, p_logits)
        first[draft.token_ids[0] if len(path) > 1 else own] += 1
        if len(path) > 1:
            second[own] += 1
            num_accepted += 1
    p = torch.softmax(p_logits.double() / TEMPERATURE, -1).numpy()
    q = torch.softmax(q_logits.double() / TEMPERATURE, -1).numpy()
    counts = np.array([first[token] for token in range(4)])
    assert chi_square(counts, 6000 * p[0]) < limit(3)
    # Drawn from q instead, the same counts would be absurd.
    assert chi_square(counts, 6000 * q[0]) > 100 * limit(3)
    behind = np.array([second[token] for token in range(4)])
    assert chi_square(behind, num_accepted * p[1]) < limit(3)
    share = np.minimum(p[0], q[0]).sum()
    assert abs(num_accepted / 6000 - share) < 4 * (share * (1 - share) / 6000) ** 0.5


def test_equal_distributions_accept_everything() -> None:
    strategy = SampledChain(1.0, torch.Generator().manual_seed(0))
    logits = torch.randn((5, 9), generator=torch.Generator().manual_seed(1))
    for _ in range(50):
        draft = strategy.draft(logits[:4])
        path, _ = strategy.accept(draft, logits)
        assert path == [0, 1, 2, 3, 4]


def test_nan_accepts_nothing() -> None:
    strategy = SampledChain(1.0, torch.Generator().manual_seed(0))
    q_PV = torch.full((3, 4), 0.25, dtype=torch.float64)
    for target_V, draft_PV in (
        (torch.full((4,), torch.nan), q_PV),
        (torch.zeros(4), q_PV * torch.nan),
    ):
        path, _ = strategy.accept(Draft.chain([1, 2, 3], draft_PV), target_V.expand(4, 4))
        assert path == [0]


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_logits_that_are_not_finite_are_refused(value: float) -> None:
    """They would be accepted to the last token, and the texts be equal."""
    model = llama(vocab_size=VOCAB)
    drafter = small_drafter()
    target = target_of(model)
    drafting = Drafting(drafter, target.decoder)
    drafting.extend(target.forward(PROMPT, target.new_cache()).features_NF)
    with torch.no_grad():
        drafter.norm.weight[0] = value
    with pytest.raises(NonFiniteError, match="the drafter's logits are not finite in float32"):
        drafting.logits(1)
    with torch.no_grad():
        model.model.norm.weight[0] = value
    with pytest.raises(NonFiniteError, match="made: its logits are not finite in float32"):
        target.forward(PROMPT, target.new_cache(), last_only=True)


def test_what_the_target_never_says_is_never_accepted() -> None:
    strategy = SampledChain(1.0, torch.Generator().manual_seed(0))
    p_logits = torch.tensor([[0.0, -torch.inf, 0.0], [0.0, 0.0, 0.0]])
    q_V = torch.tensor([[0.1, 0.8, 0.1]], dtype=torch.float64)
    own = Counter()
    for _ in range(100):
        path, token = strategy.accept(Draft.chain([1], q_V), p_logits)
        assert path == [0]
        own[token] += 1
    assert set(own) == {0, 2}


def test_drawn_texts_are_distributed_as_the_targets() -> None:
    """Tokens 1 and 2, and tokens 2 and 3, over many seeds, against exact probabilities."""
    target = target_of(llama(vocab_size=VOCAB, initializer_range=0.08, num_hidden_layers=2))
    drafter = small_drafter()
    p_123 = np.zeros((VOCAB, VOCAB, VOCAB))
    for ids in product(range(VOCAB), repeat=3):
        logits = target.forward([*PROMPT, *ids], target.new_cache()).logits_NV.double()
        p = torch.softmax(logits / TEMPERATURE, -1)[len(PROMPT) - 1 :]
        p_123[ids] = float(np.prod([p[i, token] for i, token in enumerate(ids)]))
    counts = np.zeros_like(p_123)
    accepted = []
    for seed in range(DRAWS):
        strategy = SampledChain(TEMPERATURE, torch.Generator().manual_seed(seed))
        drafting = Drafting(drafter, target.decoder)
        decoded = decode_speculatively(target, drafting, PROMPT, strategy, 3)
        counts[tuple(decoded.token_ids)] += 1
        accepted += decoded.accepted
    assert 0.2 < np.mean(accepted) < 1.8, "both outcomes must be common"
    for axis in (2, 0):
        found, expected = counts.sum(axis).ravel(), DRAWS * p_123.sum(axis).ravel()
        assert chi_square(found, expected) < limit(VOCAB**2 - 1)


def test_a_seed_gives_one_text() -> None:
    target = target_of(llama(vocab_size=VOCAB))

    def text(seed: int) -> list[int]:
        strategy = SampledChain(1.0, torch.Generator().manual_seed(seed))
        return decode_plain(target, PROMPT, strategy, 12).token_ids

    assert text(1) == text(1) != text(2)
