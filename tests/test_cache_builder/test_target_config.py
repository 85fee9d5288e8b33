"""The target's configuration files: what others wrote into them stops nothing, or says why."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from cache_builder.config import DataConfig, TargetConfig
from cache_builder.gguf import RECORD
from cache_builder.target_config import load_config
from cache_builder.target_files import describe_target
from cache_builder.tokens import describe_tokens, load_template
from shared.errors import TargetError
from shared.spec import TargetSpec

CONFIG = TargetConfig(path="-")


@pytest.fixture
def target(tiny_target: Path, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_target, tmp_path / "target")


def change(file: Path, **fields: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def described(target: Path, **fields: Any) -> TargetSpec:
    change(target / "config.json", **fields)
    return describe_target(target, CONFIG)


def test_infinity_in_a_config_is_described(target: Path) -> None:
    """State-space models have `time_step_limit: [0.0, Infinity]`, in one of two spellings."""
    plain = described(target)
    infinite = described(target, time_step_limit=[0.0, float("inf")])
    assert "Infinity]" in (target / "config.json").read_text()
    assert infinite == described(target, time_step_limit=[0.0, {"__float__": "Infinity"}])
    others = [
        described(target, time_step_limit=[0.0, limit])
        for limit in (1.0, float("-inf"), float("nan"))
    ]
    assert len({s.config_sha256 for s in (plain, infinite, *others)}) == 5


def test_infinity_in_a_tokenizer_config_is_described(target: Path) -> None:
    config = DataConfig(sources=("-",), max_length=64)
    change(target / "tokenizer_config.json", model_max_length=float("inf"))
    template = load_template(target, config)
    tokens = describe_tokens(target, config, template, load_config(target))
    change(target / "tokenizer_config.json", model_max_length=64)
    assert describe_tokens(target, config, template, load_config(target)) != tokens


def test_a_config_of_something_else_is_refused(target: Path) -> None:
    (target / "config.json").write_text('{"model_type": "vit"}')
    with pytest.raises(TargetError, match=r"no vocab_size \(model_type 'vit'\)"):
        load_config(target)


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "cannot be read as JSON"), ("[1]", "expected a JSON object, found list")],
    ids=["half", "list"],
)
def test_damaged_files_of_the_target_are_one_line(target: Path, text: str, message: str) -> None:
    (target / "generation_config.json").write_text(text)
    config = DataConfig(sources=("-",), max_length=64)
    with pytest.raises(TargetError, match=rf"generation_config\.json: {message}"):
        load_template(target, config)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        pytest.param({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8", id="fp8"),
        pytest.param({"quant_method": "gptq", "bits": 4, "group_size": 128}, "gptq", id="gptq"),
        pytest.param(
            {"load_in_4bit": True, "quant_method": "bitsandbytes"}, "bitsandbytes", id="bnb"
        ),
    ],
)
def test_quantization_by_config_is_recorded(
    target: Path, fields: dict[str, Any], expected: str
) -> None:
    plain = describe_target(target, CONFIG)
    found = described(target, quantization_config=fields)
    assert (plain.quantization, found.quantization) == (None, expected)
    assert found.config_sha256 != plain.config_sha256
    other = described(target, quantization_config={**fields, "bits": 3})
    assert other.config_sha256 != found.config_sha256


def test_quantization_before_a_conversion_from_gguf_is_recorded(target: Path) -> None:
    (target / RECORD).write_text('{"file": "a.gguf", "sha256": "0", "quantization": "Q4_1"}')
    assert describe_target(target, CONFIG).quantization == "gguf Q4_1"
    (target / RECORD).write_text("{")
    with pytest.raises(TargetError, match=r"source\.json: cannot be read as JSON"):
        describe_target(target, CONFIG)
