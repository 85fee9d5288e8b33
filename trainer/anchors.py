"""Which tokens a sample is drafted from, and the blocks that start there.

Anchors are drawn on the host, one sample at a time, as a pure function of (seed, epoch, sample):
neither workers nor order change them. Blocks are built on the device, for a whole packed row.

Letters: S context tokens of the row, A anchors, K block size.
"""

from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def legal_anchors(loss_mask: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """Positions a, ascending, with both a and a + 1 supervised.

    So a block always starts in text of the target, and its first draft always has a label.

    Source: SpecForge's DFlash training wrapper; the paper says only "from the response".
    """
    supervised = loss_mask.astype(np.bool_)
    return np.flatnonzero(supervised[:-1] & supervised[1:]).astype(np.int64)


def draw_anchors(
    loss_mask: npt.NDArray[np.bool_], *, seed: int, epoch: int, sample_id: str, limit: int
) -> npt.NDArray[np.int64]:
    """Up to `limit` legal anchors of one sample, ascending, int64, uniform without replacement.

    All of them if there are no more than `limit`; none if none is legal. A function of its
    arguments alone: the generator is keyed by seed, epoch and sample, so each epoch and each
    sample draws afresh.

    Source: DFlash, arXiv 2602.06036: random anchors, new every epoch, 512 per sample.
    """
    anchors = legal_anchors(loss_mask)
    if len(anchors) <= limit:
        return anchors
    digest = blake2b(f"{seed}/{epoch}/{sample_id}".encode(), digest_size=16).digest()
    # Raw words, ranked: numpy promises the stream of a bit generator for all its versions, but
    # not what `Generator.choice` makes of it.
    priority = np.random.Philox(key=np.frombuffer(digest, dtype="<u8")).random_raw(len(anchors))
    return np.sort(anchors[np.argsort(priority, kind="stable")[:limit]])


@dataclass(frozen=True, eq=False, slots=True)
class Blocks:
    """Inputs and labels of every block of a packed row."""

    input_id_AK: Tensor
    """int64: the anchor's token in slot 0, the mask token in the others."""

    position_AK: Tensor
    """int64: position in the document, the anchor's plus the slot's."""

    label_AK: Tensor
    """int64: the token at the slot's own position, without shift; 0 where not supervised."""

    state_AK: Tensor
    """int64: the token in the row before the slot's own, from whose last hidden state the target
    predicts the label; read only where supervised, where it lies in the same document."""

    supervised_AK: Tensor
    """bool: the slot has a label that counts. Never slot 0."""


def build_blocks(
    token_ids_S: Tensor,
    loss_mask_S: Tensor,
    document_S: Tensor,
    position_S: Tensor,
    anchor_A: Tensor,
    anchor_valid_A: Tensor,
    block_size: int,
    mask_token_id: int,
) -> Blocks:
    """Blocks of the anchors of one packed row.

    Slot k of anchor a predicts token a + k. It is supervised for k > 0, while a + k lies in the
    row and in the anchor's document, where the loss mask is set, and if the anchor is valid.

    Args:
        token_ids_S: integers.
        loss_mask_S: bool or 0/1.
        document_S: integers, negative for padding.
        position_S: integers, position of each token in its document.
        anchor_A: int64 indices into the row; any index in range where invalid.
        anchor_valid_A: bool, False for anchors that only fill the shape.

    Source: DFlash, arXiv 2602.06036, training section.
    """
    slot_K = torch.arange(block_size, device=anchor_A.device)
    index_AK = anchor_A[:, None] + slot_K
    is_inside_AK = index_AK < len(token_ids_S)
    index_AK = index_AK.clamp(max=len(token_ids_S) - 1)
    supervised_AK = (
        (slot_K > 0)
        & is_inside_AK
        & (document_S[index_AK] == document_S[anchor_A][:, None])
        & loss_mask_S[index_AK].bool()
        & anchor_valid_A[:, None]
    )
    anchor_id_A1 = token_ids_S[anchor_A][:, None].long()
    return Blocks(
        input_id_AK=torch.where(slot_K == 0, anchor_id_A1, mask_token_id),
        position_AK=position_S[anchor_A][:, None].long() + slot_K,
        label_AK=torch.where(supervised_AK, token_ids_S[index_AK].long(), 0),
        state_AK=(index_AK - 1).clamp(min=0),
        supervised_AK=supervised_AK,
    )
