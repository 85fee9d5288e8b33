"""Which samples of a cache a run trains on, and which it keeps for evaluation."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shared.errors import RunError
from trainer.caches import Caches
from trainer.config import CacheConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False, slots=True)
class Split:
    """Positions in the cache's index. Nothing is in both parts."""

    train: npt.NDArray[np.int64]
    heldout: npt.NDArray[np.int64]
    """Ordered by their split key, so that neither seed nor order decides which the first n are."""

    num_excluded: int
    """Samples left out by their id."""

    num_other_sources: int
    """Samples whose source was not selected."""

    num_without_anchor: int
    """Samples with no two supervised tokens in a row: no block can start in them."""

    num_repeated: int
    """Samples that another cache, or an earlier row of this one, has already."""


def split_samples(cache: Caches, config: CacheConfig) -> Split:
    """Select sources and divide the samples.

    A sample is held out if the hash of its prompt lies in the lowest `heldout_fraction` of all
    hashes: neither seed, order nor appended data can move it, and samples that share a prompt
    stay together.

    Raises:
        RunError: an unknown source, or nothing to train on.
    """
    index = cache.index
    known = cache.sources
    if unknown := [tag for tag in config.sources if tag not in known]:
        raise RunError(f"cache.sources: {unknown} not in {cache}, which has {sorted(known)}.")
    chosen = np.ones(len(index), bool)
    if config.sources:
        chosen = np.isin(index.source, [known.index(tag) for tag in config.sources])
    is_excluded = chosen & _has_id(cache, config.exclude)
    num_other_sources = int((~chosen).sum())
    chosen &= ~is_excluded
    _, first = np.unique(index.sample_ids[chosen].view("V16"), return_index=True)
    is_first = np.zeros(len(index), bool)
    is_first[np.flatnonzero(chosen)[first]] = True
    usable = is_first & (index.num_anchors > 0)
    # Compared as integers: a float64 cannot hold a 64-bit hash.
    bound = int(config.heldout_fraction * 2**32)
    is_heldout = (index.split_keys >> np.uint64(32)) < np.uint64(bound)
    heldout = np.flatnonzero(usable & is_heldout)
    split = Split(
        train=np.flatnonzero(usable & ~is_heldout),
        heldout=heldout[np.argsort(index.split_keys[heldout], kind="stable")],
        num_excluded=int(is_excluded.sum()),
        num_other_sources=num_other_sources,
        num_without_anchor=int((is_first & ~usable).sum()),
        num_repeated=int((chosen & ~is_first).sum()),
    )
    if not len(split.train):
        raise RunError(
            f"{cache}: no sample to train on ({len(index)} in the cache, "
            f"{split.num_other_sources} of other sources, {split.num_excluded} excluded, "
            f"{split.num_without_anchor} without an anchor, {split.num_repeated} repeated, "
            f"{len(split.heldout)} held out)."
        )
    return split


def _has_id(cache: Caches, sample_ids: Sequence[str]) -> npt.NDArray[np.bool_]:
    """Which samples have one of `sample_ids`. One that none has is named in a warning: a run may be
    evaluated on another cache than it was trained from."""
    index = cache.index.sample_ids.view("V16").ravel()
    wanted = np.frombuffer(bytes.fromhex("".join(sample_ids)), "V16")
    if len(missing := np.flatnonzero(~np.isin(wanted, index))):
        logger.warning(
            "cache.exclude: %d of %d samples are not in %s, the first of them %s. Ids are those of "
            "`train/samples` in metrics.jsonl, and of nonfinite-*.json.",
            len(missing),
            len(sample_ids),
            cache,
            sample_ids[missing[0]],
        )
    return np.isin(index, wanted)
