"""What one build adds to a cache: its samples, its shards, and the micro-batches of each.

A plan is written once, before anything is captured, and never changed; a resumed build reads it
back. Samples are planned by id, so that no order, rank or count of workers can lose one.
"""

import json
import re
from array import array
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from cache_builder.config import Forward
from cache_builder.corpus import TokenizedSample
from cache_builder.plan_check import find_contradiction
from cache_builder.retirement import recorded_shards
from shared.config import build
from shared.errors import CacheError, ConfigError
from shared.files import (
    canonical_json,
    commit_directory,
    read_json,
    remove_tree,
    sha256_bytes,
    sha256_file,
    write_json,
    writing,
)
from shared.location import Location
from shared.shard import SAMPLE_ID_BYTES

DESCRIPTION = "plan.json"
_OWN_DIGEST = "sha256"
_DAMAGED = (
    "The plan is damaged or of another version. Its committed shards are not affected: delete its "
    "directory, and a build plans anew what is missing."
)
_PLAN_ID = re.compile(r"[0-9]{4,}")
_TOKENS = "token_ids.i32"
_MASK = "loss_mask.u8"
_SAMPLES = "samples.safetensors"
DROPPED = "dropped.jsonl"
"""Every row of the data that gave no sample, for people."""

_ARRAYS: dict[str, Any] = {
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
_COLUMNS = ("split_keys", "num_tokens", "source", "file", "source_row")
"""Those that hold one value of each sample as it came."""


class Dropped(Protocol):
    """Why a row gives no sample."""

    @property
    def reason(self) -> str: ...

    @property
    def detail(self) -> str: ...


@dataclass(frozen=True, eq=False, slots=True)
class PlannedSample:
    sample_id: str
    split_key: int
    source: int
    token_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.uint8]


def cut_shards(
    num_tokens: npt.NDArray[np.int32], sample_ids: npt.NDArray[np.uint8], shard_tokens: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Order the samples by length, longest first, and cut the order into shards.

    Equal lengths are ordered by id: the result depends on the set of samples only. A shard holds
    `shard_tokens` tokens at least, but for the last.

    Returns:
        The order as sample positions, and the offset into it of each shard and of the end.
    """
    by_id = np.argsort(np.ascontiguousarray(sample_ids).view("S16").ravel(), kind="stable")
    order = by_id[np.argsort(-num_tokens[by_id], kind="stable")]
    ends = num_tokens[order].cumsum(dtype=np.int64)
    offsets = [0]
    while offsets[-1] < len(order):
        begin = ends[offsets[-1] - 1] if offsets[-1] else 0
        offsets.append(min(int(np.searchsorted(ends, begin + shard_tokens)) + 1, len(order)))
    return order, np.array(offsets, np.int64)


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
            for name in (_TOKENS, _MASK, _SAMPLES):
                if (found := sha256_file(directory / name)) != files[name]:
                    raise CacheError(
                        f"{directory / name}: expected sha256 {files[name][:16]}, found "
                        f"{found[:16]}. {_DAMAGED}"
                    )
            arrays = load_file(directory / _SAMPLES)
            if {name: array.dtype for name, array in arrays.items()} != {
                name: np.dtype(kind) for name, kind in _ARRAYS.items()
            }:
                raise CacheError(f"{directory / _SAMPLES}: not the arrays of a plan. {_DAMAGED}")
            sizes = [(directory / name).stat().st_size for name in (_TOKENS, _MASK)]
            if wrong := find_contradiction(self.description, arrays, *sizes):
                raise CacheError(f"{directory}: {wrong}. {_DAMAGED}")
            self.key = str(self.description["key"])
            self.sources = tuple(self.description["sources"])
            self.forward = build(Forward, self.description["forward"])
        except (OSError, KeyError, TypeError, SafetensorError, ConfigError) as error:
            raise CacheError(f"{directory}: not a plan ({error!r}). {_DAMAGED}") from error
        self._arrays = arrays
        self._token_ids = np.memmap(directory / _TOKENS, np.int32, "r") if len(self) else None
        self._loss_mask = np.memmap(directory / _MASK, np.uint8, "r") if len(self) else None

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


def _read_description(directory: Path) -> dict[str, Any]:
    """The fields of `plan.json`, compared with their digest."""
    fields = read_json(directory / DESCRIPTION)
    digest = fields.pop(_OWN_DIGEST, None) if isinstance(fields, dict) else None
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


class PlanWriter:
    """Collects tokenized samples on disk and turns them into a plan.

    Memory: 45 bytes a sample while they are collected, twice that while they are put in order.
    """

    def __init__(self, plans: Path, plan_id: str) -> None:
        self._target = plans / plan_id
        self._wip = plans / f"{plan_id}.wip"
        remove_tree(self._wip)
        self._sample_ids = bytearray()
        self._columns = {name: array(np.dtype(_ARRAYS[name]).char) for name in _COLUMNS}
        self._len = 0
        self._sources: dict[str, int] = {}
        self._files: dict[str, int] = {}
        with writing(self._wip):
            self._wip.mkdir(parents=True)
            self._token_file = (self._wip / _TOKENS).open("wb")
            self._mask_file = (self._wip / _MASK).open("wb")
            self._dropped_file = (self._wip / DROPPED).open("wb")

    def add(self, sample: TokenizedSample) -> None:
        with writing(self._wip):
            self._token_file.write(sample.token_ids.astype("<i4").tobytes())
            self._mask_file.write(sample.loss_mask.astype("u1").tobytes())
        self._sample_ids += bytes.fromhex(sample.sample_id)
        values = {
            "split_keys": sample.split_key,
            "num_tokens": len(sample.token_ids),
            "source": self._sources.setdefault(sample.source, len(self._sources)),
            "file": self._files.setdefault(sample.file, len(self._files)),
            "source_row": sample.row,
        }
        for name, value in values.items():
            self._columns[name].append(value)
        self._len += 1

    def note_drop(self, file: str, row: int, drop: Dropped) -> None:
        """Write down a row that gives no sample."""
        line = {"file": file, "row": row, "reason": drop.reason, "detail": drop.detail}
        with writing(self._wip):
            self._dropped_file.write(json.dumps(line).encode() + b"\n")

    def __len__(self) -> int:
        return self._len

    def commit(
        self,
        *,
        key: str,
        forward: Forward,
        report: dict[str, Any],
        shard_tokens: int = 0,
        shard_sizes: Sequence[int] | None = None,
    ) -> Plan:
        """Cut the shards and put the plan in place, whole.

        Args:
            shard_tokens: size of a shard, as in `cut_shards`.
            shard_sizes: instead of that, the samples of each shard; they were added in this order.
        """
        self.close()
        arrays = self._take_columns()
        num_tokens = arrays["num_tokens"]
        ends = num_tokens.cumsum(dtype=np.int64)
        total = int(ends[-1]) if len(ends) else 0
        ends -= num_tokens
        arrays["offset"] = ends
        if shard_sizes is None:
            arrays["order"], arrays["shard_offsets"] = cut_shards(
                num_tokens, arrays["sample_ids"], shard_tokens
            )
        else:
            assert sum(shard_sizes) == len(self)
            arrays["order"] = np.arange(len(self), dtype=np.int64)
            arrays["shard_offsets"] = np.cumsum([0, *shard_sizes], dtype=np.int64)
        num_shards = len(arrays["shard_offsets"]) - 1
        with writing(self._wip):
            save_file(arrays, self._wip / _SAMPLES)
            del arrays, num_tokens, ends  # what follows reads them again
            fields = {
                "key": key,
                "forward": asdict(forward),
                "sources": list(self._sources),
                "corpus_files": list(self._files),
                "num_samples": len(self),
                "num_tokens": total,
                "num_shards": num_shards,
                "shard_tokens": shard_tokens,
                "report": report,
                "files": {
                    name: sha256_file(self._wip / name) for name in (_TOKENS, _MASK, _SAMPLES)
                },
            }
            digest = sha256_bytes(canonical_json(fields))
            write_json(self._wip / DESCRIPTION, {**fields, _OWN_DIGEST: digest})
            commit_directory(self._wip, self._target)
        return Plan(self._target)

    def _take_columns(self) -> dict[str, npt.NDArray[Any]]:
        """What was collected, as arrays. It is not held any more."""
        arrays: dict[str, npt.NDArray[Any]] = {
            name: np.frombuffer(self._columns.pop(name), _ARRAYS[name]) for name in _COLUMNS
        }
        ids, self._sample_ids = self._sample_ids, bytearray()
        arrays["sample_ids"] = np.frombuffer(ids, np.uint8).reshape(-1, SAMPLE_ID_BYTES)
        return arrays

    def close(self) -> None:
        with writing(self._wip), ExitStack() as files:
            for file in (self._token_file, self._mask_file, self._dropped_file):
                files.callback(file.close)

    def discard(self) -> None:
        self.close()
        remove_tree(self._wip)


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
