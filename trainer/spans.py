"""Who may look at whom in a packed row: two spans of keys for each draft slot.

A row is S context tokens (whole documents end to end, document -1 where padded) followed by A
draft blocks of K slots. Queries are the Q = A*K slots; keys are [S context ; Q slots].

The rule is written here and nowhere else. Every device gets a form of it that skips what is
invisible: blocks for flex_attention on CUDA, tiles on CPU, the plain bool table elsewhere.

Letters: S context tokens, A anchors, K block size, Q = A*K, T = S+Q keys.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

Predicate: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(batch, head, query, key) -> bool, broadcast over integer tensors: flex_attention's mask_mod."""


@dataclass(frozen=True, eq=False, slots=True)
class Spans:
    """Of each slot, a span of the context and one of its own block; int32 [Q] each.

    Either may be empty, which is where it does not end after it begins.
    """

    num_keys: int
    context_begin_Q: Tensor
    context_end_Q: Tensor
    block_begin_Q: Tensor
    block_end_Q: Tensor

    @property
    def num_queries(self) -> int:
        return len(self.context_begin_Q)

    def predicate(self) -> Predicate:
        """The spans as a condition on a query and a key.

        It holds tensors alone, all of them of queries: flex_attention compiles for each other
        number that a condition holds, and would load what depends on the key for every pair.
        """
        context_begin_Q, context_end_Q = self.context_begin_Q, self.context_end_Q
        block_begin_Q, block_end_Q = self.block_begin_Q, self.block_end_Q

        def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            in_context = (key >= context_begin_Q[query]) & (key < context_end_Q[query])
            in_block = (key >= block_begin_Q[query]) & (key < block_end_Q[query])
            return in_context | in_block

        return visible


def visible_spans(
    document_S: Tensor,
    anchor_A: Tensor,
    anchor_valid_A: Tensor,
    block_size: int,
    window: int | None = None,
) -> Spans:
    """The rule: a slot sees its document before its anchor, and its own block both ways.

    Strictly before: the target has not run on the anchor when the block is drafted, so the
    anchor is known by its embedding in slot 0 only. No slot sees another block. Slots of an
    invalid anchor see their own block alone, which keeps every softmax row non-empty.

    Args:
        document_S: integers, the document of each context token, negative for padding. The tokens
            of a document lie side by side.
        anchor_A: int64 indices into the row; any index in range where invalid.
        anchor_valid_A: bool, False for anchors that only fill the shape.
        window: of a sliding layer. A slot then sees the `window` positions that end with its own,
            and so none of the slots after it: z-lab's model, SGLang and vLLM all make a sliding
            layer causal.

    Source: DFlash, arXiv 2602.06036, training mask; z-lab's dflash 0.1.0 for the window.
    """
    device, num_context = document_S.device, len(document_S)
    is_first_S = torch.ones(num_context, dtype=torch.bool, device=device)
    is_first_S[1:] = document_S[1:] != document_S[:-1]
    token_S = torch.arange(num_context, device=device)
    start_S = torch.where(is_first_S, token_S, 0).cummax(0).values
    slot_K = torch.arange(block_size, device=device)
    begin_AK = start_S[anchor_A][:, None].expand(-1, block_size)
    block_A1 = num_context + torch.arange(len(anchor_A), device=device)[:, None] * block_size
    block_begin_AK = block_A1.expand(-1, block_size)
    block_end_AK = block_begin_AK + block_size
    if window is not None:
        begin_AK = begin_AK.maximum(anchor_A[:, None] + slot_K - window + 1)
        block_begin_AK = block_A1 + (slot_K - window + 1).clamp(min=0)
        block_end_AK = block_A1 + slot_K + 1
    end_AK = torch.where(anchor_valid_A, anchor_A, 0)[:, None].expand(-1, block_size)
    ends = (begin_AK, end_AK, block_begin_AK, block_end_AK)
    num_keys = num_context + anchor_A.numel() * block_size
    return Spans(num_keys, *(x_AK.flatten().to(torch.int32) for x_AK in ends))
