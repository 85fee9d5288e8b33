import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from trainer.config import TrainConfig
from trainer.noise import add_noise, noise_scale
from trainer.recipe import NoiseConfig
from trainer.train import train


def features(*, num_tokens: int = 1000, dtype: torch.dtype = torch.float32) -> Tensor:
    """Two layers, the second ten times as large as the first."""
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(num_tokens, 2, 64, generator=generator) * torch.tensor([1.0, 10.0])[:, None]
    ).to(dtype)


def layer_rms(features_SLD: Tensor) -> Tensor:
    return features_SLD.float().square().mean(-1).sqrt().median(0).values


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        pytest.param(0, 0.0, id="start"),
        pytest.param(1, 0.2, id="rising"),
        pytest.param(2, 0.4, id="middle-of-warm-up"),
        pytest.param(4, 0.8, id="end-of-warm-up"),
        pytest.param(7, 0.8, id="hold"),
        pytest.param(10, 0.8, id="end-of-hold"),
        pytest.param(12, 0.4, id="middle-of-decay"),
        pytest.param(14, 0.0, id="end-of-decay"),
        pytest.param(1000, 0.0, id="after"),
    ],
)
def test_scale_by_hand(step: int, expected: float) -> None:
    config = NoiseConfig(scale=0.8, warmup_steps=4, hold_steps=6, decay_steps=4)
    assert noise_scale(step, config) == pytest.approx(expected, abs=1e-12)


def test_scale_moves_on_every_step_of_the_warm_up() -> None:
    config = NoiseConfig(scale=0.05, warmup_steps=100)
    scales = [noise_scale(step, config) for step in range(101)]
    assert len(set(scales)) == 101
    assert scales[-1] == 0.05


def test_without_decay_the_scale_stays() -> None:
    config = NoiseConfig(scale=0.05, warmup_steps=2, hold_steps=3)
    assert noise_scale(10**6, config) == 0.05


def test_default_is_no_noise() -> None:
    assert [noise_scale(step, NoiseConfig()) for step in (0, 1, 1000)] == [0.0, 0.0, 0.0]


@given(
    step=st.integers(0, 400),
    config=st.builds(
        NoiseConfig,
        scale=st.floats(0, 10),
        warmup_steps=st.integers(0, 100),
        hold_steps=st.integers(0, 100),
        decay_steps=st.integers(0, 100),
    ),
)
def test_scale_stays_between_0_and_its_peak(step: int, config: NoiseConfig) -> None:
    assert 0.0 <= noise_scale(step, config) <= config.scale


def test_noise_has_the_spread_of_a_uniform_in_units_of_each_layer() -> None:
    clean = features(num_tokens=4000)
    noise = add_noise(clean, 0.1, torch.Generator().manual_seed(2)) - clean
    expected = 0.1 * layer_rms(clean)
    assert noise.std(dim=(0, 2)) == pytest.approx(expected / math.sqrt(3), rel=0.01)
    assert noise.mean(dim=(0, 2)).abs().max() < 0.01 * expected.max()
    for layer in range(2):
        largest = noise[:, layer].abs().max()
        assert largest <= expected[layer] * (1 + 1e-4)
        assert largest > 0.99 * expected[layer]


def test_a_massive_activation_does_not_set_the_noise_of_the_others() -> None:
    clean = features()
    massive = clean.clone()
    massive[0, :, 3] = 1e6
    noise = add_noise(massive, 0.1, torch.Generator().manual_seed(2)) - massive
    expected = 0.1 * layer_rms(clean) / math.sqrt(3)
    assert noise[1:].std(dim=(0, 2)) == pytest.approx(expected, rel=0.02)


def test_padding_stays_zero_and_does_not_dilute_the_scale() -> None:
    clean = features()
    padded = torch.cat([clean, torch.zeros(3000, 2, 64)])
    noisy = add_noise(padded, 0.1, torch.Generator().manual_seed(2))
    assert not noisy[1000:].any()
    expected = 0.1 * layer_rms(clean) / math.sqrt(3)
    assert (noisy - padded)[:1000].std(dim=(0, 2)) == pytest.approx(expected, rel=0.02)


def test_a_row_of_padding_only_stays_zero() -> None:
    noisy = add_noise(torch.zeros(5, 2, 8), 0.1, torch.Generator())
    assert torch.equal(noisy, torch.zeros(5, 2, 8))


def test_each_micro_batch_of_a_run_has_noise_of_its_own(
    tiny_train: Callable[..., TrainConfig],
    tiny_cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that is drawn again at every step would be learned like a part of the states."""
    drawn: list[int] = []
    scales: list[float] = []

    def noting(features_SLD: Tensor, scale: float, generator: torch.Generator) -> Tensor:
        drawn.append(generator.initial_seed())
        scales.append(scale)
        return add_noise(features_SLD, scale, generator)

    monkeypatch.setattr("trainer.learner.add_noise", noting)
    for seed in (0, 1):
        noise = NoiseConfig(scale=0.1, warmup_steps=2)
        config = tiny_train(tmp_path / str(seed), tiny_cache, noise=noise)
        step = replace(config.train, steps=2, batches_per_step=3, seed=seed)
        train(replace(config, train=step))
    assert len(drawn) == len(set(drawn)) == 2 * 2 * 3
    assert scales == [0.0, 0.0, 0.0, 0.05, 0.05, 0.05] * 2


def test_scale_0_returns_the_same_object_and_draws_nothing() -> None:
    clean = features()
    generator = torch.Generator().manual_seed(3)
    before = generator.get_state()
    assert add_noise(clean, 0.0, generator) is clean
    assert torch.equal(generator.get_state(), before)


def test_the_input_is_not_changed_and_the_draw_follows_the_generator() -> None:
    clean = features(dtype=torch.bfloat16)
    kept = clean.clone()
    first = add_noise(clean, 0.1, torch.Generator().manual_seed(4))
    assert torch.equal(clean, kept)
    assert first.dtype == torch.bfloat16
    assert not torch.equal(first, clean)
    assert torch.equal(first, add_noise(clean, 0.1, torch.Generator().manual_seed(4)))
    assert not torch.equal(first, add_noise(clean, 0.1, torch.Generator().manual_seed(5)))
