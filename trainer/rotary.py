"""Rotary position embedding, plain or scaled for long contexts.

The formulas are those of transformers' `modeling_rope_utils`, which the published `dflash` model
and the servers call; the parameters bear its names.

Sources: Su et al., arXiv 2104.09864; `linear`: Chen et al., arXiv 2306.15595; `yarn`: Peng et al.,
arXiv 2309.00071; `llama3`: the Llama 3.1 release.

Letters: T positions, H head size, N heads.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from trainer.recipe import DrafterConfig, RopeScaling


class Angles(NamedTuple):
    """Rotary angles of every key position, context first."""

    cos_TH: Tensor
    sin_TH: Tensor


def rotary_angles(position_T: Tensor, config: DrafterConfig, dtype: torch.dtype) -> Angles:
    """Cosines and sines of the rotary embedding at absolute positions, rounded to `dtype`.

    The frequencies are float32 and computed here rather than kept in a buffer, which
    `module.to(bfloat16)` would round: at position 3,000 the angles are then radians off.
    """
    frequency_F, gain = frequencies(config, position_T.device)
    angle_TH = (position_T.float()[:, None] * frequency_F).repeat(1, 2)
    return Angles((gain * angle_TH.cos()).to(dtype), (gain * angle_TH.sin()).to(dtype))


def rotate(x_TNH: Tensor, angles: Angles) -> Tensor:
    """Turn each pair (i, i + H/2) of every head by its position's angle."""
    first, second = x_TNH.chunk(2, dim=-1)
    turned_TNH = torch.cat([-second, first], dim=-1)
    return x_TNH * angles.cos_TH[:, None] + turned_TNH * angles.sin_TH[:, None]


def frequencies(config: DrafterConfig, device: torch.device) -> tuple[Tensor, float]:
    """Radians per token of every pair, float32 [H / 2], and what cosine and sine are multiplied by.

    The gain is 1 but for `yarn`.
    """
    exponent_F = torch.arange(0, config.head_dim, 2, device=device).float() / config.head_dim
    frequency_F = 1.0 / config.rope_theta**exponent_F
    scaling = config.rope_scaling
    if scaling is None:
        return frequency_F, 1.0
    match scaling.rope_type:
        case "linear":
            return frequency_F / scaling.factor, 1.0
        case "llama3":
            return _llama3(frequency_F, scaling), 1.0
        case "yarn":
            return _yarn(frequency_F, config, scaling), scaling.gain


def _yarn(frequency_F: Tensor, config: DrafterConfig, scaling: RopeScaling) -> Tensor:
    """Pairs that turn often over the original context keep their speed, slow ones are divided."""
    original = scaling.original_max_position_embeddings
    assert original is not None

    def pair_that_turns(times: float) -> float:
        wavelength = original / (2 * math.pi * times)
        return config.head_dim * math.log(wavelength) / (2 * math.log(config.rope_theta))

    fast, slow = scaling.turns
    low = max(math.floor(pair_that_turns(fast)), 0)
    high = min(math.ceil(pair_that_turns(slow)), config.head_dim - 1)
    span = high - low or 0.001
    number_F = torch.arange(len(frequency_F), device=frequency_F.device, dtype=torch.float32)
    slow_F = ((number_F - low) / span).clamp(0.0, 1.0)
    return frequency_F / scaling.factor * slow_F + frequency_F * (1.0 - slow_F)


def _llama3(frequency_F: Tensor, scaling: RopeScaling) -> Tensor:
    """Short waves keep their speed, long ones are divided, those between are interpolated."""
    original = scaling.original_max_position_embeddings
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    assert original is not None
    assert low is not None
    assert high is not None
    wavelength_F = 2 * math.pi / frequency_F
    kept_F = ((original / wavelength_F - low) / (high - low)).clamp(0.0, 1.0)
    return frequency_F * kept_F + frequency_F / scaling.factor * (1.0 - kept_F)
