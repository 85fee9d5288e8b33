"""One generation of a cache, open for reading."""

import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from shared.chunk import Array
from shared.codec import Calibration
from shared.errors import (
    CacheError,
    CacheIncompatibleError,
    CacheNotFoundError,
    ShardCorruptError,
)
from shared.files import parse_json
from shared.head import Head
from shared.index import SampleIndex
from shared.layout import (
    DESCRIPTION,
    HEAD,
    MANIFEST,
    PLANS,
    PROJECTION,
    TARGET,
    record_key,
)
from shared.location import Location
from shared.manifest import ShardRecord
from shared.metadata import (
    read_calibration,
    read_checked,
    read_description,
    read_index,
    read_manifest,
    read_projection,
    require_digest,
    require_layers,
)
from shared.projection import Projection, Provenance, read_provenance
from shared.shard import StoredSample
from shared.shard_reader import ShardReader
from shared.spec import CaptureSpec
from shared.storage import open_storage


class Cache:
    """One generation of a cache, open for reading. Thread-safe."""

    def __init__(
        self,
        path: Location,
        *,
        generation: int | None = None,
        open_shards: int = 64,
        check_index: bool = True,
    ) -> None:
        """Open the newest generation, or the one asked for.

        Without `check_index` the index is read when it is first used: what verifies or repairs a
        cache must be able to open one whose index is lost.

        Raises:
            CacheNotFoundError: there is no published cache at `path`.
            CacheIncompatibleError: it has another format version or fingerprint.
            CacheError: its metadata are damaged.
        """
        self.path = path
        self.storage = open_storage(path)
        self.description = read_description(self.storage)
        self.spec = CaptureSpec.from_dict(self.description["spec"], f"{path}/{DESCRIPTION}")
        self.codec = self.spec.build_codec()
        self.manifest = read_manifest(self.storage, generation)
        if self.manifest.fingerprint != self.spec.fingerprint:
            raise CacheIncompatibleError(
                f"{path}: {MANIFEST} has fingerprint {self.manifest.fingerprint[:16]}, "
                f"{DESCRIPTION} has {self.spec.fingerprint[:16]}. The files are of two caches, or "
                f"{DESCRIPTION} was changed."
            )
        self.shard_ids = self.manifest.shard_ids
        self._index = read_index(self.storage, self.manifest) if check_index else None
        self._calibrations: dict[str | None, Calibration | None] = {}
        self._open_shards = open_shards
        self._readers: OrderedDict[str, ShardReader] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def index(self) -> SampleIndex:
        """Where every sample of this generation lies."""
        if self._index is None:
            self._index = read_index(self.storage, self.manifest)
        return self._index

    def record(self, shard_id: str) -> ShardRecord:
        """The record of one shard, checked against the manifest."""
        key = record_key(shard_id)
        fields = read_checked(self.storage, key, self.manifest.records[shard_id])
        record = ShardRecord.from_dict(fields, f"{self.path}/{key}")
        if record.shard_id != shard_id or record.fingerprint != self.manifest.fingerprint:
            raise CacheIncompatibleError(
                f"{self.path}/{key}: record of shard {record.shard_id} with fingerprint "
                f"{record.fingerprint[:16]}, expected {shard_id} with "
                f"{self.manifest.fingerprint[:16]}. It belongs to another cache."
            )
        require_layers(record, self.spec, f"{self.path}/{key}")
        return record

    def shard(self, shard_id: str) -> ShardReader:
        """A reader of one shard; the ones used last stay open.

        Raises:
            ShardCorruptError: it is damaged, or was removed by a later generation.
        """
        with self._lock:
            if shard_id in self._readers:
                self._readers.move_to_end(shard_id)
                return self._readers[shard_id]
        with self._explaining(shard_id):
            reader = ShardReader(self.storage, self.record(shard_id), self.spec)
        with self._lock:
            self._readers[shard_id] = reader
            while len(self._readers) > self._open_shards:
                self._readers.popitem(last=False)
        return reader

    def read(self, position: int) -> StoredSample:
        """The sample at `position` of the index, checked against the index.

        Raises:
            ShardCorruptError: stored bytes are not what was written, or a later generation
                removed them.
            CacheError: the index points to another sample.
        """
        reader, row = self._locate(position)
        with self._explaining(reader.record.shard_id):
            return reader.read(row)

    def tokens(self, position: int) -> tuple[Array, Array]:
        """Token ids and loss mask of the sample at `position`, as `read` gives them: no states.

        Raises:
            As `read`.
        """
        reader, row = self._locate(position)
        return reader.tokens(row)

    def _locate(self, position: int) -> tuple[ShardReader, int]:
        """The shard of a sample and its row there, checked against the index."""
        shard_id = self.shard_ids[int(self.index.shard[position])]
        reader, row = self.shard(shard_id), int(self.index.row[position])
        if row >= len(reader):
            raise CacheError(
                f"{self.path}: the index expects row {row} in shard {shard_id}, which has "
                f"{len(reader)}. Run `cache-builder repair`."
            )
        if reader.sample_id(row) != self.index.sample_id(position):
            raise CacheError(
                f"{self.path}: the index expects sample {self.index.sample_id(position)} in shard "
                f"{shard_id}, found {reader.sample_id(row)}. Run `cache-builder repair`."
            )
        return reader, row

    def calibration(self, name: str | None) -> Calibration | None:
        """The quantiser's channels by the name that a record gives."""
        with self._lock:
            if name not in self._calibrations:
                self._calibrations[name] = read_calibration(self.storage, name, self.spec)
            return self._calibrations[name]

    def unpack(self, sample: StoredSample) -> torch.Tensor:
        """States of `sample`, bfloat16 [T, L, D]."""
        return self.codec.unpack(sample.packed, self.calibration(sample.calibration))

    def head(self) -> Head:
        """The frozen tensors of the target.

        Raises:
            CacheError: they are missing or not the ones that were written.
        """
        data = self.storage.read(HEAD)
        require_digest(data, str(self.description["head_sha256"]), f"{self.path}/{HEAD}")
        return Head.from_bytes(data, self.spec, f"{self.path}/{HEAD}")

    def projection_provenance(self) -> Provenance | None:
        """How the projection was made, for people: read without the digest of the file.

        Raises:
            CacheError: it is missing or no projection.
        """
        if self.spec.projection is None:
            return None
        size = int.from_bytes(self.storage.read_range(PROJECTION, 0, 8), "little")
        most = 1 << 20  # a damaged length must not be asked for
        header = self.storage.read_range(PROJECTION, 8, min(size, most))
        return read_provenance(header, f"{self.path}/{PROJECTION}")

    def projection(self) -> Projection | None:
        """The matrix that made the stored features of the blocks' states; None where none did.

        Raises:
            CacheError: it is missing or not the one that was written.
        """
        return read_projection(self.storage, self.spec)

    @property
    def target_files(self) -> dict[str, str]:
        """Names of the files of the target that lie under `target/`, to their digests."""
        return dict(self.description["target_files"])

    def plan_report(self, plan: str) -> dict[str, Any]:
        """What the plan of that number counted of its data; empty where the cache has no such plan.

        Raises:
            CacheError: its description is damaged.
        """
        key = f"{PLANS}/{plan}/plan.json"
        if not self.storage.exists(key):
            return {}
        fields = parse_json(self.storage.read(key), f"{self.path}/{key}")
        report = fields.get("report") if isinstance(fields, dict) else None
        return report if isinstance(report, dict) else {}

    def target_file(self, name: str) -> bytes:
        """One of the files of the target that lie under `target/`.

        Raises:
            CacheError: it is missing or not the one that was written.
        """
        data = self.storage.read(f"{TARGET}/{name}")
        if name in self.target_files:
            require_digest(data, self.target_files[name], f"{self.path}/{TARGET}/{name}")
        return data

    @contextmanager
    def _explaining(self, shard_id: str) -> Iterator[None]:
        """Say so where a shard cannot be read because the newest generation is without it."""
        try:
            yield
        except ShardCorruptError as error:
            try:
                newest = read_manifest(self.storage)
            except CacheNotFoundError:
                raise ShardCorruptError(
                    f"{self.path}: it was moved or deleted while it was read. Run the same command "
                    "again with the path that it has now."
                ) from error
            except CacheError:
                raise error from None
            if shard_id in newest.records:
                raise
            raise ShardCorruptError(
                f"{self.path}: shard {shard_id} of generation {self.manifest.generation} was "
                f"removed by `cache-builder prune`, which published generation "
                f"{newest.generation}. Begin anew from that one (a run: --fresh)."
            ) from error
