"""What each codec costs in bytes, in error and in time, on one core.

T tokens   L captured layers   D hidden size   C tokens of one chunk
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numcodecs import blosc, zstd
from torch import Tensor
from tqdm import tqdm

from shared.codec import (
    CHUNK_TOKENS,
    Array,
    Calibration,
    Codec,
    LevelCodec,
    LosslessCodec,
    Packed,
    decode_chunk,
    encode_chunk,
)
from tests.bench.states import States

CODECS: dict[str, Codec] = {
    "lossless": LosslessCodec(),
    **{f"step 1/{n}": LevelCodec(step=1 / n) for n in (32, 16, 8, 4, 2)},
    "1/2 in pairs": LevelCodec(step=1 / 2, bits=4),
}
CALIBRATION_TOKENS = 8_192
_CHUNK_OVERHEAD = 20
"""Bytes of the index and of `chunk_crc32c` for one chunk."""


@dataclass(frozen=True, slots=True)
class Errors:
    """Between two tensors of states, per layer, over the tokens without massive activations."""

    relative: list[float]
    """L2 norm of the difference over that of the states."""

    normalised: list[float]
    """Root mean square of the difference, in standard deviations of its channel."""


@dataclass(frozen=True, slots=True)
class SizeRow:
    model: str
    codec: str
    ratio: float
    """Stored bytes over bfloat16 bytes: padded chunks, index, checksums and outliers."""

    outliers_per_million: float
    errors: Errors


@dataclass(frozen=True, slots=True)
class SpeedRow:
    """MB/s of bfloat16 bytes, in time of one core. Checksums are included."""

    model: str
    codec: str
    pack: float
    encode: float
    decode: float
    """To what is stored: levels, or bit patterns."""

    decode_bfloat16: float


@contextmanager
def one_core() -> Iterator[None]:
    """No library takes more than one thread here."""
    threads = torch.get_num_threads(), blosc.set_nthreads(1)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads[0])
        blosc.set_nthreads(threads[1])


def normal_tokens(hidden_TLD: Tensor) -> Tensor:
    """bool [T, L]: tokens whose rms is at most 5 times the layer's median."""
    rms_TL = hidden_TLD.float().square().mean(-1).sqrt()
    return rms_TL <= 5 * rms_TL.median(0).values


def errors(hidden_TLD: Tensor, other_TLD: Tensor, deviation_LD: Tensor) -> Errors:
    found = Errors([], [])
    normal_TL = normal_tokens(hidden_TLD)
    for layer in range(hidden_TLD.shape[1]):
        chosen_T = normal_TL[:, layer]
        values = hidden_TLD[chosen_T, layer].float()
        difference = other_TLD[chosen_T, layer].float() - values
        found.relative.append(float(difference.norm() / values.norm()))
        scaled = (difference / deviation_LD[layer]).square().mean().sqrt()
        found.normalised.append(float(scaled))
    return found


def deviation(hidden_TLD: Tensor) -> Tensor:
    """Standard deviation of each channel over the normal tokens, float32 [L, D]."""
    normal_TL = normal_tokens(hidden_TLD)
    layers = [
        hidden_TLD[normal_TL[:, layer], layer].float().std(0)
        for layer in range(hidden_TLD.shape[1])
    ]
    return torch.stack(layers).clamp_min(1e-12)


def noise(states: States) -> Errors:
    """What bfloat16 computation changes in the states, by the metric of the codecs' errors."""
    exact_TLD = states.exact_TLD
    computed_TLD = states.hidden_TLD[: len(exact_TLD)]
    return errors(exact_TLD, computed_TLD, deviation(states.hidden_TLD))


def calibrated(codec: Codec, states: States) -> Calibration | None:
    return codec.calibrate(states.hidden_TLD[:CALIBRATION_TOKENS])


def chunks(levels_TLD: Array) -> Iterator[Array]:
    """The levels of one sample cut into chunks; the last one is padded, as a shard's is."""
    for start in range(0, len(levels_TLD), CHUNK_TOKENS):
        chunk = levels_TLD[start : start + CHUNK_TOKENS]
        missing = CHUNK_TOKENS - len(chunk)
        yield np.pad(chunk, ((0, missing), (0, 0), (0, 0))) if missing else chunk


def measure_sizes(states: States) -> list[SizeRow]:
    rows, deviation_LD = [], deviation(states.hidden_TLD)
    for name, codec in tqdm(CODECS.items(), desc=f"sizes, {states.name}", disable=None):
        calibration = calibrated(codec, states)
        stored, outliers, decoded = 0, [], []
        for _, hidden_TLD in states.samples:
            packed = codec.pack(hidden_TLD, calibration)
            stored += sum(
                len(encode_chunk(codec, chunk)[0]) + _CHUNK_OVERHEAD
                for chunk in chunks(_levels(codec, packed))
            )
            outliers.append(packed)
            decoded.append(codec.unpack(packed, calibration))
        positions = torch.cat([packed.outlier_position for packed in outliers])
        bits = torch.cat([packed.outlier_bits for packed in outliers])
        if len(positions):
            stored += sum(len(zstd.compress(part.numpy(), 1)) for part in (positions, bits))
        rows.append(
            SizeRow(
                states.name,
                name,
                stored / states.raw_bytes,
                1e6 * len(positions) / states.hidden_TLD.numel(),
                errors(states.hidden_TLD, torch.cat(decoded), deviation_LD),
            )
        )
    return rows


def measure_speed(states: States, *, num_tokens: int, repeats: int) -> list[SpeedRow]:
    """Over the first samples, `num_tokens` of them at most but one sample at least."""
    count = max(1, int((states.offsets[1:] <= num_tokens).sum()))
    samples = [hidden_TLD for _, hidden_TLD in states.samples[:count]]
    megabytes = sum(hidden_TLD.nbytes for hidden_TLD in samples) / 1e6
    rows = []
    for name, codec in tqdm(CODECS.items(), desc=f"speed, {states.name}", disable=None):
        steps = _steps(codec, samples, calibrated(codec, states))
        seconds: list[list[float]] = [[] for _ in steps]
        for _ in range(repeats):
            for step, taken in zip(steps, seconds, strict=True):
                began = time.thread_time()
                step()
                taken.append(time.thread_time() - began)
        rates = [megabytes / max(statistics.median(taken), 1e-9) for taken in seconds]
        rows.append(SpeedRow(states.name, name, *rates))
    return rows


def _steps(
    codec: Codec, samples: Sequence[Tensor], calibration: Calibration | None
) -> list[Callable[[], None]]:
    """Pack, encode, decode, decode to bfloat16: each over all samples."""
    packed = [codec.pack(hidden_TLD, calibration) for hidden_TLD in samples]
    cut = [list(chunks(_levels(codec, own))) for own in packed]
    encoded = [[encode_chunk(codec, chunk) for chunk in own] for own in cut]
    buffers = [np.empty((len(own) * CHUNK_TOKENS, *own[0].shape[1:]), own[0].dtype) for own in cut]

    def pack() -> None:
        for hidden_TLD in samples:
            codec.pack(hidden_TLD, calibration)

    def encode() -> None:
        for own in cut:
            for chunk in own:
                encode_chunk(codec, chunk)

    def decode_sample(number: int) -> Packed:
        buffer = buffers[number]
        for i, (data, crc) in enumerate(encoded[number]):
            out_CLD = buffer[i * CHUNK_TOKENS : (i + 1) * CHUNK_TOKENS]
            decode_chunk(codec, np.frombuffer(data, np.uint8), crc, out_CLD, "bench")
        levels_TLD = torch.from_numpy(buffer[: len(samples[number])].view(codec.packed_dtype))
        return Packed(levels_TLD, packed[number].outlier_position, packed[number].outlier_bits)

    def decode() -> None:
        for number in range(len(samples)):
            decode_sample(number)

    def decode_bfloat16() -> None:
        for number in range(len(samples)):
            codec.unpack(decode_sample(number), calibration)

    return [pack, encode, decode, decode_bfloat16]


def _levels(codec: Codec, packed: Packed) -> Array:
    return packed.levels_TLD.numpy().view(codec.stored_dtype)
