"""Who may look at whom in a packed row, and the attention that obeys.

A row is S context tokens (whole documents end to end, document -1 where padded) followed by A
draft blocks of K slots. Queries are the Q = A*K slots; keys are [S context ; Q slots].

The rule is written once, as a predicate on (query, key) indices. Each device gets the form of
it that skips what is invisible: a BlockMask for flex_attention on CUDA, tiles on CPU, the
plain bool table elsewhere. A sliding window is one more condition in the predicate and a second
mask for the layers that use it; the forms follow by themselves.

Letters: S context tokens, A anchors, K block size, Q = A*K, T = S+Q keys, N query heads,
G key heads, H head size.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import (
    BlockMask,
    create_block_mask,
    create_mask,
    flex_attention,
)
from torch.nn.functional import scaled_dot_product_attention

from trainer.tiles import TILE_QUERIES, Predicate, TiledMask, attend_tiles, cut_tiles

Mask: TypeAlias = Tensor | TiledMask | BlockMask


def block_visibility(
    document_S: Tensor,
    anchor_A: Tensor,
    anchor_valid_A: Tensor,
    block_size: int,
    window: int | None = None,
) -> Predicate:
    """The rule: a slot sees its document before its anchor, and its own block both ways.

    Strictly before: the target has not run on the anchor when the block is drafted, so the
    anchor is known by its embedding in slot 0 only. No slot sees another block. Slots of an
    invalid anchor see their own block alone, which keeps every softmax row non-empty.

    Args:
        document_S: integers, the document of each context token, negative for padding.
        anchor_A: int64 indices into the row; any index in range where invalid.
        anchor_valid_A: bool, False for anchors that only fill the shape.
        window: of a sliding layer. A slot then sees the `window` positions that end with its own,
            and so none of the slots after it: z-lab's model, SGLang and vLLM all make a sliding
            layer causal.

    Source: DFlash, arXiv 2602.06036, training mask; z-lab's dflash 0.1.0 for the window.
    """
    num_context = document_S.shape[0]
    document_A = torch.where(anchor_valid_A, document_S[anchor_A], -2)

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        anchor = query // block_size
        document = document_S[key.clamp(max=num_context - 1)]
        before_anchor = (document == document_A[anchor]) & (key < anchor_A[anchor])
        own_block = (key >= num_context) & ((key - num_context) // block_size == anchor)
        if window is None:
            return before_anchor | own_block
        slot, key_slot = query % block_size, (key - num_context) % block_size
        in_reach = anchor_A[anchor] + slot - key < window
        in_block = (key_slot <= slot) & (slot - key_slot < window)
        return (before_anchor & in_reach) | (own_block & in_block)

    return visible


def build_mask(
    document_S: Tensor,
    anchor_A: Tensor,
    anchor_valid_A: Tensor,
    block_size: int,
    window: int | None = None,
) -> Mask:
    """The rule in the form that `attend` runs fastest on the device of `document_S`.

    One mask serves all heads, and all layers of the same window, of a micro-batch. On CPU,
    ascending anchors give the narrowest tiles; any order is correct.

    Raises:
        ValueError: there is no anchor.
    """
    if not len(anchor_A):
        raise ValueError("a row needs at least one anchor: fill it with an invalid one")
    visible = block_visibility(document_S, anchor_A, anchor_valid_A, block_size, window)
    num_context, num_queries = len(document_S), len(anchor_A) * block_size
    device = document_S.device
    if device.type == "cpu":
        tile_queries = max(TILE_QUERIES // block_size, 1) * block_size
        return cut_tiles(visible, num_context, num_queries, tile_queries)
    make = _compiled(create_block_mask) if device.type == "cuda" else create_mask
    mask: BlockMask | Tensor = make(
        visible, None, None, num_queries, num_context + num_queries, device
    )
    return mask[0, 0] if isinstance(mask, Tensor) else mask


def attend(q_NQH: Tensor, k_GTH: Tensor, v_GTH: Tensor, mask: Mask) -> Tensor:
    """Softmax attention of the slots over [context ; slots], [N, Q, H], scaled by H ** -0.5.

    Query head n reads key head n // (N / G). All three tensors share one dtype.
    """
    if isinstance(mask, TiledMask):
        return attend_tiles(q_NQH, k_GTH, v_GTH, mask)
    if isinstance(mask, BlockMask):
        run: Any = _compiled(flex_attention) if q_NQH.is_cuda else flex_attention
        out_NQH: Tensor = run(
            q_NQH[None], k_GTH[None], v_GTH[None], block_mask=mask, enable_gqa=True
        )[0]
        return out_NQH
    return scaled_dot_product_attention(
        q_NQH[None], k_GTH[None], v_GTH[None], attn_mask=mask, enable_gqa=True
    )[0]


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` compiled once: eager flex_attention would materialise the Q x T scores."""
    return torch.compile(function)
