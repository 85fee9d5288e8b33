"""The training step of large drafters on a GPU: random states and weights, no target and no cache.

Letters as in `trainer.batch`; V vocabulary, F = L*D features of a token, P parameters.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from shared import config as configs
from shared.codec import PRESETS, Packed
from shared.head import Head
from shared.shard import StoredSample
from tests.conftest import REPOSITORY
from trainer import footprint
from trainer.batch import Batch, collate
from trainer.compiled import compile_layers_
from trainer.config import TrainConfig
from trainer.drafter import Drafter
from trainer.liger import is_used
from trainer.loss import weighing
from trainer.optim import build_optimizer, scale_and_clip_
from trainer.session import enter_device
from trainer.spans import visible_spans
from trainer.step import autocast, batch_loss, forward_blocks

_CODEC = "balanced"
_PEAK_TFLOPS = {"H100": 989, "H200": 989, "B200": 2250, "A100": 312, "L40S": 362}
"""Of dense bfloat16 products, by a word of the device's name, as the vendor gives them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuShape:
    """A target, as far as its drafter's step depends on it, and the configuration of the step."""

    name: str
    config: TrainConfig
    hidden_size: int
    vocab_size: int
    num_layers: int = 5


@dataclass(frozen=True, slots=True)
class GpuRow:
    shape: str
    is_compiled: bool
    num_samples: int
    num_tokens: int
    num_anchors: int
    step_seconds: float
    """Median, from the micro-batch in page-locked memory to the new weights."""

    tokens_per_second: float
    tflops: float
    """Model FLOPs of the step a second, without what is computed twice."""

    utilisation: float | None
    """Share of the device's peak, where it is known."""

    peak_bytes: int
    expected_bytes: int


def large_shapes() -> list[GpuShape]:
    """Those of the configurations for Qwen3-8B and Qwen3.6-27B, as they are and compiled."""
    return [
        shape
        for is_compiled in (False, True)
        for shape in (
            _shape("qwen3-8b", is_compiled, hidden_size=4096, vocab_size=151_936),
            _shape("qwen3.6-27b", is_compiled, hidden_size=5120, vocab_size=248_320),
        )
    ]


def _shape(name: str, is_compiled: bool, *, hidden_size: int, vocab_size: int) -> GpuShape:
    path = REPOSITORY / Path(f"trainer/configs/{name}.toml")
    config = configs.load(TrainConfig, path, ())
    config = replace(
        config, train=replace(config.train, compile=is_compiled, compute_dtype="bfloat16")
    )
    return GpuShape(name=name, config=config, hidden_size=hidden_size, vocab_size=vocab_size)


def measure_gpu(
    shape: GpuShape, device: torch.device, *, samples: Sequence[int] = (1, 4, 16), rounds: int = 5
) -> list[GpuRow]:
    """Steps of one full micro-batch, which so many samples of one length fill."""
    enter_device(device)
    config, generator = shape.config, torch.Generator().manual_seed(0)
    hidden_size, vocab_size = shape.hidden_size, shape.vocab_size
    num_features = shape.num_layers * hidden_size
    table_VD, head_VD = (
        torch.randn(vocab_size, hidden_size, generator=generator).mul_(0.02).bfloat16().to(device)
        for _ in range(2)
    )
    head = Head(table_VD, head_VD, torch.ones(hidden_size, device=device, dtype=torch.bfloat16))
    drafter = Drafter(config.drafter, hidden_size, num_features, generator).to(device)
    if config.train.compile:
        compile_layers_(drafter)
    optimizer = build_optimizer(drafter.named_parameters(), config.optimizer)
    weigh = weighing(config.loss, config.drafter.block_size, device)
    codec = PRESETS[_CODEC]
    states_SLD = torch.randn(
        config.sampler.tokens_per_batch, shape.num_layers, hidden_size, generator=generator
    ).bfloat16()
    calibration = codec.calibrate(states_SLD[:256])
    packed = codec.pack(states_SLD, calibration)
    calibration = calibration.to(device)
    rows = []
    for count in samples:
        batch = _batch(shape, packed, count, pin=device.type == "cuda")
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        seconds = []
        for _ in range(rounds + 1):
            _wait(device)
            began = time.perf_counter()
            here = batch.to(device)
            features_SLD = codec.unpack(here.packed, calibration)
            weight = torch.zeros((), device=device)
            for part in here.parts(config.anchors.per_forward):
                with autocast(device, config.train.compute_dtype):
                    forward = forward_blocks(
                        drafter, head, part, features_SLD, config.drafter.mask_token_id
                    )
                chunk = config.loss.anchors_per_chunk
                loss = batch_loss(
                    *(forward, head, weigh),
                    anchors_per_chunk=chunk,
                    with_liger=is_used(config.loss, device),
                )
                loss.loss_sum.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
                weight += loss.weight_sum
            scale_and_clip_(drafter.parameters(), float(weight), config.optimizer.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            _wait(device)
            seconds.append(time.perf_counter() - began)
        step = float(np.median(seconds[1:]))  # the first one compiles
        rows.append(_row(shape, drafter, head, batch, device, step))
    return rows


def _batch(shape: GpuShape, packed: Packed, count: int, *, pin: bool) -> Batch:
    config = shape.config
    length = config.sampler.tokens_per_batch // count
    planes_PTW = packed.planes_PTW[:, :length]
    none = {
        "outlier_position": packed.outlier_position[:0],
        "outlier_bits": packed.outlier_bits[:0],
    }
    samples, anchors = [], []
    for number in range(count):
        token_ids = np.arange(length, dtype=np.int32) % config.drafter.mask_token_id
        mask = np.ones(length, np.uint8)
        states = replace(packed, planes_PTW=planes_PTW, **none)
        samples.append(StoredSample(str(number), token_ids, mask, states, None))
        drawn = np.random.default_rng(number).permutation(length - 1)[: config.anchors.per_sample]
        anchors.append(np.sort(drawn))
    batch = collate(samples, anchors, epoch=0, bucket=0)
    return batch.pin() if pin else batch


def _row(
    shape: GpuShape,
    drafter: Drafter,
    head: Head,
    batch: Batch,
    device: torch.device,
    seconds: float,
) -> GpuRow:
    config, count = shape.config, len(batch.anchor_A)
    size = footprint.BatchSize(
        num_tokens=batch.num_tokens,
        num_anchors=count,
        longest=batch.num_tokens // len(batch.sample_ids),
        mean_tokens=batch.num_tokens,
    )
    width = shape.num_layers * shape.hidden_size
    expected = footprint.estimate(
        config,
        size,
        [head.embedding_VD, head.lm_head_VD],
        heldout_anchors=config.anchors.per_sample,
        num_features=width,
        num_stored=width,
        bytes_per_token=width,
        num_batches=1,
        device=device,
    )
    tflops = model_flops(shape, drafter, batch) / seconds / 1e12
    peak = _peak_of(device)
    return GpuRow(
        shape=shape.name,
        is_compiled=config.train.compile,
        num_samples=len(batch.sample_ids),
        num_tokens=batch.num_tokens,
        num_anchors=count,
        step_seconds=seconds,
        tokens_per_second=batch.num_tokens / seconds,
        tflops=tflops,
        utilisation=None if peak is None else tflops / peak,
        peak_bytes=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0,
        expected_bytes=expected.on(device),
    )


def model_flops(shape: GpuShape, drafter: Drafter, batch: Batch) -> float:
    """Of one step: a product has 2 FLOPs a multiply-add forward, and as many for each gradient.

    `fc` has no gradient of its input and the LM head none of its weights.
    """
    own = shape.config.drafter
    slots = len(batch.anchor_A) * own.block_size
    fc = drafter.fc.weight.numel()
    products = sum(p.numel() for p in drafter.layers.parameters() if p.ndim == 2)
    keys = 2 * own.num_layers * own.num_kv_heads * own.head_dim * shape.hidden_size
    scored = len(batch.anchor_A) * (own.block_size - 1)
    spans = visible_spans(batch.document_S, batch.anchor_A, batch.anchor_valid_A, own.block_size)
    seen = (spans.context_end_Q - spans.context_begin_Q).clamp(min=0).sum()
    pairs = float(seen) + slots * own.block_size
    return (
        4.0 * batch.num_tokens * fc
        + 6.0 * batch.num_tokens * keys
        + 6.0 * slots * products
        + 4.0 * scored * shape.hidden_size * shape.vocab_size
        + 12.0 * own.num_layers * pairs * own.num_heads * own.head_dim
    )


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _peak_of(device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for word, peak in _PEAK_TFLOPS.items() if word in name), None)
