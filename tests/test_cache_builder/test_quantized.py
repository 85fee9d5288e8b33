"""A target that its configuration says is quantized: recorded as that, and computed as loaded."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from cache_builder.config import TargetConfig
from cache_builder.target import Target
from cache_builder.target_files import describe_target
from tests.test_cache_builder.models import Architecture, build
from tests.test_cache_builder.test_target import ids

BLOCK = 128
CONFIG = TargetConfig(path="-")


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """As DeepSeek and Qwen publish FP8: one scale for each square of 128 x 128."""
    squares = weight.float().unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
    scale = squares.abs().amax((1, 3), keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
    values = (squares / scale).reshape(weight.shape).to(torch.float8_e4m3fn)
    return values, scale[:, 0, :, 0].contiguous()


@pytest.mark.skipif(torch.cuda.is_available(), reason="transformers would take GPU kernels")
def test_an_fp8_target_is_captured_as_the_weights_it_stands_for(tmp_path: Path) -> None:
    shape = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_key_value_heads": 4}
    build(Architecture("llama", shape)).save_pretrained(tmp_path / "plain")
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    quantized, rounded = {}, {}
    for name, weight in plain.items():
        if not name.endswith("proj.weight"):
            quantized[name] = rounded[name] = weight.bfloat16()
            continue
        values, scale = quantize(weight)
        quantized[name], quantized[f"{name}_scale_inv"] = values, scale
        wide = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        rounded[name] = (values.float() * wide).bfloat16()
        assert not torch.equal(rounded[name], weight.bfloat16())
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "weight_block_size": [BLOCK, BLOCK],
        "activation_scheme": "dynamic",
        "modules_to_not_convert": ["lm_head"],
    }
    path = tmp_path / "fp8"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    save_file(quantized, path / "model.safetensors", {"format": "pt"})

    spec = describe_target(path, CONFIG)
    assert (spec.quantization, spec.dtype) == ("fp8", "bfloat16")
    target = Target.load(path, CONFIG, (1, 3), "post_norm", "cpu")
    head = target.head(ids(20))
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.bfloat16)
    reference.load_state_dict(rounded)
    own = Target(reference.eval(), (1, 3), torch.device("cpu"), "post_norm")
    assert torch.equal(target.capture([ids(33)])[0], own.capture([ids(33)])[0])
    assert torch.equal(head.lm_head_VD, own.head(ids(20)).lm_head_VD)
