"""Taps see the output of the block they name, nothing above the last one runs."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from cache_builder.config import TargetConfig
from cache_builder.decoder import Decoder, default_layer_ids
from cache_builder.quality import find_fault
from cache_builder.target import Target, describe_target, resolve_target
from shared.errors import TargetError

CPU = torch.device("cpu")


def tiny(model_type: str, **extra: object) -> torch.nn.Module:
    torch.manual_seed(0)
    common: dict[str, object] = {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "initializer_range": 0.2,
    }
    config = AutoConfig.for_model(model_type, **{**common, **extra})
    return AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)


MODELS = [
    pytest.param("llama", {}, id="llama"),
    pytest.param("qwen3", {}, id="qwen3"),
    pytest.param(
        "qwen3_moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
        id="mixture-of-experts",
    ),
    pytest.param(
        "gemma3_text",
        {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"] * 2},
        id="sliding-window",
    ),
    pytest.param(
        "qwen3_5_text",
        {
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "linear_conv_kernel_dim": 4,
            "full_attention_interval": 4,
        },
        id="hybrid-linear-attention",
    ),
    pytest.param("gpt2", {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 512}, id="gpt2"),
]


def ids(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, 512, length).astype(np.int32)


def hook_states(model: torch.nn.Module, token_ids: np.ndarray, layers: Sequence[int]) -> Tensor:
    """States of one unpadded sample by hooks of its own, float32 [T, L, D]."""
    seen: dict[int, Tensor] = {}
    blocks = Decoder.find(model).layers
    handles = [
        blocks[k].register_forward_hook(
            lambda module, inputs, out, k=k: seen.__setitem__(
                k, out if torch.is_tensor(out) else out[0]
            )
        )
        for k in layers
    ]
    with torch.inference_mode():
        model(input_ids=torch.from_numpy(token_ids).long()[None], use_cache=False)
    for handle in handles:
        handle.remove()
    return torch.stack([seen[k][0] for k in layers], dim=1)


@pytest.mark.parametrize(("model_type", "extra"), MODELS)
def test_batched_states_equal_an_unpadded_single_run(
    model_type: str, extra: dict[str, object]
) -> None:
    model = tiny(model_type, **extra)
    batch = [ids(40), ids(17, 1), ids(3, 2)]
    expected = [hook_states(model, sample, (1, 3)) for sample in batch]
    target = Target(model, (1, 3), CPU)
    for states, single in zip(target.capture(batch), expected, strict=True):
        assert states.shape == (len(single), 2, 64)
        assert states.dtype == torch.bfloat16
        # One unit in the last place of bfloat16: the float32 sums differ by 1e-6 of the values.
        torch.testing.assert_close(states.float(), single, rtol=2**-7, atol=1e-3)


def test_a_single_unpadded_sample_is_captured_bit_for_bit() -> None:
    model = tiny("qwen3").to(torch.bfloat16)
    sample = ids(33)
    expected = hook_states(model, sample, (0, 2))
    (states,) = Target(model, (0, 2), CPU).capture([sample])
    assert torch.equal(states, expected)


def test_layer_k_is_the_output_of_block_k() -> None:
    model = tiny("llama")
    for number, block in enumerate(Decoder.find(model).layers):
        block.register_forward_hook(
            lambda module, inputs, output, number=number: torch.full_like(output, number + 1.0)
        )
    (states,) = Target(model, (0, 2), CPU).capture([ids(5)])
    assert states[:, 0].unique().tolist() == [1.0]
    assert states[:, 1].unique().tolist() == [3.0]


def test_nothing_above_the_last_tap_is_run() -> None:
    model = tiny("llama")
    target = Target(model, (0, 1), CPU)
    ran = []
    decoder = Decoder.find(model)
    for name, module in [
        *((f"block {i}", block) for i, block in enumerate(decoder.layers)),
        ("final norm", decoder.final_norm),
        ("head", decoder.lm_head),
    ]:
        module.register_forward_hook(lambda *_, name=name: ran.append(name))
    target.capture([ids(5)])
    assert ran == ["block 0"]  # block 1 is cut by the tap's own hook, which comes first


@pytest.mark.parametrize("layer_ids", [(-1,), (4,), ()], ids=["negative", "too-high", "none"])
def test_taps_outside_the_model_are_refused(layer_ids: tuple[int, ...]) -> None:
    with pytest.raises(TargetError, match=r"blocks 0\.\.3"):
        Target(tiny("llama"), layer_ids, CPU)


def test_default_taps_follow_the_published_rule() -> None:
    assert default_layer_ids(64, 5) == (1, 16, 31, 46, 61)
    assert default_layer_ids(36, 5) == (1, 9, 17, 25, 33)
    assert default_layer_ids(30, 5) == (1, 8, 14, 20, 27)
    assert default_layer_ids(8, 1) == (4,)


@pytest.mark.parametrize(("num_layers", "num_taps"), [(1, 2), (2, 5), (3, 5), (5, 5)])
def test_too_shallow_targets_are_refused_not_given_repeated_taps(
    num_layers: int, num_taps: int
) -> None:
    with pytest.raises(TargetError, match=r"capture\.target_layer_ids"):
        default_layer_ids(num_layers, num_taps)


def test_head_tensors_give_the_targets_logits() -> None:
    model = tiny("qwen3").to(torch.bfloat16)
    decoder = Decoder.find(model)
    head = Target(model, (0,), CPU).head(ids(4))
    assert not head.is_tied
    assert torch.equal(head.embedding_VD, decoder.embedding.weight)
    assert torch.equal(head.lm_head_VD, decoder.lm_head.weight)
    assert torch.equal(head.final_norm_D, decoder.final_norm.weight)


def test_a_tied_head_is_stored_once() -> None:
    head = Target(tiny("llama", tie_word_embeddings=True), (0,), CPU).head(ids(4))
    assert head.is_tied


def test_a_target_is_known_by_its_content_not_its_path(tiny_target: Path, tmp_path: Path) -> None:
    import shutil

    config = TargetConfig(path="-")
    moved = tmp_path / "moved"
    shutil.copytree(tiny_target, moved)
    assert describe_target(moved, config) == describe_target(tiny_target, config)
    text = (moved / "config.json").read_text()
    (moved / "config.json").write_text(
        text.replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05')
    )
    assert describe_target(moved, config) != describe_target(tiny_target, config)


def test_a_missing_target_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match=r"target\.path"):
        resolve_target(TargetConfig(path=str(tmp_path / "nothing")))
    with pytest.raises(TargetError, match=r"no config\.json"):
        resolve_target(TargetConfig(path=str(tmp_path)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(lambda x: x, None, id="healthy"),
        pytest.param(lambda x: x.index_fill(1, torch.tensor([1]), 0.0), "all zero", id="zero"),
        pytest.param(
            lambda x: x.index_fill(1, torch.tensor([1]), 2.0), "same at every token", id="constant"
        ),
        pytest.param(
            lambda x: x.masked_fill(torch.arange(6).view(1, 1, 6) == 3, torch.nan),
            "not finite",
            id="nan",
        ),
        pytest.param(lambda x: x * torch.inf, "not finite", id="infinite"),
    ],
)
def test_unusable_states_are_named(change: object, message: str | None) -> None:
    states = torch.randn(5, 2, 6, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    assert callable(change)
    fault = find_fault(change(states), ("block 4", "block 9"))
    assert (fault is None) == (message is None)
    if message is not None:
        assert fault is not None
        assert message in fault
        assert "block 4" in fault or "block 9" in fault
