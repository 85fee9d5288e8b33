"""The same samples in this project's cache and in the layouts of others.

A read ends with token ids and states as torch tensors in the memory of the process.

T tokens of one sample   L captured layers   D hidden size
"""

import gzip
import io
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numcodecs import zstd
from safetensors.torch import load_file, save_file
from torch import Tensor

from cache_builder.publication import publish
from shared.cache import Cache
from shared.chunk import CHUNK_TOKENS, CRC_BYTES, encode_chunk
from shared.codec import PRESETS, Codec
from shared.local_storage import LocalStorage, StoredObject
from shared.shard import GROUP
from tests.bench.codecs import buffer_for, calibrated, chunks
from tests.bench.states import States
from tests.test_shared.made import add_shard, create_cache, make_sample, make_spec

OURS = "ours, balanced to levels"
OURS_BFLOAT16 = "ours, balanced to bf16"
SMALL = "ours, small to levels"
RAW = "raw bf16, mapped (DeepSpec)"
CODEC = "limit: codec of balanced alone"

_SHARD_BYTES = 64 << 20
"""Raw bytes of one of our shards here."""


class Layout:
    """One way to keep samples in `path`. `read` gives token ids, and states or their levels."""

    name: str
    stride = 1
    """Only every so many samples are read: for what would take most of the time."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, states: States) -> None:
        self.path.mkdir()
        for number, (ids, hidden_TLD) in enumerate(states.samples):
            self.write_sample(number, ids, hidden_TLD)

    def write_sample(self, number: int, ids: Tensor, hidden_TLD: Tensor) -> None:
        raise NotImplementedError

    def open(self) -> None:
        """Prepare reading, as far as that serves more than one sample."""

    def close(self) -> None: ...

    def read(self, number: int) -> tuple[Tensor, Any]:
        raise NotImplementedError

    def states(self, read: Any) -> Tensor:
        """bfloat16 [T, L, D] of what `read` gave."""
        return read

    @property
    def files(self) -> list[Path]:
        return [file for file in self.path.rglob("*") if file.is_file()]

    @property
    def stored_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.files)


class Ours(Layout):
    """A cache of this project."""

    def __init__(self, name: str, path: Path, codec: Codec, *, unpacked: bool) -> None:
        super().__init__(path)
        self.name, self._codec, self._unpacked = name, codec, unpacked
        self._cache: Cache | None = None

    def write(self, states: States) -> None:
        if self.path.exists():  # two of these read one cache
            return
        _, num_layers, width = states.hidden_TLD.shape
        spec = make_spec(self._codec)
        target = replace(
            spec.target,
            num_layers=num_layers,
            hidden_size=width,
            vocab_size=int(states.token_ids.max()) + 1,
        )
        spec = replace(spec, target=target, target_layer_ids=tuple(range(num_layers)))
        calibration = calibrated(self._codec, states)
        name = create_cache(self.path, spec, calibration)
        shards: list[list[tuple[Tensor, Tensor]]] = [[]]
        for sample in states.samples:
            if sum(hidden_TLD.nbytes for _, hidden_TLD in shards[-1]) >= _SHARD_BYTES:
                shards.append([])
            shards[-1].append(sample)
        for number, samples in enumerate(shards):
            made = [
                make_sample(spec, hidden_TLD, token_ids=ids.tolist(), calibration=calibration)
                for ids, hidden_TLD in samples
            ]
            add_shard(self.path, spec, f"0001-{number:05d}", made, calibration=name)
        publish(self.path, spec)

    def open(self) -> None:
        self._cache = Cache(self.path)

    def read(self, number: int) -> tuple[Tensor, Any]:
        assert self._cache is not None
        sample = self._cache.read(number)
        states = self._cache.unpack(sample) if self._unpacked else sample
        return torch.from_numpy(sample.token_ids), states

    def states(self, read: Any) -> Tensor:
        assert self._cache is not None
        return read if self._unpacked else self._cache.unpack(read)

    @property
    def files(self) -> list[Path]:
        """Those of the shards: what is beside them does not grow with the samples."""
        return [file for file in (self.path / GROUP).rglob("*") if file.is_file()]

    def bytes_asked(self, numbers: Sequence[int]) -> int:
        """Bytes that reading these samples asks the storage for, each shard being open."""
        assert self._cache is not None
        asked = 0

        class Counting(StoredObject):
            def read_into(self, buffer: memoryview, start: int) -> None:
                nonlocal asked
                asked += len(buffer)
                super().read_into(buffer, start)

        class CountingStorage(LocalStorage):
            def open(self, key: str) -> StoredObject:
                return Counting(self.path(key), key)

        for shard_id in self._cache.shard_ids:
            reader = self._cache.shard(shard_id)
            reader._storage, reader._states = CountingStorage(self.path), None
        for number in numbers:
            self._cache.read(number)
        return asked


class SafetensorsFiles(Layout):
    name = "safetensors per sample (speculators)"

    def write_sample(self, number: int, ids: Tensor, hidden_TLD: Tensor) -> None:
        tensors = {"hidden_states": hidden_TLD.contiguous(), "token_ids": ids.long()}
        save_file(tensors, self.path / f"hs_{number}.safetensors")

    def read(self, number: int) -> tuple[Tensor, Any]:
        tensors = load_file(self.path / f"hs_{number}.safetensors")
        return tensors["token_ids"], tensors["hidden_states"].clone()  # what it gave is mapped


class TorchFiles(Layout):
    name = "torch.save per sample (SpecForge)"

    def write_sample(self, number: int, ids: Tensor, hidden_TLD: Tensor) -> None:
        self._num_layers = hidden_TLD.shape[1]
        record = {
            "input_ids": ids.long(),
            "loss_mask": torch.ones(len(ids), dtype=torch.int64),
            "hidden_states": hidden_TLD.flatten(1).unsqueeze(0).clone(),
        }
        self._save(record, self.path / f"data_{number}.ckpt")

    def _save(self, record: dict[str, Tensor], path: Path) -> None:
        torch.save(record, path)

    def read(self, number: int) -> tuple[Tensor, Any]:
        record = torch.load(self.path / f"data_{number}.ckpt", weights_only=True)
        return self._parts(record)

    def _parts(self, record: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        states = record["hidden_states"][0].unflatten(1, (self._num_layers, -1))
        return record["input_ids"], states


class GzipFiles(TorchFiles):
    name = "torch.save + gzip-6 (SpecForge)"
    stride = 4

    def _save(self, record: dict[str, Tensor], path: Path) -> None:
        with gzip.open(path.with_suffix(".ckpt.gz"), "wb", compresslevel=6) as file:
            torch.save(record, file)

    def read(self, number: int) -> tuple[Tensor, Any]:
        with gzip.open(self.path / f"data_{number}.ckpt.gz") as file:
            record = torch.load(io.BytesIO(file.read()), weights_only=True)
        return self._parts(record)


class RawMapped(Layout):
    """One large file of states, one of ids, and offsets."""

    name = RAW

    def write(self, states: States) -> None:
        self.path.mkdir()
        self._shape = states.hidden_TLD.shape
        states.hidden_TLD.view(torch.int16).numpy().tofile(self.path / "states.bf16")
        states.token_ids.numpy().tofile(self.path / "ids.i32")
        np.save(self.path / "offsets.npy", states.offsets.numpy())

    def open(self) -> None:
        self._states = np.memmap(self.path / "states.bf16", np.int16, "c", shape=self._shape)
        self._ids = np.fromfile(self.path / "ids.i32", np.int32)
        self._offsets = np.load(self.path / "offsets.npy").tolist()

    def close(self) -> None:
        del self._states  # mapped pages would stay in memory

    def read(self, number: int) -> tuple[Tensor, Any]:
        begin, end = self._offsets[number : number + 2]
        mapped = torch.from_numpy(self._states[begin:end]).view(torch.bfloat16)
        return torch.from_numpy(self._ids[begin:end]), mapped.clone()


class RawRead(RawMapped):
    """The limit of what a file can give: `preadv` into one buffer that is used again."""

    name = "limit: raw bf16, read into one buffer"

    def open(self) -> None:
        super().open()
        self._file = os.open(self.path / "states.bf16", os.O_RDONLY)
        self._row = int(np.prod(self._shape[1:])) * 2
        self._buffer = np.ones(self._row * int(np.diff(self._offsets).max()), np.uint8)

    def close(self) -> None:
        os.close(self._file)
        super().close()

    def read(self, number: int) -> tuple[Tensor, Any]:
        begin, end = self._offsets[number : number + 2]
        view = self._buffer[: (end - begin) * self._row]
        done = 0
        while done < len(view):
            done += os.preadv(self._file, [view[done:]], begin * self._row + done)
        states = torch.from_numpy(view).view(torch.bfloat16).view(-1, *self._shape[1:])
        return torch.from_numpy(self._ids[begin:end]), states


class CodecAlone(Layout):
    """The limit of what the codec can give: chunks in memory, no checks, one buffer."""

    name = CODEC

    def write(self, states: States) -> None:
        self.path.mkdir()
        self._codec = PRESETS["balanced"]
        self._calibration = calibrated(self._codec, states)
        self._packed = [self._codec.pack(own, self._calibration) for _, own in states.samples]
        self._chunks = [
            [
                (plane, start, encode_chunk(chunk)[0][:-CRC_BYTES])
                for plane, start, chunk in chunks(own)
            ]
            for own in self._packed
        ]
        self._buffer = buffer_for(max(self._packed, key=lambda packed: packed.num_tokens))
        self._ids = [ids for ids, _ in states.samples]

    def read(self, number: int) -> tuple[Tensor, Any]:
        for plane, start, data in self._chunks[number]:
            zstd.decompress(data, self._buffer[plane, start : start + CHUNK_TOKENS])
        ids, packed = self._ids[number], self._packed[number]
        return ids, replace(packed, planes_PTW=torch.from_numpy(self._buffer[:, : len(ids)]))

    def states(self, read: Any) -> Tensor:
        return self._codec.unpack(read, self._calibration)


class Memory(Layout):
    """The limit of what memory can give: copies of tensors."""

    name = "limit: memcpy"

    def write(self, states: States) -> None:
        self.path.mkdir()
        self._samples = states.samples
        self._buffer = torch.empty_like(max((s for _, s in self._samples), key=len))

    def read(self, number: int) -> tuple[Tensor, Any]:
        ids, hidden_TLD = self._samples[number]
        return ids, self._buffer[: len(hidden_TLD)].copy_(hidden_TLD)


def all_layouts(directory: Path) -> list[Layout]:
    balanced, small, lossless = (PRESETS[name] for name in ("balanced", "small", "lossless"))
    return [
        Ours(OURS, directory / "balanced", balanced, unpacked=False),
        Ours(OURS_BFLOAT16, directory / "balanced", balanced, unpacked=True),
        Ours(SMALL, directory / "small", small, unpacked=False),
        Ours("ours, lossless to bf16", directory / "lossless", lossless, unpacked=True),
        RawMapped(directory / "mapped"),
        SafetensorsFiles(directory / "safetensors"),
        TorchFiles(directory / "torch"),
        GzipFiles(directory / "gzip"),
        CodecAlone(directory / "codec"),
        RawRead(directory / "raw"),
        Memory(directory / "memory"),
    ]
