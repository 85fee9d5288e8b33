"""A cache on disk: its names, and opening one generation of it for reading."""

import re
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from shared.chunk import Array
from shared.codec import Calibration
from shared.errors import (
    CacheError,
    CacheIncompatibleError,
    CacheNotFoundError,
    ShardCorruptError,
)
from shared.files import canonical_json, parse_json, sha256_bytes
from shared.head import Head
from shared.index import SampleIndex
from shared.location import Location
from shared.manifest import Manifest, ShardRecord
from shared.projection import Projection, Provenance, read_provenance
from shared.shard import StoredSample
from shared.shard_reader import ShardReader
from shared.spec import FORMAT_VERSION, CaptureSpec
from shared.storage import Storage, open_storage

FORMAT = "draftcache"
DESCRIPTION = "cache.json"
MANIFEST = "manifest.json"
HEAD = "head.safetensors"
PROJECTION = "projection.safetensors"
TARGET = "target"
RECORDS = "records"
GENERATIONS = "generations"
CALIBRATIONS = "calibrations"
PLANS = "plans"
WIP = "wip"


_NONE = type(None)
_DIGEST = re.compile(r"[0-9a-f]{64}")
_TARGET_FILE = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")
_DESCRIPTION_FIELDS: dict[str, tuple[type, ...]] = {
    "spec": (dict,),
    "fingerprint": (str,),
    "head_sha256": (str,),
    "calibration": (str, _NONE),
    "target_name": (str,),
    "target_revision": (str, _NONE),
}


def generation_key(generation: int, suffix: str) -> str:
    return f"{GENERATIONS}/{generation:04d}.{suffix}"


def record_key(shard_id: str) -> str:
    return f"{RECORDS}/{shard_id}.json"


def calibration_key(name: str) -> str:
    return f"{CALIBRATIONS}/{name}.safetensors"


def calibration_to_bytes(calibration: Calibration) -> bytes:
    return bytes(
        save({"mean": calibration.mean_LD.contiguous(), "step": calibration.step_LD.contiguous()})
    )


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
        _require_digest(data, str(self.description["head_sha256"]), f"{self.path}/{HEAD}")
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
            _require_digest(data, self.target_files[name], f"{self.path}/{TARGET}/{name}")
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


def read_index(storage: Storage, manifest: Manifest) -> SampleIndex:
    """The index of a generation, checked against its manifest.

    Raises:
        CacheError: it is missing or damaged.
    """
    key = generation_key(manifest.generation, "index.safetensors")
    data = storage.read(key)
    _require_digest(data, manifest.index.sha256, f"{storage}/{key}")
    index = SampleIndex.from_bytes(data, f"{storage}/{key}")
    if len(index) != manifest.totals.num_samples:
        raise CacheError(
            f"{storage}/{key}: {len(index):,} samples, the manifest counts "
            f"{manifest.totals.num_samples:,}."
        )
    index.require_within(len(manifest.records), len(manifest.sources), f"{storage}/{key}")
    return index


def require_layers(record: ShardRecord, spec: CaptureSpec, where: str) -> None:
    """Refuse a record whose statistics are not of the layers that `spec` has.

    Raises:
        CacheError: naming both counts.
    """
    if len(record.layers) != spec.num_captured:
        raise CacheError(
            f"{where}: statistics of {len(record.layers)} layers, expected {spec.num_captured}. "
            "The record is damaged."
        )


def read_projection(storage: Storage, spec: CaptureSpec) -> Projection | None:
    """The projection of a cache of `spec`; None where it has none.

    Raises:
        CacheError: missing, changed or of another target.
    """
    if spec.projection is None:
        return None
    data, where = storage.read(PROJECTION), f"{storage}/{PROJECTION}"
    _require_digest(data, spec.projection.sha256, where)
    projection = Projection.from_bytes(data, where)
    projection.require_fit(spec.target, spec.target_layer_ids, where)
    return projection


def read_calibration(storage: Storage, name: str | None, spec: CaptureSpec) -> Calibration | None:
    """The quantiser's channels by the name that a record gives; None for a lossless codec.

    Raises:
        CacheError: missing, changed or of another shape.
    """
    if name is None:
        return None
    key = calibration_key(name)
    data = storage.read(key)
    _require_digest(data, name, f"{storage}/{key}")
    try:
        tensors = load(data)
        mean_LD, step_LD = tensors["mean"], tensors["step"]
    except (SafetensorError, ValueError, KeyError) as error:
        raise CacheError(f"{storage}/{key}: not a calibration ({error}).") from None
    shape = (spec.num_captured, spec.width)
    for tensor in (mean_LD, step_LD):
        if tensor.shape != shape or tensor.dtype != torch.float32 or not tensor.isfinite().all():
            raise CacheError(f"{storage}/{key}: expected finite float32 tensors of shape {shape}.")
    if not (step_LD > 0).all():
        raise CacheError(f"{storage}/{key}: a step is not positive.")
    return Calibration(mean_LD, step_LD)


def read_description(storage: Storage) -> dict[str, Any]:
    """`cache.json`: its fields, checked by name, type and version.

    Raises:
        CacheNotFoundError: there is none.
        CacheIncompatibleError: another format or version.
        CacheError: a field is missing or of another type, or `spec` was changed.
    """
    if not storage.exists(DESCRIPTION):
        raise CacheNotFoundError(
            f"{storage}: no cache here ({DESCRIPTION} is missing). Build one with `make cache` or "
            "`cache-builder build`."
        )
    where = f"{storage}/{DESCRIPTION}"
    fields = parse_json(storage.read(DESCRIPTION), where)
    if not isinstance(fields, dict) or fields.get("format") != FORMAT:
        raise CacheIncompatibleError(f"{where}: not a {FORMAT} cache.")
    if (version := fields.get("format_version")) != FORMAT_VERSION:
        raise CacheIncompatibleError(
            f"{where}: format version {version!r}, this version reads {FORMAT_VERSION}. "
            "Use the version of draftcache that wrote the cache."
        )
    for name, kinds in _DESCRIPTION_FIELDS.items():
        if name not in fields or not isinstance(fields[name], kinds):
            expected = " or ".join("null" if kind is _NONE else kind.__name__ for kind in kinds)
            found = repr(fields[name])[:80] if name in fields else "nothing"
            raise CacheError(
                f"{where}: field {name!r}: expected {expected}, found {found}. The file is damaged."
            )
    for name in ("head_sha256", "calibration"):
        if fields[name] is not None and not _DIGEST.fullmatch(fields[name]):
            raise CacheError(
                f"{where}: field {name!r}: expected a digest, found {fields[name][:80]!r}. The "
                "file is damaged."
            )
    files = fields.setdefault("target_files", {})  # a cache of before has no digests of these
    if not isinstance(files, dict) or not all(
        _TARGET_FILE.fullmatch(name) and isinstance(digest, str) for name, digest in files.items()
    ):
        raise CacheError(
            f"{where}: field 'target_files': expected digests by file name. The file is damaged."
        )
    origin = fields.get("origin", {"kind": "", "declared": {}, "same_as": False})
    types = {"kind": str, "declared": dict, "same_as": bool}
    if not isinstance(origin, dict) or not all(
        isinstance(origin.get(name), kind) for name, kind in types.items()
    ):
        raise CacheError(
            f"{where}: field 'origin': expected {', '.join(types)}. The file is damaged."
        )
    found = sha256_bytes(canonical_json(fields["spec"]))
    if (stated := fields.get("fingerprint")) != found:
        raise CacheError(
            f"{where}: states fingerprint {str(stated)[:16]}, its 'spec' has {found[:16]}. It was "
            "changed or damaged after it was written."
        )
    return fields


def read_manifest(storage: Storage, generation: int | None = None) -> Manifest:
    """The newest manifest, or that of `generation`.

    Raises:
        CacheNotFoundError: nothing is published, or not that generation, or not any more.
    """
    key = MANIFEST if generation is None else generation_key(generation, "json")
    if not storage.exists(key):
        if generation is not None and 0 < generation < (
            newest := read_manifest(storage).generation
        ):
            raise CacheNotFoundError(
                f"{storage}: generation {generation} is gone: `cache-builder prune` removed shards "
                f"of it. The newest is {newest}: begin anew from that one (a run: --fresh)."
            )
        raise CacheNotFoundError(
            f"{storage}: {key} is missing: "
            + ("nothing is published yet. " if generation is None else "no such generation. ")
            + "Run `make cache` again: it resumes from the shards already there."
        )
    where = f"{storage}/{key}"
    manifest = Manifest.from_dict(parse_json(storage.read(key), where), where)
    if generation is not None and manifest.generation != generation:
        raise CacheError(f"{where}: it holds generation {manifest.generation}. It was replaced.")
    return manifest


def read_checked(storage: Storage, key: str, digest: str) -> Any:
    """JSON of `key` whose bytes must have `digest`."""
    data = storage.read(key)
    _require_digest(data, digest, f"{storage}/{key}")
    return parse_json(data, f"{storage}/{key}")


def _require_digest(data: bytes, digest: str, where: str) -> None:
    if (found := sha256_bytes(data)) != digest:
        raise CacheError(
            f"{where}: expected sha256 {digest[:16]}, found {found[:16]}. It was changed or "
            "damaged after it was written. Run `cache-builder verify`."
        )
