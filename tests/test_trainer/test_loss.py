"""Slot weights by hand, and the chunked loss against plain cross-entropy over all logits."""

import math
from dataclasses import fields
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.loss import (
    BlockLoss,
    WeighFunction,
    decay_weights,
    dpace_weights,
    drafter_loss,
    slot_weights,
    weighing,
)
from trainer.recipe import LossConfig

A, K, D, V = 7, 5, 8, 23
DECAY = partial(decay_weights, slot_weight_K=slot_weights(K, 3.0))
DPACE = partial(dpace_weights, alpha=0.5)


def problem(seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, head, labels and a supervision with holes; one anchor has none."""
    generator = torch.Generator().manual_seed(seed)
    hidden_AKD = torch.randn(A, K, D, generator=generator).requires_grad_()
    lm_head_VD = torch.randn(V, D, generator=generator)
    label_AK = torch.randint(V, (A, K), generator=generator)
    supervised_AK = torch.rand(A, K, generator=generator) < 0.7
    supervised_AK[:, 0] = False
    supervised_AK[3] = False
    return hidden_AKD, lm_head_VD, label_AK, supervised_AK


def reference_ce(hidden_AKD: Tensor, lm_head_VD: Tensor, label_AK: Tensor) -> Tensor:
    logits_AKV = hidden_AKD @ lm_head_VD.T
    return cross_entropy(logits_AKV.flatten(0, 1), label_AK.flatten(), reduction="none").view(
        label_AK.shape
    )


def exact(x: Tensor) -> Tensor:
    """In multiples of 1/4: in whatever order products of them are added up, sums are the same, and
    equal rows give equal logits."""
    return (4 * x.detach()).round() / 4


def gradient(loss: Tensor, hidden_AKD: Tensor) -> Tensor:
    (grad_AKD,) = torch.autograd.grad(loss, hidden_AKD)
    return grad_AKD


class Recorder(TorchDispatchMode):
    """Notes the operators that run and the largest tensor they return."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.names.append(func.overloadpacket.__name__)
        if isinstance(out, Tensor):
            self.largest = max(self.largest, out.numel())
        return out


@pytest.mark.parametrize(
    ("block_size", "gamma", "last"), [(16, 7.0, 0.1353), (10, 5.0, 0.2019), (8, 4.0, 0.2231)]
)
def test_slot_weights_are_the_published_table(block_size: int, gamma: float, last: float) -> None:
    weight_K = slot_weights(block_size, gamma)
    assert weight_K.dtype == torch.float32
    assert weight_K[0] == 0
    assert weight_K[1] == 1
    expected = [math.exp(-(k - 1) / gamma) for k in range(1, block_size)]
    assert weight_K[1:].tolist() == pytest.approx(expected)
    assert weight_K[-1].item() == pytest.approx(last, abs=5e-5)


def test_gamma_follows_the_block_size_unless_set() -> None:
    ce_AK, supervised_AK = torch.zeros(1, 16), torch.ones(1, 16, dtype=torch.bool)
    device = torch.device("cpu")
    published = weighing(LossConfig(), 16, device)(ce_AK, supervised_AK)
    assert torch.equal(published[0], slot_weights(16, 7.0))
    own = weighing(LossConfig(gamma=4.0), 16, device)(ce_AK, supervised_AK)
    assert torch.equal(own[0], slot_weights(16, 4.0))
    assert own.sum().item() == pytest.approx(4.414, abs=1e-3)
    assert published.sum().item() == pytest.approx(6.631, abs=1e-3)
    dpace = weighing(LossConfig(kind="dpace", dpace_alpha=0.3), 16, device)(ce_AK, supervised_AK)
    assert torch.equal(dpace, dpace_weights(ce_AK, supervised_AK, 0.3))


@pytest.mark.parametrize(
    ("confidence", "expected"),
    [
        pytest.param([0, 0, 0], [7 / 8, 3 / 8, 1 / 8], id="nothing_right"),
        pytest.param([1, 1, 1], [3, 2, 1], id="all_right"),
        pytest.param(
            [0.5, 0, 1],
            [0.75 + 0.375 + 0.375, 0.375 + 0.375, 0.375],
            id="mixed",
        ),
    ],
)
def test_dpace_weights_by_hand(confidence: list[float], expected: list[float]) -> None:
    ce_AK = -torch.tensor([[0.3, *confidence]]).log()
    supervised_AK = torch.tensor([[False, True, True, True]])
    weight_AK = dpace_weights(ce_AK, supervised_AK, alpha=0.5)
    assert weight_AK[0].tolist() == pytest.approx([0, *expected])


def test_dpace_passes_over_slots_without_a_label() -> None:
    ce_AK = -torch.tensor([[1, 0.5, 1e-9, 0.25, 0.1]]).log()
    supervised_AK = torch.tensor([[False, True, False, True, False]])
    weight_AK = dpace_weights(ce_AK, supervised_AK, alpha=0.0)
    assert weight_AK[0].tolist() == pytest.approx([0, 0.5 + 0.125, 0, 0.125, 0])


@pytest.mark.parametrize("weigh", [DECAY, DPACE], ids=["decay", "dpace"])
@pytest.mark.parametrize("anchors_per_chunk", [1, 2, 3, 7, 100])
@pytest.mark.parametrize("seed", [0, 1])
def test_loss_and_gradient_equal_cross_entropy_over_all_logits(
    weigh: WeighFunction, anchors_per_chunk: int, seed: int
) -> None:
    hidden_AKD, lm_head_VD, label_AK, supervised_AK = problem(seed)
    ce_AK = reference_ce(hidden_AKD, lm_head_VD, label_AK)
    weight_AK = weigh(ce_AK.detach(), supervised_AK)
    correct_AK = ((hidden_AKD @ lm_head_VD.T).argmax(-1) == label_AK) & supervised_AK

    loss = drafter_loss(
        hidden_AKD, lm_head_VD, label_AK, supervised_AK, weigh, anchors_per_chunk=anchors_per_chunk
    )
    expected_sum = (weight_AK * ce_AK).sum()
    torch.testing.assert_close(loss.loss_sum, expected_sum, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(loss.weight_sum, weight_AK.sum(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(loss.ce_AK, ce_AK.detach() * supervised_AK, rtol=1e-5, atol=1e-5)
    assert torch.equal(loss.correct_AK, correct_AK)
    assert not loss.weight_sum.requires_grad
    assert not loss.ce_AK.requires_grad
    torch.testing.assert_close(
        gradient(loss.loss_sum * 3, hidden_AKD),
        gradient(expected_sum * 3, hidden_AKD),
        rtol=1e-5,
        atol=1e-5,
    )


@pytest.mark.parametrize("num_rows", [1, 2, 4])
def test_rows_are_reduced_a_few_at_a_time(num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """So few as fit the cache of a core; with any number of them the result is the same."""
    hidden_AKD, lm_head_VD, label_AK, supervised_AK = problem()

    def measure() -> tuple[BlockLoss, Tensor, int]:
        with Recorder() as recorder:
            loss = drafter_loss(
                hidden_AKD, lm_head_VD, label_AK, supervised_AK, DPACE, anchors_per_chunk=3
            )
        return loss, gradient(loss.loss_sum, hidden_AKD), recorder.names.count("exp_")

    whole, whole_AKD, num_parts = measure()
    assert num_parts == 3  # one for each chunk
    monkeypatch.setattr("trainer.logits._BYTES_PER_CORE", 4 * V * num_rows)
    monkeypatch.setattr("torch.get_num_threads", lambda: 1)
    loss, grad_AKD, num_parts = measure()
    rows = [int(own.sum()) for own in torch.split(supervised_AK, 3)]
    assert num_parts == sum(-(-count // num_rows) for count in rows)
    assert torch.equal(loss.correct_AK, whole.correct_AK)
    torch.testing.assert_close(loss.ce_AK, whole.ce_AK)
    torch.testing.assert_close(grad_AKD, whole_AKD)


def test_labels_are_not_read_where_nothing_is_supervised() -> None:
    hidden_AKD, lm_head_VD, label_AK, supervised_AK = problem()
    label_AK = torch.where(supervised_AK, label_AK, 10**6)
    loss = drafter_loss(hidden_AKD, lm_head_VD, label_AK, supervised_AK, DECAY, anchors_per_chunk=2)
    assert (gradient(loss.loss_sum, hidden_AKD)[~supervised_AK] == 0).all()


def test_prediction_that_is_the_label_is_correct() -> None:
    label_AK = torch.tensor([[0, 1, 2, 3]])
    supervised_AK = torch.tensor([[False, True, True, False]])
    hidden_AKD = torch.eye(4)[[0, 1, 3, 3]][None]
    weigh = partial(decay_weights, slot_weight_K=slot_weights(4, 2.0))
    loss = drafter_loss(
        hidden_AKD, torch.eye(4), label_AK, supervised_AK, weigh, anchors_per_chunk=1
    )
    assert loss.correct_AK.tolist() == [[False, True, False, False]]


def test_of_equal_logits_the_first_is_the_prediction() -> None:
    """As argmax says, and so whoever decodes."""
    hidden_AKD, lm_head_VD, _, supervised_AK = problem()
    hidden_AKD, lm_head_VD = exact(hidden_AKD), exact(lm_head_VD).repeat_interleave(2, 0)
    first_AK = (hidden_AKD @ lm_head_VD.T).argmax(-1)
    assert (first_AK % 2 == 0).all()
    for number, is_correct in ((0, True), (1, False)):
        loss = drafter_loss(
            hidden_AKD, lm_head_VD, first_AK + number, supervised_AK, DECAY, anchors_per_chunk=3
        )
        assert torch.equal(loss.correct_AK, supervised_AK & is_correct)


@pytest.mark.parametrize("slot", range(1, K))
def test_gradient_of_one_slot_scales_by_its_weight(slot: int) -> None:
    hidden_AKD, lm_head_VD, label_AK, _ = problem()
    only = torch.zeros(A, K, dtype=torch.bool)
    only[:, slot] = True

    def grad_of(slot_weight_K: Tensor) -> Tensor:
        weigh = partial(decay_weights, slot_weight_K=slot_weight_K)
        loss = drafter_loss(hidden_AKD, lm_head_VD, label_AK, only, weigh, anchors_per_chunk=3)
        return gradient(loss.loss_sum, hidden_AKD)

    flat_AKD = grad_of(torch.ones(K))
    for gamma in (3.0, 7.0):
        torch.testing.assert_close(
            grad_of(slot_weights(K, gamma)), flat_AKD * math.exp(-(slot - 1) / gamma)
        )
    elsewhere = torch.arange(K) != slot
    assert (flat_AKD[:, elsewhere] == 0).all()
    assert (flat_AKD[:, slot] != 0).any(dim=-1).all()


@pytest.mark.parametrize("gamma", [1.0, 4.0, 7.0, 100.0])
def test_uniform_predictor_costs_log_v_whatever_gamma(gamma: float) -> None:
    hidden_AKD, lm_head_VD, label_AK, supervised_AK = problem()
    weigh = partial(decay_weights, slot_weight_K=slot_weights(K, gamma))
    loss = drafter_loss(
        hidden_AKD, lm_head_VD * 0, label_AK, supervised_AK, weigh, anchors_per_chunk=3
    )
    assert (loss.loss_sum / loss.weight_sum).item() == pytest.approx(math.log(V), rel=1e-5)


def expected_accepted_length(ce_AK: Tensor, supervised_AK: Tensor) -> Tensor:
    """Sum over slots of the probability that all labels up to there are drafted, in loops."""
    total = ce_AK.new_zeros(())
    for ce_K, supervised_K in zip(ce_AK, supervised_AK, strict=True):
        reach = ce_AK.new_ones(())
        for ce, is_supervised in zip(ce_K, supervised_K, strict=True):
            if is_supervised:
                reach = reach * torch.exp(-ce)
                total = total + reach
    return total


def test_dpace_at_alpha_zero_ascends_the_expected_accepted_length() -> None:
    hidden_AKD, lm_head_VD, label_AK, supervised_AK = problem()
    loss = drafter_loss(
        hidden_AKD,
        lm_head_VD,
        label_AK,
        supervised_AK,
        partial(dpace_weights, alpha=0.0),
        anchors_per_chunk=2,
    )
    ours_AKD = gradient(loss.loss_sum, hidden_AKD)

    exact_AKD, head_VD = hidden_AKD.detach().double().requires_grad_(), lm_head_VD.double()

    def length(hidden_AKD: Tensor) -> Tensor:
        return expected_accepted_length(reference_ce(hidden_AKD, head_VD, label_AK), supervised_AK)

    torch.testing.assert_close(
        ours_AKD.double(), -gradient(length(exact_AKD), exact_AKD), rtol=1e-5, atol=1e-5
    )
    step_AKD = torch.randn(A, K, D, generator=torch.Generator().manual_seed(9)).double()
    with torch.no_grad():
        difference = length(exact_AKD + 1e-5 * step_AKD) - length(exact_AKD - 1e-5 * step_AKD)
    assert -(ours_AKD * step_AKD).sum().item() == pytest.approx(difference.item() / 2e-5, rel=1e-4)


@pytest.mark.parametrize("weigh", [DECAY, DPACE], ids=["decay", "dpace"])
def test_sums_of_two_halves_make_the_whole(weigh: WeighFunction) -> None:
    hidden_AKD, lm_head_VD, label_AK, supervised_AK = problem()

    def part(anchors: slice) -> BlockLoss:
        return drafter_loss(
            hidden_AKD[anchors],
            lm_head_VD,
            label_AK[anchors],
            supervised_AK[anchors],
            weigh,
            anchors_per_chunk=2,
        )

    whole, first, second = part(slice(None)), part(slice(4)), part(slice(4, None))
    torch.testing.assert_close(first.loss_sum + second.loss_sum, whole.loss_sum)
    torch.testing.assert_close(first.weight_sum + second.weight_sum, whole.weight_sum)
    torch.testing.assert_close(
        gradient(first.loss_sum + second.loss_sum, hidden_AKD),
        gradient(whole.loss_sum, hidden_AKD),
    )


def test_nothing_supervised_is_zero_loss_zero_weight_and_zero_gradient() -> None:
    hidden_AKD, lm_head_VD, label_AK, supervised_AK = problem()
    loss = drafter_loss(
        hidden_AKD,
        lm_head_VD,
        label_AK,
        torch.zeros_like(supervised_AK),
        DPACE,
        anchors_per_chunk=3,
    )
    assert loss.loss_sum.item() == loss.weight_sum.item() == 0
    assert (gradient(loss.loss_sum, hidden_AKD) == 0).all()


def test_logits_exist_for_one_chunk_only_and_backward_computes_none() -> None:
    hidden_AKD, lm_head_VD, label_AK, supervised_AK = problem()
    with Recorder() as forward:
        loss = drafter_loss(
            hidden_AKD, lm_head_VD, label_AK, supervised_AK, DECAY, anchors_per_chunk=2
        )
    with Recorder() as backward:
        loss.loss_sum.backward()
    assert forward.names.count("mm") == 2 * 4
    assert forward.largest <= max(2 * K * V, hidden_AKD.numel())
    assert "mm" not in backward.names


def test_evaluation_does_no_gradient_work() -> None:
    hidden_AKD, lm_head_VD, label_AK, supervised_AK = problem()

    def measure() -> BlockLoss:
        return drafter_loss(
            hidden_AKD, lm_head_VD, label_AK, supervised_AK, DECAY, anchors_per_chunk=2
        )

    trained = measure()
    with torch.no_grad(), Recorder() as recorder:
        evaluated = measure()
    assert recorder.names.count("mm") == 4
    assert not evaluated.loss_sum.requires_grad
    assert torch.equal(evaluated.loss_sum, trained.loss_sum)
    assert torch.equal(evaluated.ce_AK, trained.ce_AK)


@pytest.mark.parametrize(
    ("hidden_dtype", "head_dtype", "tolerance"),
    [
        pytest.param(torch.bfloat16, torch.bfloat16, 0.03, id="bfloat16"),
        pytest.param(torch.float32, torch.bfloat16, 0.03, id="float32_hidden_bfloat16_head"),
        pytest.param(torch.bfloat16, torch.float32, 0.01, id="bfloat16_hidden_float32_head"),
        pytest.param(torch.float32, torch.float32, 1e-6, id="float32"),
    ],
)
def test_precision_is_that_of_the_head_also_under_autocast(
    hidden_dtype: torch.dtype, head_dtype: torch.dtype, tolerance: float
) -> None:
    hidden_AKD, lm_head_VD, label_AK, supervised_AK = problem()

    def loss_and_gradient(hidden_AKD: Tensor, lm_head_VD: Tensor) -> tuple[Tensor, Tensor]:
        hidden_AKD = hidden_AKD.detach().requires_grad_()
        loss = drafter_loss(
            hidden_AKD, lm_head_VD, label_AK, supervised_AK, DPACE, anchors_per_chunk=3
        )
        return loss.loss_sum, gradient(loss.loss_sum, hidden_AKD)

    exact, exact_AKD = loss_and_gradient(hidden_AKD, lm_head_VD)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss_sum, grad_AKD = loss_and_gradient(
            hidden_AKD.to(hidden_dtype), lm_head_VD.to(head_dtype)
        )
    assert loss_sum.dtype == torch.float32
    assert grad_AKD.dtype == hidden_dtype
    assert abs(loss_sum - exact) / exact < tolerance
    assert (grad_AKD - exact_AKD).norm() / exact_AKD.norm() < tolerance


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        pytest.param(torch.float32, 1e-4, id="float32"),
        pytest.param(torch.bfloat16, 0.1, id="bfloat16"),  # its logits are off by 0.05
    ],
)
def test_gradient_of_a_nearly_certain_label_is_not_lost_in_rounding(
    dtype: torch.dtype, tolerance: float
) -> None:
    """All that is left of it is a small difference of two large products."""
    _, lm_head_VD, label_AK, supervised_AK = problem()
    lm_head_VD = normalize(lm_head_VD).to(dtype)
    hidden_AKD = (20 * lm_head_VD[label_AK]).requires_grad_()
    loss = drafter_loss(hidden_AKD, lm_head_VD, label_AK, supervised_AK, DECAY, anchors_per_chunk=3)
    assert 0 < loss.ce_AK.mean() < 0.01
    exact_AKD = hidden_AKD.detach().double().requires_grad_()
    ce_AK = reference_ce(exact_AKD, lm_head_VD.double(), label_AK)
    expected_AKD = gradient((DECAY(ce_AK, supervised_AK) * ce_AK).sum(), exact_AKD)
    error_AKD = gradient(loss.loss_sum, hidden_AKD) - expected_AKD
    assert error_AKD.norm() / expected_AKD.norm() < tolerance


def test_cross_entropy_of_bfloat16_logits_is_float32() -> None:
    hidden_AKD, lm_head_VD, label_AK, supervised_AK = problem()
    hidden_AKD, lm_head_VD = hidden_AKD.detach().bfloat16(), lm_head_VD.bfloat16()
    logits_NV = (hidden_AKD @ lm_head_VD.T).float()[supervised_AK]
    loss = drafter_loss(hidden_AKD, lm_head_VD, label_AK, supervised_AK, DECAY, anchors_per_chunk=3)
    expected_N = cross_entropy(logits_NV, label_AK[supervised_AK], reduction="none")
    torch.testing.assert_close(loss.ce_AK[supervised_AK], expected_N, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_logits_of_one_chunk_are_held_at_a_time(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not those of two, nor all of one in float32."""
    monkeypatch.setattr("trainer.logits._rooms", {})  # another test may have left its room
    monkeypatch.setattr("torch.get_num_threads", lambda: 1)  # each has a few rows in work
    vocab_size, num_anchors, block_size, per_chunk = 100_000, 96, 4, 32
    hidden_AKD = torch.randn(num_anchors, block_size, 8, requires_grad=True)
    supervised_AK = torch.ones(num_anchors, block_size, dtype=torch.bool)
    supervised_AK[:, 0] = False
    weigh = partial(decay_weights, slot_weight_K=slot_weights(block_size, 4.0))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        drafter_loss(
            hidden_AKD,
            torch.randn(vocab_size, 8, dtype=dtype),
            torch.ones(num_anchors, block_size, dtype=torch.int64),
            supervised_AK,
            weigh,
            anchors_per_chunk=per_chunk,
        )
    events = profiler.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    peak = np.cumsum([num_bytes for _, num_bytes in changes]).max()
    head = vocab_size * 8 * dtype.itemsize
    num_logits = per_chunk * (block_size - 1) * vocab_size
    assert 0.9 < (peak - head) / (num_logits * dtype.itemsize) < 1.9


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_gives_the_loss_of_a_cpu_and_finds_the_first_of_equal_logits() -> None:
    hidden_AKD, lm_head_VD, label_AK, supervised_AK = problem()
    hidden_AKD, lm_head_VD = exact(hidden_AKD), exact(lm_head_VD)
    lm_head_VD[1::2] = lm_head_VD[: len(lm_head_VD) - len(lm_head_VD) % 2 : 2]  # pairs of equals
    results = []
    for device in ("cpu", "cuda"):
        inputs = [x.to(device) for x in (hidden_AKD, lm_head_VD, label_AK, supervised_AK)]
        inputs[0] = inputs[0].detach().requires_grad_()
        loss = drafter_loss(*inputs, DPACE, anchors_per_chunk=3)
        given = [getattr(loss, field.name).detach() for field in fields(loss)]
        results.append([x.cpu() for x in (*given, gradient(loss.loss_sum, inputs[0]))])
    for on_cpu, on_gpu in zip(*results, strict=True):
        torch.testing.assert_close(on_gpu, on_cpu, rtol=1e-3, atol=1e-4)
