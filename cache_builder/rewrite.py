"""Stored samples into new shards: copied as they are stored, without the target.

Levels, outliers, ids and masks are the bytes that were captured; nothing is encoded again with a
loss.
"""

import hashlib
import json
from dataclasses import replace
from pathlib import Path

from cache_builder.commit import commit_shard
from cache_builder.plan import Plan
from cache_builder.quality import LayerSums
from cache_builder.selection import Selection
from cache_builder.workspace import workspace
from shared.errors import ShardCorruptError
from shared.files import remove_tree, sha256_bytes, write_json, writing
from shared.layout import WIP
from shared.location import Location
from shared.manifest import ShardRecord, StoredFile
from shared.metadata import read_calibration
from shared.shard import GROUP, CapturedSample
from shared.shard_reader import ShardReader
from shared.shard_writer import ShardWriter
from shared.spec import CaptureSpec

_GROUP_FILE = "zarr.json"
_COPY_BYTES = 1 << 24


def write_selection(
    cache: Location, selection: Selection, spec: CaptureSpec, plan: Plan, shard_id: str
) -> ShardRecord:
    """Write and commit `selection` as shard `shard_id` of `plan` in `cache`.

    Raises:
        ShardCorruptError: a stored byte is not what was written. Nothing is committed.
    """
    wip = workspace(cache) / WIP / shard_id
    remove_tree(wip)
    if selection.is_whole:
        record = _copy_files(selection, wip, shard_id)
    else:
        record = _copy_samples(selection, wip, spec, plan, shard_id)
    return commit_shard(cache, record)


def _copy_samples(
    selection: Selection, wip: Path, spec: CaptureSpec, plan: Plan, shard_id: str
) -> ShardRecord:
    """Some rows of a shard, levels and outliers as they are.

    The statistics are those of the decoded states; what the codec lost of the captured ones is
    known for the old shard as a whole only, and kept.
    """
    old, codec = selection.record, spec.build_codec()
    reader = ShardReader(selection.storage, old, spec)
    calibration = read_calibration(selection.storage, old.calibration, spec)
    sums = LayerSums(spec.row_sizes)
    writer = ShardWriter(wip, spec, shard_id)
    try:
        positions = plan.shard_positions(shard_id)
        for row, position in zip(selection.rows.tolist(), positions.tolist(), strict=True):
            stored, planned = reader.read(row), plan.sample(position)
            assert stored.sample_id == planned.sample_id
            decoded_TLD = codec.unpack(stored.packed, calibration)
            sums.add(decoded_TLD, decoded_TLD)
            writer.add(
                CapturedSample(
                    planned.sample_id,
                    planned.split_key,
                    planned.source,
                    planned.token_ids,
                    planned.loss_mask,
                    stored.packed,
                )
            )
        return writer.finish(
            layers=tuple(
                replace(new, relative_error=before.relative_error)
                for new, before in zip(sums.statistics(), old.layers, strict=True)
            ),
            sources=plan.sources,
            calibration=old.calibration,
            quarantined=selection.quarantined,
        )
    finally:
        writer.close()


def _copy_files(selection: Selection, wip: Path, shard_id: str) -> ShardRecord:
    """A whole shard, file by file; only its name in the attributes changes."""
    record, files = selection.record, dict(selection.record.files)
    sizes = selection.storage.sizes(f"{GROUP}/{record.shard_id}")
    for name, expected in files.items():
        with writing(wip):
            (wip / name).parent.mkdir(parents=True, exist_ok=True)
        _copy_file(selection, name, expected, sizes.get(name, 0), wip / name)
    path = wip / _GROUP_FILE
    group = json.loads(path.read_bytes())
    group["attributes"]["shard_id"] = shard_id
    write_json(path, group)
    data = path.read_bytes()
    files[_GROUP_FILE] = StoredFile(size=len(data), sha256=sha256_bytes(data))
    return replace(record, shard_id=shard_id, files=files)


def _copy_file(
    selection: Selection, name: str, expected: StoredFile, found: int, target: Path
) -> None:
    key = f"{GROUP}/{selection.record.shard_id}/{name}"
    if found != expected.size:
        raise ShardCorruptError(
            f"{selection.storage}/{key}: expected {expected.size:,} bytes, found {found:,}. Run "
            "`cache-builder repair` on that cache."
        )
    digest = hashlib.sha256()
    with writing(target), target.open("wb") as copy:
        for start in range(0, expected.size, _COPY_BYTES):
            size = min(_COPY_BYTES, expected.size - start)
            part = selection.storage.read_range(key, start, size)
            digest.update(part)
            copy.write(part)
    if digest.hexdigest() != expected.sha256:
        raise ShardCorruptError(
            f"{selection.storage}/{key}: expected sha256 {expected.sha256[:16]}, found "
            f"{digest.hexdigest()[:16]}. Run `cache-builder repair` on that cache."
        )
