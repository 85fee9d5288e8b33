"""The real target's weights in other architectures: the same text gives the same states.

Random models are told apart by their noise; here a wrong mask, rotation or scale would show in
states that mean something. Mistral and a wrapper compute what Llama computes; Qwen2 adds biases,
which are zero; Mixtral sends every token to two experts that are both the one MLP.
"""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText

from cache_builder.config import DataConfig, SourceConfig, TargetConfig
from cache_builder.corpus import read_corpus
from cache_builder.target import Target
from cache_builder.target_files import describe_target
from cache_builder.tokens import load_template
from shared.head import Head
from tests.conftest import DEMO_DATA

pytestmark = pytest.mark.slow

LAYERS = (1, 15, 28)
CONFIG = TargetConfig(path="-", dtype="float32")
KEPT = """
vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads
max_position_embeddings rms_norm_eps rope_parameters hidden_act tie_word_embeddings bos_token_id
eos_token_id pad_token_id
"""
"""Fields that these configurations share with Llama's."""

Weights = dict[str, Tensor]


@dataclass(frozen=True, eq=False, slots=True)
class Captured:
    head: Head
    states: list[Tensor]


@pytest.fixture(scope="module")
def texts(target_dir: Path) -> list[np.ndarray]:
    """Three conversations of the demo, of different length."""
    template = load_template(target_dir, DataConfig(sources=("-",), max_length=128))
    samples = read_corpus(
        [SourceConfig(path=str(DEMO_DATA))],
        template,
        vocab_size=49152,
        max_length=128,
        truncation="drop",
        cut_off_answers="keep",
        on_bad_row="count",
        supervise_text=False,
    )
    found = [sample.token_ids for sample in islice(samples, 3)]
    assert len({len(token_ids) for token_ids in found}) == 3
    return found


def capture(path: Path, texts: list[np.ndarray]) -> Captured:
    target = Target.load(path, CONFIG, LAYERS, "post_norm", "cpu")
    return Captured(target.head(texts[0]), target.capture(texts))


@pytest.fixture(scope="module")
def own(target_dir: Path, texts: list[np.ndarray]) -> Captured:
    return capture(target_dir, texts)


def mistral(kept: dict[str, Any], weights: Weights) -> tuple[Any, Weights]:
    return AutoConfig.for_model("mistral", **kept, sliding_window=None), weights


def qwen2(kept: dict[str, Any], weights: Weights) -> tuple[Any, Weights]:
    biases = {
        name.replace("weight", "bias"): torch.zeros(len(weight), dtype=weight.dtype)
        for name, weight in weights.items()
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))
    }
    return AutoConfig.for_model("qwen2", **kept), weights | biases


def mixtral(kept: dict[str, Any], weights: Weights) -> tuple[Any, Weights]:
    config = AutoConfig.for_model(
        "mixtral", **kept, num_local_experts=2, num_experts_per_tok=2, sliding_window=None
    )
    routers = {
        f"model.layers.{i}.block_sparse_moe.gate.weight": torch.randn(2, 576).bfloat16()
        for i in range(30)
    }
    experts = {}
    for name in [name for name in weights if ".mlp." in name]:
        weight = weights.pop(name)
        for dense, sparse in (("gate", "w1"), ("down", "w2"), ("up", "w3")):
            if f"{dense}_proj" in name:
                block = name.partition("mlp.")[0] + "block_sparse_moe.experts"
                experts |= {f"{block}.{e}.{sparse}.weight": weight.clone() for e in range(2)}
    return config, weights | routers | experts


def llava(kept: dict[str, Any], weights: Weights) -> tuple[Any, Weights]:
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 1, "image_size": 16, "patch_size": 16}
    config = AutoConfig.for_model(
        "llava",
        text_config={"model_type": "llama", **kept},
        vision_config={"model_type": "clip_vision_model", **vision},
        tie_word_embeddings=True,
        image_token_index=17,
    )
    weights = {name.replace("model.", "model.language_model.", 1): w for name, w in weights.items()}
    with torch.device("meta"):
        shapes = AutoModelForImageTextToText.from_config(config).state_dict()
    others = {
        name: torch.randn(shape.shape).bfloat16()
        for name, shape in shapes.items()
        if "language_model" not in name and "lm_head" not in name
    }
    return config, weights | others


@pytest.fixture(scope="module", params=[mistral, qwen2, mixtral, llava], ids=lambda f: f.__name__)
def rehoused(
    request: pytest.FixtureRequest,
    target_dir: Path,
    texts: list[np.ndarray],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Captured]:
    path = tmp_path_factory.mktemp("rehoused")
    source = AutoConfig.from_pretrained(target_dir)
    kept = {name: getattr(source, name) for name in KEPT.split()}
    config, weights = request.param(kept, load_file(target_dir / "model.safetensors"))
    config.save_pretrained(path)
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    spec = describe_target(path, CONFIG)
    assert spec.model_type == request.param.__name__
    assert (spec.num_layers, spec.hidden_size, spec.vocab_size) == (30, 576, 49152)
    yield capture(path, texts)
    shutil.rmtree(path)


def test_its_states_are_those_of_the_target(rehoused: Captured, own: Captured) -> None:
    for found_TLD, own_TLD in zip(rehoused.states, own.states, strict=True):
        assert found_TLD.shape == own_TLD.shape
        exact_TLD = own_TLD.float()
        difference_TL = (found_TLD.float() - exact_TLD).norm(dim=-1)
        # Float32 on other paths: the last bit of bfloat16 in a few values of a token.
        assert (difference_TL <= 1e-3 * exact_TLD.norm(dim=-1)).all()


def test_its_head_is_that_of_the_target(rehoused: Captured, own: Captured) -> None:
    assert rehoused.head.readout == own.head.readout
    assert rehoused.head.is_tied
    assert torch.equal(rehoused.head.lm_head_VD, own.head.lm_head_VD)
    assert torch.equal(rehoused.head.final_norm_D, own.head.final_norm_D)
    for found_TLD, own_TLD in zip(rehoused.states, own.states, strict=True):
        found_TV, own_TV = rehoused.head.logits(found_TLD[:, -1]), own.head.logits(own_TLD[:, -1])
        assert (found_TV.argmax(-1) == own_TV.argmax(-1)).float().mean() > 0.98
        torch.testing.assert_close(found_TV, own_TV, rtol=2**-6, atol=0.2)
