"""Few shapes instead of one for each batch: libraries keep something for every shape they meet.

On a CPU with bfloat16 units each new shape of a matrix product leaves 1 to 2 MB behind, for good:
a compiled kernel and its buffers, in oneDNN's and torch's caches. A run meets a new shape in most
of its steps, and grew by 1.5 GB in its first hundred. So rows are filled up to round sizes.

On a GPU flex_attention is compiled for sizes that vary, but anew where there is one block of
queries alone, and with another kernel where there is less than one. So rows fill whole blocks, two
at least.

S context tokens   A anchors   K block size   Q = A*K
"""

import math

import torch
from torch import Tensor
from torch.nn import functional

CONTEXT_STEP = 64
"""Context tokens, and keys that a tile of queries sees."""

QUERY_STEP = 64
"""Draft slots."""

GPU_CONTEXT_STEP, GPU_QUERY_STEP = 128, 256
"""One block of keys and two of queries: see `trainer.flex`."""


def round_steps(device: torch.device, block_size: int) -> tuple[int, int]:
    """Of what numbers of context tokens and of anchors are to be multiples."""
    if device.type != "cpu":
        return GPU_CONTEXT_STEP, GPU_QUERY_STEP // math.gcd(GPU_QUERY_STEP, block_size)
    return CONTEXT_STEP, max(QUERY_STEP // block_size, 1)


def fill(x_R: Tensor, step: int, value: int = 0) -> Tensor:
    """`x_R`, of one dimension or two, with `value` in new rows up to a multiple of `step`."""
    missing = -len(x_R) % step
    if not missing:
        return x_R
    return functional.pad(x_R, (*(0, 0) * (x_R.dim() - 1), 0, missing), value=value)


def widen(begin: int, end: int, size: int) -> slice:
    """The span moved outward to multiples of `CONTEXT_STEP`, inside [0, `size`]."""
    return slice(
        begin // CONTEXT_STEP * CONTEXT_STEP, min(-(-end // CONTEXT_STEP) * CONTEXT_STEP, size)
    )
