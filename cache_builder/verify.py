"""Checking a cache: every piece that should be there is, and is what was written."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from cache_builder.commit import read_record
from cache_builder.plan import Plan
from cache_builder.retirement import RETIRED, foreign_records, retired_shards
from cache_builder.stored_plans import plan_ids, readable_plan
from shared.cache import Cache
from shared.errors import CacheError
from shared.layout import MANIFEST, RECORDS, generation_key
from shared.location import Location
from shared.manifest import ShardRecord
from shared.metadata import read_description, read_manifest
from shared.shard import GROUP
from shared.spec import CaptureSpec
from shared.storage import open_storage

Piece = Literal[
    "description",
    "manifest",
    "generation",
    "index",
    "head",
    "calibration",
    "projection",
    "target",
    "plan",
    "records",
    "shard",
]


_MISSING = re.compile(r": missing(\.|$)| is missing[:)]")
"""What is said of a file that is not there. Paths and other messages may hold the word, too."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with a cache."""

    piece: Piece
    """What of it."""

    shard: str | None
    """The shard that must be captured anew; None for a piece of the whole cache."""

    kind: str
    """`missing`, `damaged`, `not_finite` or `foreign`; `differs` if the target gives other states.
    """

    message: str

    name: str = ""
    """Of one plan or file where there are many."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "piece": self.piece,
            "shard": self.shard,
            "kind": self.kind,
            "message": self.message,
        }


def verify_cache(
    path: Location, *, deep: bool, progress: Callable[[int], None] = lambda shards: None
) -> list[Problem]:
    """What is wrong with the newest generation of a cache; empty if nothing is.

    Without `deep`: metadata, digests of the small files (those of Zarr, which only other readers
    need, among them), and the presence and size of the large ones. With it: every byte, and that
    every state is finite.
    """
    problems = _verify_top(path)
    if problems:
        return problems  # without these, nothing else can be told
    cache = Cache(path, check_index=False)
    problems = [*_verify_whole(cache), *_verify_builder(path)]
    for done, shard_id in enumerate(cache.shard_ids, 1):
        problems += _verify_shard(cache, shard_id, deep=deep)
        progress(done)
    return problems


def verify_unpublished(
    path: Location, spec: CaptureSpec, shard_ids: Iterable[str]
) -> list[Problem]:
    """What is wrong with committed shards that no generation has yet: every byte of them."""
    problems = []
    for shard_id in sorted(shard_ids):
        try:
            problems += _verify_files(path, read_record(path, spec, shard_id)[0], deep=True)
        except CacheError as error:
            problems.append(_problem("shard", error, shard=shard_id))
    return problems


def _problem(
    piece: Piece, error: CacheError, *, shard: str | None = None, name: str = ""
) -> Problem:
    kind = "missing" if _MISSING.search(str(error)) else "damaged"
    return Problem(piece, shard, kind, str(error), name)


def _verify_top(path: Location) -> list[Problem]:
    """`cache.json` and `manifest.json`."""
    storage = open_storage(path)
    try:
        CaptureSpec.from_dict(read_description(storage)["spec"], str(path))
    except CacheError as error:
        return [_problem("description", error)]
    try:
        read_manifest(storage)
        Cache(path, check_index=False)
    except CacheError as error:
        return [_problem("manifest", error)]
    return []


def _verify_whole(cache: Cache) -> list[Problem]:
    problems = []
    try:
        cache.head()
    except CacheError as error:
        problems.append(_problem("head", error))
    try:
        cache.calibration(cache.description["calibration"])
    except CacheError as error:
        problems.append(_problem("calibration", error))
    try:
        cache.projection()
    except CacheError as error:
        problems.append(_problem("projection", error))
    try:
        _ = cache.index
    except CacheError as error:
        problems.append(_problem("index", error))
    newest = cache.manifest.generation
    try:
        same = read_manifest(cache.storage, newest)
        if same != cache.manifest:
            key = generation_key(newest, "json")
            raise CacheError(f"{cache.path}/{key}: it differs from {MANIFEST}. It is damaged.")
    except CacheError as error:
        problems.append(_problem("generation", error))
    for name in cache.target_files:
        try:
            cache.target_file(name)
        except CacheError as error:
            problems.append(_problem("target", error, name=name))
    return problems


def _verify_builder(path: Location) -> list[Problem]:
    """What only the builder reads."""
    problems = []
    for plan_id in plan_ids(path):
        try:
            with readable_plan(path, plan_id) as directory:
                Plan(directory)
        except CacheError as error:
            problems.append(_problem("plan", error, name=plan_id))
    try:
        retired_shards(path)
    except CacheError as error:
        problems.append(_problem("records", error, name=RETIRED))
    for foreign in foreign_records(path):
        where = f"{path}/{RECORDS}/{foreign}"
        message = f"{where}: not a record of this cache. No command reads it; remove it."
        problems.append(Problem("records", None, "foreign", message, foreign))
    return problems


def _verify_shard(cache: Cache, shard_id: str, *, deep: bool) -> list[Problem]:
    try:
        record = cache.record(shard_id)
    except CacheError as error:
        return [_problem("shard", error, shard=shard_id)]
    if record.calibration != cache.description["calibration"]:
        try:
            cache.calibration(record.calibration)
        except CacheError as error:
            return [_problem("calibration", error)]
    problems = _verify_files(cache.path, record, deep=deep)
    if problems:
        return problems
    try:
        reader = cache.shard(shard_id)
        for row in range(len(reader) if deep else 0):
            sample = reader.read(row)
            if not bool(torch.isfinite(cache.unpack(sample)).all()):
                message = f"{cache.path}: shard {shard_id}, sample {sample.sample_id}: not finite"
                problems.append(Problem("shard", shard_id, "not_finite", message))
    except CacheError as error:
        problems.append(Problem("shard", shard_id, "damaged", str(error)))
    return problems


def _verify_files(path: Location, record: ShardRecord, *, deep: bool) -> list[Problem]:
    storage, group = open_storage(path), f"{GROUP}/{record.shard_id}"
    sizes = storage.sizes(group)
    problems = []
    for name, expected in record.files.items():
        where = f"{path}: shard {record.shard_id}, {name}"
        if (size := sizes.get(name)) is None:
            problems.append(Problem("shard", record.shard_id, "missing", f"{where}: missing"))
        elif size != expected.size:
            message = f"{where}: expected {expected.size:,} bytes, found {size:,}"
            problems.append(Problem("shard", record.shard_id, "damaged", message))
        elif (deep or name.endswith("zarr.json")) and (
            storage.sha256(f"{group}/{name}") != expected.sha256
        ):
            message = f"{where}: other bytes than were written"
            problems.append(Problem("shard", record.shard_id, "damaged", message))
    return problems
