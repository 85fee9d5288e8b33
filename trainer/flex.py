"""Attention on a GPU: the spans as blocks for flex_attention, which skips those nobody sees.

Letters as in `trainer.attention`; M rows and J columns of blocks.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import pad

from trainer.spans import Spans

BLOCK = 128
"""Queries and keys of one block: what torch's kernels are tuned for."""


def cut_blocks(spans: Spans, size: int = BLOCK) -> BlockMask:
    """Which blocks of `size` queries and keys are seen in whole, and which in part.

    What torch's `create_block_mask` gives, from the ends of the spans alone. That one asks the rule
    of every query and key: 5 billion pairs for a row of 8,192 tokens and 4,096 blocks of 16, as a
    kernel compiled anew for sizes that it has not met, or as tables of gigabytes.
    """
    num_rows, num_columns = -(-spans.num_queries // size), -(-spans.num_keys // size)
    first_J = torch.arange(num_columns, device=spans.context_begin_Q.device, dtype=torch.int32)
    first_J *= size
    is_context_seen_QJ, is_context_whole_QJ = _covered(
        spans.context_begin_Q[:, None], spans.context_end_Q[:, None], first_J, size
    )
    is_block_seen_QJ, is_block_whole_QJ = _covered(
        spans.block_begin_Q[:, None], spans.block_end_Q[:, None], first_J, size
    )
    seen_QJ, whole_QJ = (
        is_context_seen_QJ | is_block_seen_QJ,
        is_context_whole_QJ | is_block_whole_QJ,
    )
    # Of the last row, queries that there are not see nothing, so that no block of it is whole.
    missing = (0, 0, 0, num_rows * size - spans.num_queries)
    shape = (num_rows, size, num_columns)
    whole_MJ = pad(whole_QJ, missing).view(shape).all(1)
    part_MJ = pad(seen_QJ, missing).view(shape).any(1) & ~whole_MJ
    return BlockMask.from_kv_blocks(
        *_ordered(part_MJ),
        *_ordered(whole_MJ),
        BLOCK_SIZE=size,
        mask_mod=spans.predicate(),
        seq_lengths=(spans.num_queries, spans.num_keys),
    )


def _covered(begin_Q1: Tensor, end_Q1: Tensor, first_J: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Whether a span holds a key of each block, and whether it holds all of them, bool [Q, J]."""
    last_J = first_J + size
    seen_QJ = (begin_Q1 < last_J) & (end_Q1 > first_J) & (begin_Q1 < end_Q1)
    return seen_QJ, (begin_Q1 <= first_J) & (end_Q1 >= last_J)


def _ordered(is_block_MJ: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks of each row there are, and their columns first, int32 [1, 1, M (, J)]."""
    column_MJ = is_block_MJ.int().argsort(dim=1, descending=True, stable=True)
    return is_block_MJ.sum(1).int()[None, None], column_MJ.int()[None, None]


def attend_blocks(q_NQH: Tensor, k_GTH: Tensor, v_GTH: Tensor, mask: BlockMask) -> Tensor:
    """`trainer.attention.attend` for a mask of blocks."""
    run = compiled_flex_attention() if q_NQH.is_cuda else flex_attention
    qkv = (q_NQH[None], k_GTH[None], v_GTH[None])
    out_NQH: Tensor = run(*qkv, block_mask=mask, enable_gqa=True)[0]
    return out_NQH


@cache
def compiled_flex_attention(backend: str = "inductor") -> Any:
    """flex_attention compiled once, for any numbers of tokens and blocks.

    As one graph: otherwise torch goes on without a word, after eight sizes that it did not expect,
    with a form that holds all Q x T scores of all heads.
    """
    return torch.compile(flex_attention, dynamic=True, fullgraph=True, backend=backend)
