"""Hidden states to stored bytes and back; one frozen dataclass per codec.

A codec works in two halves. `pack` runs where the states are (on a GPU before the copy, so that
fewer bytes cross the bus) and turns bfloat16 states into levels plus exact outliers.
`encode` runs on the host and turns one chunk of levels into bytes. Reading mirrors it: `decode`
on the host, `unpack` where the states are used.

T tokens of one sample   L captured layers   D hidden size   C tokens of one chunk
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import google_crc32c
import numpy as np
import numpy.typing as npt
import torch
from numcodecs import blosc, zstd
from torch import Tensor
from zarr.abc.codec import BytesBytesCodec
from zarr.codecs import BloscCodec, Crc32cCodec, TransposeCodec, ZstdCodec

from shared.errors import CacheIncompatibleError, ShardCorruptError
from shared.scratch import Scratch

CHUNK_TOKENS = 64
"""Tokens of one chunk. 1,024 read 3 to 5 times slower, 16 make the index 4 times longer."""

_BLOCK_BYTES = 1 << 20
"""Blosc's block. Its automatic choice costs 10 points of ratio on these data."""

_BLOCK_VALUES = 1 << 16
"""What a CPU quantises or expands at a time, so that the float32 values never leave its cache:
two to three times faster than one pass over all of them. A GPU takes all at once."""

_CRC_BYTES = 4
_MAX_CHUNK_BYTES = (1 << 31) - 1 - (1 << 20)
"""What the compressors take in one call."""

Array = npt.NDArray[Any]

_by_layer = Scratch()
"""A decoded chunk before its axes are exchanged."""


@dataclass(frozen=True, eq=False, slots=True)
class Calibration:
    """What the quantiser knows about each channel. Constant over a cache."""

    mean_LD: Tensor
    """float32 [L, D]: removed before rounding."""

    step_LD: Tensor
    """float32 [L, D], positive: width of one level."""

    def to(self, device: torch.device | str) -> "Calibration":
        return Calibration(self.mean_LD.to(device), self.step_LD.to(device))


@dataclass(frozen=True, eq=False, slots=True)
class Packed:
    """One sample between `pack` and `encode`, or between `decode` and `unpack`."""

    levels_TLD: Tensor
    """int16 (bit patterns of bfloat16) or int8 (levels) [T, L, D], or uint8 [T, L, D / 2]: the
    levels of channel d in the lower four bits of byte d, of channel D / 2 + d in the upper."""

    outlier_position: Tensor
    """int64 [E], ascending: flat positions in [T, L, D] whose level does not hold the value."""

    outlier_bits: Tensor
    """int16 [E]: bit patterns of the bfloat16 values there."""

    @property
    def values_per_token(self) -> int:
        """L x D: what outlier positions of one token span."""
        per_element = 2 if self.levels_TLD.dtype == torch.uint8 else 1
        return per_element * self.levels_TLD[0].numel()

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "Packed":
        return Packed(
            self.levels_TLD.to(device, non_blocking=non_blocking),
            self.outlier_position.to(device, non_blocking=non_blocking),
            self.outlier_bits.to(device, non_blocking=non_blocking),
        )


class Codec(Protocol):
    """How one cache stores its states."""

    @property
    def name(self) -> str: ...

    @property
    def stored_dtype(self) -> np.dtype[Any]:
        """Type of the array in the store."""

    @property
    def packed_dtype(self) -> np.dtype[Any]:
        """The same bytes as `Packed` has them: torch knows few unsigned types."""

    def stored_width(self, hidden_size: int) -> int:
        """Elements of the array in the store for the D channels of one layer.

        Raises:
            CacheIncompatibleError: the codec cannot store this many.
        """

    @property
    def needs_calibration(self) -> bool: ...

    @property
    def expected_ratio(self) -> float:
        """Stored bytes over raw bfloat16 bytes, before anything is measured."""

    def calibrate(self, hidden_TLD: Tensor) -> Calibration | None:
        """Learn the channels from some tokens of the target."""

    def pack(self, hidden_TLD: Tensor, calibration: Calibration | None) -> Packed: ...

    def unpack(self, packed: Packed, calibration: Calibration | None) -> Tensor:
        """bfloat16 [T, L, D]."""

    def encode(self, levels_CLD: Array) -> bytes: ...

    def decode(self, data: Any, out_CLD: Array) -> None:
        """Decode the body of one chunk, without its checksum, into `out_CLD`."""

    def zarr_filters(self) -> list[TransposeCodec]: ...

    def zarr_compressors(self) -> list[BytesBytesCodec]: ...

    def to_dict(self) -> dict[str, Any]: ...


def _blocks(values_TLD: Tensor) -> Iterator[tuple[int, Tensor]]:
    """`values_TLD` in pieces of tokens that suit its device, each with its first token."""
    step = max(len(values_TLD), 1)
    if values_TLD.device.type == "cpu":
        step = max(_BLOCK_VALUES // max(values_TLD.shape[1:].numel(), 1), 1)
    for start in range(0, len(values_TLD), step):
        yield start, values_TLD[start : start + step]


def _empty(device: torch.device) -> tuple[Tensor, Tensor]:
    return (
        torch.empty(0, dtype=torch.int64, device=device),
        torch.empty(0, dtype=torch.int16, device=device),
    )


@dataclass(frozen=True, slots=True)
class LosslessCodec:
    """The bfloat16 bits, exactly. About 0.69 of their size on real states.

    Layers are kept apart inside a chunk (2 to 3 % smaller: their exponents differ), the two bytes
    of a value too; what compresses is the exponent plane.
    """

    name: ClassVar[str] = "lossless"
    stored_dtype: ClassVar[np.dtype[Any]] = np.dtype("<u2")
    packed_dtype: ClassVar[np.dtype[Any]] = np.dtype("<i2")
    needs_calibration: ClassVar[bool] = False
    expected_ratio: ClassVar[float] = 0.70

    def stored_width(self, hidden_size: int) -> int:
        return hidden_size

    def calibrate(self, hidden_TLD: Tensor) -> None:
        return None

    def pack(self, hidden_TLD: Tensor, calibration: Calibration | None) -> Packed:
        return Packed(hidden_TLD.contiguous().view(torch.int16), *_empty(hidden_TLD.device))

    def unpack(self, packed: Packed, calibration: Calibration | None) -> Tensor:
        return packed.levels_TLD.view(torch.bfloat16)

    def encode(self, levels_CLD: Array) -> bytes:
        by_layer = np.ascontiguousarray(levels_CLD.transpose(1, 0, 2))
        return bytes(
            blosc.compress(
                by_layer, b"zstd", clevel=1, shuffle=blosc.SHUFFLE, blocksize=_BLOCK_BYTES
            )
        )

    def decode(self, data: Any, out_CLD: Array) -> None:
        num_tokens, num_layers, width = out_CLD.shape
        by_layer = _by_layer.array((num_layers, num_tokens, width), out_CLD.dtype)
        blosc.decompress(data, by_layer)
        out_CLD[...] = by_layer.transpose(1, 0, 2)

    def zarr_filters(self) -> list[TransposeCodec]:
        return [TransposeCodec(order=(1, 0, 2))]

    def zarr_compressors(self) -> list[BytesBytesCodec]:
        return [
            BloscCodec(
                typesize=2, cname="zstd", clevel=1, shuffle="shuffle", blocksize=_BLOCK_BYTES
            ),
            Crc32cCodec(),
        ]

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name}


@dataclass(frozen=True, slots=True)
class LevelCodec:
    """Small integers of a static step per channel, and the exact value where none holds it.

    The step is `step` times the channel's standard deviation, so the error (rms over the
    channel's standard deviation) is `step / sqrt(12)`: 1.8 % at 1/16, which is what the states of
    one model differ by between two attention kernels. Nothing is ever saturated: a value outside
    the levels (massive activations of the first token) or not finite is stored exactly.

    With 4 bits two levels share a byte. That is for wide steps: the compressor spends whole bits
    on a symbol and looks for matches where symbols repeat often, so it does better on pairs, and
    has half as many bytes to decode.
    """

    name: ClassVar[str] = "levels"
    needs_calibration: ClassVar[bool] = True

    step: float
    """Width of one level in standard deviations of the channel."""

    bits: int = 8
    """Of one level: 8 for levels up to 127, 4 for levels up to 7."""

    def __post_init__(self) -> None:
        if not 0.0 < self.step <= 1.0:
            raise ValueError(f"step must be in (0, 1], got {self.step}")
        if self.bits not in (4, 8):
            raise ValueError(f"bits must be 4 or 8, got {self.bits}")

    @property
    def stored_dtype(self) -> np.dtype[Any]:
        return np.dtype("i1" if self.bits == 8 else "u1")

    @property
    def packed_dtype(self) -> np.dtype[Any]:
        return self.stored_dtype

    @property
    def expected_ratio(self) -> float:
        """From the entropy of a rounded Gaussian, 2.05 + log2(1 / step) bits of 16."""
        return (2.05 - math.log2(self.step)) / 16

    @property
    def _torch_dtype(self) -> torch.dtype:
        return torch.int8 if self.bits == 8 else torch.uint8

    @property
    def _level_max(self) -> int:
        return 127 if self.bits == 8 else 7

    def stored_width(self, hidden_size: int) -> int:
        if self.bits == 8:
            return hidden_size
        if hidden_size % 2:
            raise CacheIncompatibleError(
                f"a codec of 4 bits stores channels in pairs, the target has {hidden_size}. "
                "Choose another codec.preset."
            )
        return hidden_size // 2

    def calibrate(self, hidden_TLD: Tensor) -> Calibration:
        """Mean and step per channel from `hidden_TLD`, without the tokens of massive activations.

        Those (rms beyond 5 times the layer's median) would widen every step of their channels.
        Tokens that are not finite are left out too: one would spoil every channel.
        """
        hidden = hidden_TLD.float()
        rms_TL = hidden.square().mean(-1).sqrt()
        normal_TL = rms_TL <= 5 * rms_TL.nanmedian(0).values
        hidden = hidden.where(normal_TL.unsqueeze(-1), 0.0)
        weight_TL1 = (normal_TL / normal_TL.sum(0).clamp_min(1)).unsqueeze(-1)
        mean_LD = (hidden * weight_TL1).sum(0)
        variance_LD = ((hidden - mean_LD).square() * weight_TL1).sum(0)
        # A channel that never moved in the calibration tokens still needs a width: its layer's.
        floor_L1 = variance_LD.mean(-1, keepdim=True).clamp_min(1e-12) * 1e-6
        return Calibration(mean_LD, self.step * variance_LD.maximum(floor_L1).sqrt())

    def pack(self, hidden_TLD: Tensor, calibration: Calibration | None) -> Packed:
        assert calibration is not None
        num_tokens, num_layers, size = hidden_TLD.shape
        shape = (num_tokens, num_layers, self.stored_width(size))
        levels_TLD = torch.empty(shape, dtype=self._torch_dtype, device=hidden_TLD.device)
        outliers = []
        for start, part_TLD in _blocks(hidden_TLD.contiguous()):
            level_TLD = (part_TLD - calibration.mean_LD).div_(calibration.step_LD).round_()
            held_TLD = level_TLD.abs() <= self._level_max  # False for NaN and infinities too
            if not bool(held_TLD.all()):
                position = held_TLD.logical_not_().flatten().nonzero().squeeze(1)
                bits = part_TLD.view(torch.int16).flatten()[position]
                outliers.append((position + start * num_layers * size, bits))
                level_TLD.view(-1)[position] = 0.0
            if self.bits == 4:
                lower, upper = level_TLD.to(torch.int8).chunk(2, -1)
                level_TLD = ((lower & 15) | (upper << 4)).view(torch.uint8)
            levels_TLD[start : start + len(part_TLD)] = level_TLD
        if not outliers:
            return Packed(levels_TLD, *_empty(hidden_TLD.device))
        positions, values = (torch.cat(parts) for parts in zip(*outliers, strict=True))
        return Packed(levels_TLD, positions, values)

    def unpack(self, packed: Packed, calibration: Calibration | None) -> Tensor:
        assert calibration is not None
        mean_LD, step_LD = calibration.mean_LD, calibration.step_LD
        num_tokens, (num_layers, size) = len(packed.levels_TLD), mean_LD.shape
        hidden_TLD = torch.empty(
            (num_tokens, num_layers, size), dtype=torch.bfloat16, device=packed.levels_TLD.device
        )
        for start, part_TLD in _blocks(packed.levels_TLD.view(torch.int8)):
            out_TLD = hidden_TLD[start : start + len(part_TLD)]
            if self.bits == 4:
                part_TLD = torch.cat([part_TLD << 4 >> 4, part_TLD >> 4], -1)
            out_TLD.copy_(torch.addcmul(mean_LD, part_TLD, step_LD))
        if packed.outlier_position.numel():
            values = packed.outlier_bits.view(torch.bfloat16)
            hidden_TLD.view(-1)[packed.outlier_position] = values
        return hidden_TLD

    def encode(self, levels_CLD: Array) -> bytes:
        return bytes(zstd.compress(np.ascontiguousarray(levels_CLD), 1))

    def decode(self, data: Any, out_CLD: Array) -> None:
        zstd.decompress(data, out_CLD)

    def zarr_filters(self) -> list[TransposeCodec]:
        return []

    def zarr_compressors(self) -> list[BytesBytesCodec]:
        return [ZstdCodec(level=1, checksum=False), Crc32cCodec()]

    def to_dict(self) -> dict[str, Any]:
        fields = {"name": self.name, "step": self.step}
        return fields if self.bits == 8 else fields | {"bits": self.bits}


PRESETS: dict[str, Codec] = {
    "lossless": LosslessCodec(),
    "balanced": LevelCodec(step=1 / 16),
    "small": LevelCodec(step=1 / 2, bits=4),
}
"""The codecs by the names that a config uses."""


def codec_from_dict(fields: dict[str, Any]) -> Codec:
    """The codec that `to_dict` described.

    Raises:
        CacheIncompatibleError: this version knows no such codec.
    """
    match fields:
        case {"name": "lossless", **rest} if not rest:
            return LosslessCodec()
        case {"name": "levels", "step": float(step), **rest} if not rest and 0.0 < step <= 1.0:
            return LevelCodec(step=step)
        case {"name": "levels", "step": float(step), "bits": 4, **rest} if (
            not rest and 0.0 < step <= 1.0
        ):
            return LevelCodec(step=step, bits=4)
    raise CacheIncompatibleError(
        f"codec {fields!r} is unknown to this version. Read the cache with the one that wrote it."
    )


def check_chunk_bytes(codec: Codec, num_layers: int, hidden_size: int) -> None:
    """Refuse chunks that the compressors cannot take.

    Raises:
        CacheIncompatibleError: one chunk is larger than 2 GiB, or has an odd number of channels
            where the codec stores pairs.
    """
    width = codec.stored_width(hidden_size)
    size = CHUNK_TOKENS * num_layers * width * codec.stored_dtype.itemsize
    if size > _MAX_CHUNK_BYTES:
        raise CacheIncompatibleError(
            f"a chunk of {CHUNK_TOKENS} tokens x {num_layers} layers x {hidden_size} channels has "
            f"{size:,} bytes, the compressors take {_MAX_CHUNK_BYTES:,}. Capture fewer layers."
        )


def encode_chunk(codec: Codec, levels_CLD: Array) -> tuple[bytes, int]:
    """One chunk as stored, and its crc32c (which is also its last four bytes)."""
    body = codec.encode(levels_CLD)
    crc = int(google_crc32c.value(body))
    return body + crc.to_bytes(_CRC_BYTES, "little"), crc


def decode_chunk(codec: Codec, data: Array, crc: int, out_CLD: Array, where: str) -> None:
    """Check one stored chunk, uint8, against the checksum of the record, then decode it.

    Raises:
        ShardCorruptError: other bytes than were written, or they do not decode.
    """
    body = data[:-_CRC_BYTES]
    if (
        int.from_bytes(data[-_CRC_BYTES:].tobytes(), "little") != crc
        or google_crc32c.value(body) != crc
    ):
        raise ShardCorruptError(
            f"{where}: checksum differs from the one written. Run `cache-builder repair`."
        )
    try:
        codec.decode(body, out_CLD)
    except (RuntimeError, ValueError) as error:
        raise ShardCorruptError(f"{where}: does not decode ({error}).") from error
