"""One shard: a Zarr v3 group that is written once, whole, and read by sample.

Hidden states are one array of bytes [P planes, T tokens, W] in one storage object (Zarr sharding,
inner chunks of 64 tokens of one plane). Every sample starts on a chunk boundary and its chunks lie
together, so that reading it is one range of its own bytes only. Everything else is small and in
arrays of one chunk.
`FORMAT.md` is the normative text; `shard_writer` and `shard_reader` do what it says.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from shared.chunk import Array
from shared.codec import Packed

GROUP = "shards.zarr"
STATES = "hidden_states"
STATES_OBJECT = f"{STATES}/c/0/0/0"
SAMPLE_ID_BYTES = 16

SMALL_ARRAYS: dict[str, np.dtype[Any]] = {
    "token_ids": np.dtype("<i4"),
    "loss_mask": np.dtype("u1"),
    "sample_offsets": np.dtype("<i8"),
    "sample_starts": np.dtype("<i8"),
    "sample_ids": np.dtype("u1"),
    "split_keys": np.dtype("<u8"),
    "sample_sources": np.dtype("<i2"),
    "chunk_crc32c": np.dtype("<u4"),
    "outlier_offsets": np.dtype("<i8"),
    "outlier_positions": np.dtype("<i8"),
    "outlier_bits": np.dtype("<u2"),
}
"""The small arrays of a shard and their types, in the order of FORMAT.md."""

INDEX_ENTRY = np.dtype([("offset", "<u8"), ("size", "<u8")])


@dataclass(frozen=True, eq=False, slots=True)
class CapturedSample:
    """One sample on its way into a shard."""

    sample_id: str
    """32 hexadecimal digits."""

    split_key: int
    source: int
    token_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.uint8]
    packed: Packed
    """On the CPU."""


@dataclass(frozen=True, eq=False, slots=True)
class StoredSample:
    """One sample as read back."""

    sample_id: str
    token_ids: npt.NDArray[np.int32]
    """int32 [T]."""

    loss_mask: npt.NDArray[np.uint8]
    """uint8 [T]: 1 where the target produced the token."""

    packed: Packed
    """States of the T tokens; `Codec.unpack` makes them bfloat16 [T, L, D]."""

    calibration: str | None


def chunks_of(num_tokens: Array | int, chunk_tokens: int) -> Any:
    """Chunks that a sample of `num_tokens` covers."""
    return -(-num_tokens // chunk_tokens)
