"""The states of a target in the layouts of other tools, written by code of its own."""

import gzip
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file


@dataclass(frozen=True, eq=False)
class Captured:
    """One sample as another engine has it: every block's output before the final norm."""

    token_ids: list[int]
    loss_mask: list[int]
    blocks_TND: torch.Tensor
    """bfloat16 [T, N, D]."""

    normed_TD: torch.Tensor
    """The last block's output after the final norm."""


def run_target(
    path: Path, samples: Iterable[tuple[Sequence[int], Sequence[int]]]
) -> list[Captured]:
    """Run the target in float32 over (ids, mask) pairs, one by one, with transformers' own list
    of hidden states, and a hook where that list has the norm's output instead."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    before_norm = []
    model.model.norm.register_forward_pre_hook(lambda module, given: before_norm.append(given[0]))
    captured = []
    with torch.inference_mode():
        for ids, mask in samples:
            out = model.model(torch.tensor([list(ids)]), output_hidden_states=True, use_cache=False)
            blocks = [*out.hidden_states[1:-1], before_norm.pop()]
            captured.append(
                Captured(
                    list(map(int, ids)),
                    list(map(int, mask)),
                    torch.stack([block[0] for block in blocks], 1).to(torch.bfloat16).clone(),
                    out.last_hidden_state[0].to(torch.bfloat16).clone(),
                )
            )
    return captured


def write_speculators(
    root: Path,
    samples: Sequence[Captured],
    entries: Sequence[int],
    *,
    dtype: torch.dtype = torch.bfloat16,
) -> Path:
    """A data set and one file of states per row; entry n of hidden_states is block n - 1."""
    from datasets import Dataset

    rows = Dataset.from_dict(
        {
            "input_ids": [sample.token_ids for sample in samples],
            "loss_mask": [sample.loss_mask for sample in samples],
            "seq_len": [len(sample.token_ids) for sample in samples],
        }
    )
    rows.set_format("torch", columns=["input_ids", "loss_mask", "seq_len"])
    rows.save_to_disk(str(root))
    (root / "hidden_states").mkdir()
    for number, sample in enumerate(samples):
        save_file(
            {
                "token_ids": torch.tensor(sample.token_ids),
                "hidden_states": sample.blocks_TND[:, [n - 1 for n in entries]].to(dtype).clone(),
            },
            root / "hidden_states" / f"hs_{number}.safetensors",
        )
    return root


def write_specforge(
    root: Path, samples: Sequence[Captured], blocks: Sequence[int], *, batch: int = 4
) -> Path:
    """Records padded to the longest of a batch with id 0 and mask 0; every third is compressed.

    The states at padding are what a target gives for token 0: not zeros.
    """
    for number, sample in enumerate(samples):
        mates = samples[number // batch * batch :][:batch]
        padding = max(len(mate.token_ids) for mate in mates) - len(sample.token_ids)
        states = sample.blocks_TND[:, list(blocks)].reshape(1, len(sample.token_ids), -1)
        record = {
            "input_ids": torch.tensor(sample.token_ids + [0] * padding),
            "loss_mask": torch.tensor(sample.loss_mask + [0] * padding),
            "hidden_states": torch.cat([states, states[:, :1].expand(1, padding, -1)], 1),
        }
        folder = root / f"rows_{number // 10 * 10}-{number // 10 * 10 + 10}"
        folder.mkdir(parents=True, exist_ok=True)
        if number % 3 == 0:
            buffer = io.BytesIO()
            torch.save(record, buffer)
            (folder / f"data_{number}.ckpt.gz").write_bytes(gzip.compress(buffer.getvalue(), 1))
        else:
            torch.save(record, folder / f"data_{number}.ckpt")
    return root


def mask_and_ids(path: Path) -> list[tuple[np.ndarray, np.ndarray]]:
    """Tokens and masks of every sample of a cache, in the order of its index."""
    from shared.cache import Cache

    cache = Cache(path)
    samples = [cache.read(position) for position in range(len(cache.index))]
    return [(sample.token_ids, sample.loss_mask) for sample in samples]
