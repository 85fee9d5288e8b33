"""Codecs: exact where they promise it, bounded where they do not, and every byte is checked.

T tokens of one sample   L captured layers   D hidden size   C tokens of one chunk
"""

import math
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shared.chunk import (
    CHUNK_TOKENS,
    check_chunk_bytes,
    checksum,
    decode_chunk,
    encode_chunk,
)
from shared.codec import (
    PRESETS,
    Calibration,
    Codec,
    LevelCodec,
    LosslessCodec,
    Packed,
    codec_from_dict,
)
from shared.errors import CacheIncompatibleError, ShardCorruptError
from tests.test_shared.made import CODECS, bits

each_codec = pytest.mark.parametrize("codec", CODECS, ids=list(PRESETS))
LEVELS = {name: codec for name, codec in PRESETS.items() if isinstance(codec, LevelCodec)}
each_level_codec = pytest.mark.parametrize("codec", LEVELS.values(), ids=list(LEVELS))


def normal(num_tokens: int, num_layers: int = 2, size: int = 32, *, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_tokens, num_layers, size, generator=generator).bfloat16()


def every_bit_pattern() -> Tensor:
    """All 65,536 values of bfloat16 as [256, 2, 128], NaN payloads and infinities among them."""
    patterns = np.arange(2**16, dtype=np.uint16).reshape(256, 2, 128)
    return torch.from_numpy(patterns.view(np.int16)).view(torch.bfloat16)


def through_bytes(packed: Packed) -> Packed:
    """`packed` encoded and decoded chunk by chunk."""
    planes = packed.planes_PTW.numpy()
    decoded = np.empty_like(planes)
    for plane, out in zip(planes, decoded, strict=True):
        for start in range(0, packed.num_tokens, CHUNK_TOKENS):
            chunk = slice(start, start + CHUNK_TOKENS)
            data, crc = encode_chunk(plane[chunk])
            decode_chunk(np.frombuffer(data, np.uint8), crc, out[chunk], "here")
    return replace(packed, planes_PTW=torch.from_numpy(decoded))


def levels_of(packed: Packed, num_layers: int) -> Tensor:
    """int64 [T, L, D]: what the bytes of a level codec stand for, bit by bit."""
    planes = packed.planes_PTW.long().unflatten(-1, (num_layers, -1))
    halves = torch.cat([planes & 15, planes >> 4], -1)  # [P, T, L, D], unsigned
    levels = halves[0] if len(halves) == 1 else 16 * halves[0] + halves[1]
    limit = 16 ** len(halves)
    return torch.where(levels < limit // 2, levels, levels - limit)


def round_trip(codec: Codec, hidden_TLD: Tensor, calibration: Calibration | None) -> Tensor:
    return codec.unpack(through_bytes(codec.pack(hidden_TLD, calibration)), calibration)


def test_lossless_keeps_every_bit_pattern() -> None:
    hidden = every_bit_pattern()
    assert np.array_equal(bits(round_trip(LosslessCodec(), hidden, None)), bits(hidden))


@pytest.mark.parametrize(("codec", "last"), [(LEVELS["balanced"], 127), (LEVELS["small"], 7)])
def test_levels_keep_every_bit_pattern_that_they_cannot_hold(codec: LevelCodec, last: int) -> None:
    hidden = every_bit_pattern()
    calibration = Calibration(torch.zeros(2, 128), torch.full((2, 128), codec.step))
    found = round_trip(codec, hidden, calibration)
    inside = (hidden.float().abs() / codec.step).round() <= last  # False for NaN
    assert np.array_equal(bits(found)[~inside.numpy()], bits(hidden)[~inside.numpy()])
    error = (found.float() - hidden.float())[inside].abs()
    assert (error <= codec.step / 2).all()
    assert int((~inside).sum()) > 30_000


@pytest.mark.parametrize("step", [1 / 16, 1 / 8, 1 / 4, 1 / 2])
def test_the_error_of_levels_is_that_of_a_uniform_quantiser(step: float) -> None:
    codec = LevelCodec(step=step)
    hidden = (normal(2048, 2, 64) + torch.linspace(-1, 1, 64)) * torch.logspace(-1, 1, 64)
    hidden = hidden.bfloat16()
    calibration = codec.calibrate(hidden)
    packed = codec.pack(hidden, calibration)
    decoded = calibration.mean_LD + levels_of(packed, 2) * calibration.step_LD
    error = (decoded - hidden.float()) / hidden.float().std(0)
    assert error.square().mean().sqrt().item() == pytest.approx(step / math.sqrt(12), rel=0.03)
    assert error.mean().abs() < 0.03 * step


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**32),
    step=st.sampled_from([1 / 16, 1 / 4, 1.0]),
    width=st.sampled_from([4, 8]),
)
def test_no_value_is_further_off_than_half_a_step_and_its_rounding(
    seed: int, step: float, width: int
) -> None:
    codec = LevelCodec(step=step, bits=width)
    hidden = (normal(70, seed=seed) * torch.logspace(-3, 3, 32)).bfloat16()
    calibration = codec.calibrate(hidden)
    found = round_trip(codec, hidden, calibration).float()
    rounding = found.abs() * 2**-8 + 1e-30
    slack = 1 + 1e-5  # of float32
    bound = slack * (calibration.step_LD / 2 + rounding)
    assert ((found - hidden.float()).abs() <= bound).all()


@pytest.mark.parametrize(
    "value", [3000.0, -3000.0, 29_000.0, math.inf, -math.inf, math.nan, 3.0e38], ids=str
)
@each_level_codec
def test_an_outlier_survives_exactly_and_costs_its_neighbours_nothing(
    codec: LevelCodec, value: float
) -> None:
    hidden = normal(256).clamp(-3, 3)
    calibration = codec.calibrate(hidden)
    plain = round_trip(codec, hidden, calibration)
    hidden[7, 1, 5] = value
    packed = codec.pack(hidden, calibration)
    assert packed.outlier_position.tolist() == [(7 * 2 + 1) * 32 + 5]
    found = codec.unpack(through_bytes(packed), calibration)
    assert bits(found)[7, 1, 5] == bits(hidden)[7, 1, 5]
    plain[7, 1, 5] = found[7, 1, 5]
    assert np.array_equal(bits(plain), bits(found))


@settings(max_examples=60)
@given(
    scale=st.floats(1e-3, 1e4),
    seed=st.integers(0, 2**32),
    codec=st.sampled_from([*LEVELS.values()]),
)
def test_levels_never_saturate(scale: float, seed: int, codec: LevelCodec) -> None:
    """States far outside the calibrated range come back exactly, not clipped to its end."""
    calibration = Calibration(torch.zeros(2, 32), torch.full((2, 32), codec.step))
    hidden = (normal(8, seed=seed) * scale).bfloat16()
    error = (round_trip(codec, hidden, calibration).float() - hidden.float()).abs()
    assert (error <= codec.step / 2 + hidden.float().abs() * 2**-8).all()


@each_level_codec
def test_blocks_of_a_long_sample_are_packed_as_each_token_alone(codec: LevelCodec) -> None:
    """The host quantises and expands a few tokens at a time; positions count from the first."""
    hidden = normal(5, 3, 20_000)
    hidden[0, 0, 1], hidden[2, 1, 19_999], hidden[4, 2, 0] = 29_000.0, math.nan, -math.inf
    calibration = codec.calibrate(normal(50, 3, 20_000, seed=1))
    packed, size = codec.pack(hidden, calibration), 3 * 20_000
    alone = [codec.pack(token, calibration) for token in hidden.split(1)]
    assert torch.equal(packed.planes_PTW, torch.cat([own.planes_PTW for own in alone], 1))
    positions = [own.outlier_position + i * size for i, own in enumerate(alone)]
    assert torch.equal(packed.outlier_position, torch.cat(positions))
    assert {1, 2 * size + 39_999, 4 * size + 40_000} <= set(packed.outlier_position.tolist())
    assert torch.equal(packed.outlier_bits, torch.cat([own.outlier_bits for own in alone]))
    unpacked = torch.cat([codec.unpack(own, calibration) for own in alone])
    assert np.array_equal(bits(codec.unpack(packed, calibration)), bits(unpacked))
    assert packed.values_per_token == size


def test_two_levels_of_four_bits_share_a_byte() -> None:
    """Channel d in the lower half of byte d, channel D / 2 + d in the upper, two's complement."""
    codec = LevelCodec(step=1.0, bits=4)
    calibration = Calibration(torch.zeros(1, 6), torch.ones(1, 6))
    hidden = torch.tensor([[[7.0, -7.0, -1.0, 0.0, 3.0, -5.0]]]).bfloat16()
    packed = codec.pack(hidden, calibration)
    assert packed.planes_PTW.tolist() == [[[0x07, 0x39, 0xBF]]]
    assert torch.equal(codec.unpack(packed, calibration), hidden)
    hidden[0, 0, 0], hidden[0, 0, 4] = 8.0, -8.0
    packed = codec.pack(hidden, calibration)
    assert packed.outlier_position.tolist() == [0, 4]
    assert packed.planes_PTW.tolist() == [[[0x00, 0x09, 0xBF]]]
    assert torch.equal(codec.unpack(packed, calibration), hidden)


def test_levels_of_eight_bits_lie_in_two_planes() -> None:
    """Upper halves in the first, lower ones in the second, channels paired as with 4 bits."""
    codec = LevelCodec(step=1 / 16)
    calibration = Calibration(torch.zeros(1, 4), torch.ones(1, 4))
    hidden = torch.tensor([[[0x57, -1.0, 127.0, -127.0]]]).bfloat16()  # 57 FF 7F 81
    packed = codec.pack(hidden, calibration)
    assert packed.planes_PTW.tolist() == [[[0x75, 0x8F]], [[0xF7, 0x1F]]]
    assert levels_of(packed, 1).tolist() == [[[0x57, -1, 127, -127]]]
    assert torch.equal(codec.unpack(packed, calibration), hidden)
    hidden[0, 0, 1] = -128.0
    packed = codec.pack(hidden, calibration)
    assert packed.outlier_position.tolist() == [1]
    assert packed.planes_PTW.tolist() == [[[0x75, 0x80]], [[0xF7, 0x10]]]


def test_exponents_and_the_rest_of_lossless_states_lie_in_planes_by_layer() -> None:
    codec = LosslessCodec()
    patterns = np.array([[[0xC3F5, 0x0001], [0x8000, 0x7FFF]]], np.uint16)
    hidden = torch.from_numpy(patterns.view(np.int16)).view(torch.bfloat16)
    packed = codec.pack(hidden, None)
    assert packed.planes_PTW.tolist() == [
        [[0x87, 0x00]], [[0x00, 0xFF]], [[0xF5, 0x01]], [[0x80, 0x7F]]
    ]  # fmt: skip


@pytest.mark.parametrize("preset", LEVELS)
def test_channels_that_do_not_pair_are_refused_by_name(preset: str) -> None:
    with pytest.raises(CacheIncompatibleError, match=r"pairs, the states have 33.*codec\.preset"):
        check_chunk_bytes(PRESETS[preset], 5, 33)


def test_a_massive_token_does_not_widen_the_steps() -> None:
    codec = LevelCodec(step=1 / 16)
    hidden = normal(500)
    without = codec.calibrate(hidden[1:])
    hidden[0, :, 3] = 29_000.0
    found = codec.calibrate(hidden)
    torch.testing.assert_close(found.mean_LD, without.mean_LD)
    torch.testing.assert_close(found.step_LD, without.step_LD)


@pytest.mark.parametrize(("times", "is_left_out"), [(4.5, False), (5.5, True)])
def test_a_token_is_massive_from_five_times_the_usual_rms_on(
    times: float, is_left_out: bool
) -> None:
    codec = LevelCodec(step=1 / 16)
    hidden = normal(500).sign()  # so that every token has the same
    without = codec.calibrate(hidden[1:])
    hidden[0] *= times
    found = codec.calibrate(hidden)
    assert torch.allclose(found.step_LD, without.step_LD) == is_left_out


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
def test_a_token_that_is_not_finite_does_not_spoil_the_calibration(value: float) -> None:
    codec = LevelCodec(step=1 / 16)
    hidden = normal(500)
    without = codec.calibrate(hidden[1:])
    hidden[0, :, 3] = value
    found = codec.calibrate(hidden)
    torch.testing.assert_close(found.mean_LD, without.mean_LD)
    torch.testing.assert_close(found.step_LD, without.step_LD)


@pytest.mark.parametrize("value", [0.0, 1.0, -29_000.0], ids=str)
def test_a_constant_channel_is_kept_and_may_still_move_later(value: float) -> None:
    codec = LevelCodec(step=1 / 16)
    hidden = normal(200)
    hidden[:, :, 4] = value
    calibration = codec.calibrate(hidden)
    assert (calibration.step_LD > 0).all()
    found = round_trip(codec, hidden, calibration)
    assert np.allclose(found[:, :, 4].float(), value, rtol=2**-8, atol=1e-3)
    hidden[9, 1, 4] = value + 2.0
    found = round_trip(codec, hidden, calibration)
    assert found[9, 1, 4] == hidden[9, 1, 4]


def test_states_that_are_all_zero_calibrate_to_positive_steps() -> None:
    codec = LevelCodec(step=1 / 16)
    hidden = torch.zeros(70, 2, 32, dtype=torch.bfloat16)
    calibration = codec.calibrate(hidden)
    assert (calibration.step_LD > 0).all()
    assert torch.equal(round_trip(codec, hidden, calibration), hidden)


@each_codec
def test_the_same_states_give_the_same_bytes_in_any_thread(codec: Codec) -> None:
    packed = codec.pack(normal(CHUNK_TOKENS, 4, 512), codec.calibrate(normal(500, 4, 512)))
    chunk = packed.planes_PTW[0].numpy()
    found: list[tuple[bytes, int]] = []
    thread = threading.Thread(target=lambda: found.append(encode_chunk(chunk)))
    thread.start()
    thread.join()
    assert found == [encode_chunk(chunk.copy())]


@pytest.mark.parametrize(("step", "width"), [(1 / 32, 8), (1 / 16, 8), (1 / 2, 4)])
def test_levels_of_normal_values_take_the_bits_that_theory_says(step: float, width: int) -> None:
    codec = LevelCodec(step=step, bits=width)
    hidden = normal(CHUNK_TOKENS, 4, 512)
    packed = codec.pack(hidden, codec.calibrate(normal(1000, 4, 512, seed=1)))
    size = sum(len(encode_chunk(plane)[0]) for plane in packed.planes_PTW.numpy())
    assert 8 * size / hidden.numel() == pytest.approx(2.05 + math.log2(1 / step), rel=0.03)


def test_lossless_stores_normal_values_in_the_share_of_the_study() -> None:
    hidden = normal(CHUNK_TOKENS, 4, 2048)
    planes = LosslessCodec().pack(hidden, None).planes_PTW.numpy()
    size = sum(len(encode_chunk(plane)[0]) for plane in planes)
    assert 0.64 < size / hidden.nbytes < 0.72


@each_codec
@pytest.mark.parametrize("num_layers", [1, 3])
def test_a_sample_of_no_special_shape_round_trips(codec: Codec, num_layers: int) -> None:
    hidden = normal(130, num_layers, 24)
    calibration = codec.calibrate(hidden)
    packed = codec.pack(hidden, calibration)
    num_planes, width = codec.plane_shape(num_layers, 24)
    assert packed.planes_PTW.shape == (num_planes, 130, width)
    assert packed.planes_PTW.dtype == torch.uint8
    assert packed.values_per_token == num_layers * 24
    assert torch.equal(through_bytes(packed).planes_PTW, packed.planes_PTW)


@each_codec
def test_states_that_are_not_contiguous_are_packed_as_if_they_were(codec: Codec) -> None:
    wide = normal(64, 4, 32)
    wide[3, 2, 1] = 29_000.0
    layers_first = wide.transpose(0, 1).contiguous().transpose(0, 1)
    for hidden in (wide[:, ::2], layers_first):
        assert not hidden.is_contiguous()
        calibration = codec.calibrate(hidden)
        found = codec.pack(hidden, calibration)
        expected = codec.pack(hidden.contiguous(), calibration)
        for name in ("planes_PTW", "outlier_position", "outlier_bits"):
            assert torch.equal(getattr(found, name), getattr(expected, name))


def stored_chunk(codec: Codec) -> tuple[bytes, int, np.ndarray]:
    """One stored chunk, its checksum, and an array to decode it into."""
    hidden = normal(CHUNK_TOKENS, 2, 16)
    plane = codec.pack(hidden, codec.calibrate(hidden)).planes_PTW[0].numpy()
    return *encode_chunk(plane), np.empty_like(plane)


@each_codec
def test_a_flipped_bit_anywhere_in_a_chunk_is_found(codec: Codec) -> None:
    data, crc, out = stored_chunk(codec)

    @settings(max_examples=300)
    @given(st.integers(0, 8 * len(data) - 1))
    def check(bit: int) -> None:
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ShardCorruptError, match=r"^shard 7, chunk 3: checksum differs"):
            decode_chunk(np.frombuffer(damaged, np.uint8), crc, out, "shard 7, chunk 3")

    check()


@each_codec
def test_a_chunk_cut_short_or_run_on_is_found(codec: Codec) -> None:
    data, crc, out = stored_chunk(codec)
    for damaged in (b"", data[:3], data[:4], data[:-1], data[1:], data + b"\0", data[-4:]):
        with pytest.raises(ShardCorruptError):
            decode_chunk(np.frombuffer(damaged, np.uint8), crc, out, "here")


@each_codec
def test_an_intact_chunk_in_the_place_of_another_is_found(codec: Codec) -> None:
    data, _, out = stored_chunk(codec)
    _, other_crc = encode_chunk(np.ones_like(out))
    with pytest.raises(ShardCorruptError, match="checksum differs"):
        decode_chunk(np.frombuffer(data, np.uint8), other_crc, out, "here")


@each_codec
def test_bytes_with_a_right_checksum_that_are_no_chunk_are_refused(codec: Codec) -> None:
    _, _, out = stored_chunk(codec)
    larger, crc = encode_chunk(np.zeros((2 * len(out), *out.shape[1:]), out.dtype))
    with pytest.raises(ShardCorruptError, match="here: does not decode"):
        decode_chunk(np.frombuffer(larger, np.uint8), crc, out, "here")
    noise = b"no frame of any compressor"
    crc = checksum(noise)
    with pytest.raises(ShardCorruptError, match="here: does not decode"):
        decode_chunk(np.frombuffer(noise + crc.to_bytes(4, "little"), np.uint8), crc, out, "here")


@each_codec
def test_a_codec_is_what_its_dict_says(codec: Codec) -> None:
    assert codec_from_dict(codec.to_dict()) == codec


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({}, id="empty"),
        pytest.param({"name": "gzip"}, id="unknown"),
        pytest.param({"name": "lossless", "level": 1}, id="further-setting"),
        pytest.param({"name": "levels"}, id="no-step"),
        pytest.param({"name": "levels", "step": 0.0}, id="step-of-zero"),
        pytest.param({"name": "levels", "step": 1.5}, id="step-too-wide"),
        pytest.param({"name": "levels", "step": math.nan}, id="step-nan"),
        pytest.param({"name": "levels", "step": "fine"}, id="step-as-text"),
        pytest.param({"name": "levels", "step": 0.5, "bits": 2}, id="bits-unknown"),
        pytest.param({"name": "levels", "step": 0.5, "bits": 8}, id="bits-not-canonical"),
        pytest.param({"name": "levels", "step": 1.5, "bits": 4}, id="bits-and-step-too-wide"),
    ],
)
def test_an_unknown_codec_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(CacheIncompatibleError, match=r"codec \{.*\} is unknown to this version"):
        codec_from_dict(fields)


@pytest.mark.parametrize("step", [0.0, -1.0, 1.01, math.nan], ids=str)
def test_a_step_outside_zero_to_one_is_refused(step: float) -> None:
    with pytest.raises(ValueError, match=r"step must be in \(0, 1\]"):
        LevelCodec(step=step)


@pytest.mark.parametrize("width", [0, 2, 16])
def test_levels_of_another_width_are_refused(width: int) -> None:
    with pytest.raises(ValueError, match="bits must be 4 or 8"):
        LevelCodec(step=0.5, bits=width)


@each_codec
def test_a_chunk_that_the_compressors_cannot_take_is_refused_with_its_size(codec: Codec) -> None:
    check_chunk_bytes(codec, 80, 65_536)  # larger than any model
    per_element = CHUNK_TOKENS
    per_channel = 2 // codec.plane_shape(1, 2)[1]
    largest = (2**31 - 1 - 2**20) // per_element
    check_chunk_bytes(codec, 1, largest * per_channel)
    size, channels = (largest + 1) * per_element, (largest + 1) * per_channel
    message = f"1 layers x {channels} channels has {size:,} bytes, .* Capture fewer layers"
    with pytest.raises(CacheIncompatibleError, match=message):
        check_chunk_bytes(codec, 1, channels)
