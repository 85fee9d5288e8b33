"""Whether what a plan says fits together, before anything is looked up in it."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from shared.shard import SAMPLE_ID_BYTES

Arrays = Mapping[str, npt.NDArray[Any]]


def find_contradiction(
    description: Mapping[str, Any], arrays: Arrays, num_token_bytes: int, num_mask_bytes: int
) -> str | None:
    """What of a plan cannot be, in a few words; None if it all fits.

    Args:
        arrays: of the right types.
        num_token_bytes, num_mask_bytes: sizes of its two files.
    """
    of_texts = ["sources", "corpus_files"]
    if "relies_on" in description:  # not in plans of older versions
        of_texts.append("relies_on")
    for name in of_texts:
        if not _are_texts(description[name]):
            return f"{name} must be a list of texts"
    if not isinstance(description["report"], dict):
        return "report must be a table"
    num = arrays["order"].size
    shapes = dict.fromkeys(arrays, (num,)) | {
        "sample_ids": (num, SAMPLE_ID_BYTES),
        "shard_offsets": (arrays["shard_offsets"].size,),
    }
    for name, shape in shapes.items():
        if arrays[name].shape != shape:
            return f"{name} has shape {arrays[name].shape}, expected {shape}"
    cuts, lengths = arrays["shard_offsets"], arrays["num_tokens"].astype(np.int64)
    if not len(cuts) or [cuts[0], cuts[-1]] != [0, num] or (np.diff(cuts) <= 0).any():
        return f"shard_offsets do not cut {num} samples"
    if not np.array_equal(np.sort(arrays["order"]), np.arange(num)):
        return "order does not name every sample once"
    if (lengths <= 0).any() or not np.array_equal(arrays["offset"], lengths.cumsum() - lengths):
        return "offset and num_tokens disagree"
    if [num_token_bytes, num_mask_bytes] != [4 * lengths.sum(), lengths.sum()]:
        return f"its files do not hold {lengths.sum()} tokens"
    for name, named in (("source", "sources"), ("file", "corpus_files")):
        if ((arrays[name] < 0) | (arrays[name] >= len(description[named]))).any():
            return f"{name} points outside {named}"
    return None


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)
