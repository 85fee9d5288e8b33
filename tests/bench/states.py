"""States to measure on: of the real demo target, and of two random models.

Captured once by the cache builder's own code and kept in a file, so that a second run is fast.

T tokens   L captured layers   D hidden size
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm import tqdm

from cache_builder.config import BuildConfig
from cache_builder.corpus import read_corpus
from cache_builder.taps import default_layer_ids
from cache_builder.target import Target
from cache_builder.target_files import describe_target
from cache_builder.tokens import load_template
from shared.config import load
from shared.files import canonical_json, sha256_bytes, sha256_file
from tests.conftest import REPOSITORY

DEMO_CONFIG = REPOSITORY / "cache_builder" / "configs" / "demo.toml"
EXACT_TOKENS = 3_000
RANDOM_TOKENS = 3_000
WIDE_SIZE = 5_120

_VERSION = 1
"""Raise it to capture anew."""


@dataclass(frozen=True, eq=False, slots=True)
class States:
    """Samples of one model, one after the other."""

    name: str
    hidden_TLD: Tensor
    """bfloat16 [T, L, D]."""

    exact_TLD: Tensor
    """bfloat16 [T', L, D]: the first tokens again, computed in float32."""

    token_ids: Tensor
    """int32 [T]."""

    offsets: Tensor
    """int64 [N + 1]: sample i owns tokens `offsets[i]` to `offsets[i + 1]`."""

    @property
    def samples(self) -> list[tuple[Tensor, Tensor]]:
        """Token ids [T] and states [T, L, D] of each sample."""
        pairs = zip(self.offsets[:-1].tolist(), self.offsets[1:].tolist(), strict=True)
        return [(self.token_ids[a:b], self.hidden_TLD[a:b]) for a, b in pairs]

    @property
    def raw_bytes(self) -> int:
        return self.hidden_TLD.nbytes


def demo_states(directory: Path, num_tokens: int) -> States:
    """States of the demo target over about `num_tokens` tokens of the demo data."""
    config = load(BuildConfig, DEMO_CONFIG)
    source = config.data.tagged_sources[0]
    data, target_path = REPOSITORY / source.path, REPOSITORY / config.target.path
    spec = describe_target(target_path, config.target)
    layer_ids = default_layer_ids(spec.num_layers, config.capture.num_layers)
    facts = [_VERSION, num_tokens, EXACT_TOKENS, layer_ids, spec.weights_sha256, sha256_file(data)]
    key = sha256_bytes(canonical_json(facts))[:16]
    path = directory / f"states-{key}.safetensors"
    if not path.is_file():
        corpus = read_corpus(
            [replace(source, path=str(data))],
            load_template(target_path, config.data),
            vocab_size=spec.vocab_size,
            max_length=config.data.max_length,
            truncation=config.data.truncation,
            cut_off_answers=config.data.cut_off_answers,
            on_bad_row=config.data.on_bad_row,
            supervise_text=config.data.supervise_text,
        )
        ids = _chosen([sample.token_ids for sample in corpus], num_tokens)

        def target(dtype: Any) -> Target:
            return Target.load(
                target_path, replace(config.target, dtype=dtype), layer_ids, "none", "cpu"
            )

        captured = _capture("", target("bfloat16"), target("float32"), ids, EXACT_TOKENS)
        directory.mkdir(parents=True, exist_ok=True)
        save_file({name: getattr(captured, name) for name in _TENSORS}, path)
    with safe_open(path, "pt") as file:
        return States("SmolLM2-135M", **{name: file.get_tensor(name).clone() for name in _TENSORS})


def random_states(num_tokens: int = RANDOM_TOKENS, *, hidden_size: int = 512) -> Iterator[States]:
    """States of two models that were never trained, with massive activations put in by hand.

    Some channels of two early blocks write 60 times as much as the others (outlier channels), and
    the embedding of the first token has a few values a thousand times too large (massive
    activations). How far real models differ from this is not known; what it shows is that the
    codecs hold such values.
    """
    from transformers import Gemma2Config, Gemma2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

    shape = {
        "vocab_size": 512,
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": hidden_size // 4,
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    generator = np.random.default_rng(1)
    ids = []
    while sum(map(len, ids)) < num_tokens:
        drawn = 2 + generator.zipf(1.3, generator.integers(40, 300)) % 510
        ids.append(np.array([1, *drawn], np.int32))
    for name, model_class, config in (
        ("random Qwen3", Qwen3ForCausalLM, Qwen3Config(**shape)),
        ("random Gemma 2", Gemma2ForCausalLM, Gemma2Config(**shape)),
    ):
        targets = []
        for dtype in (torch.bfloat16, torch.float32):
            torch.manual_seed(0)
            model = _with_massive_activations(model_class(config)).to(torch.bfloat16).to(dtype)
            model.eval().requires_grad_(False)
            targets.append(Target(model, default_layer_ids(8, 3), torch.device("cpu")))
        yield _capture(name, *targets, ids, num_tokens)


def widened(states: States, hidden_size: int = WIDE_SIZE) -> States:
    """The same values as those of a wider model: tokens side by side, cut to `hidden_size`.

    Each value is real, and so are size and error of a codec; how channels of a model of that
    width relate to each other is not.
    """
    hidden_TLD = states.hidden_TLD
    beside = -(-hidden_size // hidden_TLD.shape[2])
    num = len(hidden_TLD) // beside
    wide = hidden_TLD[: num * beside].unflatten(0, (beside, num)).permute(1, 2, 0, 3)
    wide = wide.flatten(2)[..., :hidden_size].contiguous()
    lengths = np.random.default_rng(2).integers(100, 400, num // 100)
    ends = lengths.cumsum()
    offsets = [0, *ends[ends < num].tolist(), num]
    return States(
        f"{states.name}, {beside} tokens side by side",
        wide,
        wide[:0],
        states.token_ids[:num],
        torch.tensor(offsets),
    )


_TENSORS = ("hidden_TLD", "exact_TLD", "token_ids", "offsets")


def _with_massive_activations(model: Any) -> nn.Module:
    with torch.no_grad():
        width = model.config.hidden_size
        model.get_input_embeddings().weight[1, [3, width // 2]] *= 1000
        for block in model.get_decoder().layers[:2]:
            block.mlp.down_proj.weight[[5, width // 3, width - 2]] *= 60
    return model


def _chosen(ids: list[Any], num_tokens: int) -> list[Any]:
    """Samples of all sources, until they have `num_tokens`."""
    order = np.random.default_rng(0).permutation(len(ids))
    ends = np.cumsum([len(ids[i]) for i in order])
    return [ids[i] for i in order[: int(np.searchsorted(ends, num_tokens)) + 1]]


def _capture(name: str, target: Target, exact: Target, ids: list[Any], num_exact: int) -> States:
    lengths = np.array([len(own) for own in ids])
    ends = lengths.cumsum()
    count = int(np.searchsorted(ends, num_exact)) + 1
    with tqdm(total=int(ends[-1]), desc=f"capture {name}", unit="tok", disable=None) as bar:
        hidden, in_float32 = [], []
        for number, own in enumerate(ids):
            hidden += target.capture([own])
            if number < count:
                in_float32 += exact.capture([own])
            bar.update(len(own))
    return States(
        name,
        torch.cat(hidden),
        torch.cat(in_float32),
        torch.from_numpy(np.concatenate(ids)),
        torch.from_numpy(np.concatenate([[0], ends])),
    )
