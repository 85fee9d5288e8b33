"""Forward and loss of one micro-batch.

S context tokens   L captured layers   D hidden size   A anchors   K block size   Q = A*K
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from shared.head import Head
from trainer.anchors import Blocks, build_blocks
from trainer.attention import build_mask
from trainer.batch import Batch
from trainer.drafter import Drafter
from trainer.loss import BlockLoss, WeighFunction, drafter_loss
from trainer.shapes import fill, round_steps
from trainer.teacher import Teacher


@dataclass(frozen=True, eq=False, slots=True)
class Forward:
    """Hidden states of the blocks of a batch, and what they are to predict."""

    hidden_AKD: Tensor
    blocks: Blocks


def autocast(device: torch.device, compute_dtype: str) -> AbstractContextManager[object]:
    """Matrix products in `compute_dtype`; weights stay float32."""
    if compute_dtype == "float32":
        return nullcontext()
    return torch.autocast(device.type, getattr(torch, compute_dtype))


def forward_blocks(
    drafter: Drafter, head: Head, batch: Batch, features_SLD: Tensor, mask_token_id: int
) -> Forward:
    """Run the drafter on every block of `batch`."""
    config = drafter.config
    block_size = config.block_size
    blocks = build_blocks(
        batch.token_ids_S,
        batch.loss_mask_S,
        batch.document_S,
        batch.position_S,
        batch.anchor_A,
        batch.anchor_valid_A,
        block_size,
        mask_token_id,
    )
    num_slots = len(batch.anchor_A) * block_size
    contexts, anchors = round_steps(features_SLD.device, block_size)
    # What fills up belongs to no document and is no valid anchor: nobody sees it.
    row = (
        fill(batch.document_S, contexts, -1),
        fill(batch.anchor_A, anchors),
        fill(batch.anchor_valid_A, anchors),
        block_size,
    )
    mask = None if all(config.slides) else build_mask(*row)
    sliding_mask = build_mask(*row, config.sliding_window) if any(config.slides) else None
    embeddings_QD = functional.embedding(blocks.input_id_AK.flatten(), head.embedding_VD)
    embeddings_QD = fill(embeddings_QD, anchors * block_size)
    features_SF = fill(features_SLD.flatten(1), contexts)
    if not torch.is_autocast_enabled(features_SF.device.type):
        dtype = drafter.fc.weight.dtype
        features_SF, embeddings_QD = features_SF.to(dtype), embeddings_QD.to(dtype)
    hidden_QD = drafter(
        features_SF,
        embeddings_QD,
        fill(batch.position_S, contexts),
        fill(blocks.position_AK.flatten(), anchors * block_size),
        mask,
        sliding_mask,
    )
    return Forward(hidden_QD[:num_slots].unflatten(0, (-1, block_size)), blocks)


def batch_loss(
    forward: Forward,
    head: Head,
    weigh: WeighFunction,
    teacher: Teacher | None = None,
    *,
    anchors_per_chunk: int,
    with_liger: bool = False,
) -> BlockLoss:
    """Weighted loss of the blocks through the frozen LM head: see `drafter_loss`."""
    return drafter_loss(
        forward.hidden_AKD,
        head.lm_head_VD,
        forward.blocks.label_AK,
        forward.blocks.supervised_AK,
        weigh,
        teacher,
        anchors_per_chunk=anchors_per_chunk,
        with_liger=with_liger,
    )
