"""Optional noise on the target features: its scale as a function of the step, and the draw.

Shapes: S context tokens, L captured layers, D hidden size.
"""

import torch
from torch import Tensor

from trainer.recipe import NoiseConfig


def noise_scale(step: int, config: NoiseConfig) -> float:
    """Half-width of the noise at optimizer step `step`, in units of the features' RMS.

    Straight lines through (0, 0), (warmup, scale), (warmup + hold, scale) and
    (warmup + hold + decay, 0), in steps; without `decay_steps` it stays at `scale`. To be
    asked anew each step: a value kept from the start of a run is 0 for all of it.
    """
    if step < config.warmup_steps:
        return config.scale * step / config.warmup_steps
    if config.decay_steps == 0:
        return config.scale
    past_hold = max(0, step - config.warmup_steps - config.hold_steps)
    return config.scale * max(0.0, 1.0 - past_hold / config.decay_steps)


def add_noise(features_SLD: Tensor, scale: float, generator: torch.Generator) -> Tensor:
    """`features_SLD` plus uniform noise in +-`scale` times the RMS of each layer.

    The RMS of a layer is the median over the row's tokens of the RMS of one token: the few
    tokens with massive activations would otherwise set the noise of all others. Padding
    (all zero in a layer) counts for nothing and stays zero. Drawn and added in float32, layer
    by layer, in the input's type again on return.

    Args:
        features_SLD: not changed.
        scale: from `noise_scale`; 0 returns `features_SLD` itself.
        generator: on the device of `features_SLD`, seeded by the caller from (seed, step).
    """
    if scale == 0.0:
        return features_SLD
    noisy_SLD = torch.empty_like(features_SLD)
    for layer in range(features_SLD.shape[1]):
        clean_SD = features_SLD[:, layer].float()
        rms_S = clean_SD.square().mean(dim=-1).sqrt()
        is_token_S = rms_S > 0
        rms = rms_S.where(is_token_S, torch.nan).nanmedian()
        width_S = torch.where(is_token_S, scale * rms, 0.0)
        noise_SD = torch.empty_like(clean_SD).uniform_(-1.0, 1.0, generator=generator)
        noisy_SLD[:, layer] = clean_SD + noise_SD * width_S[:, None]
    return noisy_SLD
