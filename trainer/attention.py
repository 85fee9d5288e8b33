"""The attention of a packed row, in the form that suits the device.

Who may look at whom is the rule of `trainer.spans`. A sliding window changes the spans, and is a
second mask for the layers that use it; the forms follow by themselves.

Letters: S context tokens, A anchors, K block size, Q = A*K, T = S+Q keys, N query heads,
G key heads, H head size.
"""

from typing import TypeAlias

from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_mask
from torch.nn.functional import scaled_dot_product_attention

from trainer.flex import attend_blocks, cut_blocks
from trainer.spans import visible_spans
from trainer.tiles import TILE_QUERIES, TiledMask, attend_tiles, cut_tiles

Mask: TypeAlias = Tensor | TiledMask | BlockMask


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
    spans = visible_spans(document_S, anchor_A, anchor_valid_A, block_size, window)
    device = document_S.device
    if device.type == "cuda":
        return cut_blocks(spans)
    if device.type == "cpu":
        tile_queries = max(TILE_QUERIES // block_size, 1) * block_size
        return cut_tiles(spans.predicate(), len(document_S), spans.num_queries, tile_queries)
    sizes = (spans.num_queries, spans.num_keys)
    mask_QT: Tensor = create_mask(spans.predicate(), None, None, *sizes, device)[0, 0]
    return mask_QT


def attend(q_NQH: Tensor, k_GTH: Tensor, v_GTH: Tensor, mask: Mask) -> Tensor:
    """Softmax attention of the slots over [context ; slots], [N, Q, H], scaled by H ** -0.5.

    Query head n reads key head n // (N / G). All three tensors share one dtype.
    """
    if isinstance(mask, TiledMask):
        return attend_tiles(q_NQH, k_GTH, v_GTH, mask)
    if isinstance(mask, BlockMask):
        return attend_blocks(q_NQH, k_GTH, v_GTH, mask)
    return scaled_dot_product_attention(
        q_NQH[None], k_GTH[None], v_GTH[None], attn_mask=mask, enable_gqa=True
    )[0]
