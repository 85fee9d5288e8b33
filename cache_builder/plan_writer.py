"""Writing a plan: samples are collected on disk, ordered, cut into shards, put in place whole."""

import json
from array import array
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from cache_builder.config import Forward
from cache_builder.corpus import TokenizedSample
from cache_builder.plan import ARRAYS, DESCRIPTION, DROPPED, MASK, OWN_DIGEST, SAMPLES, TOKENS, Plan
from shared.files import (
    canonical_json,
    commit_directory,
    remove_tree,
    sha256_bytes,
    sha256_file,
    write_json,
    writing,
)
from shared.shard import SAMPLE_ID_BYTES

_COLUMNS = ("split_keys", "num_tokens", "source", "file", "source_row")
"""Those that hold one value of each sample as it came."""


class Dropped(Protocol):
    """Why a row gives no sample."""

    @property
    def reason(self) -> str: ...

    @property
    def detail(self) -> str: ...


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


class PlanWriter:
    """Collects tokenized samples on disk and turns them into a plan.

    Memory: 45 bytes a sample while they are collected, twice that while they are put in order.
    """

    def __init__(self, plans: Path, plan_id: str) -> None:
        self._target = plans / plan_id
        self._wip = plans / f"{plan_id}.wip"
        remove_tree(self._wip)
        self._sample_ids = bytearray()
        self._columns = {name: array(np.dtype(ARRAYS[name]).char) for name in _COLUMNS}
        self._len = 0
        self._sources: dict[str, int] = {}
        self._files: dict[str, int] = {}
        with writing(self._wip):
            self._wip.mkdir(parents=True)
            self._token_file = (self._wip / TOKENS).open("wb")
            self._mask_file = (self._wip / MASK).open("wb")
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
        relies_on: Collection[str] = (),
    ) -> Plan:
        """Cut the shards and put the plan in place, whole.

        Args:
            shard_tokens: size of a shard, as in `cut_shards`.
            shard_sizes: instead of that, the samples of each shard; they were added in this order.
            relies_on: committed shards that have, or may have, what was left out as stored.
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
            save_file(arrays, self._wip / SAMPLES)
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
                "relies_on": sorted(relies_on),
                "report": report,
                "files": {name: sha256_file(self._wip / name) for name in (TOKENS, MASK, SAMPLES)},
            }
            digest = sha256_bytes(canonical_json(fields))
            write_json(self._wip / DESCRIPTION, {**fields, OWN_DIGEST: digest})
            commit_directory(self._wip, self._target)
        return Plan(self._target)

    def _take_columns(self) -> dict[str, npt.NDArray[Any]]:
        """What was collected, as arrays. It is not held any more."""
        arrays: dict[str, npt.NDArray[Any]] = {
            name: np.frombuffer(self._columns.pop(name), ARRAYS[name]) for name in _COLUMNS
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
