"""Cross-entropy by the kernel of Liger, which reads the logits twice and writes them once.

A GPU takes each operator of torch over all logits on its own, half of them in float32: ten passes
through its memory (on a CPU they stay in its cache, see `trainer.logits`).

M slots of a chunk   V vocabulary
"""

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from shared.errors import ConfigError
from trainer.recipe import LossConfig

_NO_LABEL = -100


@cache
def is_installed() -> bool:
    return find_spec("liger_kernel") is not None


def is_used(config: LossConfig, device: torch.device) -> bool:
    """Whether the loss takes Liger's kernel: `auto` takes it on a GPU where it is installed.

    Raises:
        ConfigError: it is asked for and cannot be had.
    """
    if config.kernel != "liger":
        is_fit = device.type == "cuda" and not config.needs_teacher
        return config.kernel == "auto" and is_fit and is_installed()
    where = "loss.kernel 'liger'"
    if device.type != "cuda":
        raise ConfigError(f"{where}: needs a GPU, train.device is {device}. Set 'auto'.")
    if not is_installed():
        raise ConfigError(
            f"{where}: liger-kernel is not installed. Run `pip install liger-kernel`."
        )
    return True


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
