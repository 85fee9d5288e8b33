"""What one build adds to a cache: its samples, its shards, and the micro-batches of each.

A plan is written once, before anything is captured, and never changed; a resumed build reads it
back. Samples are planned by id, so that no order, rank or count of workers can lose one.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load_file

from cache_builder.config import Forward
from cache_builder.plan_check import find_contradiction
from cache_builder.retirement import recorded_shards
from shared.config import build
from shared.errors import CacheError, ConfigError
from shared.files import (
    canonical_json,
    read_json,
    sha256_bytes,
    sha256_file,
)
from shared.location import Location

DESCRIPTION = "plan.json"
OWN_DIGEST = "sha256"
_DAMAGED = (
    "The plan is damaged or of another version. Its committed shards are not affected: delete its "
    "directory, and a build plans anew what is missing."
)
_PLAN_ID = re.compile(r"[0-9]{4,}")
TOKENS = "token_ids.i32"
MASK = "loss_mask.u8"
SAMPLES = "samples.safetensors"
DROPPED = "dropped.jsonl"
"""Every row of the data that gave no sample, for people."""

ARRAYS: dict[str, Any] = {
    "sample_ids": np.uint8,
    "split_keys": np.uint64,
    "num_tokens": np.int32,
    "offset": np.int64,
    "source": np.int16,
    "file": np.int32,
    "source_row": np.int64,
    "order": np.int64,
    "shard_offsets": np.int64,
}


@dataclass(frozen=True, eq=False, slots=True)
class PlannedSample:
    sample_id: str
    split_key: int
    source: int
    token_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.uint8]


def micro_batches(num_tokens: npt.NDArray[np.int32], batch_tokens: int) -> Iterator[slice]:
    """Cut samples, longest first, into runs whose padded size is at most `batch_tokens`.

    A sample longer than that goes alone.
    """
    begin = 0
    while begin < len(num_tokens):
        rows = max(1, batch_tokens // int(num_tokens[begin]))
        yield slice(begin, min(begin + rows, len(num_tokens)))
        begin += rows


class Plan:
    """A plan on disk, open for reading."""

    def __init__(self, directory: Path) -> None:
        """Read and check the plan in `directory`.

        Raises:
            CacheError: it is damaged.
        """
        self.directory = directory
        self.description = _read_description(directory)
        self.plan_id = directory.name
        try:
            files = self.description["files"]
            for name in (TOKENS, MASK, SAMPLES):
                if (found := sha256_file(directory / name)) != files[name]:
                    raise CacheError(
                        f"{directory / name}: expected sha256 {files[name][:16]}, found "
                        f"{found[:16]}. {_DAMAGED}"
                    )
            arrays = load_file(directory / SAMPLES)
            if {name: array.dtype for name, array in arrays.items()} != {
                name: np.dtype(kind) for name, kind in ARRAYS.items()
            }:
                raise CacheError(f"{directory / SAMPLES}: not the arrays of a plan. {_DAMAGED}")
            sizes = [(directory / name).stat().st_size for name in (TOKENS, MASK)]
            if wrong := find_contradiction(self.description, arrays, *sizes):
                raise CacheError(f"{directory}: {wrong}. {_DAMAGED}")
            self.key = str(self.description["key"])
            self.sources = tuple(self.description["sources"])
            self.forward = build(Forward, self.description["forward"])
            self.relies_on = _relies_on(self.description)
        except (OSError, KeyError, TypeError, SafetensorError, ConfigError) as error:
            raise CacheError(f"{directory}: not a plan ({error!r}). {_DAMAGED}") from error
        self._arrays = arrays
        self._token_ids = np.memmap(directory / TOKENS, np.int32, "r") if len(self) else None
        self._loss_mask = np.memmap(directory / MASK, np.uint8, "r") if len(self) else None

    def __len__(self) -> int:
        return len(self._arrays["order"])

    @property
    def num_tokens(self) -> int:
        return int(self._arrays["num_tokens"].sum())

    @property
    def shard_ids(self) -> list[str]:
        """Longest samples first."""
        return [f"{self.plan_id}-{i:05d}" for i in range(len(self._arrays["shard_offsets"]) - 1)]

    def shard_positions(self, shard_id: str) -> npt.NDArray[np.int64]:
        """Positions in the plan of the samples of one shard, longest first."""
        number = self.shard_ids.index(shard_id)
        begin, end = self._arrays["shard_offsets"][number : number + 2]
        positions: npt.NDArray[np.int64] = self._arrays["order"][begin:end]
        return positions

    def lengths(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        lengths: npt.NDArray[np.int32] = self._arrays["num_tokens"][positions]
        return lengths

    def sample(self, position: int) -> PlannedSample:
        assert self._token_ids is not None
        assert self._loss_mask is not None
        arrays = self._arrays
        begin = int(arrays["offset"][position])
        end = begin + int(arrays["num_tokens"][position])
        return PlannedSample(
            bytes(arrays["sample_ids"][position]).hex(),
            int(arrays["split_keys"][position]),
            int(arrays["source"][position]),
            np.array(self._token_ids[begin:end]),
            np.array(self._loss_mask[begin:end]),
        )

    def provenance(self, position: int) -> tuple[str, int, str]:
        """File, row and source tag of a sample."""
        arrays = self._arrays
        return (
            self.description["corpus_files"][int(arrays["file"][position])],
            int(arrays["source_row"][position]),
            self.sources[int(arrays["source"][position])],
        )

    def calibration_positions(self, num_tokens: int) -> list[int]:
        """Samples spread evenly over the lengths that hold about `num_tokens` tokens."""
        mean = max(1, self.num_tokens // len(self))
        count = min(len(self), -(-num_tokens // mean))
        ranks = np.linspace(0, len(self) - 1, count).astype(np.int64)
        return [int(position) for position in self._arrays["order"][ranks]]


def _relies_on(description: Mapping[str, Any]) -> frozenset[str] | None:
    """Shards that have what the plan left out as stored; None if that is not known."""
    if "relies_on" in description:
        return frozenset(description["relies_on"])
    report = description["report"]  # of an older version, which only counted what it left out
    return frozenset() if report.get("already_cached", report.get("num_cached")) == 0 else None


def _read_description(directory: Path) -> dict[str, Any]:
    """The fields of `plan.json`, compared with their digest."""
    fields = read_json(directory / DESCRIPTION, remedy=_DAMAGED)
    digest = fields.pop(OWN_DIGEST, None) if isinstance(fields, dict) else None
    try:
        found = sha256_bytes(canonical_json(fields))
    except ValueError:  # NaN
        found = "no digest"
    if digest != found:
        raise CacheError(
            f"{directory / DESCRIPTION}: states sha256 {str(digest)[:16]}, its fields have "
            f"{found[:16]}. {_DAMAGED}"
        )
    return dict(fields)


def is_plan_id(name: str) -> bool:
    return _PLAN_ID.fullmatch(name) is not None


def find_plans(plans: Path) -> list[Path]:
    """Directories of the committed plans, oldest first."""
    if not plans.is_dir():
        return []
    return sorted(
        (path for path in plans.iterdir() if is_plan_id(path.name)),
        key=lambda path: int(path.name),
    )


def next_plan_id(plans: Path, cache: Location | None = None) -> str:
    """A number above that of every plan and of every committed shard: no id is used twice.

    Args:
        cache: of which `plans` are; None for the directory that they are in.
    """
    used = [path.name for path in find_plans(plans)]
    used += [shard_id.partition("-")[0] for shard_id in recorded_shards(cache or plans.parent)]
    return f"{max(map(int, used), default=0) + 1:04d}"
