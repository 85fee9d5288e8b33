"""The norm of a CPU against torch's own, values and gradients."""

import pytest
import torch
from torch.nn.functional import rms_norm

from trainer.norm import RMSNorm


@pytest.mark.parametrize("shape", [(5, 12), (5, 3, 12)])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)], ids=str
)
@pytest.mark.parametrize("under_autocast", [False, True])
def test_values_and_gradients_are_those_of_torch(
    shape: tuple[int, ...], dtype: torch.dtype, tolerance: float, under_autocast: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    norm = RMSNorm(12, 1e-2)  # an eps that counts
    weight = torch.rand(12, generator=generator) + 0.5
    norm.weight.data.copy_(weight)
    x = torch.randn(shape, generator=generator).to(dtype).requires_grad_()
    toward = torch.randn(shape, generator=generator).to(dtype)
    before = x.detach().clone()
    with torch.autocast("cpu", torch.bfloat16, enabled=under_autocast):
        out = norm(x)
        out.backward(toward)
    assert out.dtype == dtype
    assert norm.weight.grad is not None
    assert norm.weight.grad.dtype == torch.float32
    assert torch.equal(x, before)

    exact = x.detach().double().requires_grad_()
    exact_weight = weight.double().requires_grad_()
    expected = rms_norm(exact, (12,), exact_weight, 1e-2)
    expected.backward(toward.double())
    for found, wanted in (
        (out, expected),
        (x.grad, exact.grad),
        (norm.weight.grad, exact_weight.grad),
    ):
        assert found is not None
        assert wanted is not None
        assert (found.double() - wanted).norm() / wanted.norm() < tolerance
    # Nothing of the weight's gradient is lost to bfloat16.
    assert exact_weight.grad is not None
    torch.testing.assert_close(norm.weight.grad.double(), exact_weight.grad, rtol=1e-5, atol=1e-5)


def test_float64_stays_float64() -> None:
    generator = torch.Generator().manual_seed(0)
    norm = RMSNorm(12, 1e-2)
    norm.weight.data = torch.rand(12, generator=generator, dtype=torch.float64) + 0.5
    x = torch.randn((5, 12), generator=generator, dtype=torch.float64).requires_grad_()
    out = norm(x)
    (found,) = torch.autograd.grad(out.sum(), x)
    expected = rms_norm(x, (12,), norm.weight, 1e-2)
    (wanted,) = torch.autograd.grad(expected.sum(), x)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
