"""Products are of the type that the device has units for, and a run keeps its own."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shared.errors import RunError
from trainer import precision
from trainer.config import StepConfig, TrainConfig
from trainer.evaluate import evaluate_run
from trainer.precision import has_bfloat16_units
from trainer.run import Run
from trainer.session import Session
from trainer.train import train

MakeTrain = Callable[..., TrainConfig]
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("machine", "avx512_bf16", "amx", "onednn", "expected"),
    [
        pytest.param("x86_64", True, False, True, True, id="zen-4"),
        pytest.param("AMD64", True, True, True, True, id="sapphire-rapids"),
        pytest.param("x86_64", False, False, True, False, id="avx512-alone"),
        pytest.param("x86_64", False, False, False, False, id="avx2"),
        pytest.param("aarch64", False, False, True, True, id="arm"),
        pytest.param("aarch64", False, False, False, False, id="old-arm"),
    ],
)
def test_units_of_a_cpu(
    monkeypatch: pytest.MonkeyPatch,
    machine: str,
    avx512_bf16: bool,
    amx: bool,
    onednn: bool,
    expected: bool,
) -> None:
    """What torch is asked is private to it: it must be there, and answer."""
    assert type(has_bfloat16_units(CPU)) is bool
    monkeypatch.setattr(precision.platform, "machine", lambda: machine)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512_bf16)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    assert type(has_bfloat16_units(CPU)) is bool
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: onednn)
    assert has_bfloat16_units(CPU) is expected


@pytest.mark.parametrize(("has_units", "taken"), [(True, "bfloat16"), (False, "float32")])
def test_a_run_keeps_the_type_that_it_took(
    tiny_train: MakeTrain,
    tiny_cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    has_units: bool,
    taken: str,
) -> None:
    """On another machine it goes on in the same type or not at all."""
    config = tiny_train(tmp_path, tiny_cache, train=StepConfig(steps=2, device="cpu"))
    assert config.train.compute_dtype == "auto"
    monkeypatch.setattr(precision, "has_bfloat16_units", lambda device: has_units)
    caplog.set_level("INFO")
    train(config)
    assert f"train.compute_dtype 'auto' takes {taken}: cpu has" in caplog.text
    run = Run(tmp_path)
    assert run.config().train.compute_dtype == taken
    dtype = getattr(torch, taken)
    assert Session.open(config).head.lm_head_VD.dtype is dtype
    found = evaluate_run(run, cache=None, max_samples=None)
    monkeypatch.setattr(precision, "has_bfloat16_units", lambda device: not has_units)
    assert evaluate_run(run, cache=None, max_samples=None) == found
    with pytest.raises(RunError, match=rf"train\.compute_dtype: '{taken}' before, '.*' now"):
        train(config)
    train(replace(config, train=replace(config.train, compute_dtype=taken)))  # type: ignore[arg-type]


@pytest.mark.parametrize("has_units", [True, False])
def test_bfloat16_without_units_is_warned_of(
    tiny_train: MakeTrain,
    tiny_cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    has_units: bool,
) -> None:
    step = StepConfig(steps=1, device="cpu", compute_dtype="bfloat16")
    monkeypatch.setattr("trainer.announce.has_bfloat16_units", lambda device: has_units)
    train(tiny_train(tmp_path, tiny_cache, train=step))
    assert ("cpu has no units for it" in caplog.text) is not has_units
