"""The network against the published one, and what its blocks may not see."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trainer.anchors import build_blocks
from trainer.attention import build_mask
from trainer.drafter import Drafter, fit_start_
from trainer.recipe import DrafterConfig

HIDDEN, LAYERS_TAPPED, BLOCK, VOCABULARY = 24, 3, 4, 50
CONFIG = DrafterConfig(
    mask_token_id=49,
    intermediate_size=40,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,  # not HIDDEN / num_heads, as in Qwen3
    rope_theta=10_000.0,
    num_layers=2,
    block_size=BLOCK,
    initializer_range=0.2,  # large, so that attention is far from uniform
)


@dataclass(frozen=True, eq=False)
class Row:
    """A packed row and the anchors drafted from it."""

    token_ids_S: Tensor
    document_S: Tensor
    position_S: Tensor
    features_SF: Tensor
    anchor_A: Tensor

    def embeddings(self) -> tuple[Tensor, Tensor]:
        """Block embeddings [Q, D] and positions [Q]."""
        blocks = build_blocks(
            self.token_ids_S,
            torch.ones_like(self.token_ids_S),
            self.document_S,
            self.position_S,
            self.anchor_A,
            torch.ones_like(self.anchor_A, dtype=torch.bool),
            BLOCK,
            CONFIG.mask_token_id,
        )
        generator = torch.Generator().manual_seed(1)
        table_VD = torch.randn(VOCABULARY, HIDDEN, generator=generator)
        return table_VD[blocks.input_id_AK.flatten()], blocks.position_AK.flatten()


@pytest.fixture
def row() -> Row:
    """Two documents of 9 and 7 tokens, which start at positions 0 and 300, and 2 of padding."""
    generator = torch.Generator().manual_seed(0)
    return Row(
        token_ids_S=torch.randint(VOCABULARY - 1, (18,), generator=generator),
        document_S=torch.tensor([0] * 9 + [1] * 7 + [-1] * 2),
        position_S=torch.cat([torch.arange(9), torch.arange(300, 307), torch.zeros(2).long()]),
        features_SF=torch.randn(18, LAYERS_TAPPED * HIDDEN, generator=generator),
        anchor_A=torch.tensor([1, 4, 5, 8, 12, 14]),  # 4 and 5 overlap
    )


@pytest.fixture
def drafter() -> Drafter:
    """Random weights, norms included."""
    generator = torch.Generator().manual_seed(2)
    drafter = Drafter(CONFIG, HIDDEN, LAYERS_TAPPED * HIDDEN, generator)
    for parameter in drafter.parameters():
        if parameter.ndim == 1:
            nn.init.uniform_(parameter, 0.5, 1.5, generator=generator)
    return drafter


def draft(drafter: Drafter, row: Row) -> Tensor:
    """Hidden states [A, K, D] of the row's blocks."""
    mask = build_mask(row.document_S, row.anchor_A, torch.ones_like(row.anchor_A).bool(), BLOCK)
    embeddings_QD, position_Q = row.embeddings()
    hidden_QD = drafter(row.features_SF, embeddings_QD, row.position_S, position_Q, mask)
    return hidden_QD.view(-1, BLOCK, HIDDEN)


def published(drafter: Drafter) -> Any:
    """The published model with the weights of `drafter`, loaded strictly both ways."""
    dflash = pytest.importorskip("dflash.model")
    from transformers import Qwen3Config

    model = dflash.DFlashDraftModel(
        Qwen3Config(
            hidden_size=HIDDEN,
            intermediate_size=CONFIG.intermediate_size,
            num_hidden_layers=CONFIG.num_layers,
            num_attention_heads=CONFIG.num_heads,
            num_key_value_heads=CONFIG.num_kv_heads,
            head_dim=CONFIG.head_dim,
            rms_norm_eps=CONFIG.rms_norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": CONFIG.rope_theta},
            vocab_size=VOCABULARY,
            num_target_layers=12,
            dflash_config={
                "target_layer_ids": list(range(LAYERS_TAPPED)),
                "mask_token_id": CONFIG.mask_token_id,
                "block_size": BLOCK,
            },
        )
    )
    model.load_state_dict(drafter.state_dict(), strict=True)
    drafter.load_state_dict(model.state_dict(), strict=True)
    return model.float().eval()


def draft_published(model: Any, row: Row) -> Tensor:
    """Hidden states [A, K, D], one call of the published model per block, as in serving."""
    embeddings_QD, position_Q = row.embeddings()
    hidden_AKD = []
    for a, anchor in enumerate(row.anchor_A.tolist()):
        seen = torch.arange(18) < anchor
        seen &= row.document_S == row.document_S[anchor]
        block = slice(a * BLOCK, (a + 1) * BLOCK)
        hidden_1KD = model(
            target_hidden=row.features_SF[seen][None],
            noise_embedding=embeddings_QD[block][None],
            position_ids=torch.cat([row.position_S[seen], position_Q[block]])[None],
        )
        hidden_AKD.append(hidden_1KD[0])
    return torch.stack(hidden_AKD)


def test_blocks_of_a_row_equal_separate_calls_of_the_published_model(
    drafter: Drafter, row: Row
) -> None:
    model = published(drafter)
    ours, theirs = draft(drafter, row), draft_published(model, row)
    assert (ours - theirs).abs().max() < 1e-4
    assert theirs.std(dim=0).mean() > 0.1  # the blocks do differ

    ours.square().sum().backward()
    theirs.square().sum().backward()
    reference = dict(model.named_parameters())
    for name, parameter in drafter.named_parameters():
        torch.testing.assert_close(parameter.grad, reference[name].grad, rtol=1e-3, atol=1e-3)


def test_parameters_have_the_published_names() -> None:
    layer = [
        "input_layernorm.weight",
        "mlp.down_proj.weight",
        "mlp.gate_proj.weight",
        "mlp.up_proj.weight",
        "post_attention_layernorm.weight",
        "self_attn.k_norm.weight",
        "self_attn.k_proj.weight",
        "self_attn.o_proj.weight",
        "self_attn.q_norm.weight",
        "self_attn.q_proj.weight",
        "self_attn.v_proj.weight",
    ]
    assert sorted(Drafter(CONFIG, HIDDEN, LAYERS_TAPPED * HIDDEN).state_dict()) == [
        "fc.weight",
        "hidden_norm.weight",
        *(f"layers.{i}.{name}" for i in range(2) for name in layer),
        "norm.weight",
    ]


@pytest.mark.parametrize("block", range(6))
def test_block_sees_features_before_its_anchor_only(drafter: Drafter, row: Row, block: int) -> None:
    anchor = int(row.anchor_A[block])
    before = draft(drafter, row)[block]
    changed_SF = row.features_SF.clone()
    changed_SF[anchor:] = 7.0
    assert torch.equal(draft(drafter, replace(row, features_SF=changed_SF))[block], before)
    changed_SF = row.features_SF.clone()
    changed_SF[anchor - 1] = 7.0
    assert not torch.allclose(draft(drafter, replace(row, features_SF=changed_SF))[block], before)


@pytest.mark.parametrize("block", range(6))
def test_block_sees_of_the_tokens_its_anchor_alone(drafter: Drafter, row: Row, block: int) -> None:
    anchor = int(row.anchor_A[block])
    before = draft(drafter, row)[block]
    others = torch.arange(18) != anchor
    changed_S = torch.where(others, 5, row.token_ids_S)
    assert torch.equal(draft(drafter, replace(row, token_ids_S=changed_S))[block], before)
    changed_S = torch.where(others, row.token_ids_S, (row.token_ids_S + 1) % (VOCABULARY - 1))
    assert not torch.allclose(draft(drafter, replace(row, token_ids_S=changed_S))[block], before)


def test_other_anchors_change_nothing(drafter: Drafter, row: Row) -> None:
    together_AKD = draft(drafter, row)
    for a in range(6):
        alone_1KD = draft(drafter, replace(row, anchor_A=row.anchor_A[a : a + 1]))
        torch.testing.assert_close(alone_1KD[0], together_AKD[a], rtol=0, atol=1e-5)


def test_other_documents_change_nothing(drafter: Drafter, row: Row) -> None:
    packed_AKD = draft(drafter, row)
    second = slice(9, 16)
    alone = Row(
        token_ids_S=row.token_ids_S[second],
        document_S=row.document_S[second],
        position_S=row.position_S[second],
        features_SF=row.features_SF[second],
        anchor_A=row.anchor_A[4:] - 9,
    )
    torch.testing.assert_close(draft(drafter, alone), packed_AKD[4:], rtol=0, atol=1e-5)
    changed_SF = row.features_SF.clone()
    changed_SF[9:] = 7.0
    changed_AKD = draft(drafter, replace(row, features_SF=changed_SF))
    assert torch.equal(changed_AKD[:4], packed_AKD[:4])


def test_positions_are_relative_to_each_other_within_a_document(drafter: Drafter, row: Row) -> None:
    shifted = replace(row, position_S=row.position_S + 1000)
    torch.testing.assert_close(draft(drafter, shifted), draft(drafter, row), rtol=0, atol=1e-3)
    stretched = replace(row, position_S=row.position_S * 2)
    assert not torch.allclose(draft(drafter, stretched), draft(drafter, row), rtol=0, atol=1e-3)


def test_initial_weights_are_a_function_of_the_generator_alone() -> None:
    state = torch.random.get_rng_state()
    first, again = (
        Drafter(CONFIG, HIDDEN, LAYERS_TAPPED * HIDDEN, torch.Generator().manual_seed(3))
        for _ in range(2)
    )
    other = Drafter(CONFIG, HIDDEN, LAYERS_TAPPED * HIDDEN, torch.Generator().manual_seed(4))
    assert torch.equal(torch.random.get_rng_state(), state)
    for (name, x), y, z in zip(
        first.named_parameters(), again.parameters(), other.parameters(), strict=True
    ):
        assert torch.equal(x, y)
        assert x.dtype == torch.float32
        if x.ndim == 1:
            assert (x == 1).all(), name
        else:
            assert not torch.equal(x, z), name
            assert x.std().item() == pytest.approx(0.2, rel=0.1), name
            assert abs(x.mean().item()) < 0.02, name


def test_the_start_scales_logits_by_the_mean_row_of_the_whole_head(drafter: Drafter) -> None:
    lm_head_VD = (
        torch.randn(20_000, len(drafter.norm.weight)) * torch.linspace(0.1, 9, 20_000)[:, None]
    )
    fit_start_(drafter, lm_head_VD.bfloat16(), torch.ones(drafter.fc.in_features), None)
    wanted = 1 / lm_head_VD.bfloat16().float().norm(dim=1).mean()
    torch.testing.assert_close(drafter.norm.weight, wanted.expand_as(drafter.norm.weight))


def test_drafter_without_initial_weights_is_nan_until_it_loads_some(drafter: Drafter) -> None:
    empty = Drafter(CONFIG, HIDDEN, LAYERS_TAPPED * HIDDEN)
    assert all(parameter.isnan().all() for parameter in empty.parameters())
    empty.load_state_dict(drafter.state_dict())
    assert all(parameter.isfinite().all() for parameter in empty.parameters())


def test_autocast_computes_in_bfloat16_and_keeps_float32_gradients(
    drafter: Drafter, row: Row
) -> None:
    exact_AKD = draft(drafter, row)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded_AKD = draft(drafter, row)
    rounded_AKD.float().square().sum().backward()
    error = (rounded_AKD - exact_AKD).norm() / exact_AKD.norm()
    assert 0 < error < 0.05
    for parameter in drafter.parameters():
        assert parameter.grad is not None
        assert parameter.grad.dtype == torch.float32
        assert parameter.grad.isfinite().all()


def test_bfloat16_parameters_keep_exact_positions(drafter: Drafter, row: Row) -> None:
    far = replace(row, position_S=row.position_S + 3000)
    exact_AKD = draft(drafter, far)
    assert list(drafter.buffers()) == []
    drafter.bfloat16()
    embeddings_QD, position_Q = far.embeddings()
    mask = build_mask(far.document_S, far.anchor_A, torch.ones_like(far.anchor_A).bool(), BLOCK)
    hidden_QD = drafter(
        far.features_SF.bfloat16(), embeddings_QD.bfloat16(), far.position_S, position_Q, mask
    )
    assert hidden_QD.dtype == torch.bfloat16
    error = (hidden_QD.float().view_as(exact_AKD) - exact_AKD).norm() / exact_AKD.norm()
    assert error < 0.05
