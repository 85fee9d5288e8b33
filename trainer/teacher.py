"""The target's own distribution at each slot, and how far the drafter's is from it.

M supervised slots of a chunk   S context tokens   A anchors   K block size   V vocabulary
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from shared.head import Head
from trainer.anchors import Blocks
from trainer.recipe import LossConfig


@dataclass(frozen=True, eq=False, slots=True)
class Teacher:
    """What the target would have given at the slots of one micro-batch."""

    kind: str
    """`kl` or `tv`."""

    head: Head
    last_hidden_SD: Tensor
    """Of every token of the row, as stored: on the side of the final norm that the head knows."""

    state_AK: Tensor
    """int64: the token whose state predicts the slot's label; read only where supervised."""

    def logits(self, slot_M: Tensor) -> Tensor:
        """The target's own logits at the flat slots `slot_M`, [M, V]."""
        return self.head.logits(self.last_hidden_SD[self.state_AK.flatten()[slot_M]])

    def diverge(self, own_MV: Tensor, logits_MV: Tensor) -> tuple[Tensor, Tensor]:
        """Divergence of the drafter's `logits_MV` from the target's own.

        Returns:
            float32 [M], and its gradient with respect to the drafter's logits, float32 [M, V].
        """
        return (kl_divergence if self.kind == "kl" else total_variation)(own_MV, logits_MV)


def teacher_of(
    config: LossConfig, head: Head, last_hidden_SD: Tensor | None, blocks: Blocks
) -> Teacher | None:
    """The teacher that the loss asks for; None for those that need the labels alone."""
    if not config.needs_teacher:
        return None
    assert last_hidden_SD is not None  # the session refused such a cache
    return Teacher(config.kind, head, last_hidden_SD, blocks.state_AK)


def kl_divergence(target_MV: Tensor, drafter_MV: Tensor) -> tuple[Tensor, Tensor]:
    """Sum over v of p log(p / q), in nats, with p the target's softmax and q the drafter's.

    Its gradient with respect to the drafter's logits is q - p.
    """
    log_p_MV = torch.log_softmax(target_MV, -1, torch.float32)
    log_q_MV = torch.log_softmax(drafter_MV, -1, torch.float32)
    p_MV = log_p_MV.exp()
    kl_M = torch.linalg.vecdot(p_MV, log_p_MV.sub_(log_q_MV))
    return kl_M, log_q_MV.exp_().sub_(p_MV)


def total_variation(target_MV: Tensor, drafter_MV: Tensor) -> tuple[Tensor, Tensor]:
    """Half the sum over v of |p - q|: the chance that speculative sampling rejects the draft.

    With s = sign(q - p), its gradient with respect to the drafter's logits is
    q (s - sum over v of q s) / 2.
    """
    p_MV = torch.softmax(target_MV, -1, torch.float32)
    q_MV = torch.softmax(drafter_MV, -1, torch.float32)
    difference_MV = q_MV - p_MV
    tv_M = difference_MV.abs().sum(-1) / 2
    sign_MV = difference_MV.sign_()
    mean_M = torch.linalg.vecdot(q_MV, sign_MV)
    return tv_M, sign_MV.sub_(mean_M[:, None]).mul_(q_MV).div_(2)
