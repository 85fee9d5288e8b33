"""The memory of a run: what is said before its first step is what it then takes."""

import mmap
import multiprocessing
import re
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shared.errors import ConfigError
from tests.test_trainer.test_stop import lines
from trainer import config as training
from trainer import footprint
from trainer.config import TrainConfig
from trainer.drafter import num_parameters
from trainer.sampler import EpochPlan
from trainer.train import Training, train

MakeTrain = Callable[..., TrainConfig]
CPU = torch.device("cpu")


def shaped(config: TrainConfig, **shape: Any) -> TrainConfig:
    """`config` with sizes of the drafter, and `tokens`, `anchors`, `dtype` and such if
    given."""
    tokens, anchors = shape.pop("tokens", 512), shape.pop("anchors", 8)
    together = shape.pop("together", None)
    dtype = shape.pop("dtype", "float32")
    return replace(
        config,
        drafter=replace(config.drafter, **shape),
        sampler=replace(config.sampler, tokens_per_batch=tokens),
        anchors=training.AnchorConfig(per_sample=anchors, per_forward=together),
        train=replace(config.train, compute_dtype=dtype),
        evaluate=replace(config.evaluate, max_samples=1),
    )


def measure(config: TrainConfig, pipe: Connection) -> None:
    """Train in a process of its own: expected and measured bytes."""
    torch.set_num_threads(1)
    warm = torch.ones(8, 8, requires_grad=True)  # libraries that load at their first use
    with torch.autocast("cpu", torch.bfloat16):
        (warm @ warm).sum().backward()  # type: ignore[no-untyped-call]
    torch.optim.AdamW([warm], fused=True).step()
    run = Training(config)
    run.train()
    parts = run.footprint
    pipe.send((parts.on(CPU), parts.libraries, run.meter.peak, str(parts)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param({"intermediate_size": 49_152}, id="weights"),
        pytest.param({"anchors": 64, "tokens": 1536, "intermediate_size": 4096}, id="activations"),
        pytest.param(
            {
                "anchors": 64,
                "tokens": 1536,
                "num_heads": 32,
                "head_dim": 64,
            },
            id="attention",
        ),
        pytest.param(
            {"anchors": 64, "tokens": 1536, "intermediate_size": 8192, "dtype": "bfloat16"},
            id="bfloat16",
        ),
        pytest.param(
            {"anchors": 64, "tokens": 1536, "intermediate_size": 16_384, "together": 100},
            id="anchors by parts",
        ),
    ],
)
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_the_estimate_is_within_a_fifth_of_the_peak(
    shape: dict[str, Any], tiny_cache: Path, tiny_train: MakeTrain, tmp_path: Path
) -> None:
    """Of the process's resident memory, above what it had before the run. The vocabulary is tiny:
    for a real one the allocator of a CPU holds more, see `trainer.footprint`."""
    config = shaped(tiny_train(tmp_path / "run", tiny_cache, steps=2), **shape)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=measure, args=(config, theirs))
    process.start()
    theirs.close()
    assert ours.poll(600)
    expected, libraries, measured, parts = ours.recv()
    process.join(60)
    assert expected > 80e6
    # In float32 what libraries hold is loaded already, and the vocabulary is tiny. In bfloat16 they
    # add kernels for each shape, where the CPU has units for it.
    counted = expected - libraries
    most = expected if shape.get("dtype") == "bfloat16" else counted
    assert 0.8 * measured < most, f"{expected:,} expected, {measured:,} taken: {parts}"
    assert counted < 1.2 * measured, f"{expected:,} expected, {measured:,} taken: {parts}"


@pytest.mark.parametrize(
    ("dtype", "tokens", "steps", "others", "taken"),
    [
        pytest.param("bfloat16", 1024, 20, 435, 785, id="demo, young"),
        pytest.param("bfloat16", 1024, 600, 435, 1088, id="demo"),
        pytest.param("bfloat16", 1024, 24, 386, 638, id="projected, young, one thread"),
        pytest.param("bfloat16", 512, 20, 345, 497, id="projected, short rows, young"),
        pytest.param("bfloat16", 512, 600, 345, 768, id="projected, short rows"),
        pytest.param("bfloat16", 512, 600, 395, 873, id="lossless, short rows"),
        pytest.param("bfloat16", 1024, 200, 995, 1450, id="vocabulary of 262,144"),
        pytest.param("bfloat16", 1024, 20, 438, 888, id="earlier release, young"),
        pytest.param("bfloat16", 1024, 600, 382, 1330, id="earlier release"),
        pytest.param("float32", 512, 30, 527, 704, id="float32, short rows"),
        pytest.param("float32", 1024, 60, 616, 833, id="float32"),
        pytest.param("float32", 1024, 600, 616, 865, id="float32, demo"),
        pytest.param("float32", 2048, 30, 812, 1120, id="float32, long rows"),
    ],
)
def test_what_libraries_hold_is_within_a_fifth_of_what_real_runs_took(
    dtype: str,
    tokens: int,
    steps: int,
    others: int,
    taken: int,
    tiny_cache: Path,
    tiny_train: MakeTrain,
) -> None:
    """MB: `others` is what the estimate says of all the rest, `taken` the peak that was measured,
    on a CPU with bfloat16 units."""
    config = shaped(tiny_train(Path("run"), tiny_cache, steps=steps), dtype=dtype)
    batch = footprint.BatchSize(num_tokens=tokens, num_anchors=1, longest=1, mean_tokens=1)
    parts = footprint.estimate(
        config,
        batch,
        [torch.zeros(8, 8)],
        heldout_anchors=1,
        num_features=8,
        num_stored=8,
        bytes_per_token=8,
        num_batches=1,
        device=CPU,
    )
    assert 0.8 < (others * 1e6 + parts.libraries) / (taken * 1e6) < 1.2


def test_a_run_that_memory_cannot_hold_is_refused_in_one_line(
    tiny_cache: Path, tiny_train: MakeTrain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(footprint, "memory_of", lambda device: 1_000_000)
    config = tiny_train(tmp_path / "run", tiny_cache)
    with pytest.raises(ConfigError) as caught:
        train(config)
    assert re.search(
        r"needs about .* MB \(weights .*, snapshot .*\), cpu has 1.00 MB.*tokens_per_batch",
        str(caught.value),
    )
    assert not (tmp_path / "run").exists()


def test_the_peak_is_logged_with_every_step(
    tiny_cache: Path, tiny_train: MakeTrain, tmp_path: Path
) -> None:
    train(tiny_train(tmp_path / "run", tiny_cache, steps=3))
    peaks = [line["memory/peak_bytes"] for line in lines(tmp_path / "run")]
    assert len(peaks) == 3
    if Path("/proc/self/status").exists():
        assert peaks == sorted(peaks)
        assert peaks[0] >= 0


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_the_peak_holds_what_was_freed_again() -> None:
    meter = footprint.Meter(CPU)
    # Not by a tensor: a heap that holds what other tests have freed would have room for it.
    with mmap.mmap(-1, 256_000_000, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as taken:
        for page in range(0, len(taken), mmap.PAGESIZE):
            taken[page] = 1
    peak = meter.read()
    assert peak is not None
    assert peak > 240e6  # but for what each core has not told yet


def test_a_peak_is_never_below_what_was_in_use_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux counts resident pages loosely, so that its highest can be below an earlier figure."""
    kib = iter([1000, 920, 1040, 1010])
    monkeypatch.setattr(footprint, "_resident", lambda name: next(kib) * 1024)
    meter = footprint.Meter(CPU)
    assert [meter.read() for _ in range(3)] == [0, 40 * 1024, 40 * 1024]


def test_gradients_of_what_went_before_are_there_beside_the_activations(
    tiny_train: MakeTrain, tmp_path: Path
) -> None:
    config = tiny_train(tmp_path / "run", tmp_path)
    size = footprint.BatchSize(num_tokens=512, num_anchors=64, longest=200, mean_tokens=500)

    def largest(num_batches: int, per_forward: int | None, device: str) -> int:
        anchors = replace(config.anchors, per_forward=per_forward)
        return footprint.estimate(
            replace(config, anchors=anchors),
            size,
            [torch.empty(272, 64), torch.empty(272, 64)],
            heldout_anchors=1,
            num_features=128,
            num_stored=128,
            bytes_per_token=128,
            num_batches=num_batches,
            device=torch.device(device),
        ).gradients_or_activations

    gradients = 4 * num_parameters(config.drafter, 64, 128)
    for device in ("cpu", "cuda"):
        alone, halved = largest(1, None, device), largest(1, 32, device)
        assert largest(2, None, device) == alone + gradients
        assert halved == largest(2, 32, device)
        assert 0.4 * alone < halved - gradients < 0.7 * alone


def test_logits_of_a_gpu_are_not_held_in_float32_where_a_kernel_reduces_them(
    tiny_train: MakeTrain, tmp_path: Path
) -> None:
    config = tiny_train(tmp_path / "run", tmp_path)
    taken = {}
    for kernel in ("torch", "auto"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("trainer.liger.is_installed", lambda: True)
            taken[kernel] = footprint.estimate(
                replace(config, loss=training.LossConfig(kernel=kernel, anchors_per_chunk=16)),
                footprint.BatchSize(num_tokens=512, num_anchors=64, longest=200, mean_tokens=500),
                [torch.empty(50_000, 64)],
                heldout_anchors=1,
                num_features=128,
                num_stored=128,
                bytes_per_token=128,
                num_batches=1,
                device=torch.device("cuda"),
            ).gradients_or_activations
    num_logits = 16 * (config.drafter.block_size - 1) * 50_000
    assert taken["torch"] - taken["auto"] == 4 * num_logits


def test_the_largest_batch_is_found_by_tokens_and_slots() -> None:
    plan = EpochPlan(
        sample=np.array([3, 0, 1, 2]),
        offset=np.array([0, 1, 3, 4]),
        bucket=np.zeros(3, np.int16),
        edge=np.array([0, 100]),
        tokens_per_batch=100,
    )
    length, anchors = np.array([30, 20, 60, 90]), np.array([5, 6, 9, 1])
    found = footprint.largest_batch(plan, length, anchors, 8)
    assert (found.num_tokens, found.num_anchors, found.longest) == (50, 11, 30)
    assert found.mean_tokens == (90 + 50 + 60) // 3
    assert footprint.largest_batch(plan, length, anchors, 2).num_tokens == 90
