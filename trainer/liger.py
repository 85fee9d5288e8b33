"""Cross-entropy by the kernel of Liger, which reads the logits twice and writes them once.

A GPU takes each operator of torch over all logits on its own, half of them in float32: ten passes
through its memory (on a CPU they stay in its cache, see `trainer.logits`).

M slots of a chunk   V vocabulary
"""

import logging
from functools import cache
from importlib.metadata import PackageNotFoundError, version

import torch
from packaging.specifiers import SpecifierSet
from torch import Tensor

from trainer.recipe import LossConfig

logger = logging.getLogger(__name__)

VERSIONS = ">=0.8.5,<0.9"
"""Whose kernel takes the arguments below; those of the extra `liger`."""

_NO_LABEL = -100


@cache
def is_installed() -> bool:
    """Whether liger-kernel is there in a version that is known; warns of another, once."""
    try:
        found = version("liger-kernel")
    except PackageNotFoundError:
        return False
    if found not in SpecifierSet(VERSIONS):
        logger.warning(
            "liger-kernel %s is not used: expected %s. `pip install 'liger-kernel%s'`, or set "
            "loss.kernel = 'torch'.",
            *(found, VERSIONS, VERSIONS),
        )
        return False
    return True


def is_used(config: LossConfig, device: torch.device) -> bool:
    """Whether the loss takes Liger's kernel: on a GPU, where it is installed and not refused."""
    is_fit = device.type == "cuda" and not config.needs_teacher
    return is_fit and config.kernel == "auto" and is_installed()


def cross_entropy_(
    logits_MV: Tensor, label_M: Tensor, *, keep_error: bool
) -> tuple[Tensor, Tensor]:
    """Cross-entropy of each row in nats, float32 [M], and whether its argmax is the label [M].

    If asked, the error takes the place of the logits: their softmax, less 1 at the label. Of
    equal logits the first is the argmax.

    Liger's own function around this kernel gives the cross-entropy in the type of the logits, and
    waits for the device three times.
    """
    from liger_kernel.ops.cross_entropy import MAX_FUSED_SIZE, liger_cross_entropy_kernel
    from triton import next_power_of_2

    num_rows, num_logits = logits_MV.shape
    ce_M = logits_MV.new_empty(num_rows, dtype=torch.float32)
    correct_M = torch.empty_like(ce_M)
    liger_cross_entropy_kernel[(num_rows,)](
        X_ptr=logits_MV,
        X_stride=logits_MV.stride(0),
        Y_ptr=label_M,
        Y_stride=label_M.stride(0),
        weight_ptr=None,
        loss_ptr=ce_M,
        z_loss_ptr=None,
        loss_stride=ce_M.stride(0),
        token_accuracy_ptr=correct_M,
        token_accuracy_stride=correct_M.stride(0),
        predicted_tokens_ptr=None,
        predicted_tokens_stride=0,
        n_cols=num_logits,
        n_non_ignore=num_rows,
        sum_non_ignore_weight=num_rows,
        weight_sum=0.0,
        ignore_index=_NO_LABEL,
        lse_square_scale=0.0,
        label_smoothing=0.0,
        reduction="none",
        softcap=None,
        RETURN_Z_LOSS=False,
        RETURN_TOKEN_ACCURACY=True,
        RETURN_PREDICTED_TOKENS=False,
        BLOCK_SIZE=min(MAX_FUSED_SIZE, next_power_of_2(num_logits)),
        HAS_WEIGHT=False,
        HAS_SOFTCAPPING=False,
        HAS_GRADIENTS=keep_error,
        num_warps=16 if torch.version.hip else 32,
    )
    return ce_M, correct_M > 0
