"""Weighted loss of the blocks through the frozen LM head, never holding all logits.

At each slot it is the cross-entropy of the label or, with a teacher, the divergence from the
target's distribution.

The loss is a sum and comes with its weight: one optimizer step divides the gradients of all its
micro-batches and ranks by their total weight, so the result does not depend on how the step was
split.

Letters: A anchors, K block size, D hidden size, V vocabulary, M supervised slots of a chunk.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trainer.logits import reduce, room_for_logits
from trainer.recipe import LossConfig
from trainer.teacher import Teacher

WeighFunction: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""(ce_AK, supervised_AK) -> float32 weight_AK, without gradient, 0 where not supervised. Each
anchor's weights depend on that anchor alone."""


@dataclass(frozen=True, eq=False, slots=True)
class BlockLoss:
    """Loss of the blocks of one micro-batch."""

    loss_sum: Tensor
    """float32 []: sum of weight times loss; carries the gradient."""

    weight_sum: Tensor
    """float32 []: sum of the weights, 0 if nothing is supervised."""

    ce_AK: Tensor
    """float32: cross-entropy in nats, detached, 0 where not supervised."""

    loss_AK: Tensor
    """float32: what is summed, detached: the cross-entropy or the divergence, 0 as above."""

    correct_AK: Tensor
    """bool: the most probable token is the label; False where not supervised."""


def slot_weights(block_size: int, gamma: float) -> Tensor:
    """Loss weight of each slot, float32 [K].

    Slot 0 is the anchor and weighs 0; slot k weighs exp(-(k - 1) / gamma), so the first draft
    weighs 1. `gamma` is in slots.

    Source: DFlash, arXiv 2602.06036, training loss.
    """
    slot_K = torch.arange(block_size, dtype=torch.float32)
    return torch.where(slot_K > 0, torch.exp(-(slot_K - 1) / gamma), 0.0)


def decay_weights(ce_AK: Tensor, supervised_AK: Tensor, slot_weight_K: Tensor) -> Tensor:
    """The same weight per slot for every anchor, whatever the drafter predicts."""
    return supervised_AK * slot_weight_K


def dpace_weights(ce_AK: Tensor, supervised_AK: Tensor, alpha: float) -> Tensor:
    """Weights that follow the drafter's own confidence, float32 [A, K], detached.

    With q the probability of the label and p = (1 - alpha) q + alpha, slot j weighs
    sum over m >= j of the product of p over slots 1..m: at alpha 0 the gradient of the loss is
    that of minus the expected accepted length. Slots without a label are passed over: they
    neither end the product nor count in the sum.

    Source: D-PACE, as implemented in SpecForge and speculators (the paper was not read).
    """
    confidence_AK = (1 - alpha) * torch.exp(-ce_AK.detach().float()) + alpha
    reach_AK = torch.where(supervised_AK, confidence_AK, 1.0).cumprod(dim=-1) * supervised_AK
    return reach_AK.flip(-1).cumsum(dim=-1).flip(-1) * supervised_AK


def weighing(config: LossConfig, block_size: int, device: torch.device) -> WeighFunction:
    """The weights that the configuration asks for."""
    if config.kind == "dpace":
        return partial(dpace_weights, alpha=config.dpace_alpha)
    slot_weight_K = slot_weights(block_size, config.resolve_gamma(block_size)).to(device)
    return partial(decay_weights, slot_weight_K=slot_weight_K)


def drafter_loss(
    hidden_AKD: Tensor,
    lm_head_VD: Tensor,
    label_AK: Tensor,
    supervised_AK: Tensor,
    weigh: WeighFunction,
    teacher: Teacher | None = None,
    *,
    anchors_per_chunk: int,
    with_liger: bool = False,
) -> BlockLoss:
    """Sum of weighted losses of the slots, differentiable with respect to `hidden_AKD` alone.

    Logits exist for `anchors_per_chunk` blocks at a time and only for supervised slots. They are
    computed in the dtype of `lm_head_VD`, whatever autocast says, and reduced in float32. If a
    gradient is wanted, it is computed in the same pass, so that backward neither keeps logits
    nor recomputes them; it has the dtype of `hidden_AKD`.

    Args:
        label_AK: int64, read only where supervised.
        supervised_AK: bool, False in slot 0.
        teacher: of the same slots; None takes the cross-entropy of the labels.
        with_liger: take Liger's kernel for the cross-entropy. Only rounding depends on it.
    """
    if not torch.is_grad_enabled():
        hidden_AKD = hidden_AKD.detach()  # `needs_input_grad` looks at the tensor alone
    fields = _ChunkedLoss.apply(  # type: ignore[no-untyped-call]  # torch leaves it untyped
        hidden_AKD,
        lm_head_VD,
        label_AK,
        supervised_AK,
        weigh,
        teacher,
        anchors_per_chunk,
        with_liger,
    )
    return BlockLoss(*fields)


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_AKD: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
        grad_AKD = hidden_AKD.new_zeros(hidden_AKD.shape) if ctx.needs_input_grad[0] else None
        with torch.autocast(hidden_AKD.device.type, enabled=False):
            sums_and_slots = _sweep(hidden_AKD, grad_AKD, *inputs)
        if grad_AKD is not None:
            ctx.save_for_backward(grad_AKD)
        ctx.mark_non_differentiable(*sums_and_slots[1:])
        return sums_and_slots

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        (grad_AKD,) = ctx.saved_tensors
        return grad_AKD * grad_loss, None, None, None, None, None, None, None


def _sweep(
    hidden_AKD: Tensor,
    grad_AKD: Tensor | None,
    lm_head_VD: Tensor,
    label_AK: Tensor,
    supervised_AK: Tensor,
    weigh: WeighFunction,
    teacher: Teacher | None,
    anchors_per_chunk: int,
    with_liger: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The fields of BlockLoss; fills `grad_AKD`, zero on entry, if there is one."""
    block_size = supervised_AK.shape[1]
    ce_AK = torch.zeros(supervised_AK.shape, device=hidden_AKD.device)
    loss_AK, correct_AK = torch.zeros_like(ce_AK), torch.zeros_like(supervised_AK)
    loss_sum, weight_sum = ce_AK.new_zeros(()), ce_AK.new_zeros(())
    # One transfer tells all chunk sizes; asking chunk by chunk would stall the device each time.
    sizes = [chunk_AK.sum() for chunk_AK in torch.split(supervised_AK, anchors_per_chunk)]
    slots = supervised_AK.flatten().nonzero().flatten()
    for index, slot_M in enumerate(torch.split(slots, torch.stack(sizes).tolist())):
        if not len(slot_M):
            continue
        first = index * anchors_per_chunk
        chunk = slice(first, first + anchors_per_chunk)
        label_M = label_AK.flatten()[slot_M]
        hidden_MD = hidden_AKD.flatten(0, 1)[slot_M].to(lm_head_VD.dtype)
        logits_MV = torch.mm(hidden_MD, lm_head_VD.T, out=room_for_logits(len(slot_M), lm_head_VD))
        own_MV = None if teacher is None else teacher.logits(slot_M)
        keep_error = grad_AKD is not None
        rows = reduce(
            logits_MV, label_M, teacher, own_MV, keep_error=keep_error, with_liger=with_liger
        )
        del own_MV
        ce_AK.view(-1)[slot_M] = rows.ce_M
        correct_AK.view(-1)[slot_M] = rows.correct_M
        weight_AK = weigh(ce_AK[chunk], supervised_AK[chunk])
        weight_M = weight_AK.flatten()[slot_M - first * block_size]
        loss_AK.view(-1)[slot_M] = rows.loss_M
        loss_sum += weight_M @ rows.loss_M
        weight_sum += weight_M.sum()
        if grad_AKD is not None:
            grad_MD = (logits_MV @ lm_head_VD) * (weight_M * rows.scale_M)[:, None]
            grad_AKD.view(-1, grad_AKD.shape[-1])[slot_M] = grad_MD.to(grad_AKD.dtype)
        del logits_MV  # before the next chunk's exist: the peak would hold those of two
    return loss_sum, weight_sum, ce_AK, loss_AK, correct_AK
