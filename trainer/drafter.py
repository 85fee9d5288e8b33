"""The DFlash drafter: a few Qwen3-like layers whose keys and values include target features.

Context enters only as keys and values. The tapped states of the target are fused once
(`fc`, `hidden_norm`) and every layer projects the same fused features with its own `k_proj` and
`v_proj`; they pass through no query, no MLP and no `input_layernorm`. Queries come from the block.

Parameter names are those of the published checkpoints. Works with float32 parameters, with or
without autocast, and with bfloat16 and float64 parameters.

Letters: S context tokens, Q draft slots, T = S+Q, L tapped layers, D hidden size, F = L*D (or the
rank of a projection), N query heads, G key heads, H head size.

Source: DFlash, arXiv 2602.06036, section on the architecture; parameter names as in the published
z-lab/dflash 0.1.0.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from shared.projection import Projection
from trainer.attention import Mask, attend
from trainer.norm import RMSNorm
from trainer.recipe import DrafterConfig
from trainer.rotary import Angles, rotary_angles, rotate

_NORM_ROWS = 8192
"""Rows of the LM head that are in float32 at a time."""


class Attention(nn.Module):
    """Queries from the block; keys and values from the context and the block."""

    def __init__(self, config: DrafterConfig, hidden_size: int) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.q_proj = _linear(hidden_size, config.num_heads * config.head_dim)
        self.k_proj = _linear(hidden_size, config.num_kv_heads * config.head_dim)
        self.v_proj = _linear(hidden_size, config.num_kv_heads * config.head_dim)
        self.o_proj = _linear(config.num_heads * config.head_dim, hidden_size)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def project(
        self, block_QD: Tensor, context_SD: Tensor, angles: Angles
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [N, Q, H], keys and values [G, T, H], turned."""
        num_context = context_SD.shape[0]
        # One product for all that reads the same input: narrow ones take as long as wide ones.
        key_value = [self.k_proj.weight, self.v_proj.weight]
        context_SE = functional.linear(context_SD, torch.cat(key_value))
        block_QE = functional.linear(block_QD, torch.cat([self.q_proj.weight, *key_value]))
        widths = [len(self.q_proj.weight), context_SE.shape[1]]
        q_QE, block_kv_QE = torch.split(block_QE, widths, dim=1)
        k_TE, v_TE = torch.cat([context_SE, block_kv_QE]).chunk(2, dim=1)
        q_QNH = self.q_norm(self._heads(q_QE))
        k_TGH = self.k_norm(self._heads(k_TE))
        v_TGH = self._heads(v_TE)
        q_QNH = rotate(q_QNH, Angles(*(x_TH[num_context:] for x_TH in angles)))
        k_TGH = rotate(k_TGH, angles)
        return q_QNH.transpose(0, 1), k_TGH.transpose(0, 1), v_TGH.transpose(0, 1)

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(len(x), -1, self.head_dim)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DrafterConfig, hidden_size: int) -> None:
        super().__init__()
        self.gate_proj = _linear(hidden_size, config.intermediate_size)
        self.up_proj = _linear(hidden_size, config.intermediate_size)
        self.down_proj = _linear(config.intermediate_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """Attention and MLP, each with a norm before it and a residual around it."""

    def __init__(self, config: DrafterConfig, hidden_size: int) -> None:
        super().__init__()
        self.self_attn = Attention(config, hidden_size)
        self.mlp = MLP(config, hidden_size)
        self.input_layernorm = RMSNorm(hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(hidden_size, config.rms_norm_eps)

    def forward(self, block_QD: Tensor, context_SD: Tensor, angles: Angles, mask: Mask) -> Tensor:
        q_NQH, k_GTH, v_GTH = self.before(block_QD, context_SD, angles)
        return self.after(block_QD, attend(q_NQH, k_GTH, v_GTH, mask))

    def before(
        self, block_QD: Tensor, context_SD: Tensor, angles: Angles
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What comes before the attention: its queries, keys and values."""
        normed_QD = self.input_layernorm(block_QD)
        return self.self_attn.project(normed_QD, context_SD, angles)

    def after(self, block_QD: Tensor, out_NQH: Tensor) -> Tensor:
        """What becomes of what the attention gave."""
        block_QD = block_QD + self.self_attn.o_proj(out_NQH.transpose(0, 1).flatten(1))
        out_QD: Tensor = block_QD + self.mlp(self.post_attention_layernorm(block_QD))
        return out_QD


class Drafter(nn.Module):
    """The trainable part. Embedding and LM head belong to the target and stay outside.

    Args:
        hidden_size: of the target, and so of the drafter.
        num_features: values of one token that are fused, F: those of all tapped layers, or of
            their projection.
        generator: a CPU generator that draws the initial weights: the same ones on every
            device. Without it all weights are NaN until `load_state_dict`.
    """

    def __init__(
        self,
        config: DrafterConfig,
        hidden_size: int,
        num_features: int,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        # Built without storage, so that the layers' own initialisation costs nothing and leaves
        # the global seed alone.
        with torch.device("meta"):
            self.fc = _linear(num_features, hidden_size)
            self.hidden_norm = RMSNorm(hidden_size, config.rms_norm_eps)
            self.layers = nn.ModuleList(
                Layer(config, hidden_size) for _ in range(config.num_layers)
            )
            self.norm = RMSNorm(hidden_size, config.rms_norm_eps)
        self.to_empty(device="cpu")
        for parameter in self.parameters():
            if generator is None:
                nn.init.constant_(parameter, torch.nan)
            elif parameter.ndim == 1:
                nn.init.ones_(parameter)
            else:
                nn.init.normal_(parameter, std=config.initializer_range, generator=generator)

    def forward(
        self,
        features_SF: Tensor,
        block_embeddings_QD: Tensor,
        position_S: Tensor,
        position_Q: Tensor,
        mask: Mask | None,
        sliding_mask: Mask | None = None,
    ) -> Tensor:
        """Final hidden state of every slot, [Q, D], after `norm`: ready for the LM head.

        Args:
            features_SF: tapped target states of each context token, layers side by side, or
                what a projection made of them.
            block_embeddings_QD: target embedding of the anchor in slot 0, of the mask token in
                the others.
            position_S: absolute position of each context token in its document.
            position_Q: absolute position of each slot, the anchor's plus the slot's.
            mask: of the same row, from `trainer.attention.build_mask`, for the layers of full
                attention; None where there is none.
            sliding_mask: the same with the window, for the layers that slide.
        """
        context_SD = self.hidden_norm(self.fc(features_SF))
        angles = rotary_angles(torch.cat([position_S, position_Q]), self.config, context_SD.dtype)
        hidden_QD = block_embeddings_QD
        for layer, is_sliding in zip(self.layers, self.config.slides, strict=True):
            layer_mask = sliding_mask if is_sliding else mask
            assert layer_mask is not None
            hidden_QD = layer(hidden_QD, context_SD, angles, layer_mask)
        out_QD: Tensor = self.norm(hidden_QD)
        return out_QD


def num_parameters(config: DrafterConfig, hidden_size: int, num_features: int) -> int:
    """Parameters of the drafter, without building it."""
    heads = 2 * (config.num_heads + config.num_kv_heads) * config.head_dim
    products = hidden_size * (heads + 3 * config.intermediate_size)
    norms = 2 * hidden_size + 2 * config.head_dim
    fusion = num_features * hidden_size
    return fusion + 2 * hidden_size + config.num_layers * (products + norms)


@torch.no_grad()
def fit_start_(
    drafter: Drafter, lm_head_VD: Tensor, channel_rms_F: Tensor, projection: Projection | None
) -> None:
    """Fit freshly drawn weights to the target. The function class is untouched.

    `norm` starts at the inverse of the LM head's mean row norm, so that logits start small: Adam
    moves a weight by about the learning rate a step, and shrinking it from 1 takes hundreds.
    `fc` starts as the last tapped layer, which is nearest to what the LM head reads, plus half of
    its random start; every channel is divided by its RMS, since a few are a hundred times louder
    than the rest and would be all that `hidden_norm` lets through. Measured on SmolLM2 with the
    demo's settings, accuracy of the first slot after 280 steps: 0.15 scaled alone, 0.20 with the
    last layer.

    Behind a projection `fc` starts as what the projection says: the pilot's `fc`, or, without a
    pilot, what comes nearest to the last tapped layer, with half of the random start.
    """
    drafter.norm.weight.fill_(1.0 / _mean_row_norm(lm_head_VD))
    scale_F = 1.0 / channel_rms_F.to(drafter.fc.weight).clamp_min(1e-6)
    if projection is not None:
        if projection.provenance.kind == "pilot":
            scale_F.zero_()
        drafter.fc.weight.mul_(0.5 * scale_F).add_(projection.start_DR.to(drafter.fc.weight))
        return
    hidden_size = len(drafter.hidden_norm.weight)
    drafter.fc.weight.mul_(0.5 * scale_F)
    drafter.fc.weight[:, -hidden_size:] += torch.diag(scale_F[-hidden_size:])


def _mean_row_norm(matrix_VD: Tensor) -> float:
    """Some rows at a time: whole in float32, the LM head of a large target takes gigabytes."""
    parts = [rows.float().norm(dim=1) for rows in torch.split(matrix_VD, _NORM_ROWS)]
    return float(torch.cat(parts).mean())


def _linear(in_features: int, out_features: int) -> nn.Linear:
    return nn.Linear(in_features, out_features, bias=False)
