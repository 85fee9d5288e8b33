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
from dataclasses import dataclass
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

TILE_QUERIES = 128
"""Queries of one CPU tile. Forward and backward of 256 blocks of 16 over 1,024 tokens, 9 heads
of 64, 2 threads, float32: 280 ms in one document and 110 ms in four, against 1,400 and 1,300 ms
for the dense table. Tiles of 64 and 256 are within a fifth of that; 512 loses up to 70 %."""

Predicate: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(batch, head, query, key) -> bool, broadcast over integer tensors: flex_attention's mask_mod."""


@dataclass(frozen=True, eq=False, slots=True)
class Tile:
    """What a run of whole blocks sees: one span of the context, and the blocks themselves."""

    context: slice
    """Smallest span that holds every context token seen by any query of the tile."""

    visible_QT: Tensor
    """bool [tile queries, span + tile queries]."""


@dataclass(frozen=True, eq=False, slots=True)
class TiledMask:
    """The rule, cut into tiles of queries, so that invisible keys are mostly not touched."""

    tile_queries: int
    """Queries of each tile but perhaps the last."""

    tiles: tuple[Tile, ...]


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


def cut_tiles(
    visible: Predicate, num_context: int, num_queries: int, tile_queries: int
) -> TiledMask:
    """Evaluate the predicate tile by tile, keeping of the context only the span that is seen.

    `tile_queries` must be a multiple of the block size: a block in two tiles would lose keys.
    """
    zero = torch.zeros((), dtype=torch.int64)
    context_S = torch.arange(num_context)
    tiles = []
    for query_Q in torch.split(torch.arange(num_queries), tile_queries):
        context_QS = visible(zero, zero, query_Q[:, None], context_S[None])
        own_QQ = visible(zero, zero, query_Q[:, None], num_context + query_Q[None])
        seen = context_QS.any(dim=0).nonzero().flatten().tolist()
        span = slice(seen[0], seen[-1] + 1) if seen else slice(0, 0)
        tiles.append(Tile(span, torch.cat([context_QS[:, span], own_QQ], dim=1)))
    return TiledMask(tile_queries, tuple(tiles))


def attend(q_NQH: Tensor, k_GTH: Tensor, v_GTH: Tensor, mask: Mask) -> Tensor:
    """Softmax attention of the slots over [context ; slots], [N, Q, H], scaled by H ** -0.5.

    Query head n reads key head n // (N / G). All three tensors share one dtype.
    """
    if isinstance(mask, TiledMask):
        return _attend_tiles(q_NQH, k_GTH, v_GTH, mask)
    if isinstance(mask, BlockMask):
        run: Any = _compiled(flex_attention) if q_NQH.is_cuda else flex_attention
        out_NQH: Tensor = run(
            q_NQH[None], k_GTH[None], v_GTH[None], block_mask=mask, enable_gqa=True
        )[0]
        return out_NQH
    return _attend_dense(q_NQH, k_GTH, v_GTH, mask)


def _attend_dense(q_NQH: Tensor, k_GTH: Tensor, v_GTH: Tensor, visible_QT: Tensor) -> Tensor:
    return scaled_dot_product_attention(
        q_NQH[None], k_GTH[None], v_GTH[None], attn_mask=visible_QT, enable_gqa=True
    )[0]


def _attend_tiles(q_NQH: Tensor, k_GTH: Tensor, v_GTH: Tensor, mask: TiledMask) -> Tensor:
    num_queries = q_NQH.shape[1]
    sections = [k_GTH.shape[1] - num_queries, num_queries]
    k_context, k_blocks = torch.split(k_GTH, sections, dim=1)
    v_context, v_blocks = torch.split(v_GTH, sections, dim=1)
    outs = []
    for tile, q, k, v in zip(
        mask.tiles,
        *(torch.split(x, mask.tile_queries, dim=1) for x in (q_NQH, k_blocks, v_blocks)),
        strict=True,
    ):
        k_seen = torch.cat([k_context[:, tile.context], k], dim=1)
        v_seen = torch.cat([v_context[:, tile.context], v], dim=1)
        outs.append(_attend_dense(q, k_seen, v_seen, tile.visible_QT))
    return torch.cat(outs, dim=1)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` compiled once: eager flex_attention would materialise the Q x T scores."""
    return torch.compile(function)
