"""Reading one shard by sample: every byte is checked, and only those of the sample are read."""

import numpy as np
import numpy.typing as npt
import torch
from numcodecs import zstd

from shared.chunk import CRC_BYTES, Array, checksum, decode_chunk
from shared.codec import Packed
from shared.errors import ShardCorruptError
from shared.files import sha256_bytes
from shared.manifest import ShardRecord
from shared.shard import (
    GROUP,
    INDEX_ENTRY,
    SAMPLE_ID_BYTES,
    SMALL_ARRAYS,
    STATES,
    STATES_OBJECT,
    StoredSample,
    chunks_of,
)
from shared.spec import CaptureSpec
from shared.storage import OpenObject, Storage

_ENDS = (("sample", 0), ("sample", -1), ("outlier", 0), ("outlier", -1))
"""Which offsets must be those of the first and the last token and outlier."""


class ShardReader:
    """Reads samples of one committed shard. Thread-safe: it has no position."""

    def __init__(self, storage: Storage, record: ShardRecord, spec: CaptureSpec) -> None:
        """Read and check everything but the states.

        Raises:
            ShardCorruptError: a piece is missing or not what the record says.
        """
        self._storage = storage
        self._values_per_token = spec.num_captured * spec.width
        self._plane_shape = spec.build_codec().plane_shape(spec.num_captured, spec.width)
        self._spec = spec
        self.record = record
        self._prefix = f"{GROUP}/{record.shard_id}"
        self.arrays = self._read_arrays()
        self._check_shapes()
        self._bounds = self._read_index()
        self._states: OpenObject | None = None

    def __len__(self) -> int:
        return self.record.num_samples

    def read(self, row: int) -> StoredSample:
        """Read, check and decode one sample. It touches the bytes of this sample only.

        Raises:
            ShardCorruptError: a chunk is not what was written.
        """
        arrays, step = self.arrays, self._spec.chunk_tokens
        num_planes, width = self._plane_shape
        begin, end = arrays["sample_offsets"][row : row + 2].tolist()
        first = int(arrays["sample_starts"][row]) // step * num_planes
        num_tokens = int(chunks_of(end - begin, step)) * step
        last = first + num_tokens // step * num_planes
        bounds = self._bounds[first : last + 1].tolist()
        crcs = arrays["chunk_crc32c"][first:last].tolist()
        where = f"{self._storage}: shard {self.record.shard_id}, sample {row}, chunk"
        planes_PTW = np.empty((num_planes, num_tokens, width), np.uint8)
        for i, data in enumerate(self._open_states().pieces(bounds)):
            start, plane = i // num_planes * step, i % num_planes
            decode_chunk(
                data,
                crcs[i],
                planes_PTW[plane, start : start + step],
                f"{where} {first + i}",
            )
        from_, to = arrays["outlier_offsets"][row : row + 2].tolist()
        return StoredSample(
            self.sample_id(row),
            *self.tokens(row),
            Packed(
                torch.from_numpy(planes_PTW[:, : end - begin]),
                torch.from_numpy(arrays["outlier_positions"][from_:to]),
                torch.from_numpy(arrays["outlier_bits"][from_:to].view(np.int16)),
                self._values_per_token,
            ),
            self.record.calibration,
        )

    def tokens(self, row: int) -> tuple[Array, Array]:
        """Token ids and loss mask of one sample, [T] each: in memory already."""
        begin, end = self.arrays["sample_offsets"][row : row + 2].tolist()
        return self.arrays["token_ids"][begin:end], self.arrays["loss_mask"][begin:end]

    def _open_states(self) -> OpenObject:
        """The states, open from the first sample on: readers of the small arrays hold no file."""
        if self._states is None:  # two threads may both open it, and the later one stays
            self._states = self._storage.open(f"{self._prefix}/{STATES_OBJECT}")
        return self._states

    def sample_id(self, row: int) -> str:
        return bytes(self.arrays["sample_ids"][row]).hex()

    def _read_arrays(self) -> dict[str, Array]:
        """The small arrays; one that is empty has no file."""
        files = {name: f"{name}/c/0{'/0' if _tail(name) else ''}" for name in SMALL_ARRAYS}
        stored = [file for file in files.values() if file in self.record.files]
        found = self._storage.read_many(f"{self._prefix}/{file}" for file in stored)
        data = dict(zip(stored, found, strict=True))
        arrays = {}
        for name, dtype in SMALL_ARRAYS.items():
            arrays[name] = np.empty((0, *_tail(name)), dtype)
            if (file := files[name]) in data:
                self._check_file(file, data[file])
                try:
                    values = zstd.decompress(data[file][:-CRC_BYTES])
                    # A copy is writable, as torch.from_numpy wants.
                    arrays[name] = np.frombuffer(values, dtype).reshape(-1, *_tail(name)).copy()
                except (RuntimeError, ValueError, MemoryError) as error:
                    raise ShardCorruptError(
                        f"{self._storage}: shard {self.record.shard_id}, {file}: not an array "
                        f"({error}). It was written by something else."
                    ) from None
        return arrays

    def _check_file(self, name: str, data: bytes) -> None:
        where = f"{self._storage}: shard {self.record.shard_id}, {name}"
        expected = self.record.files[name]
        if len(data) != expected.size or sha256_bytes(data) != expected.sha256:
            raise ShardCorruptError(
                f"{where}: expected {expected.size:,} bytes with sha256 {expected.sha256[:16]}, "
                f"found {len(data):,} with {sha256_bytes(data)[:16]}. Run `cache-builder repair`."
            )

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
            "chunk_crc32c": int(chunks.sum()) * self._plane_shape[0],
            "outlier_offsets": num + 1,
            "outlier_positions": record.num_outliers,
            "outlier_bits": record.num_outliers,
        }
        found = {name: len(values) for name, values in arrays.items()}
        starts = (chunks.cumsum() - chunks) * self._spec.chunk_tokens
        outliers = np.diff(arrays["outlier_offsets"])
        ends = [arrays[f"{name}_offsets"][i:][:1].tolist() for name, i in _ENDS]
        if (
            found != expected
            or (lengths <= 0).any()
            or (outliers < 0).any()
            or not np.array_equal(starts, arrays["sample_starts"])
            or ends != [[0], [record.num_tokens], [0], [record.num_outliers]]
            or not _are_below(arrays["sample_sources"], len(record.sources))
            or not _are_below(arrays["token_ids"], self._spec.target.vocab_size)
            or not _are_below(arrays["loss_mask"], 2)
            or not _are_below(
                arrays["outlier_positions"], np.repeat(lengths * self._values_per_token, outliers)
            )
        ):
            raise ShardCorruptError(
                f"{self._storage}: shard {record.shard_id}: its arrays disagree with its record "
                f"(expected lengths {expected}, found {found}). Run `cache-builder repair`."
            )

    def _read_index(self) -> npt.NDArray[np.int64]:
        """Where each chunk begins in the file, and where the last one ends: int64 [C + 1]."""
        num_chunks = len(self.arrays["chunk_crc32c"])
        if STATES_OBJECT not in self.record.files:
            raise ShardCorruptError(
                f"{self._storage}: shard {self.record.shard_id}, {STATES}: not in the record. "
                "Run `cache-builder repair`."
            )
        total = self.record.files[STATES_OBJECT].size
        size = num_chunks * INDEX_ENTRY.itemsize + CRC_BYTES
        key = f"{self._prefix}/{STATES_OBJECT}"
        where = f"{self._storage}: shard {self.record.shard_id}, {STATES}"
        data = self._storage.read_range(key, total - size, size)
        if checksum(data[:-CRC_BYTES]) != int.from_bytes(data[-CRC_BYTES:], "little"):
            raise ShardCorruptError(
                f"{where}: the checksum of the chunk index differs. Run `cache-builder repair`."
            )
        by_plane = np.frombuffer(data[:-CRC_BYTES], INDEX_ENTRY).reshape(self._plane_shape[0], -1)
        entries = by_plane.T.ravel()
        ends = entries["offset"] + entries["size"]
        begins = np.concatenate([np.zeros(1, np.uint64), ends])
        if (
            not np.array_equal(begins[:-1], entries["offset"])
            or (begins[1:] < begins[:-1]).any()
            or begins[-1] != total - size
        ):
            raise ShardCorruptError(
                f"{where}: chunks are missing from the index. Run `cache-builder repair`."
            )
        return begins.astype(np.int64)


def _are_below(values: Array, end: int | Array) -> bool:
    return not ((values < 0) | (values >= end)).any()


def _tail(name: str) -> tuple[int, ...]:
    """Shape of one value of a small array."""
    return (SAMPLE_ID_BYTES,) if name == "sample_ids" else ()
