"""Whose states are these? The one comparison of stored states with those that the target gives.

T tokens of one sample   L stored layers   N blocks of the target   D hidden size
"""

import torch
from torch import Tensor

NOISE = 0.05
"""Distance by which states of one target may differ between two batch shapes, kernels or types.
Measured on 24 samples of SmolLM2 in bfloat16 on a CPU: at most 0.025 between batch shapes, thread
counts and kernels, 0.036 from float32, both in the last block. Its next block is 0.21 away at
least (by the whole sample alone, 0.013)."""

_CLEARLY = 1.5
"""A block that is nearer by this factor is the one that the states are of. Noise is far from any
direction, so that the right block is the nearest one, or one of several that are as near."""


def block_distances(stored_TLD: Tensor, fresh_TND: Tensor) -> Tensor:
    """Relative L2 distance of each stored layer to each block, float64 [L, N].

    Of the whole sample, or of its median token if that is larger: massive activations of a few
    tokens make up most of the whole and are alike in neighbouring blocks. By the whole alone, the
    states of one block pass for those of the next. NaN where a state is NaN.
    """
    rows = [
        torch.stack([_distance(stored_TD, fresh_TD) for fresh_TD in fresh_TND.unbind(1)])
        for stored_TD in stored_TLD.unbind(1)
    ]
    return torch.stack(rows)


def _distance(stored_TD: Tensor, fresh_TD: Tensor) -> Tensor:
    fresh_TD = fresh_TD.double()
    square_T = (stored_TD.double() - fresh_TD).square().sum(1)
    norm_T = fresh_TD.square().sum(1)
    whole = square_T.sum() / norm_T.sum().clamp_min(1e-30)
    token = (square_T / norm_T.clamp_min(1e-30)).median()
    return whole.maximum(token).sqrt()


def is_of_block(distance_N: Tensor, block: int, allowed: float) -> bool:
    """Whether a stored layer is the output of `block`, by its distances to several.

    In a deep target neighbours may differ by less than `allowed`: the nearest one tells.
    """
    own = float(distance_N[block])
    return own <= allowed and own <= _CLEARLY * float(distance_N[nearest_block(distance_N)])


def nearest_block(distance_N: Tensor) -> int:
    return int(distance_N.nan_to_num(torch.inf).argmin())
