import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from trainer.optim import (
    build_optimizer,
    describe,
    learning_rate,
    scale_and_clip_,
    set_learning_rate,
)
from trainer.recipe import OptimizerConfig


def drafter() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3, bias=False), nn.RMSNorm(3), nn.Linear(3, 2, bias=False))


def parameter_with_gradient(*values: float) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros(len(values)))
    parameter.grad = torch.tensor(values)
    return parameter


def test_live_groups_equal_the_configuration() -> None:
    config = OptimizerConfig(lr=3e-4, betas=(0.8, 0.9), eps=1e-7, weight_decay=0.1)
    optimizer = build_optimizer(drafter().named_parameters(), config)
    matrices, vectors = optimizer.param_groups
    for group in optimizer.param_groups:
        assert (group["lr"], group["betas"], group["eps"]) == (3e-4, (0.8, 0.9), 1e-7)
        assert group["foreach"] is None
        assert group["fused"] is True
    assert matrices["weight_decay"] == 0.1
    assert matrices["param_names"] == ["0.weight", "2.weight"]
    assert vectors["weight_decay"] == 0.0
    assert vectors["param_names"] == ["1.weight"]


def test_defaults_are_the_recipe() -> None:
    optimizer = build_optimizer(drafter().named_parameters(), OptimizerConfig())
    for group in optimizer.param_groups:
        assert group["lr"] == 6e-4
        assert group["betas"] == (0.9, 0.95)
        assert group["eps"] == 1e-8
        assert group["weight_decay"] == 0.0


def test_state_is_two_moments_of_the_drafter_and_frozen_weights_keep_their_bits() -> None:
    model = drafter()
    head = nn.Linear(2, 5, bias=False).requires_grad_(False)
    before = head.weight.clone()
    optimizer = build_optimizer(model.named_parameters(), OptimizerConfig())
    for _ in range(10):
        head(model(torch.ones(1, 4))).sum().backward()
        optimizer.step()
    moments = [
        state[key] for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")
    ]
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    assert sum(moment.numel() for moment in moments) == 2 * num_parameters
    assert torch.equal(head.weight, before)
    assert head.weight.grad is None


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        pytest.param([], "no parameters", id="none"),
        pytest.param(
            [("head", nn.Parameter(torch.ones(2), requires_grad=False))],
            "head is frozen",
            id="frozen",
        ),
        pytest.param(
            [("fc", nn.Parameter(torch.ones(2, dtype=torch.bfloat16)))],
            "fc is torch.bfloat16",
            id="bfloat16",
        ),
    ],
)
def test_refuses_what_does_not_train_in_float32(
    parameters: list[tuple[str, nn.Parameter]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        build_optimizer(parameters, OptimizerConfig())


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        pytest.param(0, 0.25, id="first-step-is-not-0"),
        pytest.param(1, 0.5, id="second"),
        pytest.param(3, 1.0, id="end-of-warm-up"),
        pytest.param(51, 0.1 + 0.9 * 0.5, id="midpoint-of-the-cosine"),
        pytest.param(99, 0.1, id="last"),
    ],
)
def test_learning_rate_by_hand(step: int, expected: float) -> None:
    # 4 warm-up steps, 0 to 3; the cosine runs from step 3 to step 99, its middle is step 51.
    config = OptimizerConfig(lr=2.0, warmup_fraction=0.04, min_lr_fraction=0.1)
    assert learning_rate(step, 100, config) == pytest.approx(2.0 * expected, rel=1e-12)


def test_warm_up_steps_are_not_rounded_up_by_float_noise() -> None:
    assert 0.07 * 100 > 7
    config = OptimizerConfig(lr=1.0, warmup_fraction=0.07)
    assert learning_rate(6, 100, config) == 1.0
    assert learning_rate(7, 100, config) < 1.0


def test_a_part_of_a_warm_up_step_counts_as_one() -> None:
    config = OptimizerConfig(lr=1.0, warmup_fraction=0.011)
    assert [learning_rate(step, 100, config) for step in (0, 1)] == [0.5, 1.0]


@pytest.mark.parametrize("step", [-1, 10])
def test_learning_rate_outside_the_run_is_refused(step: int) -> None:
    with pytest.raises(ValueError, match=r"step must be in \[0, 10\)"):
        learning_rate(step, 10, OptimizerConfig())


@given(
    total=st.integers(1, 300),
    warmup=st.floats(0, 1),
    least=st.floats(0, 1),
)
def test_learning_rate_rises_to_the_peak_and_falls_to_the_floor(
    total: int, warmup: float, least: float
) -> None:
    config = OptimizerConfig(lr=1.0, warmup_fraction=warmup, min_lr_fraction=least)
    rates = [learning_rate(step, total, config) for step in range(total)]
    peak = rates.index(max(rates))
    assert max(rates) == 1.0
    assert rates[0] > 0 or total == 1
    assert rates[:peak] == sorted(rates[:peak])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    if peak < total - 1:
        assert rates[-1] == pytest.approx(least, abs=1e-12)


def test_the_set_rate_is_the_one_that_moves_the_weights() -> None:
    parameter = parameter_with_gradient(1.0)
    optimizer = build_optimizer([("w", parameter)], OptimizerConfig())
    set_learning_rate(optimizer, 0.125)
    optimizer.step()
    assert parameter.item() == pytest.approx(-0.125)  # the first AdamW step is lr * sign


def test_gradients_are_divided_by_the_weight_and_left_below_the_limit() -> None:
    first, second = parameter_with_gradient(3.0, 0.0), parameter_with_gradient(4.0)
    assert scale_and_clip_([first, second], 10.0, max_norm=1.0) == pytest.approx(0.5)
    assert first.grad is not None
    assert second.grad is not None
    assert torch.allclose(first.grad, torch.tensor([0.3, 0.0]))
    assert torch.allclose(second.grad, torch.tensor([0.4]))


def test_the_norm_before_the_clip_is_returned_and_the_one_after_is_the_limit() -> None:
    first, second = parameter_with_gradient(3.0, 0.0), parameter_with_gradient(4.0)
    norm = scale_and_clip_([first, second], 0.5, max_norm=2.0)
    assert norm == pytest.approx(10.0)
    assert first.grad is not None
    assert second.grad is not None
    assert torch.allclose(first.grad, torch.tensor([1.2, 0.0]))
    assert torch.allclose(second.grad, torch.tensor([1.6]))


def test_two_splits_of_a_step_give_the_same_gradient() -> None:
    values = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    results = []
    for split in ([values], [values[:1], values[1:]]):
        parameter = nn.Parameter(torch.ones(1))
        for part in split:
            (parameter * part).sum().backward()  # type: ignore[no-untyped-call]  # torch's own
        scale_and_clip_([parameter], float(len(values)), max_norm=100.0)
        results.append(parameter.grad)
    assert results[0] == results[1] == torch.tensor([3.0])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_non_finite_gradient_is_reported_and_nothing_is_touched(bad: float) -> None:
    healthy, sick = parameter_with_gradient(3.0), parameter_with_gradient(bad)
    assert not math.isfinite(scale_and_clip_([healthy, sick], 2.0, max_norm=1.0))
    assert healthy.grad == torch.tensor([3.0])


@pytest.mark.parametrize("weight", [math.nan, math.inf])
def test_a_non_finite_weight_is_reported_and_nothing_is_touched(weight: float) -> None:
    parameter = parameter_with_gradient(3.0)
    assert not math.isfinite(scale_and_clip_([parameter], weight, max_norm=1.0))
    assert parameter.grad == torch.tensor([3.0])


def test_a_step_without_supervised_tokens_or_gradients_is_refused() -> None:
    with pytest.raises(ValueError, match="no token is supervised"):
        scale_and_clip_([parameter_with_gradient(1.0)], 0.0, max_norm=1.0)
    with pytest.raises(ValueError, match="no parameter has a gradient"):
        scale_and_clip_([nn.Parameter(torch.ones(1))], 1.0, max_norm=1.0)


def test_description_shows_live_settings() -> None:
    optimizer = build_optimizer(drafter().named_parameters(), OptimizerConfig(weight_decay=0.1))
    set_learning_rate(optimizer, 0.5)
    description = describe(optimizer)
    assert description["name"] == "AdamW"
    assert description["num_parameters"] == 4 * 3 + 3 + 3 * 2
    assert [group["weight_decay"] for group in description["groups"]] == [0.1, 0.0]
    assert [group["num_parameters"] for group in description["groups"]] == [18, 3]
    assert {group["lr"] for group in description["groups"]} == {0.5}
    assert description["groups"][0]["betas"] == [0.9, 0.95]
