"""The caches of a run: one, or several of one fingerprint, read as if they were one."""

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from shared import config as configs
from shared.cache import Cache
from shared.chunk import Array
from shared.codec import Calibration
from shared.errors import CacheError, CacheIncompatibleError, DraftCacheError, RunError
from shared.head import Head
from shared.index import SampleIndex, require_countable
from shared.location import Location
from shared.projection import Projection
from shared.shard import StoredSample


class Caches:
    """Caches of one fingerprint. Positions count through all of them, in order. Thread-safe.

    Attributes:
        spec, codec: the same for all.
        index: of all samples; `source` refers to `sources`, `shard` to the cache's own shards.
        sources: tags of all caches.
    """

    def __init__(
        self,
        paths: Sequence[Location],
        *,
        generations: Sequence[int] | None = None,
        open_shards: int = 64,
    ) -> None:
        """Open the newest generations, or the ones given, one for each path.

        Args:
            open_shards: of each cache, those used last that stay open.

        Raises:
            CacheError: one is missing, damaged or of another version; or the path is no place.
            CacheIncompatibleError: they hold states of different kinds: names what differs.
        """
        if generations is not None and len(generations) != len(paths):
            raise CacheIncompatibleError(
                f"{', '.join(map(str, paths))}: {len(paths)} caches, the run was started from "
                f"{len(generations)}. Give the same ones in the same order."
            )
        wanted: Sequence[int | None] = generations or [None] * len(paths)
        self.parts = [
            _open(path, number, open_shards) for path, number in zip(paths, wanted, strict=True)
        ]
        first = self.parts[0]
        for part in self.parts[1:]:
            _require_same_kind(first, part)
        self.spec, self.codec = first.spec, first.codec
        tags = {tag for part in self.parts for tag in part.manifest.sources}
        self.sources = list(first.manifest.sources) if len(self.parts) == 1 else sorted(tags)
        require_countable(self.sources, str(self))
        self.index = SampleIndex.concatenate(self._renamed(part) for part in self.parts)
        self._begin = np.cumsum([0, *(len(part.index) for part in self.parts)])
        self._home: dict[str | None, Cache] = {None: first}
        """Where each calibration met so far is stored."""

    def __str__(self) -> str:
        return ", ".join(str(part.path) for part in self.parts)

    def _renamed(self, part: Cache) -> SampleIndex:
        numbers = np.array([self.sources.index(tag) for tag in part.manifest.sources], np.int16)
        return replace(part.index, source=numbers[part.index.source])

    def shard_numbers(self) -> npt.NDArray[np.int64]:
        """The shard of every sample, int64 [N], counted through all caches."""
        begin = np.cumsum([0, *(len(part.shard_ids) for part in self.parts)])
        return np.concatenate(
            [start + part.index.shard for start, part in zip(begin, self.parts, strict=False)]
        )

    def read(self, position: int) -> StoredSample:
        """The sample at `position` of the index: see `Cache.read`."""
        part, position = self._locate(position)
        sample = part.read(position)
        self._home.setdefault(sample.calibration, part)
        return sample

    def tokens(self, position: int) -> tuple[Array, Array]:
        """Token ids and loss mask of the sample at `position`, without its states."""
        part, position = self._locate(position)
        return part.tokens(position)

    def _locate(self, position: int) -> tuple[Cache, int]:
        number = int(np.searchsorted(self._begin, position, side="right")) - 1
        return self.parts[number], position - int(self._begin[number])

    def calibration(self, name: str | None) -> Calibration | None:
        """The quantiser's channels that a sample read from here names."""
        return self._home[name].calibration(name)

    def unpack(self, sample: StoredSample) -> torch.Tensor:
        """States of `sample`, bfloat16 [T, L, D]."""
        return self.codec.unpack(sample.packed, self.calibration(sample.calibration))

    def head(self) -> Head:
        """The frozen tensors of the target."""
        return self.parts[0].head()

    def projection(self) -> Projection | None:
        """What made the features of the tapped states; None where nothing did. Read anew."""
        return self.parts[0].projection()

    @property
    def stored_bytes(self) -> int:
        return sum(part.manifest.totals.stored_bytes for part in self.parts)

    def describe(self) -> dict[str, Any]:
        """What a checkpoint remembers. Of several caches, lists of what differs between them."""
        return {
            "fingerprint": self.spec.fingerprint,
            "generation": _one_or_all([part.manifest.generation for part in self.parts]),
            "index_sha256": _one_or_all([part.manifest.index.sha256 for part in self.parts]),
            "target_layer_ids": list(self.spec.target_layer_ids),
            "hidden_size": self.spec.target.hidden_size,
            # Not a key without a value: what runs of before remembered stays as it is.
            **{k: v for k, v in self.spec.to_dict().items() if k == "projection"},
        }

    def require_same(
        self, remembered: dict[str, Any], where: str, *, same_samples: bool = True
    ) -> None:
        """Refuse a checkpoint that was trained from states of another kind, or other samples.

        Args:
            remembered: by the checkpoint, of what `describe` gave.
            same_samples: False allows another cache of the same fingerprint.

        Raises:
            CacheIncompatibleError: naming what differs.
            RunError: the checkpoint does not say what it was trained from.
        """
        ours = self.describe()
        keys = ["fingerprint", "target_layer_ids", "hidden_size"]
        for key in keys + ["index_sha256"] * same_samples:
            if key not in remembered:
                raise RunError(f"{where}: {key!r} is missing; it cannot be matched to a cache.")
            if remembered[key] != ours[key]:
                raise CacheIncompatibleError(
                    f"{where}: trained from a cache with {key} {remembered[key]}, "
                    f"{self} has {ours[key]}. Give the cache it was trained from."
                )


def generations_of(remembered: dict[str, Any]) -> list[int]:
    """The generations in what `Caches.describe` gave."""
    found = remembered["generation"]
    return [int(number) for number in (found if isinstance(found, list) else [found])]


def _one_or_all(values: list[Any]) -> Any:
    return values[0] if len(values) == 1 else values


def _require_same_kind(first: Cache, other: Cache) -> None:
    names = (f"in {first.path}", f"in {other.path}")
    lines = configs.differences(first.spec.to_dict(), other.spec.to_dict(), names)
    if first.description["head_sha256"] != other.description["head_sha256"]:
        lines.append("head.safetensors: not the same tensors")
    if lines:
        raise CacheIncompatibleError(
            f"cache.path: the caches hold states of different kinds ({'; '.join(lines)}). Train "
            "from caches of one kind."
        )


def _open(path: Location, generation: int | None, open_shards: int) -> Cache:
    try:
        return Cache(path, generation=generation, open_shards=open_shards)
    except DraftCacheError:
        raise
    except OSError as error:
        raise CacheError(
            f"{path}: cannot be read ({os.strerror(error.errno or 0)}). Look at cache.path."
        ) from error
