"""Every kind of drafter that can be configured, against the published model."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from shared import config as configs
from shared.errors import ConfigError
from trainer.attention import build_mask
from trainer.drafter import Drafter
from trainer.recipe import DrafterConfig, RopeScaling

HIDDEN, NUM_CONTEXT = 24, 40
PLAIN = DrafterConfig(
    mask_token_id=49,
    intermediate_size=40,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rope_theta=10_000.0,
    num_layers=2,
    block_size=8,
    initializer_range=0.2,
)
FULL, SLIDING = "full_attention", "sliding_attention"
SCALINGS = {
    "linear": RopeScaling(rope_type="linear", factor=4.0),
    "yarn": RopeScaling(rope_type="yarn", factor=4.0, original_max_position_embeddings=64),
    "yarn, all set": RopeScaling(
        rope_type="yarn",
        factor=8.0,
        original_max_position_embeddings=256,
        beta_fast=16.0,
        beta_slow=2.0,
        attention_factor=1.25,
    ),
    "llama3": RopeScaling(
        rope_type="llama3",
        factor=8.0,
        original_max_position_embeddings=128,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
    ),
}
VARIANTS = {
    **{f"block {size}": replace(PLAIN, block_size=size) for size in range(7, 17)},
    **{f"depth {depth}": replace(PLAIN, num_layers=depth) for depth in range(1, 9)},
    **{f"rope {name}": replace(PLAIN, rope_scaling=each) for name, each in SCALINGS.items()},
    "all slide": replace(PLAIN, layer_types=(SLIDING, SLIDING), sliding_window=12),
    "one slides": replace(PLAIN, layer_types=(SLIDING, FULL), sliding_window=12),
    "window below the block": replace(PLAIN, layer_types=(FULL, SLIDING), sliding_window=3),
}


def published(config: DrafterConfig, num_taps: int) -> Any:
    dflash = pytest.importorskip("dflash.model")
    from transformers import Qwen3Config

    scaling = {} if config.rope_scaling is None else config.rope_scaling.parameters()
    return dflash.DFlashDraftModel(
        Qwen3Config(
            hidden_size=HIDDEN,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            rms_norm_eps=config.rms_norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta, **scaling},
            max_position_embeddings=512,
            vocab_size=50,
            num_target_layers=12,
            layer_types=[SLIDING if slides else FULL for slides in config.slides],
            sliding_window=config.sliding_window,
            use_sliding_window=any(config.slides),
            dflash_config={
                "target_layer_ids": list(range(num_taps)),
                "mask_token_id": config.mask_token_id,
                "block_size": config.block_size,
            },
        )
    ).eval()


@pytest.mark.parametrize("num_taps", [1, 3])
@pytest.mark.parametrize("name", VARIANTS)
def test_it_computes_what_the_published_model_does(name: str, num_taps: int) -> None:
    config = VARIANTS[name]
    generator = torch.Generator().manual_seed(0)
    drafter = Drafter(config, HIDDEN, num_taps * HIDDEN, generator)
    for parameter in drafter.parameters():
        if parameter.ndim == 1:
            nn.init.uniform_(parameter, 0.5, 1.5, generator=generator)
    model = published(config, num_taps)
    model.load_state_dict(drafter.state_dict(), strict=True)
    features_SF = torch.randn(NUM_CONTEXT, num_taps * HIDDEN, generator=generator)
    anchor_A = torch.tensor([5, 20, 39])
    size = config.block_size
    embeddings_QD = torch.randn(3 * size, HIDDEN, generator=generator)
    position_S = torch.arange(NUM_CONTEXT) + 100  # far enough for the frequencies to matter
    position_Q = (position_S[anchor_A][:, None] + torch.arange(size)).flatten()
    row = (torch.zeros(NUM_CONTEXT).long(), anchor_A, torch.ones(3).bool(), size)
    with torch.no_grad():
        ours_QD = drafter(
            features_SF,
            embeddings_QD,
            position_S,
            position_Q,
            build_mask(*row),
            build_mask(*row, config.sliding_window),
        )
        for a, anchor in enumerate(anchor_A.tolist()):
            block = slice(a * size, (a + 1) * size)
            theirs_KD = model(
                target_hidden=features_SF[None, :anchor],
                noise_embedding=embeddings_QD[None, block],
                position_ids=torch.cat([position_S[:anchor], position_Q[block]])[None],
            )[0]
            torch.testing.assert_close(ours_QD[block], theirs_KD, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", [name for name in VARIANTS if name.startswith(("rope", "all"))])
def test_a_variant_is_not_the_plain_drafter(name: str) -> None:
    """Else the comparison above would say nothing."""
    outputs = []
    for config in (PLAIN, VARIANTS[name]):
        drafter = Drafter(config, HIDDEN, HIDDEN, torch.Generator().manual_seed(0))
        row = (torch.zeros(30).long(), torch.tensor([25]), torch.ones(1).bool(), 8)
        masks = build_mask(*row), build_mask(*row, config.sliding_window)
        generator = torch.Generator().manual_seed(1)
        features_SF, block_QD = (torch.randn(n, HIDDEN, generator=generator) for n in (30, 8))
        positions = torch.arange(100, 130), torch.arange(125, 133)
        outputs.append(drafter(features_SF, block_QD, *positions, *masks))
    assert (outputs[0] - outputs[1]).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layer_types": ["full_attention"]}, "layer_types must name all 2 layers, got 1"),
        ({"layer_types": [FULL, SLIDING]}, "sliding_window goes with"),
        ({"sliding_window": 8}, "sliding_window goes with"),
        ({"layer_types": [FULL, "linear_attention"]}, "expected one of"),
        ({"sliding_window": 0}, "sliding_window must be in"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor must be 1, got 0.25"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4}}, "needs original_max_position"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4}}, "expected one of"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, "factor must be in"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2, "beta_fast": 32}},
            "'linear' has no beta_fast",
        ),
        (
            {
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 4,
                    "original_max_position_embeddings": 8192,
                    "beta_fast": 0.5,
                }
            },
            "beta_fast .0.5. must not be below beta_slow .1",
        ),
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8,
                    "original_max_position_embeddings": 8192,
                    "low_freq_factor": 4,
                    "high_freq_factor": 4,
                }
            },
            "low_freq_factor must be below",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_before_anything_starts(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        configs.build(DrafterConfig, configs.to_dict(PLAIN) | settings)
