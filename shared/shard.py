"""One shard: a Zarr v3 group that is written once, whole, and read by sample.

Hidden states are one array [P, L, D] in one storage object (Zarr sharding, inner chunks of 64
tokens). Every sample starts on a chunk boundary, so that reading it touches its own bytes only.
P counts tokens with that padding. Everything else is small and in arrays of one chunk.
`FORMAT.md` is the normative text.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import numpy.typing as npt
import torch
import zarr
from numcodecs import zstd
from zarr.codecs import BytesCodec, Crc32cCodec, ZstdCodec

from shared.codec import Array, Codec, Packed, decode_chunk, encode_chunk
from shared.errors import ShardCorruptError
from shared.files import sha256_bytes, sha256_file, sync_file, writing
from shared.manifest import LayerStatistics, ShardRecord, StoredFile
from shared.spec import CaptureSpec
from shared.storage import LocalStorage

GROUP = "shards.zarr"
STATES = "hidden_states"
STATES_OBJECT = f"{STATES}/c/0/0/0"
SAMPLE_ID_BYTES = 16

SMALL_ARRAYS: dict[str, np.dtype[Any]] = {
    "token_ids": np.dtype("<i4"),
    "loss_mask": np.dtype("u1"),
    "sample_offsets": np.dtype("<i8"),
    "sample_starts": np.dtype("<i8"),
    "sample_ids": np.dtype("u1"),
    "split_keys": np.dtype("<u8"),
    "sample_sources": np.dtype("<i2"),
    "chunk_crc32c": np.dtype("<u4"),
    "outlier_offsets": np.dtype("<i8"),
    "outlier_positions": np.dtype("<i8"),
    "outlier_bits": np.dtype("<u2"),
}
"""The small arrays of a shard and their types, in the order of FORMAT.md."""

_INDEX_ENTRY = np.dtype([("offset", "<u8"), ("size", "<u8")])
_CRC_BYTES = 4


@dataclass(frozen=True, eq=False, slots=True)
class CapturedSample:
    """One sample on its way into a shard."""

    sample_id: str
    """32 hexadecimal digits."""

    split_key: int
    source: int
    token_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.uint8]
    packed: Packed
    """On the CPU."""


@dataclass(frozen=True, eq=False, slots=True)
class StoredSample:
    """One sample as read back."""

    sample_id: str
    token_ids: npt.NDArray[np.int32]
    """int32 [T]."""

    loss_mask: npt.NDArray[np.uint8]
    """uint8 [T]: 1 where the target produced the token."""

    packed: Packed
    """States of the T tokens; `Codec.unpack` makes them bfloat16 [T, L, D]."""

    calibration: str | None


def chunks_of(num_tokens: Array | int, chunk_tokens: int) -> Any:
    """Chunks that a sample of `num_tokens` covers."""
    return -(-num_tokens // chunk_tokens)


class ShardWriter:
    """Streams samples into `directory`, which becomes a committed shard by a rename.

    Memory is one sample, whatever the shard's size: encoded chunks go straight to the storage
    object, whose index is written last.
    """

    def __init__(self, directory: Path, spec: CaptureSpec, shard_id: str) -> None:
        self._directory = directory
        self._spec = spec
        self._codec: Codec = spec.build_codec()
        self._shard_id = shard_id
        self._entries: list[tuple[int, int]] = []
        self._crcs: list[int] = []
        self._samples: list[CapturedSample] = []
        self._hash = hashlib.sha256()
        self._size = 0
        with writing(directory):
            object_path = directory / STATES_OBJECT
            object_path.parent.mkdir(parents=True)
            self._file = object_path.open("wb")

    def add(self, sample: CapturedSample) -> None:
        """Append one sample.

        Raises:
            ValueError: rows, tokens and mask differ in length, or the states are of another spec.
            OutOfSpaceError: the disk is full.
        """
        levels_TLD = sample.packed.levels_TLD.numpy().view(self._codec.stored_dtype)
        lengths = (len(levels_TLD), len(sample.token_ids), len(sample.loss_mask))
        if len(set(lengths)) != 1 or lengths[0] == 0:
            raise ValueError(
                f"sample {sample.sample_id}: {lengths[0]} rows of states, {lengths[1]} tokens, "
                f"{lengths[2]} mask entries; they must be equal and positive"
            )
        expected = (self._spec.num_captured, self._spec.target.hidden_size)
        if levels_TLD.shape[1:] != expected:
            raise ValueError(
                f"sample {sample.sample_id}: states of shape {levels_TLD.shape}, expected "
                f"{(lengths[0], *expected)}"
            )
        step = self._spec.chunk_tokens
        for start in range(0, len(levels_TLD), step):
            chunk = levels_TLD[start : start + step]
            if len(chunk) < step:
                padding = np.zeros((step - len(chunk), *chunk.shape[1:]), chunk.dtype)
                chunk = np.concatenate([chunk, padding])
            data, crc = encode_chunk(self._codec, chunk)
            self._entries.append((self._size, len(data)))
            self._crcs.append(crc)
            self._append(data)
        self._samples.append(
            CapturedSample(
                sample.sample_id,
                sample.split_key,
                sample.source,
                sample.token_ids,
                sample.loss_mask,
                Packed(  # the levels are on disk; keep only what the small arrays need
                    torch.empty(0),
                    sample.packed.outlier_position,
                    sample.packed.outlier_bits,
                ),
            )
        )

    def finish(
        self,
        *,
        layers: tuple[LayerStatistics, ...],
        sources: tuple[str, ...],
        calibration: str | None,
        quarantined: Mapping[str, str],
    ) -> ShardRecord:
        """Write index, metadata and small arrays; everything is synced. Does not commit."""
        index = np.array(self._entries, _INDEX_ENTRY).tobytes()
        self._append(index + google_crc32c.value(index).to_bytes(_CRC_BYTES, "little"))
        self.close()
        with writing(self._directory):
            sync_file(self._directory / STATES_OBJECT)
            self._write_zarr()
        files = {
            path.relative_to(self._directory).as_posix(): StoredFile(
                size=path.stat().st_size, sha256=sha256_file(path)
            )
            for path in sorted(self._directory.rglob("*"))
            if path.is_file() and path != self._directory / STATES_OBJECT
        }
        files[STATES_OBJECT] = StoredFile(size=self._size, sha256=self._hash.hexdigest())
        return ShardRecord(
            shard_id=self._shard_id,
            fingerprint=self._spec.fingerprint,
            num_samples=len(self._samples),
            num_tokens=sum(len(sample.token_ids) for sample in self._samples),
            num_supervised=sum(int(sample.loss_mask.sum()) for sample in self._samples),
            num_outliers=sum(len(sample.packed.outlier_bits) for sample in self._samples),
            calibration=calibration,
            files=dict(sorted(files.items())),
            sources=sources,
            layers=layers,
            quarantined=dict(sorted(quarantined.items())),
        )

    def close(self) -> None:
        with writing(self._directory):  # closing writes what is still buffered
            self._file.close()

    def _append(self, data: bytes) -> None:
        with writing(self._directory):
            self._file.write(data)
        self._hash.update(data)
        self._size += len(data)

    def _write_zarr(self) -> None:
        spec, codec = self._spec, self._codec
        num_chunks = len(self._entries)
        group = zarr.create_group(
            str(self._directory),
            attributes={
                "format": "draftcache",
                "format_version": spec.format_version,
                "shard_id": self._shard_id,
                "fingerprint": spec.fingerprint,
                "logical_dtype": "bfloat16",
                "codec": codec.to_dict(),
                "target_layer_ids": list(spec.target_layer_ids),
            },
        )
        padded = max(num_chunks, 1) * spec.chunk_tokens
        states = (spec.num_captured, spec.target.hidden_size)
        group.create_array(
            STATES,
            shape=(num_chunks * spec.chunk_tokens, *states),
            shards=(padded, *states),
            chunks=(spec.chunk_tokens, *states),
            dtype=codec.stored_dtype,
            filters=codec.zarr_filters(),
            serializer=BytesCodec(),
            compressors=codec.zarr_compressors(),
            fill_value=0,
        )
        for name, values in self._small_arrays().items():
            array = group.create_array(
                name,
                shape=values.shape,
                chunks=tuple(max(size, 1) for size in values.shape),
                dtype=values.dtype,
                filters=[],
                serializer=BytesCodec(),
                compressors=[ZstdCodec(level=1, checksum=False), Crc32cCodec()],
                fill_value=0,
                config={"write_empty_chunks": True},
            )
            if values.size:
                array[...] = values

    def _small_arrays(self) -> dict[str, Array]:
        samples = self._samples
        lengths = np.array([len(sample.token_ids) for sample in samples], np.int64)
        chunks = chunks_of(lengths, self._spec.chunk_tokens)
        outliers = np.array([len(sample.packed.outlier_bits) for sample in samples], np.int64)
        ids = b"".join(bytes.fromhex(sample.sample_id) for sample in samples)
        values = {
            "token_ids": _joined([sample.token_ids for sample in samples]),
            "loss_mask": _joined([sample.loss_mask for sample in samples]),
            "sample_offsets": np.concatenate([[0], lengths.cumsum()]),
            "sample_starts": (chunks.cumsum() - chunks) * self._spec.chunk_tokens,
            "sample_ids": np.frombuffer(ids, np.uint8).reshape(-1, SAMPLE_ID_BYTES),
            "split_keys": np.array([sample.split_key for sample in samples], np.uint64),
            "sample_sources": np.array([sample.source for sample in samples]),
            "chunk_crc32c": np.array(self._crcs, np.uint32),
            "outlier_offsets": np.concatenate([[0], outliers.cumsum()]),
            "outlier_positions": _joined([s.packed.outlier_position.numpy() for s in samples]),
            "outlier_bits": _joined([s.packed.outlier_bits.numpy().view("<u2") for s in samples]),
        }
        return {name: values[name].astype(dtype) for name, dtype in SMALL_ARRAYS.items()}


class ShardReader:
    """Reads samples of one committed shard. Thread-safe: it has no position."""

    def __init__(self, storage: LocalStorage, record: ShardRecord, spec: CaptureSpec) -> None:
        """Read and check everything but the states.

        Raises:
            ShardCorruptError: a piece is missing or not what the record says.
        """
        self._storage = storage
        self._codec = spec.build_codec()
        self._spec = spec
        self.record = record
        self._prefix = f"{GROUP}/{record.shard_id}"
        self.arrays = {name: self._read_small(name, kind) for name, kind in SMALL_ARRAYS.items()}
        self._check_shapes()
        self._entries = self._read_index()

    def __len__(self) -> int:
        return self.record.num_samples

    def read(self, row: int) -> StoredSample:
        """Read, check and decode one sample. It touches the bytes of this sample only.

        Raises:
            ShardCorruptError: a chunk is not what was written.
        """
        arrays, step = self.arrays, self._spec.chunk_tokens
        begin, end = (int(value) for value in arrays["sample_offsets"][row : row + 2])
        first = int(arrays["sample_starts"][row]) // step
        entries = self._entries[first : first + int(chunks_of(end - begin, step))]
        base = int(entries["offset"][0])
        last = entries[-1]
        size = int(last["offset"]) + int(last["size"]) - base
        data = memoryview(self._storage.read_range(f"{self._prefix}/{STATES_OBJECT}", base, size))
        levels = np.empty(
            (len(entries) * step, self._spec.num_captured, self._spec.target.hidden_size),
            self._codec.stored_dtype,
        )
        for i, entry in enumerate(entries):
            start = int(entry["offset"]) - base
            decode_chunk(
                self._codec,
                data[start : start + int(entry["size"])],
                int(arrays["chunk_crc32c"][first + i]),
                levels[i * step : (i + 1) * step],
                f"{self._storage}: shard {self.record.shard_id}, sample {row}, chunk {first + i}",
            )
        from_, to = (int(value) for value in arrays["outlier_offsets"][row : row + 2])
        kind = np.int16 if self._codec.stored_dtype.itemsize == 2 else np.int8
        return StoredSample(
            self.sample_id(row),
            arrays["token_ids"][begin:end],
            arrays["loss_mask"][begin:end],
            Packed(
                torch.from_numpy(levels[: end - begin].view(kind)),
                torch.from_numpy(arrays["outlier_positions"][from_:to]),
                torch.from_numpy(arrays["outlier_bits"][from_:to].view(np.int16)),
            ),
            self.record.calibration,
        )

    def sample_id(self, row: int) -> str:
        return bytes(self.arrays["sample_ids"][row]).hex()

    def _read_file(self, name: str) -> bytes:
        where = f"{self._storage}: shard {self.record.shard_id}, {name}"
        if name not in self.record.files:
            raise ShardCorruptError(f"{where}: not in the record. Run `cache-builder repair`.")
        data = self._storage.read(f"{self._prefix}/{name}")
        expected = self.record.files[name]
        if len(data) != expected.size or sha256_bytes(data) != expected.sha256:
            raise ShardCorruptError(
                f"{where}: expected {expected.size:,} bytes with sha256 {expected.sha256[:16]}, "
                f"found {len(data):,} with {sha256_bytes(data)[:16]}. Run `cache-builder repair`."
            )
        return data

    def _read_small(self, name: str, dtype: np.dtype[Any]) -> Array:
        tail = (SAMPLE_ID_BYTES,) if name == "sample_ids" else ()
        if f"{name}/c/0{'/0' if tail else ''}" not in self.record.files:
            return np.empty((0, *tail), dtype)  # an empty array has no chunk
        data = self._read_file(f"{name}/c/0{'/0' if tail else ''}")
        values = np.frombuffer(zstd.decompress(data[:-_CRC_BYTES]), dtype).reshape(-1, *tail)
        return values.copy()  # writable, as torch.from_numpy wants

    def _check_shapes(self) -> None:
        record, arrays, num = self.record, self.arrays, self.record.num_samples
        lengths = np.diff(arrays["sample_offsets"])
        chunks = chunks_of(lengths, self._spec.chunk_tokens)
        expected = {
            "token_ids": record.num_tokens,
            "loss_mask": record.num_tokens,
            "sample_offsets": num + 1,
            "sample_starts": num,
            "sample_ids": num,
            "split_keys": num,
            "sample_sources": num,
            "chunk_crc32c": int(chunks.sum()),
            "outlier_offsets": num + 1,
            "outlier_positions": record.num_outliers,
            "outlier_bits": record.num_outliers,
        }
        found = {name: len(values) for name, values in arrays.items()}
        starts = (chunks.cumsum() - chunks) * self._spec.chunk_tokens
        ends = [*arrays["sample_offsets"][-1:], *arrays["outlier_offsets"][-1:]]
        if (
            found != expected
            or (lengths <= 0).any()
            or not np.array_equal(starts, arrays["sample_starts"])
            or ends != [record.num_tokens, record.num_outliers]
        ):
            raise ShardCorruptError(
                f"{self._storage}: shard {record.shard_id}: its arrays disagree with its record "
                f"(expected lengths {expected}, found {found}). Run `cache-builder repair`."
            )

    def _read_index(self) -> npt.NDArray[np.void]:
        num_chunks = len(self.arrays["chunk_crc32c"])
        if STATES_OBJECT not in self.record.files:
            raise ShardCorruptError(
                f"{self._storage}: shard {self.record.shard_id}, {STATES}: not in the record. "
                "Run `cache-builder repair`."
            )
        total = self.record.files[STATES_OBJECT].size
        size = num_chunks * _INDEX_ENTRY.itemsize + _CRC_BYTES
        key = f"{self._prefix}/{STATES_OBJECT}"
        where = f"{self._storage}: shard {self.record.shard_id}, {STATES}"
        data = self._storage.read_range(key, total - size, size)
        if google_crc32c.value(data[:-_CRC_BYTES]) != int.from_bytes(data[-_CRC_BYTES:], "little"):
            raise ShardCorruptError(
                f"{where}: the checksum of the chunk index differs. Run `cache-builder repair`."
            )
        entries = np.frombuffer(data[:-_CRC_BYTES], _INDEX_ENTRY)
        ends = entries["offset"] + entries["size"]
        begins = np.concatenate([np.zeros(1, np.uint64), ends])
        if not np.array_equal(begins[:-1], entries["offset"]) or begins[-1] != total - size:
            raise ShardCorruptError(
                f"{where}: chunks are missing from the index. Run `cache-builder repair`."
            )
        return entries


def _joined(arrays: list[Any]) -> Array:
    return np.concatenate(arrays) if arrays else np.empty(0)
