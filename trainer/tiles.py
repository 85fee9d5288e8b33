"""Attention on a CPU: the rule cut into tiles of queries, so that invisible keys are not touched.

Letters as in `trainer.attention`; R = N/G query heads of one key head, P queries of one tile,
M keys that a tile sees.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import scaled_dot_product_attention

from trainer.shapes import widen
from trainer.spans import Predicate

TILE_QUERIES = 128
"""Queries of one tile. Forward and backward of 64 blocks of 16 over 1,024 tokens, 9 heads of 64 on
3 key heads, bfloat16, 2 threads: 70 ms of CPU in one document and 47 ms in four. Tiles of 64 and
256 are within a fifth of that; 32 loses a third."""


@dataclass(frozen=True, eq=False, slots=True)
class Tile:
    """What a run of whole blocks sees: one span of the context, and the blocks themselves."""

    context: slice
    """A span that holds every context token seen by any query of the tile."""

    visible_QT: Tensor
    """bool [tile queries, span + tile queries]."""


@dataclass(frozen=True, eq=False, slots=True)
class TiledMask:
    """The rule, cut into tiles of queries, so that invisible keys are mostly not touched."""

    tile_queries: int
    """Queries of each tile but perhaps the last."""

    tiles: tuple[Tile, ...]


def cut_tiles(
    visible: Predicate, num_context: int, num_queries: int, tile_queries: int
) -> TiledMask:
    """Evaluate the predicate tile by tile, keeping of the context about the span that is seen.

    `tile_queries` must be a multiple of the block size: a block in two tiles would lose keys.
    """
    zero = torch.zeros((), dtype=torch.int64)
    context_S = torch.arange(num_context)
    tiles = []
    for query_Q in torch.split(torch.arange(num_queries), tile_queries):
        context_QS = visible(zero, zero, query_Q[:, None], context_S[None])
        own_QQ = visible(zero, zero, query_Q[:, None], num_context + query_Q[None])
        seen = context_QS.any(dim=0).nonzero().flatten().tolist()
        span = widen(seen[0], seen[-1] + 1, num_context) if seen else slice(0, 0)
        tiles.append(Tile(span, torch.cat([context_QS[:, span], own_QQ], dim=1)))
    return TiledMask(tile_queries, tuple(tiles))


def attend_tiles(q_NQH: Tensor, k_GTH: Tensor, v_GTH: Tensor, mask: TiledMask) -> Tensor:
    """`trainer.attention.attend` for a tiled mask."""
    out_NQH: Tensor = _TiledAttention.apply(q_NQH, k_GTH, v_GTH, mask)  # type: ignore[no-untyped-call]
    return out_NQH


class _TiledAttention(torch.autograd.Function):
    """torch's own backward on a CPU takes seven times its forward. This one runs each tile again
    as plain matrix products, which use the same units as those of the layers, and takes half as
    long; nothing of the size of the scores is kept in between."""

    @staticmethod
    def forward(ctx: Any, q_NQH: Tensor, k_GTH: Tensor, v_GTH: Tensor, mask: TiledMask) -> Tensor:
        ctx.save_for_backward(q_NQH, k_GTH, v_GTH)
        ctx.mask = mask
        out_NQH = torch.empty_like(q_NQH)
        for tile, queries, own in _places(mask, q_NQH, k_GTH):
            out_NQH[:, queries] = scaled_dot_product_attention(
                q_NQH[None, :, queries],
                _seen(k_GTH, tile, own)[None],
                _seen(v_GTH, tile, own)[None],
                attn_mask=tile.visible_QT,
                enable_gqa=True,
            )[0]
        return out_NQH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NQH: Tensor) -> tuple[Tensor | None, ...]:
        q_NQH, k_GTH, v_GTH = ctx.saved_tensors
        # Sums over the tiles, so not in bfloat16.
        sums = torch.promote_types(k_GTH.dtype, torch.float32)
        grad_q = torch.empty_like(q_NQH)
        grad_k, grad_v = (torch.zeros_like(x, dtype=sums) for x in (k_GTH, v_GTH))
        for tile, queries, own in _places(ctx.mask, q_NQH, k_GTH):
            k_GMH, v_GMH = _seen(k_GTH, tile, own), _seen(v_GTH, tile, own)
            tile_q, tile_k, tile_v = _tile_gradients(
                q_NQH[:, queries], k_GMH, v_GMH, grad_NQH[:, queries], tile.visible_QT
            )
            grad_q[:, queries] = tile_q
            width = tile.context.stop - tile.context.start
            for total, part in ((grad_k, tile_k), (grad_v, tile_v)):
                total[:, tile.context] += part[:, :width]
                total[:, own] = part[:, width:]
        return grad_q, grad_k.to(k_GTH.dtype), grad_v.to(v_GTH.dtype), None


def _places(mask: TiledMask, q_NQH: Tensor, k_GTH: Tensor) -> list[tuple[Tile, slice, slice]]:
    """Each tile with its queries, as places among the queries and among the keys."""
    num_queries = q_NQH.shape[1]
    num_context = k_GTH.shape[1] - num_queries
    starts = range(0, num_queries, mask.tile_queries)
    stops = [min(start + mask.tile_queries, num_queries) for start in starts]
    return [
        (tile, slice(start, stop), slice(num_context + start, num_context + stop))
        for tile, start, stop in zip(mask.tiles, starts, stops, strict=True)
    ]


def _seen(x_GTH: Tensor, tile: Tile, own: slice) -> Tensor:
    return torch.cat([x_GTH[:, tile.context], x_GTH[:, own]], dim=1)


def _tile_gradients(
    q_NPH: Tensor, k_GMH: Tensor, v_GMH: Tensor, grad_NPH: Tensor, visible_PM: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of one tile. The query heads of a key head are one matrix, R * P rows high."""
    num_keys, scale = len(k_GMH), q_NPH.shape[-1] ** -0.5
    q_GRH, grad_GRH = (x.reshape(num_keys, -1, x.shape[-1]) for x in (q_NPH, grad_NPH))
    hidden_PM = torch.where(visible_PM, 0.0, -torch.inf).to(q_NPH.dtype)
    hidden_RM = hidden_PM.repeat(len(q_NPH) // num_keys, 1)
    score_GRM = torch.baddbmm(
        hidden_RM.expand(num_keys, -1, -1), q_GRH, k_GMH.mT, alpha=scale
    ).requires_grad_()
    with torch.enable_grad():
        weight_GRM = torch.softmax(score_GRM, -1)  # in float32 inside, whatever goes in
    (score_grad_GRM,) = torch.autograd.grad(weight_GRM, score_GRM, grad_GRH @ v_GMH.mT)
    return (
        (score_grad_GRM @ k_GMH).mul_(scale).reshape(q_NPH.shape),
        (score_grad_GRM.mT @ q_GRH).mul_(scale),
        weight_GRM.detach().mT @ grad_GRH,
    )
