"""What the loss needs of logits, in few passes over them: they are the largest tensor of a step.

M slots of a chunk   V vocabulary   R rows in work at a time
"""

from typing import NamedTuple

import torch
from torch import Tensor

from trainer import liger
from trainer.teacher import Teacher

_BYTES_PER_CORE = 3 << 19
"""Of float32 logits that a core works on at a time: what stays in a second-level cache. Rows of
a vocabulary of 49,152 are then reduced eight at a time, in 80 ms for 960 rows against 180 ms in
one piece."""

_rooms: dict[torch.dtype, Tensor] = {}


def room_for_logits(num_slots: int, lm_head_VD: Tensor) -> Tensor:
    """Where logits of `num_slots` go, [M, V] of the head's type: on a CPU the same place each time.

    Small blocks that stay move into the hole which a freed one of this size leaves in the heap: a
    run grew by such a block every few steps.
    """
    shape = (num_slots, len(lm_head_VD))
    if lm_head_VD.device.type != "cpu":
        return lm_head_VD.new_empty(shape)
    room = _rooms.get(lm_head_VD.dtype)
    if room is None or room.numel() < shape[0] * shape[1]:
        room = _rooms[lm_head_VD.dtype] = lm_head_VD.new_empty(shape[0] * shape[1])
    return room[: shape[0] * shape[1]].view(shape)


class Rows(NamedTuple):
    """Of each slot of a chunk."""

    ce_M: Tensor
    loss_M: Tensor
    correct_M: Tensor
    scale_M: Tensor
    """What the error kept in place of the logits is to be multiplied by."""


def reduce(
    logits_MV: Tensor,
    label_M: Tensor,
    teacher: Teacher | None,
    own_MV: Tensor | None,
    *,
    keep_error: bool,
    with_liger: bool = False,
) -> Rows:
    """Reduce the logits in float32 and, if asked, put the error of each in their place.

    The error is the gradient of the loss with respect to the logits, divided by `scale_M`. Each
    pass over the logits counts: on a CPU a few rows at a time go through all passes while they lie
    in its cache, and only they exist in float32.

    Args:
        with_liger: take Liger's kernel, where there is no teacher.
    """
    if with_liger and own_MV is None:
        ce_M, correct_M = liger.cross_entropy_(logits_MV, label_M, keep_error=keep_error)
        return Rows(ce_M, ce_M, correct_M, torch.ones_like(ce_M))
    num_rows, num_logits = logits_MV.shape
    if logits_MV.device.type == "cpu":
        num_rows = torch.get_num_threads() * max(1, _BYTES_PER_CORE // (4 * num_logits))
    parts = []
    for start in range(0, len(logits_MV), num_rows):
        part = slice(start, start + num_rows)
        logits_RV, label_R = logits_MV[part], label_M[part]
        wide_RV = logits_RV.to(torch.float32, copy=True)
        gold_R = wide_RV.gather(1, label_R[:, None])[:, 0]
        peak_R, correct_R = _peak(wide_RV, label_R, gold_R)
        if teacher is not None and own_MV is not None:
            loss_R, error_RV = teacher.diverge(own_MV[part], wide_RV)
        sum_R = wide_RV.sub_(peak_R[:, None]).exp_().sum(dim=-1)
        ce_R = sum_R.log() + peak_R - gold_R
        scale_R = torch.ones_like(sum_R)
        if own_MV is None:
            loss_R, error_RV, scale_R = ce_R, wide_RV, 1 / sum_R
            # Here, in float32: of a label that is nearly certain little is left, and that little
            # would be lost in the rounding of the products.
            error_RV.scatter_add_(1, label_R[:, None], -sum_R[:, None])
        if keep_error:
            logits_RV.copy_(error_RV)
        parts.append((ce_R, loss_R, correct_R, scale_R))
    ce_M, loss_M, correct_M, scale_M = (torch.cat(column) for column in zip(*parts, strict=True))
    return Rows(ce_M, loss_M, correct_M, scale_M)


def _peak(logits_MV: Tensor, label_M: Tensor, gold_M: Tensor) -> tuple[Tensor, Tensor]:
    """The largest logit, and whether the label is what argmax gives: the first that has it.

    On a CPU only rows whose label is a peak are searched; of a GPU it would have to be asked which.
    """
    if logits_MV.device.type != "cpu":
        peak_M, first_M = logits_MV.max(dim=-1)
        return peak_M, first_M == label_M
    peak_M = logits_MV.amax(dim=-1)
    is_first_M = torch.zeros_like(label_M, dtype=torch.bool)
    peaks = (gold_M == peak_M).nonzero().flatten()
    is_first_M[peaks] = logits_MV[peaks].argmax(dim=-1) == label_M[peaks]
    return peak_M, is_first_M
