"""Hidden states as planes of bytes, and back; one frozen dataclass per codec.

`pack` runs where the states are (on a GPU before the copy, so that fewer bytes cross the bus):
it rounds to levels, keeps exact outliers, and lays bits that compress and bits that do not into
planes of their own. `shared/chunk.py` turns a plane of some tokens into stored bytes and back.
`unpack` runs where the states are used, and undoes what `pack` did.

T tokens of one sample   L captured layers   D hidden size   P planes   W bytes of one token in one
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from shared.errors import CacheIncompatibleError

_BLOCK_VALUES = 1 << 17
"""What a CPU packs or unpacks at a time, so that intermediate values never leave its cache:
two to three times faster than one pass over all of them. A GPU takes all at once."""


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
    """States of some tokens as they are stored, before compression or after it."""

    planes_PTW: Tensor
    """uint8 [P, T, W]: what the bytes mean is the codec's."""

    outlier_position: Tensor
    """int64 [E], ascending: flat positions in [T, L, D] of values that the planes do not hold."""

    outlier_bits: Tensor
    """int16 [E]: bit patterns of the bfloat16 values there."""

    values_per_token: int
    """L x D: what outlier positions of one token span."""

    @property
    def num_tokens(self) -> int:
        return self.planes_PTW.shape[1]


class Codec(Protocol):
    """How one cache stores its states."""

    @property
    def name(self) -> str: ...

    @property
    def needs_calibration(self) -> bool: ...

    @property
    def expected_ratio(self) -> float:
        """Stored bytes over raw bfloat16 bytes, before anything is measured."""

    def plane_shape(self, num_layers: int, hidden_size: int) -> tuple[int, int]:
        """Planes P of one sample, and bytes W of one token in each.

        Raises:
            CacheIncompatibleError: the codec cannot store so many channels.
        """

    def calibrate(self, hidden_TLD: Tensor) -> Calibration | None:
        """Learn the channels from some tokens of the target."""

    def pack(self, hidden_TLD: Tensor, calibration: Calibration | None) -> Packed: ...

    def unpack(self, packed: Packed, calibration: Calibration | None) -> Tensor:
        """bfloat16 [T, L, D]."""

    def to_dict(self) -> dict[str, Any]: ...


def token_blocks(num_tokens: int, values_per_token: int, device: torch.device) -> Iterator[slice]:
    """The tokens in pieces that suit the device."""
    step = max(num_tokens, 1)
    if device.type == "cpu":
        step = max(_BLOCK_VALUES // max(values_per_token, 1), 1)
    for start in range(0, num_tokens, step):
        yield slice(start, min(start + step, num_tokens))


def _empty(device: torch.device) -> tuple[Tensor, Tensor]:
    return (
        torch.empty(0, dtype=torch.int64, device=device),
        torch.empty(0, dtype=torch.int16, device=device),
    )


@dataclass(frozen=True, slots=True)
class LosslessCodec:
    """The bfloat16 bits, exactly. About 0.69 of their size on real states.

    Two planes a layer: exponents, which compress (each layer has its own range of them), and sign
    with mantissa, which do not, so that no time is spent on them.
    """

    name: ClassVar[str] = "lossless"
    needs_calibration: ClassVar[bool] = False
    expected_ratio: ClassVar[float] = 0.70

    def plane_shape(self, num_layers: int, hidden_size: int) -> tuple[int, int]:
        return 2 * num_layers, hidden_size

    def calibrate(self, hidden_TLD: Tensor) -> None:
        return None

    def pack(self, hidden_TLD: Tensor, calibration: Calibration | None) -> Packed:
        num_tokens, num_layers, size = hidden_TLD.shape
        device, shape = hidden_TLD.device, (2 * num_layers, num_tokens, size)
        planes_PTW = torch.empty(shape, dtype=torch.uint8, device=device)
        bits_LTD = hidden_TLD.contiguous().view(torch.int16).transpose(0, 1)
        for part in token_blocks(num_tokens, num_layers * size, device):
            bits = bits_LTD[:, part]
            planes_PTW[:num_layers, part] = bits >> 7
            planes_PTW[num_layers:, part] = (bits & 0x7F) | (bits >> 8 & 0x80)
        return Packed(planes_PTW, *_empty(device), num_layers * size)

    def unpack(self, packed: Packed, calibration: Calibration | None) -> Tensor:
        num_planes, num_tokens, size = packed.planes_PTW.shape
        device, num_layers = packed.planes_PTW.device, num_planes // 2
        shape = (num_tokens, num_layers, size)
        bits_TLD = torch.empty(shape, dtype=torch.int16, device=device)
        for part in token_blocks(num_tokens, num_layers * size, device):
            exponent, rest = packed.planes_PTW[:, part].to(torch.int16).chunk(2)
            bits = exponent.bitwise_left_shift_(7).bitwise_or_(rest & 0x7F)
            bits_TLD[part] = bits.bitwise_or_((rest & 0x80) << 8).transpose(0, 1)
        return bits_TLD.view(torch.bfloat16)

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name}


@dataclass(frozen=True, slots=True)
class LevelCodec:
    """Small integers of a static step per channel, and the exact value where none holds it.

    The step is `step` times the channel's standard deviation, so the error (rms over the
    channel's standard deviation) is `step / sqrt(12)`: 1.8 % at 1/16, which is what the states of
    one model differ by between two attention kernels. Nothing is ever saturated: a value outside
    the levels (massive activations of the first token) or not finite is stored exactly.

    Levels are stored by halves of 4 bits, those of two channels in a byte: the upper halves in
    one plane, which compresses, the lower ones, which are as good as random, in another. With
    `bits` 4 there is no other. A compressor spends whole bits on a symbol and looks for matches
    where symbols repeat often, so pairs compress better than single levels, and half the bytes
    are decoded in twice the speed.
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
    def expected_ratio(self) -> float:
        """From the entropy of a rounded Gaussian, 2.05 + log2(1 / step) bits of 16."""
        return (2.05 - math.log2(self.step)) / 16

    @property
    def _level_max(self) -> int:
        return 127 if self.bits == 8 else 7

    def plane_shape(self, num_layers: int, hidden_size: int) -> tuple[int, int]:
        if hidden_size % 2:
            raise CacheIncompatibleError(
                f"this codec stores channels in pairs, the states have {hidden_size}. "
                "Set codec.preset to lossless."
            )
        return self.bits // 4, num_layers * hidden_size // 2

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
        hidden_TLD = hidden_TLD.contiguous()
        num_tokens, num_layers, size = hidden_TLD.shape
        device, per_token = hidden_TLD.device, num_layers * size
        num_planes, width = self.plane_shape(num_layers, size)
        planes_PTW = torch.empty((num_planes, num_tokens, width), dtype=torch.uint8, device=device)
        outliers = []
        for part in token_blocks(num_tokens, per_token, device):
            part_TLD = hidden_TLD[part]
            level_TLD = part_TLD.float().sub_(calibration.mean_LD)
            level_TLD.div_(calibration.step_LD).round_()
            # Few vectors have a value outside the levels: only those are looked at one by one.
            peak_TL = torch.linalg.vector_norm(level_TLD, torch.inf, -1)
            held_TL = peak_TL <= self._level_max  # False for NaN, too
            if not bool(held_TL.all()):
                vector = held_TL.flatten().logical_not_().nonzero()
                level_VD = level_TLD.view(-1, size)[vector.squeeze(1)]
                outside = (level_VD.abs() <= self._level_max).logical_not_().nonzero()
                position = vector[outside[:, 0], 0] * size + outside[:, 1]
                bits = part_TLD.view(torch.int16).flatten()[position]
                outliers.append((position + part.start * per_token, bits))
                level_TLD.view(-1)[position] = 0.0
            first, second = level_TLD.to(torch.int8).chunk(2, -1)
            lower = ((first & 15) | (second << 4)).view(torch.uint8)
            planes_PTW[-1, part] = lower.flatten(1)
            if self.bits == 8:
                upper = ((first >> 4 & 15) | (second & -16)).view(torch.uint8)
                planes_PTW[0, part] = upper.flatten(1)
        if not outliers:
            return Packed(planes_PTW, *_empty(device), per_token)
        positions, values = (torch.cat(parts) for parts in zip(*outliers, strict=True))
        return Packed(planes_PTW, positions, values, per_token)

    def unpack(self, packed: Packed, calibration: Calibration | None) -> Tensor:
        assert calibration is not None
        mean_LD, step_LD = calibration.mean_LD, calibration.step_LD
        num_tokens, device = packed.num_tokens, packed.planes_PTW.device
        shape = (num_tokens, *mean_LD.shape)
        hidden_TLD = torch.empty(shape, dtype=torch.bfloat16, device=device)
        planes_PTLW = packed.planes_PTW.view(torch.int8)
        planes_PTLW = planes_PTLW.view(-1, num_tokens, len(mean_LD), mean_LD.shape[1] // 2)
        for part in token_blocks(num_tokens, packed.values_per_token, device):
            upper = planes_PTLW[0, part]
            if self.bits == 4:
                first, second = upper << 4 >> 4, upper >> 4
            else:
                lower = planes_PTLW[1, part]
                first = (upper << 4).bitwise_or_(lower & 15)
                second = (upper & -16).bitwise_or_(lower >> 4 & 15)
            level_TLD = torch.cat([first, second], -1)
            hidden_TLD[part].copy_(torch.addcmul(mean_LD, level_TLD, step_LD))
        if packed.outlier_position.numel():
            values = packed.outlier_bits.view(torch.bfloat16)
            hidden_TLD.view(-1)[packed.outlier_position] = values
        return hidden_TLD

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
