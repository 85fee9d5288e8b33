"""Writing one shard: samples are streamed, the index and the small arrays come last."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zarr
from zarr.codecs import BytesCodec

from shared.chunk import CRC_BYTES, Array, checksum, encode_chunk, zarr_compressors
from shared.codec import Codec, Packed
from shared.files import sha256_file, writing
from shared.manifest import LayerStatistics, ShardRecord, StoredFile
from shared.shard import (
    INDEX_ENTRY,
    SAMPLE_ID_BYTES,
    SMALL_ARRAYS,
    STATES,
    STATES_OBJECT,
    CapturedSample,
    chunks_of,
)
from shared.spec import CaptureSpec


class ShardWriter:
    """Streams samples into `directory`, which becomes a committed shard by a rename.

    Memory is one sample, whatever the shard's size: encoded chunks go straight to the storage
    object, whose index is written last.
    """

    def __init__(self, directory: Path, spec: CaptureSpec, shard_id: str) -> None:
        self._directory = directory
        self._spec = spec
        self._codec: Codec = spec.build_codec()
        self._plane_shape = self._codec.plane_shape(spec.num_captured, spec.width)
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
        planes_PTW = sample.packed.planes_PTW.numpy()
        num_planes, num_tokens, width = planes_PTW.shape
        lengths = (num_tokens, len(sample.token_ids), len(sample.loss_mask))
        if len(set(lengths)) != 1 or lengths[0] == 0:
            raise ValueError(
                f"sample {sample.sample_id}: {lengths[0]} rows of states, {lengths[1]} tokens, "
                f"{lengths[2]} mask entries; they must be equal and positive"
            )
        if (num_planes, width) != self._plane_shape:
            raise ValueError(
                f"sample {sample.sample_id}: {num_planes} planes of {width} bytes a token, "
                f"expected {self._plane_shape[0]} of {self._plane_shape[1]}"
            )
        step = self._spec.chunk_tokens
        for start in range(0, num_tokens, step):
            part_PCW = planes_PTW[:, start : start + step]
            if (missing := step - part_PCW.shape[1]) > 0:
                part_PCW = np.pad(part_PCW, ((0, 0), (0, missing), (0, 0)))
            for chunk_CW in part_PCW:
                data, crc = encode_chunk(chunk_CW)
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
                Packed(  # the planes are on disk; keep only what the small arrays need
                    torch.empty(0),
                    sample.packed.outlier_position,
                    sample.packed.outlier_bits,
                    sample.packed.values_per_token,
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
        """Write index, metadata and small arrays. Does not commit, which is what syncs them."""
        # Zarr's index goes plane by plane; in the file all planes of some tokens are neighbours.
        by_tokens = np.array(self._entries, INDEX_ENTRY).reshape(-1, self._plane_shape[0])
        index = by_tokens.T.tobytes()
        self._append(index + checksum(index).to_bytes(CRC_BYTES, "little"))
        self.close()
        with writing(self._directory):
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
        num_planes, width = self._plane_shape
        num_tokens = len(self._entries) // num_planes * spec.chunk_tokens
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
                **({} if spec.last_hidden == "none" else {"last_hidden": spec.last_hidden}),
                **({} if spec.projection is None else {"projection": spec.to_dict()["projection"]}),
            },
        )
        group.create_array(
            STATES,
            shape=(num_planes, num_tokens, width),
            shards=(num_planes, max(num_tokens, spec.chunk_tokens), width),
            chunks=(1, spec.chunk_tokens, width),
            dtype=np.uint8,
            filters=[],
            serializer=BytesCodec(),
            compressors=zarr_compressors(),
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
                compressors=zarr_compressors(),
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


def _joined(arrays: list[Any]) -> Array:
    return np.concatenate(arrays) if arrays else np.empty(0)
