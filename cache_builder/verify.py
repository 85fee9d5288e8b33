"""Checking a cache: every piece that should be there is, and is what was written."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shared.cache import Cache
from shared.errors import CacheError
from shared.files import sha256_file
from shared.manifest import ShardRecord
from shared.shard import GROUP


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with a cache."""

    shard: str | None
    """The shard that must be captured anew; None for a piece of the whole cache."""

    kind: str
    """`missing`, `damaged` or `not_finite`; `differs` if the target gives other states."""

    message: str

    def to_dict(self) -> dict[str, Any]:
        return {"shard": self.shard, "kind": self.kind, "message": self.message}


def verify_cache(
    path: Path, *, deep: bool, progress: Callable[[int], None] = lambda shards: None
) -> list[Problem]:
    """What is wrong with the newest generation of a cache; empty if nothing is.

    Without `deep`: metadata, digests of the small files, and the presence and size of the large
    ones. With it: every byte, and that every state is finite.

    Raises:
        CacheError: the cache cannot be opened at all.
    """
    cache = Cache(path)
    problems = []
    try:
        cache.head()
    except CacheError as error:
        problems.append(Problem(None, "damaged", str(error)))
    for done, shard_id in enumerate(cache.shard_ids, 1):
        problems += _verify_shard(cache, shard_id, deep=deep)
        progress(done)
    return problems


def _verify_shard(cache: Cache, shard_id: str, *, deep: bool) -> list[Problem]:
    try:
        record = cache.record(shard_id)
    except CacheError as error:
        kind = "missing" if "missing" in str(error) else "damaged"
        return [Problem(shard_id, kind, str(error))]
    try:
        cache.calibration(record.calibration)
    except CacheError as error:
        return [Problem(None, "damaged", str(error))]
    problems = _verify_files(cache, record, deep=deep)
    if problems:
        return problems
    try:
        reader = cache.shard(shard_id)
        for row in range(len(reader) if deep else 0):
            sample = reader.read(row)
            if not bool(torch.isfinite(cache.unpack(sample)).all()):
                message = f"{cache.path}: shard {shard_id}, sample {sample.sample_id}: not finite"
                problems.append(Problem(shard_id, "not_finite", message))
    except CacheError as error:
        problems.append(Problem(shard_id, "damaged", str(error)))
    return problems


def _verify_files(cache: Cache, record: ShardRecord, *, deep: bool) -> list[Problem]:
    group = cache.path / GROUP / record.shard_id
    problems = []
    for name, expected in record.files.items():
        path = group / name
        where = f"{cache.path}: shard {record.shard_id}, {name}"
        if not path.is_file():
            problems.append(Problem(record.shard_id, "missing", f"{where}: missing"))
        elif (size := path.stat().st_size) != expected.size:
            message = f"{where}: expected {expected.size:,} bytes, found {size:,}"
            problems.append(Problem(record.shard_id, "damaged", message))
        elif deep and sha256_file(path) != expected.sha256:
            message = f"{where}: other bytes than were written"
            problems.append(Problem(record.shard_id, "damaged", message))
    return problems
