"""One dataset of real states for three trainers: our cache, and the same states as peers keep them.

T tokens   L captured layers, the last hidden state after them   D hidden size
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from cache_builder.build import build
from cache_builder.config import (
    BuildConfig,
    CacheConfig,
    CaptureConfig,
    CodecConfig,
    DataConfig,
    WorkersConfig,
)
from shared.cache import Cache
from shared.config import load
from shared.files import canonical_json, sha256_bytes, sha256_file
from tests.bench.states import DEMO_CONFIG
from tests.conftest import REPOSITORY

_VERSION = 1
"""Raise it to capture anew."""

_CHARACTERS_PER_TOKEN = 12
"""More than any 1,024 tokens of the demo data have on average: each text is cut at its tokens."""


@dataclass(frozen=True, slots=True)
class StepData:
    """The same samples, each of the same number of tokens, all of them supervised."""

    cache: Path
    speculators: Path
    specforge: Path
    target: Path
    layer_ids: tuple[int, ...]


def step_data(directory: Path, *, num_samples: int, num_tokens: int) -> StepData:
    """Samples of the demo data, joined and cut to `num_tokens`; made once and kept.

    The cache has the codec `balanced`, and the peers get the states as decoded from it, so that
    all train on the same values.
    """
    demo = load(BuildConfig, DEMO_CONFIG)
    target_path = REPOSITORY / demo.target.path
    lines = (REPOSITORY / demo.data.tagged_sources[0].path).read_text().splitlines()
    texts = _texts(lines, num_samples, _CHARACTERS_PER_TOKEN * num_tokens)
    weights = sorted(target_path.glob("*.safetensors"))
    facts = [_VERSION, num_tokens, texts, *map(sha256_file, weights)]
    root = directory / f"step-{sha256_bytes(canonical_json(facts))[:16]}"
    root.mkdir(parents=True, exist_ok=True)
    rows = root / "texts.jsonl"
    rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    build(
        BuildConfig(
            cache=CacheConfig(path=root / "cache", min_free_gb=0),
            target=load(
                BuildConfig, DEMO_CONFIG, [f"target.path={json.dumps(str(target_path))}"]
            ).target,
            data=DataConfig(sources=(str(rows),), max_length=num_tokens, supervise_text=True),
            codec=CodecConfig(preset="balanced"),
            capture=CaptureConfig(last_hidden="pre_norm"),  # what speculators keeps
            workers=WorkersConfig(devices="cpu", num_workers=1),
        )
    )
    cache = Cache(root / "cache")
    data = StepData(
        cache=root / "cache",
        speculators=root / "speculators",
        specforge=root / "specforge",
        target=target_path,
        layer_ids=tuple(cache.spec.target_layer_ids),
    )
    if not (root / "complete").exists():
        samples = [cache.read(position) for position in range(len(cache.index))]
        ids = [torch.from_numpy(sample.token_ids).long() for sample in samples]
        states = [cache.unpack(sample) for sample in samples]
        if [len(own) for own in ids] != [num_tokens] * num_samples:
            raise RuntimeError(f"samples of {sorted({len(own) for own in ids})} tokens in {root}")
        write_speculators(data.speculators, ids, states)
        write_specforge(data.specforge, ids, states)
        (root / "complete").touch()
    return data


def write_speculators(directory: Path, ids: list[Tensor], states: list[Tensor]) -> None:
    """A data set, and a file of states for each row: all layers, [T, L + 1, D]."""
    from datasets import Dataset

    rows = Dataset.from_dict(
        {
            "input_ids": [own.tolist() for own in ids],
            "loss_mask": [[1] * len(own) for own in ids],
            "seq_len": [len(own) for own in ids],
        }
    )
    rows.set_format("torch", columns=["input_ids", "loss_mask", "seq_len"])
    rows.save_to_disk(str(directory))
    (directory / "hidden_states").mkdir(exist_ok=True)
    for number, (own, states_TLD) in enumerate(zip(ids, states, strict=True)):
        save_file(
            {"token_ids": own, "hidden_states": states_TLD.contiguous()},
            directory / "hidden_states" / f"hs_{number}.safetensors",
        )


def write_specforge(directory: Path, ids: list[Tensor], states: list[Tensor]) -> None:
    """A record for each sample: the layers side by side, [1, T, L * D], no last hidden state."""
    rows = directory / "rows_0-2000"
    rows.mkdir(parents=True, exist_ok=True)
    for number, (own, states_TLD) in enumerate(zip(ids, states, strict=True)):
        record = {
            "input_ids": own,
            "loss_mask": torch.ones_like(own),
            "hidden_states": states_TLD[:, :-1].flatten(1)[None].contiguous(),
        }
        torch.save(record, rows / f"data_{number}.ckpt")


def _texts(lines: list[str], count: int, num_characters: int) -> list[str]:
    """Answers of the demo data, joined until each text has `num_characters`."""
    texts, text = [], ""
    for line in lines:
        text += json.loads(line)["messages"][-1]["content"] + "\n\n"
        if len(text) >= num_characters:
            texts.append(text)
            text = ""
            if len(texts) == count:
                break
    return texts
