"""Random targets, and a stand-in for the drafter that knows the text."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trainer.decoding.target import Target

VOCAB = 48


def sizes(**changes: Any) -> dict[str, Any]:
    """Of a tiny transformers model. Weights are large, so that greedy texts do not loop at once."""
    return {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "initializer_range": 0.3,
        "tie_word_embeddings": False,
        "eos_token_id": None,
        "bos_token_id": None,
        "pad_token_id": None,
        **changes,
    }


def llama(**changes: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**sizes(**changes)))


def target_of(model: Any, layer_ids: Sequence[int] = (0, 1)) -> Target:
    return Target(model, layer_ids, "made")


class Oracle:
    """Drafts from the text that will come, wrong here and there, and remembers what it was given.

    Its logits are a function of the position alone: the coming token has rank 0, 1 or 2, or is
    out of the reach of any tree.
    """

    def __init__(
        self, num_prompt: int, text: Sequence[int], num_slots: int = 7, *, is_right: bool = False
    ) -> None:
        self.num_context = 0
        self.features: list[Tensor] = []
        self._num_prompt = num_prompt
        generator = torch.Generator().manual_seed(1)
        padded = [*text, *[0] * (num_slots + 1)]
        self.logits_TPV = torch.randn((len(text), num_slots, VOCAB), generator=generator)
        rank_TP = torch.tensor([0, 0, 0, 1, 2, -1])[
            torch.randint(6, self.logits_TPV.shape[:2], generator=generator)
        ]
        for at in range(len(text)):
            for slot in range(num_slots):
                row_V, token = self.logits_TPV[at, slot], padded[at + slot + 1]
                rank = 0 if is_right else int(rank_TP[at, slot])
                others_V = row_V[torch.arange(VOCAB) != token].sort(descending=True).values
                row_V[token] = others_V[-1] - 1 if rank < 0 else others_V[rank] + 1e-4
                if rank == 0:
                    row_V[token] += 1

    def extend(self, features_NF: Tensor) -> None:
        self.features.append(features_NF)
        self.num_context += len(features_NF)

    def logits(self, token_id: int) -> Tensor:
        return self.logits_TPV[self.num_context - self._num_prompt]
