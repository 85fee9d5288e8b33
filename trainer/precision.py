"""The type of the matrix products: bfloat16 where the device has units for it, else float32."""

import logging
import platform
from dataclasses import replace
from typing import Literal

import torch

from trainer.config import TrainConfig

logger = logging.getLogger(__name__)


def with_compute_dtype(config: TrainConfig, device: torch.device) -> TrainConfig:
    """`config` with the type that `train.compute_dtype = "auto"` means on `device`."""
    if config.train.compute_dtype != "auto":
        return config
    taken: Literal["bfloat16", "float32"]
    taken = "bfloat16" if has_bfloat16_units(device) else "float32"
    logger.info(
        "train.compute_dtype 'auto' takes %s: %s %s units for bfloat16",
        taken,
        device,
        "has" if taken == "bfloat16" else "has no",
    )
    return replace(config, train=replace(config.train, compute_dtype=taken))


def has_bfloat16_units(device: torch.device) -> bool:
    """Whether products in bfloat16 are faster on `device` than in float32.

    On a CPU of AVX-512 without them they were seen to take 2.5 times as long, and with AVX2 alone,
    where torch multiplies by loops of its own, the gradient of the LM head 127 times.
    """
    if device.type == "cuda":
        is_native: bool = torch.cuda.is_bf16_supported(including_emulation=False)
        return is_native
    if device.type != "cpu":
        return True
    # There is no public question that all versions of torch answer.
    if platform.machine().lower() in ("x86_64", "amd64"):
        return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    return torch.backends.mkldnn.is_available() and bool(  # type: ignore[no-untyped-call]
        torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )
