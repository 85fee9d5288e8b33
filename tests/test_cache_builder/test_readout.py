"""What the head makes of the stored last hidden state is what the target itself says."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from cache_builder.build import build
from cache_builder.config import BuildConfig
from cache_builder.target import Target
from shared.cache import Cache
from shared.decoder import Decoder
from shared.errors import TargetError
from shared.spec import LastHidden
from tests.conftest import conversations, write_jsonl
from tests.test_cache_builder.test_target import CPU, ids, tiny

MakeBuild = Callable[..., BuildConfig]


def shaken(model_type: str, extra: dict[str, object]) -> torch.nn.Module:
    """A tiny model whose weights, those of its norms too, are random and fit bfloat16."""
    model = tiny(model_type, **extra)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in Decoder.find(model).final_norm.named_parameters():
        parameter.data += 0.5 * torch.rand(parameter.shape, generator=generator)
        assert name in ("weight", "bias")
    return model.to(torch.bfloat16).float()


def own_logits(model: torch.nn.Module, token_ids: np.ndarray) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = model(input_ids=torch.from_numpy(token_ids).long()[None]).logits[0]
    return logits


def states_and_logits(
    model: torch.nn.Module, token_ids: np.ndarray, last_hidden: LastHidden
) -> tuple[Tensor, Tensor]:
    """What goes into or comes out of the final norm, and the logits, as the target has them."""
    seen = []
    handle = Decoder.find(model).final_norm.register_forward_hook(
        lambda module, inputs, out: seen.append(inputs[0] if last_hidden == "pre_norm" else out)
    )
    logits_NV = own_logits(model, token_ids)
    handle.remove()
    return seen[-1][0], logits_NV


def test_what_the_readout_says_is_what_the_config_says() -> None:
    def readout(model_type: str, last_hidden: LastHidden, **extra: object) -> tuple[object, ...]:
        found = Target(shaken(model_type, extra), (0,), CPU, last_hidden).head(ids(20)).readout
        assert found is not None
        return found.scale, found.soft_cap, found.norm_eps, found.norm_offset

    assert readout("llama", "post_norm") == (1.0, None, None, 0.0)
    assert readout("granite", "post_norm", logits_scaling=8.0) == (1 / 8, None, None, 0.0)
    assert readout("hyperclovax", "post_norm", logits_scaling=8.0) == (8.0, None, None, 0.0)
    assert readout("gemma2", "pre_norm", final_logit_softcapping=2.0) == (1.0, 2.0, 1e-6, 1.0)
    assert readout("qwen3", "pre_norm", rms_norm_eps=1e-3) == (1.0, None, 1e-3, 0.0)


def test_logits_that_cannot_be_rebuilt_are_refused() -> None:
    model = tiny("llama")
    Decoder.find(model).lm_head.register_forward_hook(lambda module, inputs, out: out + 0.5)
    with pytest.raises(TargetError, match=r"logits are not what its LM head gives .* = 'none'"):
        Target(model, (0,), CPU, "post_norm").head(ids(20))
    assert Target(model, (0,), CPU).head(ids(20)).readout is None


def test_a_norm_that_is_called_twice_counts_the_last_time() -> None:
    """nanochat norms its embedding with the module that norms the end."""
    model = tiny("llama")
    decoder = Decoder.find(model)
    decoder.embedding.register_forward_hook(lambda module, inputs, out: decoder.final_norm(out))
    expected_NV = own_logits(model, ids(30))
    target = Target(model, (0, 2), CPU, "post_norm")
    head = target.head(ids(20)).to("cpu", torch.float32)
    (states_TLD,) = target.capture([ids(30)])
    torch.testing.assert_close(head.logits(states_TLD[:, 2]), expected_NV, rtol=0.02, atol=0.05)


@pytest.mark.parametrize("last_hidden", ["pre_norm", "post_norm"])
def test_the_blocks_are_the_same_and_the_lm_head_is_not_run(last_hidden: LastHidden) -> None:
    model = tiny("qwen3")
    batch = [ids(40), ids(17, 1), ids(3, 2)]
    alone = Target(model, (0, 2), CPU).capture(batch)
    model = tiny("qwen3")
    ran = []
    Decoder.find(model).lm_head.register_forward_hook(lambda *_: ran.append("head"))
    for states_TLD, blocks_TLD in zip(
        Target(model, (0, 2), CPU, last_hidden).capture(batch), alone, strict=True
    ):
        assert torch.equal(states_TLD[:, :2], blocks_TLD)
        assert states_TLD.shape == (len(blocks_TLD), 3, 64)
    assert not ran


def test_a_cache_of_the_real_target_gives_its_logits_to_the_bit(
    target_dir: Path, tiny_build: MakeBuild, tmp_path: Path
) -> None:
    data = write_jsonl(tmp_path / "rows.jsonl", conversations(range(2)))
    config = tiny_build(
        tmp_path / "cache", preset="lossless", data=[data], layer_ids=(8,), dtype="bfloat16"
    )
    build(
        replace(
            config,
            target=replace(config.target, path=str(target_dir)),
            capture=replace(config.capture, last_hidden="post_norm", batch_tokens=1),
        )
    )
    cache = Cache(tmp_path / "cache")
    head = cache.head()
    model = AutoModelForCausalLM.from_pretrained(target_dir, dtype=torch.bfloat16).eval()
    for position in range(2):
        sample = cache.read(position)
        found_NV = head.logits(cache.unpack(sample)[:, -1])
        assert torch.equal(found_NV, own_logits(model, sample.token_ids))


@pytest.mark.parametrize("last_hidden", ["pre_norm", "post_norm"])
def test_in_float32_every_argmax_of_the_real_target_is_its_own(
    target_dir: Path, last_hidden: LastHidden
) -> None:
    model = AutoModelForCausalLM.from_pretrained(target_dir, dtype=torch.float32).eval()
    text = np.arange(1000, 1064, dtype=np.int32)
    head = Target(model, (0,), CPU, last_hidden).head(text).to("cpu", torch.float32)
    state_ND, expected_NV = states_and_logits(model, text, last_hidden)
    found_NV = head.logits(state_ND)
    torch.testing.assert_close(found_NV, expected_NV, rtol=1e-4, atol=1e-4)
    assert torch.equal(found_NV.argmax(-1), expected_NV.argmax(-1))
