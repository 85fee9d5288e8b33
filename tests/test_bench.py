"""The benchmark runs and its figures are sane, on states of tiny random models."""

from pathlib import Path

import pytest
import torch

from shared.codec import PRESETS
from tests.bench.codecs import calibrated, measure_sizes, measure_speed, noise
from tests.bench.layouts import OURS, OURS_BFLOAT16, RAW, Ours, all_layouts
from tests.bench.reads import breakeven, measure_reads
from tests.bench.states import States, random_states, widened
from tests.test_shared.made import bits


@pytest.fixture(scope="module")
def models() -> list[States]:
    return list(random_states(300, hidden_size=64))


def test_codec_figures_are_sane(models: list[States]) -> None:
    for states in models:
        rows = {row.codec: row for row in measure_sizes(states)}
        ratios = [row.ratio for row in rows.values()]
        assert ratios == sorted(ratios, reverse=True)
        assert ratios[0] < 1
        assert max(rows["lossless"].errors.normalised) == 0
        steps_of = {"step 1/16": 16, "step 1/8": 8, "step 1/4": 4, "1/2 in pairs": 2}
        for name, steps in steps_of.items():
            expected = 1 / steps / 12**0.5
            assert rows[name].errors.normalised == pytest.approx(
                [expected] * states.hidden_TLD.shape[1], rel=0.2
            )
        assert all(value > 0 for value in noise(states).normalised)
    for row in measure_speed(models[0], num_tokens=200, repeats=1):
        assert min(row.pack, row.encode, row.decode, row.decode_bfloat16) > 0


def test_massive_activations_are_there_and_exact(models: list[States]) -> None:
    codec = PRESETS["balanced"]
    for states in models:
        calibration = calibrated(codec, states)
        _, hidden_TLD = states.samples[0]
        packed = codec.pack(hidden_TLD, calibration)
        position = packed.outlier_position
        assert len(position)
        decoded = codec.unpack(packed, calibration).flatten()
        assert torch.equal(decoded[position], hidden_TLD.flatten()[position])


def test_layouts_read_back_what_was_written(models: list[States], tmp_path: Path) -> None:
    states = models[0]
    for layout in all_layouts(tmp_path):
        layout.write(states)
        layout.open()
        for number, (ids, hidden_TLD) in enumerate(states.samples):
            found_ids, read = layout.read(number)
            expected = hidden_TLD
            for name in ("balanced", "small"):
                if name in layout.name:
                    codec = PRESETS[name]
                    calibration = calibrated(codec, states)
                    expected = codec.unpack(codec.pack(hidden_TLD, calibration), calibration)
            assert found_ids.tolist() == ids.tolist()
            assert bits(layout.states(read)).tolist() == bits(expected).tolist(), layout.name
        if isinstance(layout, Ours):
            assert 0 < layout.bytes_asked(range(len(states.samples))) <= layout.stored_bytes
        layout.close()


def test_read_figures_are_sane(models: list[States], tmp_path: Path) -> None:
    rows = {
        row.layout: row
        for row in measure_reads(widened(models[1], 100), tmp_path, rounds=1, cold_rounds=1)
    }
    assert rows[RAW].ratio == pytest.approx(1, rel=0.1)
    for row in rows.values():
        rates = (row.warm_random, row.warm_sequential, row.cold_random, row.cold_sequential)
        assert min(rates) > 0
    for name in (OURS, OURS_BFLOAT16):
        serial, overlapped = breakeven(rows[name], rows[RAW])
        assert serial > 0
        assert overlapped == rows[name].warm_random
