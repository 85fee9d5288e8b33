"""Taps see the output of the block they name, nothing above the last one runs."""

import gc
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import ref

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from cache_builder import target
from cache_builder.build import build
from cache_builder.config import TargetConfig
from cache_builder.quality import find_fault
from cache_builder.taps import default_layer_ids
from cache_builder.target import Target, load_model
from cache_builder.target_files import describe_target, resolve_target
from shared.cache import Cache
from shared.decoder import Decoder
from shared.errors import CacheIncompatibleError, TargetError
from shared.spec import LastHidden
from tests.test_shared.made import CODECS, make_spec

CPU = torch.device("cpu")
CONFIG = TargetConfig(path="-", dtype="float32")


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


def test_a_single_unpadded_sample_is_captured_bit_for_bit() -> None:
    model = tiny("qwen3").to(torch.bfloat16)
    sample = ids(33)
    expected = hook_states(model, sample, (0, 2))
    (states,) = Target(model, (0, 2), CPU).capture([sample])
    assert torch.equal(states, expected)


@pytest.mark.parametrize("last_hidden", ["none", "post_norm"])
def test_states_under_the_hooks_of_several_devices_are_the_same_bits(
    last_hidden: LastHidden,
) -> None:
    """accelerate moves what goes into each block, here to where it is. Twice: the last tap unwinds
    the forward through the hooks."""
    from accelerate import dispatch_model

    plain, spread = tiny("qwen3").to(torch.bfloat16), tiny("qwen3").to(torch.bfloat16)
    parts = ["model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"]
    parts += [f"model.layers.{number}" for number in range(4)]
    dispatch_model(spread, dict.fromkeys(parts, "cpu"), main_device="cpu", force_hooks=True)
    assert all(hasattr(spread.get_submodule(part), "_hf_hook") for part in parts)
    batch = [ids(40), ids(17, 1)]
    target = Target(spread, (0, 2), None, last_hidden)
    assert target.device == CPU
    expected = Target(plain, (0, 2), CPU, last_hidden)
    for _ in range(2):
        for found, states in zip(target.capture(batch), expected.capture(batch), strict=True):
            assert torch.equal(found, states)
    assert target.head(ids(20)).to_bytes() == expected.head(ids(20)).to_bytes()


def test_several_devices_are_given_to_transformers_by_their_free_memory(
    tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {}

    def refuse(path: Path, **arguments: object) -> None:
        asked.update(arguments)
        raise OSError("no GPU here")

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda name: (int(name[-1]) * 1000, 0))
    with monkeypatch.context() as patch:
        patch.setattr(AutoModelForCausalLM, "from_pretrained", refuse)
        with pytest.raises(TargetError, match="no GPU here"):
            Target.load(tiny_target, CONFIG, (0,), "none", "cuda:2", "cuda:3")
    assert asked["device_map"] == "balanced"
    assert asked["max_memory"] == {2: 1800, 3: 2700}


def test_a_target_that_its_devices_do_not_hold_is_refused(
    tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target, "_spread", lambda devices: {"device_map": {"": "cpu"}})
    with pytest.raises(TargetError, match=r"cuda:0, cuda:1 do not hold it: [0-9]+ of its weights"):
        Target.load(tiny_target, CONFIG, (0,), "none", "cuda:0", "cuda:1")


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


def test_a_forward_that_memory_does_not_hold_leaves_no_states_behind() -> None:
    model, states = tiny("llama"), []
    target = Target(model, (0, 3), CPU)
    blocks = Decoder.find(model).layers
    blocks[0].register_forward_hook(lambda module, inputs, output: states.append(ref(output)))

    def run_out(module: torch.nn.Module, inputs: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    handle = blocks[2].register_forward_pre_hook(run_out)
    with pytest.raises(torch.OutOfMemoryError):
        target.capture([ids(5)])
    gc.collect()  # the traceback that pytest has kept
    assert [state() for state in states] == [None]
    handle.remove()
    assert target.capture([ids(5)])[0].shape == (5, 2, 64)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_gives_the_states_of_a_cpu(tiny_target: Path) -> None:
    texts = [ids(30, seed=1) % 64, ids(9, seed=2) % 64]
    on_cpu, on_gpu = (
        Target.load(tiny_target, CONFIG, (0, 1), "post_norm", device)
        for device in ("cpu", "cuda:0")
    )
    for left, right in zip(on_gpu.capture(texts), on_cpu.capture(texts), strict=True):
        assert left.device.type == "cuda"
        assert (left.cpu().float() - right.float()).norm() < 0.01 * right.float().norm()


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


def test_the_head_is_a_copy_of_the_weights_in_bfloat16() -> None:
    model = tiny("qwen3").to(torch.bfloat16)
    decoder = Decoder.find(model)
    head = Target(model, (0,), CPU).head(ids(4))
    assert not head.is_tied
    assert torch.equal(head.embedding_VD, decoder.embedding.weight)
    assert torch.equal(head.lm_head_VD, decoder.lm_head.weight)
    assert torch.equal(head.final_norm_D, decoder.final_norm.weight)
    assert head.lm_head_VD.data_ptr() != decoder.lm_head.weight.data_ptr()


def test_a_tied_head_is_stored_once() -> None:
    head = Target(tiny("llama", tie_word_embeddings=True), (0,), CPU).head(ids(4))
    assert head.is_tied


def test_a_quantized_lm_head_is_refused() -> None:
    model = tiny("llama")
    lm_head = Decoder.find(model).lm_head
    lm_head.weight.data = lm_head.weight.data.to(torch.float8_e4m3fn)
    with pytest.raises(
        TargetError, match=r"LM head \(Linear\) has no plain weight .*float8_e4m3fn"
    ):
        Target(model, (0,), CPU).head(ids(4))


def test_a_vocabulary_that_is_not_that_of_the_config_is_refused() -> None:
    model = tiny("llama")
    model.config.vocab_size = 500  # type: ignore[union-attr]  # a PreTrainedModel
    with pytest.raises(TargetError, match=r"embedding is \[512, 64\], expected \[500, 64\]"):
        Target(model, (0,), CPU).head(ids(4))


@pytest.mark.parametrize("last_hidden", ["none", "post_norm"])
def test_blocks_that_carry_several_states_a_token_are_refused(last_hidden: LastHidden) -> None:
    """As hyper-connections do (DeepSeek V4)."""
    model = tiny("llama")
    last = Decoder.find(model).layers[3]
    last.register_forward_hook(
        lambda module, inputs, output: output[:, :, None].expand(1, 9, 4, 64)
    )
    Decoder.find(model).final_norm.register_forward_pre_hook(
        lambda module, inputs: inputs[0].mean(2)
    )
    with pytest.raises(
        TargetError, match=r"block 3 gave .* \[1, 9, 4, 64\], expected \[1, 9, 64\]"
    ):
        Target(model, (1, 3), CPU, last_hidden).capture([ids(9)])


def test_a_target_is_known_by_its_content_not_its_path(tiny_target: Path, tmp_path: Path) -> None:
    config = TargetConfig(path="-")
    moved = tmp_path / "moved"
    shutil.copytree(tiny_target, moved)
    assert describe_target(moved, config) == describe_target(tiny_target, config)
    text = (moved / "config.json").read_text()
    (moved / "config.json").write_text(
        text.replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05')
    )
    assert describe_target(moved, config) != describe_target(tiny_target, config)


def test_type_of_the_computation_and_quantization_are_in_the_fingerprint(tiny_target: Path) -> None:
    plain = describe_target(tiny_target, TargetConfig(path="-"))
    float32 = describe_target(tiny_target, TargetConfig(path="-", dtype="float32"))
    assert (plain.dtype, float32.dtype) == ("bfloat16", "float32")
    specs = [
        make_spec(CODECS[0], target=target)
        for target in (plain, float32, replace(plain, quantization="gguf Q4_1"))
    ]
    assert len({spec.fingerprint for spec in specs}) == 3
    with pytest.raises(CacheIncompatibleError, match=r"target\.dtype: 'float32' asked for"):
        specs[1].require_equal(specs[0], "cache")
    with pytest.raises(CacheIncompatibleError, match=r"target\.path \(quantization\)"):
        specs[2].require_equal(specs[0], "cache")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_target_computes_in_the_type_that_is_recorded(tiny_target: Path, dtype: Any) -> None:
    model = load_model(tiny_target, TargetConfig(path="-", dtype=dtype))
    assert {str(weight.dtype) for weight in model.parameters()} == {f"torch.{dtype}"}


def test_weights_that_are_not_there_are_not_random(tiny_target: Path, tmp_path: Path) -> None:
    target = shutil.copytree(tiny_target, tmp_path / "target")
    weights = load_file(target / "model.safetensors")
    del weights["model.layers.2.mlp.up_proj.weight"]
    save_file(weights, target / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        TargetError, match=r"weights lack 1 tensor of Qwen3.* \(model\.layers\.2\.mlp\.up_proj"
    ):
        load_model(target, TargetConfig(path="-"))


def test_a_truncated_weight_file_is_one_line(tiny_target: Path, tmp_path: Path) -> None:
    target = shutil.copytree(tiny_target, tmp_path / "target")
    file = target / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(TargetError, match="transformers cannot load it") as caught:
        load_model(target, TargetConfig(path="-"))
    assert "\n" not in str(caught.value)


def test_a_missing_target_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match=r"target\.path"):
        resolve_target(TargetConfig(path=str(tmp_path / "nothing")))
    with pytest.raises(TargetError, match=r"no config\.json"):
        resolve_target(TargetConfig(path=str(tmp_path)))


def test_a_target_of_the_hub_is_recorded_with_its_commit(
    tiny_target: Path, tiny_build: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the hub's client keeps it: a branch, and a snapshot by its commit."""
    commit, cached = "0123456789abcdef" * 2 + "01234567", tmp_path / "models--lab--tiny"
    shutil.copytree(tiny_target, cached / "snapshots" / commit)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    for number, revision in enumerate((None, "main")):
        config = tiny_build(tmp_path / f"cache{number}")
        config = replace(config, target=replace(CONFIG, path="lab/tiny", revision=revision))
        build(config)
        description = Cache(tmp_path / f"cache{number}").description
        assert description["target_name"] == "lab/tiny"
        assert description["target_revision"] == commit
    with pytest.raises(TargetError, match="is a directory, which has no revisions"):
        resolve_target(TargetConfig(path=str(tiny_target), revision="main"))


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
