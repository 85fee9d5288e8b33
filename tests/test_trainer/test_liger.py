"""Liger's kernel in place of torch's operators: the same loss, gradients and metrics.

Without a GPU its code runs in the interpreter of Triton, which must be asked for before Triton is
imported: in a process of its own.
"""

import multiprocessing
import tomllib
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from tests.conftest import REPOSITORY
from tests.test_trainer.test_loss import exact
from trainer import config as training
from trainer import liger
from trainer.config import TrainConfig
from trainer.evaluate import evaluate
from trainer.loader import Loader
from trainer.loss import dpace_weights, drafter_loss
from trainer.recipe import LossConfig
from trainer.train import Training

MakeTrain = Callable[..., TrainConfig]
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
DPACE = partial(dpace_weights, alpha=0.5)
needs_liger = pytest.mark.skipif(not liger.is_installed(), reason="needs liger-kernel")


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Callable[..., Any]]:
    """Calls a function of this file in a process where kernels of Triton run on the CPU."""
    with (
        pytest.MonkeyPatch.context() as context,
        ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool,
    ):
        context.setenv("TRITON_INTERPRET", "1")
        yield lambda function, *arguments: pool.submit(function, *arguments).result(timeout=300)


def losses(vocab_size: int, dtype: torch.dtype, device: torch.device) -> list[list[Tensor]]:
    """Fields and gradient of the loss by torch and by Liger; some logits equal, some huge."""
    generator = torch.Generator().manual_seed(0)
    hidden_AKD = exact(torch.randn(7, 5, 8, generator=generator)).to(device)
    hidden_AKD[2] *= 60
    lm_head_VD = exact(torch.randn(vocab_size, 8, generator=generator)).to(device, dtype)
    lm_head_VD[1::2] = lm_head_VD[: vocab_size - vocab_size % 2 : 2]
    label_AK = torch.randint(vocab_size, (7, 5), generator=generator).to(device)
    supervised_AK = (torch.rand(7, 5, generator=generator) < 0.7).to(device)
    supervised_AK[:, 0] = supervised_AK[3] = False
    supervised_AK[0, 1:] = supervised_AK[2, 1:] = True
    logits_KV = hidden_AKD[0].to(dtype) @ lm_head_VD.T
    label_AK[0] = logits_KV.argmax(-1)  # of two equal logits the first is the prediction
    label_AK[2] = (hidden_AKD[2].to(dtype) @ lm_head_VD.T).argmax(-1)  # near certain
    label_AK[0, 2] += 1  # and not the second
    found = []
    for with_liger in (False, True):
        hidden_AKD = hidden_AKD.detach().requires_grad_()
        loss = drafter_loss(
            *(hidden_AKD, lm_head_VD, label_AK, supervised_AK, DPACE),
            anchors_per_chunk=3,
            with_liger=with_liger,
        )
        (grad_AKD,) = torch.autograd.grad(loss.loss_sum, hidden_AKD)
        with torch.no_grad():
            silent = drafter_loss(
                *(hidden_AKD, lm_head_VD, label_AK, supervised_AK, DPACE),
                anchors_per_chunk=3,
                with_liger=with_liger,
            )
        given = [getattr(each, field.name) for each in (loss, silent) for field in fields(each)]
        found.append([x.detach().cpu().float() for x in (*given, grad_AKD)])
    return found


def check(found: list[list[Tensor]], dtype: torch.dtype) -> None:
    by_torch, by_liger = found
    for ours, theirs in zip(by_torch[:-1], by_liger[:-1], strict=True):
        torch.testing.assert_close(theirs, ours, rtol=2e-6, atol=2e-6)
    assert by_torch[4][0].tolist() == [0, 1, 0, 1, 1]
    # The label's share of the gradient goes through the type of the logits.
    near = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(by_liger[-1], by_torch[-1], rtol=near, atol=near)


@needs_liger
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [23, 40_000])  # in one piece, and in two
def test_the_kernel_gives_the_loss_of_torch(
    interpreted: Callable[..., Any], vocab_size: int, dtype: torch.dtype
) -> None:
    check(interpreted(losses, vocab_size, dtype, CPU), dtype)


@pytest.mark.gpu
@needs_liger
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_gives_the_loss_of_torch_on_a_gpu(dtype: torch.dtype) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    check(losses(40_000, dtype, CUDA), dtype)


def run_both_ways(config: TrainConfig) -> list[dict[str, Any]]:
    """A step and an evaluation of a run by torch, and by Liger, and how often the kernel ran."""
    found, kernel = [], liger.cross_entropy_
    for with_liger in (False, True):
        with (
            patch("trainer.session.is_used", lambda *_, use=with_liger: use),
            patch("trainer.liger.cross_entropy_", wraps=kernel) as counted,
        ):
            path = config.run.path / str(with_liger)
            run = Training(replace(config, run=training.RunConfig(path=path)))
            with Loader.open(run.session, run.ranks, 0) as loader:
                step = run.learner.train_step(iter(loader))
            in_step = counted.call_count
            heldout = {f"heldout/{name}": value for name, value in evaluate(run.session).items()}
            numbers = {**step, **heldout}
            found.append(
                {name: x for name, x in numbers.items() if isinstance(x, int | float)}
                | {"calls": (in_step > 0, counted.call_count > in_step)}
            )
    return found


@pytest.mark.slow
@needs_liger
def test_a_run_takes_the_kernel_in_its_steps_and_evaluations(
    interpreted: Callable[..., Any], tiny_train: MakeTrain, tiny_cache: Path, tmp_path: Path
) -> None:
    by_torch, by_liger = interpreted(run_both_ways, tiny_train(tmp_path, tiny_cache))
    assert by_torch.pop("calls") == (False, False)
    assert by_liger.pop("calls") == (True, True)
    assert by_torch["train/loss"] > 0
    assert by_torch["train/grad_norm"] > 0
    assert by_liger == pytest.approx(by_torch, rel=1e-5)


@pytest.mark.parametrize(
    ("kernel", "kind", "device", "is_installed", "expected"),
    [
        ("auto", "decay", CUDA, True, True),
        ("auto", "dpace", CUDA, True, True),
        ("auto", "kl", CUDA, True, False),
        ("auto", "decay", CUDA, False, False),
        ("auto", "decay", CPU, True, False),
        ("torch", "decay", CUDA, True, False),
    ],
)
def test_the_kernel_is_taken_where_it_can_be(
    kernel: Any,
    kind: Any,
    device: torch.device,
    is_installed: bool,
    expected: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(liger, "is_installed", lambda: is_installed)
    assert liger.is_used(LossConfig(kind=kind, kernel=kernel), device) is expected


@pytest.mark.parametrize(
    ("found", "expected"), [("0.8.5", True), ("0.8.4", False), ("0.9.0", False)]
)
def test_another_version_is_not_used_and_is_named(
    found: str, expected: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its kernel may take other arguments, and a run would end in its first step."""
    monkeypatch.setattr(liger, "version", lambda _: found)
    assert liger.is_installed.__wrapped__() is expected
    assert (
        f"liger-kernel {found} is not used: expected {liger.VERSIONS}" in caplog.text
    ) != expected


def test_the_extra_installs_a_version_that_is_used() -> None:
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert extras["optional-dependencies"]["liger"] == [f"liger-kernel{liger.VERSIONS}"]
