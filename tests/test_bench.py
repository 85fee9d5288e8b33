"""The benchmark runs and its figures are sane, on states of tiny random models."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from shared.codec import PRESETS
from tests.bench import step
from tests.bench.__main__ import gpu_table, step_table
from tests.bench.codecs import calibrated, measure_sizes, measure_speed, noise
from tests.bench.gpu import GpuShape, large_shapes, measure_gpu, model_flops
from tests.bench.layouts import OURS, OURS_BFLOAT16, RAW, Ours, all_layouts
from tests.bench.peers.stamps import Stamps, start_from
from tests.bench.reads import breakeven, measure_reads
from tests.bench.states import States, random_states, widened
from tests.test_shared.made import bits
from trainer.drafter import Drafter
from trainer.recipe import DrafterConfig


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


def timed(*, seconds: float, loss: float = 38.0, parameters: int = 7) -> dict[str, Any]:
    """What a trainer writes of four steps and the two before them that do not count."""
    return {
        "wall_seconds": [9.0, *[2 * seconds] * 4],
        "cpu_seconds": [9.0, *[seconds] * 4],
        "losses": [loss, *[20.0] * 5],
        "peak_bytes": 10**9,
        "version": "1.0",
        "num_parameters": parameters,
        "loss_scale": 1.0,
    }


@pytest.mark.parametrize(
    ("peer", "message"),
    [
        ({"parameters": 8}, "specforge trains 8 parameters, ours 7"),
        ({"loss": 50.0}, "specforge starts at a loss of 50.00, ours at 38.00"),
        ({}, None),
    ],
)
def test_steps_are_compared_only_where_the_work_is_the_same(
    peer: dict[str, Any], message: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = {
        "ours": timed(seconds=1.0),
        "specforge": timed(seconds=1.5, **peer),
    }
    order = []

    def run(name: str, *given: Any) -> dict[str, Any]:
        order.append(name)
        return runs[name]

    monkeypatch.setattr(step, "_run", run)
    monkeypatch.setattr(step, "step_data", lambda *given, **named: None)
    monkeypatch.setattr(step, "absent_peers", lambda: ["speculators"])
    if message is not None:
        with pytest.raises(RuntimeError, match=message):
            step.measure_step(tmp_path, rounds=1, steps=4, shape=step.Shape())
        return
    rows = step.measure_step(tmp_path, rounds=2, steps=4, shape=step.Shape())
    assert order == ["ours", "specforge", "specforge", "ours"]
    assert [row.cpu_seconds for row in rows] == [1.0, 1.5]
    assert [row.num_steps for row in rows] == [8, 8]
    assert rows[0].tokens_per_second == 512
    table = step_table(rows, step.Shape())
    assert "ours takes 1/1.50 of the CPU time of specforge" in table
    assert "1.50 times the tokens/s" in table


def test_stamps_are_differences_between_steps(tmp_path: Path) -> None:
    stamps = Stamps()
    for loss in (3.0, 2.0, 1.5):
        stamps.add(loss)
    stamps.write(str(tmp_path / "result.json"), loss_scale=2.0)
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["losses"] == [3.0, 2.0, 1.5]
    assert len(result["wall_seconds"]) == len(result["cpu_seconds"]) == 2
    assert min(result["wall_seconds"]) >= 0
    assert result["peak_bytes"] > 2**20
    assert result["loss_scale"] == 2.0


def test_trainers_start_only_from_weights_of_their_own_shape(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    wanted = {"weight": torch.ones(2, 3), "bias": torch.zeros(2)}
    save_file(wanted, tmp_path / "weights.safetensors")
    assert start_from(model, str(tmp_path / "weights.safetensors")) == 8
    assert torch.equal(model.weight, wanted["weight"])
    with pytest.raises(ValueError, match="not the same drafter"):
        start_from(torch.nn.Linear(3, 4), str(tmp_path / "weights.safetensors"))


def test_figures_of_large_drafters_are_sane() -> None:
    """On the CPU in the GPU's place, with a small drafter of the same configuration."""
    large = large_shapes()[0].config
    drafter = replace(
        large.drafter,
        mask_token_id=499,
        num_layers=2,
        intermediate_size=128,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
    )
    config = replace(
        large,
        drafter=drafter,
        anchors=replace(large.anchors, per_sample=8, per_forward=16),
        sampler=replace(large.sampler, tokens_per_batch=240, bucket_edges=()),
    )
    shape = GpuShape(name="small", config=config, hidden_size=64, vocab_size=500, num_layers=2)
    rows = measure_gpu(shape, torch.device("cpu"), samples=(1, 4), rounds=1)
    assert [(row.num_tokens, row.num_anchors) for row in rows] == [(240, 8), (240, 32)]
    assert all(row.step_seconds > 0 and row.expected_bytes > 0 for row in rows)
    assert rows[0].utilisation is None
    assert "small" in gpu_table(rows, "a CPU")


def test_model_flops_are_those_counted_by_hand() -> None:
    large = large_shapes()[0]
    own = DrafterConfig(
        mask_token_id=9,
        num_layers=1,
        block_size=8,
        intermediate_size=8,
        num_heads=2,
        num_kv_heads=1,
        head_dim=4,
        rope_theta=1e4,
    )
    shape = GpuShape(
        name="tiny",
        config=replace(large.config, drafter=own),
        hidden_size=8,
        vocab_size=10,
        num_layers=3,
    )
    drafter = Drafter(own, 8, 24, torch.Generator().manual_seed(0))
    batch = SimpleNamespace(
        num_tokens=6,
        anchor_A=torch.tensor([1, 4]),
        anchor_valid_A=torch.tensor([True, True]),
        document_S=torch.zeros(6, dtype=torch.int64),
    )
    fc = 4 * 6 * (24 * 8)
    keys_of_context = 6 * 6 * (2 * 8 * 4)
    layer = 6 * 16 * (8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 8)  # q, k and v, o, the three of the MLP
    head = 4 * (2 * 7) * 8 * 10
    attention = 12 * (8 * (1 + 8) + 8 * (4 + 8)) * 2 * 4  # 8 slots see 9 keys, 8 see 12
    assert model_flops(shape, drafter, batch) == fc + keys_of_context + layer + head + attention
