"""SampleIndex: where every sample of a generation lies, in flat arrays.

One small file serves a million samples (46 bytes each); no shard is opened to plan an epoch.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load, save

from shared.chunk import Array
from shared.errors import CacheError
from shared.shard import SAMPLE_ID_BYTES
from shared.shard_reader import ShardReader

MAX_SOURCES = 2**15
"""Source tags of one index, which counts them in int16."""

_TYPES: dict[str, np.dtype[Any]] = {
    "sample_ids": np.dtype("u1"),
    "split_keys": np.dtype("<u8"),
    "shard": np.dtype("<i4"),
    "row": np.dtype("<i4"),
    "num_tokens": np.dtype("<i4"),
    "num_supervised": np.dtype("<i4"),
    "num_anchors": np.dtype("<i4"),
    "source": np.dtype("<i2"),
}


def require_countable(sources: Sequence[str], where: str) -> None:
    """Refuse more source tags than an index can tell apart.

    Raises:
        CacheError: naming the limit.
    """
    if len(sources) > MAX_SOURCES:
        raise CacheError(
            f"{where}: {len(sources):,} source tags, an index can tell {MAX_SOURCES:,} apart. "
            "Build with a `tag` for each of data.sources instead of one for each row."
        )


@dataclass(frozen=True, eq=False, slots=True)
class SampleIndex:
    """One row per sample, in the order of shard ids and rows."""

    sample_ids: npt.NDArray[np.uint8]
    """uint8 [N, 16]: hash of token ids and loss mask."""

    split_keys: npt.NDArray[np.uint64]
    """uint64 [N]: hash of the prompt. Samples that share a prompt share it."""

    shard: npt.NDArray[np.int32]
    """int32 [N]: position in the manifest's sorted shard ids."""

    row: npt.NDArray[np.int32]
    """int32 [N]: row inside the shard."""

    num_tokens: npt.NDArray[np.int32]
    num_supervised: npt.NDArray[np.int32]

    num_anchors: npt.NDArray[np.int32]
    """int32 [N]: positions where a block may start: supervised, and so is the next one."""

    source: npt.NDArray[np.int16]
    """int16 [N]: position in the manifest's sources."""

    def __len__(self) -> int:
        return len(self.row)

    def sample_id(self, position: int) -> str:
        return bytes(self.sample_ids[position]).hex()

    def select(self, chosen: npt.NDArray[np.bool_]) -> "SampleIndex":
        return SampleIndex(**{f.name: getattr(self, f.name)[chosen] for f in fields(self)})

    def to_bytes(self) -> bytes:
        return bytes(save({name: np.ascontiguousarray(getattr(self, name)) for name in _TYPES}))

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> "SampleIndex":
        """Parse what `to_bytes` wrote.

        Raises:
            CacheError: the arrays are not those of an index.
        """
        try:
            arrays = load(data)
        except (SafetensorError, ValueError, KeyError) as error:
            raise CacheError(f"{where}: not a sample index ({error}).") from None
        found = {name: (array.dtype, array.shape) for name, array in arrays.items()}
        num = arrays["row"].size if "row" in arrays else -1
        expected = {
            name: (kind, (num, SAMPLE_ID_BYTES) if name == "sample_ids" else (num,))
            for name, kind in _TYPES.items()
        }
        if found != expected:
            raise CacheError(f"{where}: expected arrays {expected}, found {found}.")
        return cls(**arrays)

    def require_within(self, num_shards: int, num_sources: int, where: str) -> None:
        """Refuse rows that point outside the cache.

        Raises:
            CacheError: a shard, row, source or count that cannot be.
        """
        limits: dict[str, tuple[Array, int | None]] = {
            "shard": (self.shard, num_shards),
            "row": (self.row, None),
            "num_tokens": (self.num_tokens, None),
            "source": (self.source, max(num_sources, 1)),
        }
        for name, (values, end) in limits.items():
            if len(values) and (values.min() < 0 or (end is not None and values.max() >= end)):
                raise CacheError(
                    f"{where}: {name} {values.min()} to {values.max()}, expected at least 0 and "
                    f"below {end or 'what the shard has'}. The file is damaged."
                )

    @classmethod
    def concatenate(cls, parts: Iterable["SampleIndex"]) -> "SampleIndex":
        parts = list(parts)
        empty = {
            name: np.empty((0, SAMPLE_ID_BYTES) if name == "sample_ids" else 0, kind)
            for name, kind in _TYPES.items()
        }
        return cls(
            **{
                name: np.concatenate([empty[name], *(getattr(part, name) for part in parts)])
                for name in _TYPES
            }
        )

    @classmethod
    def of_shard(cls, reader: ShardReader, shard: int, sources: list[str]) -> "SampleIndex":
        """The rows of one shard, whose position among the shard ids is `shard`.

        `sources` are the tags of the whole cache; those of the shard must be among them.
        """
        arrays, num = reader.arrays, len(reader)
        begins, ends = arrays["sample_offsets"][:-1], arrays["sample_offsets"][1:]
        mask = arrays["loss_mask"].astype(np.int64)
        followed = mask.copy()
        followed[:-1] *= mask[1:]
        followed[ends - 1] = 0  # the last token of a sample has no next one
        return cls(
            sample_ids=arrays["sample_ids"],
            split_keys=arrays["split_keys"],
            shard=np.full(num, shard, np.int32),
            row=np.arange(num, dtype=np.int32),
            num_tokens=(ends - begins).astype(np.int32),
            num_supervised=_sums(mask, begins),
            num_anchors=_sums(followed, begins),
            source=np.array([sources.index(tag) for tag in reader.record.sources] or [0], np.int16)[
                arrays["sample_sources"]
            ],
        )


def _sums(values: Array, begins: Array) -> npt.NDArray[np.int32]:
    sums = np.add.reduceat(values, begins) if len(begins) else np.empty(0)
    return sums.astype(np.int32)
