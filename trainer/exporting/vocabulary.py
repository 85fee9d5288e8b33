"""A reduced vocabulary: the tokens that a drafter is most often asked for."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainer.caches import Caches

_SAMPLES_PER_COUNT = 1024


def most_frequent(
    cache: Caches, positions: npt.NDArray[np.int64], size: int
) -> tuple[Tensor, npt.NDArray[np.int64]]:
    """The `size` tokens that are supervised most often in the samples at `positions`.

    End tokens are always among them; ties go to the lower id.

    Returns:
        Their ids, int64 [size], ascending, and the counts of all tokens, int64 [V].
    """
    counts_V = np.zeros(cache.spec.target.vocab_size, np.int64)
    for start in range(0, len(positions), _SAMPLES_PER_COUNT):
        read = [cache.tokens(p) for p in positions[start : start + _SAMPLES_PER_COUNT].tolist()]
        supervised = [token_ids[loss_mask.astype(bool)] for token_ids, loss_mask in read]
        counts_V += np.bincount(np.concatenate(supervised), minlength=len(counts_V))
    rank_V = counts_V.copy()
    rank_V[list(cache.spec.tokens.eos_token_ids)] = np.iinfo(np.int64).max
    kept = np.argsort(-rank_V, kind="stable")[:size]
    return torch.from_numpy(np.sort(kept)), counts_V


def coverage(kept: Tensor, counts_V: npt.NDArray[np.int64]) -> float:
    """Share of the counted tokens that are kept."""
    return float(counts_V[kept.numpy()].sum() / max(counts_V.sum(), 1))
