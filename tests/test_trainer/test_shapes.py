"""Rows are filled up to round sizes, so that a run meets few shapes, and nothing else changes."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trainer import config as training
from trainer import shapes, step
from trainer.config import TrainConfig
from trainer.flex import BLOCK
from trainer.shapes import CONTEXT_STEP, fill, round_steps, widen
from trainer.train import Training

MakeTrain = Callable[..., TrainConfig]
CPU = torch.device("cpu")
# Those whose kernels depend on what is summed over. The rows of the result matter to none.
PRODUCTS = ("mm", "bmm", "baddbmm", "_scaled_dot_product_flash_attention_for_cpu")


class Seen(TorchDispatchMode):
    """Collects the shapes of matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[Any, ...]] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.__name__.split(".")[0]
        if name in PRODUCTS:
            tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
            self.shapes.add((name, *(tuple(tensor.shape) for tensor in tensors)))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def varied(tiny_train: MakeTrain, tiny_cache: Path, tmp_path: Path) -> TrainConfig:
    config = tiny_train(tmp_path / "run", tiny_cache, steps=24)
    return replace(
        config,
        sampler=replace(config.sampler, tokens_per_batch=700),
        anchors=training.AnchorConfig(per_sample=13),
    )


def losses_and_shapes(config: TrainConfig) -> tuple[list[float], list[int]]:
    """Of each step: its loss, and how many shapes were met until then. Those with the head are
    left out: its products vary by the rows of their results alone."""
    run, seen = Training(config), Seen()
    vocab_size = run.session.cache.spec.target.vocab_size
    losses, counts = [], []
    train_step = run.learner.train_step

    def counted(batches: Any) -> dict[str, Any]:
        with seen:
            metrics = train_step(batches)
        losses.append(metrics["train/loss"])
        counts.append(sum(vocab_size not in itertools.chain(*s[1:]) for s in seen.shapes))
        return metrics

    run.learner.train_step = counted  # type: ignore[method-assign]
    run.train()
    return losses, counts


def test_a_run_meets_few_shapes_and_learns_the_same(
    varied: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses, counts = losses_and_shapes(varied)
    monkeypatch.setattr(step, "round_steps", lambda device, block_size: (1, 1))
    monkeypatch.setattr(shapes, "CONTEXT_STEP", 1)
    plain = replace(varied, run=replace(varied.run, path=varied.run.path.with_name("plain")))
    losses_as_they_come, counts_as_they_come = losses_and_shapes(plain)
    assert losses == pytest.approx(losses_as_they_come, rel=1e-4)
    assert counts_as_they_come[-1] - counts_as_they_come[11] > 100  # new ones in every step
    assert counts[-1] - counts[11] <= 15


def test_filled_rows_are_zero_or_the_value_given() -> None:
    assert fill(torch.tensor([5, 6, 7]), 4, -1).tolist() == [5, 6, 7, -1]
    assert fill(torch.tensor([[1.0, 2.0]]), 2).tolist() == [[1.0, 2.0], [0.0, 0.0]]
    assert fill(torch.tensor([True]), 3).tolist() == [True, False, False]
    whole = torch.ones(4)
    assert fill(whole, 4) is whole


@pytest.mark.parametrize(
    ("begin", "end", "size", "expected"),
    [
        (0, 1, 640, (0, 64)),
        (63, 65, 640, (0, 128)),
        (64, 128, 640, (64, 128)),
        (70, 99, 99, (64, 99)),
    ],
)
def test_a_span_widens_to_round_ends(
    begin: int, end: int, size: int, expected: tuple[int, int]
) -> None:
    assert CONTEXT_STEP == 64
    span = widen(begin, end, size)
    assert (span.start, span.stop) == expected


@pytest.mark.parametrize(("block_size", "anchors"), [(8, 8), (16, 4), (7, 9), (128, 1)])
def test_anchors_fill_about_half_a_tile(block_size: int, anchors: int) -> None:
    assert round_steps(CPU, block_size) == (CONTEXT_STEP, anchors)


@pytest.mark.parametrize(("block_size", "anchors"), [(8, 32), (10, 128), (16, 16), (7, 256)])
def test_rows_on_a_gpu_fill_whole_blocks(block_size: int, anchors: int) -> None:
    assert round_steps(torch.device("cuda"), block_size) == (128, anchors)
    assert anchors * block_size % (2 * BLOCK) == 0
