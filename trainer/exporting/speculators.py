"""The layout of speculators, which vLLM serves by its path alone.

Layer ids count as in HF's `hidden_states`: those of z-lab's layout plus 1. Embedding and LM head
are left to the target, as speculators 0.9.0 itself does when it saves, unless the vocabulary is
reduced: then the rows of the LM head that are kept go along, and where they lie in the target's.

Source: speculators 0.9.0, `models/dflash`; vLLM, `transformers_utils/configs/speculators`.
"""

from typing import Any

import torch
from torch import Tensor

from shared.errors import ConfigError
from trainer.caches import Caches
from trainer.exporting.zlab import dflash_shapes, layer_config
from trainer.recipe import DrafterConfig

VERSION = "0.9.0"


def speculators_config(
    drafter: DrafterConfig,
    cache: Caches,
    target: dict[str, Any],
    *,
    verifier: str,
    architectures: list[str],
    draft_vocab_size: int,
) -> dict[str, Any]:
    """`config.json` of a drafter for the target that `cache` holds states of.

    Args:
        target: the target's own `config.json`.
        verifier: hub id or path of the target, which speculators and vLLM load it from.
        architectures: of the target.

    Raises:
        ConfigError: the format has no word for the drafter's layers.
    """
    if any(drafter.slides) and not all(drafter.slides):
        raise ConfigError(
            f"drafter.layer_types {list(drafter.layer_types or ())}: vLLM gives one causality to "
            "all layers of a drafter in the speculators format, and these need both. Export it "
            "with --format dflash."
        )
    return {
        "architectures": ["DFlashDraftModel"],
        "aux_hidden_state_layer_ids": [i + 1 for i in cache.spec.target_layer_ids],
        "block_size": drafter.block_size,
        "draft_vocab_size": draft_vocab_size,
        "dtype": "bfloat16",
        "mask_token_id": drafter.mask_token_id,
        "sample_from_anchor": False,
        # What vLLM makes of all layers, sliding or not: `false` would have it serve a drafter
        # that looks both ways as a causal one, at a fifth of its acceptance less.
        "sliding_window_non_causal": not any(drafter.slides),
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "accept_tolerance": 0.0,
                    "proposal_type": "greedy",
                    "speculative_tokens": drafter.block_size - 1,
                    "verifier_accept_k": 1,
                }
            ],
            "verifier": {"architectures": architectures, "name_or_path": verifier},
        },
        "speculators_model_type": "dflash",
        "speculators_version": VERSION,
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "transformer_layer_config": layer_config(drafter, cache, target),
    }


def speculators_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a drafter of `config` has."""
    layers = as_dflash(config)
    shapes = dflash_shapes(layers)
    kept, vocab_size = config["draft_vocab_size"], layers["vocab_size"]
    if kept != vocab_size:
        shapes |= {
            "lm_head.weight": (kept, layers["hidden_size"]),
            "d2t": (kept,),
            "t2d": (vocab_size,),
        }
    return shapes


def vocabulary_tensors(kept: Tensor, lm_head_VD: Tensor) -> dict[str, Tensor]:
    """LM head and maps of a reduced vocabulary.

    Args:
        kept: int64, ids of the target's tokens that the drafter may draft, ascending.
        lm_head_VD: the target's.
    """
    t2d = torch.zeros(len(lm_head_VD), dtype=torch.bool)
    t2d[kept] = True
    return {
        "lm_head.weight": lm_head_VD[kept].to(torch.bfloat16).contiguous(),
        "d2t": kept - torch.arange(len(kept)),  # offsets, not ids
        "t2d": t2d,
    }


def as_dflash(config: dict[str, Any]) -> dict[str, Any]:
    """The same drafter in z-lab's words, with z-lab's layer ids."""
    return {
        **config["transformer_layer_config"],
        "block_size": config["block_size"],
        "dflash_config": {
            "mask_token_id": config["mask_token_id"],
            "target_layer_ids": [i - 1 for i in config["aux_hidden_state_layer_ids"]],
        },
    }
