"""The best tokens of every draft slot, in the one order that metrics and trees go by.

M slots   V vocabulary   T ranks kept
"""

from torch import Tensor

NUM_RANKS = 64
"""Ranks kept of the vocabulary. The trees of the paper's budgets hardly ever look further."""


def best_tokens(logits_MV: Tensor, num_ranks: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities, falling, and ids of the best tokens, [M, T] each; ties by rising id.

    Args:
        logits_MV: float32; what they are overwritten with is of no use.
    """
    top_MT, token_MT = logits_MV.topk(num_ranks, dim=-1)
    # topk leaves ties in any order; decoding takes the lowest id (argmax).
    by_id_MT = token_MT.argsort(dim=-1)
    top_MT, token_MT = top_MT.gather(1, by_id_MT), token_MT.gather(1, by_id_MT)
    order_MT = top_MT.argsort(dim=-1, descending=True, stable=True)
    top_MT, token_MT = top_MT.gather(1, order_MT), token_MT.gather(1, order_MT)
    peak_M1 = top_MT[:, :1]
    sum_M1 = logits_MV.sub_(peak_M1).exp_().sum(-1, keepdim=True)
    return top_MT - peak_M1 - sum_M1.log(), token_MT
