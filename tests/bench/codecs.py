"""What each codec costs in bytes, in error and in time, on one core.

T tokens   L captured layers   D hidden size   C tokens of one chunk
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from numcodecs import zstd
from torch import Tensor
from tqdm import tqdm

from shared.chunk import CHUNK_TOKENS, Array, decode_chunk, encode_chunk
from shared.codec import Calibration, Codec, LevelCodec, LosslessCodec, Packed
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
    """To planes: what the reader hands over, and a device unpacks."""

    decode_bfloat16: float


@contextmanager
def one_core() -> Iterator[None]:
    """No library takes more than one thread here."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


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


def chunks(packed: Packed) -> Iterator[tuple[int, int, Array]]:
    """One sample cut into chunks: plane, first token, bytes. The last ones are padded, as in a
    shard."""
    for start in range(0, packed.num_tokens, CHUNK_TOKENS):
        for plane, plane_TW in enumerate(packed.planes_PTW.numpy()):
            chunk_CW = plane_TW[start : start + CHUNK_TOKENS]
            missing = CHUNK_TOKENS - len(chunk_CW)
            yield plane, start, np.pad(chunk_CW, ((0, missing), (0, 0))) if missing else chunk_CW


def buffer_for(packed: Packed) -> Array:
    """What the chunks of one sample decode into, uint8 [P, T, W] with the padding."""
    num_planes, num_tokens, width = packed.planes_PTW.shape
    return np.empty((num_planes, -(-num_tokens // CHUNK_TOKENS) * CHUNK_TOKENS, width), np.uint8)


def measure_sizes(states: States) -> list[SizeRow]:
    rows, deviation_LD = [], deviation(states.hidden_TLD)
    for name, codec in tqdm(CODECS.items(), desc=f"sizes, {states.name}", disable=None):
        calibration = calibrated(codec, states)
        stored, outliers, decoded = 0, [], []
        for _, hidden_TLD in states.samples:
            packed = codec.pack(hidden_TLD, calibration)
            stored += sum(
                len(encode_chunk(chunk)[0]) + _CHUNK_OVERHEAD for *_, chunk in chunks(packed)
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
    cut = [list(chunks(own)) for own in packed]
    encoded = [[(*place, *encode_chunk(chunk)) for *place, chunk in own] for own in cut]
    buffers = [buffer_for(own) for own in packed]

    def pack() -> None:
        for hidden_TLD in samples:
            codec.pack(hidden_TLD, calibration)

    def encode() -> None:
        for own in cut:
            for *_, chunk in own:
                encode_chunk(chunk)

    def decode_sample(number: int) -> Packed:
        buffer = buffers[number]
        for plane, start, data, crc in encoded[number]:
            out_CW = buffer[plane, start : start + CHUNK_TOKENS]
            decode_chunk(np.frombuffer(data, np.uint8), crc, out_CW, "bench")
        planes_PTW = torch.from_numpy(buffer[:, : len(samples[number])])
        return replace(packed[number], planes_PTW=planes_PTW)

    def decode() -> None:
        for number in range(len(samples)):
            decode_sample(number)

    def decode_bfloat16() -> None:
        for number in range(len(samples)):
            codec.unpack(decode_sample(number), calibration)

    return [pack, encode, decode, decode_bfloat16]
