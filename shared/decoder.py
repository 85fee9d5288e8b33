"""Finding the parts of a transformers model that are tapped or read, whatever wraps them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from shared.errors import TargetError

_LAYERS = ("layers", "h")
_FINAL_NORMS = (
    "norm",
    "final_layernorm",
    "final_layer_norm",
    "ln_f",
    "norm_f",
    "embedding_norm",
)


@dataclass(frozen=True, eq=False, slots=True)
class Decoder:
    """The decoder inside a model: plain, multimodal-wrapped, hybrid or mixture of experts."""

    module: nn.Module
    """Calling it runs embedding, blocks and final norm, without the LM head."""

    layers: Sequence[nn.Module]
    embedding: nn.Module
    lm_head: nn.Module
    final_norm: nn.Module

    @classmethod
    def find(cls, model: Any) -> "Decoder":
        """Walk the transformers model `model` to its decoder.

        Raises:
            TargetError: a part is not where any known architecture has it.
        """
        name = type(model).__name__
        module = model.get_decoder() if hasattr(model, "get_decoder") else None
        if not isinstance(module, nn.Module):
            raise TargetError(f"{name}: get_decoder() gives no module; it is not a causal LM.")
        if isinstance(inner := getattr(module, "model", None), nn.Module):
            module = inner  # Llama 4 gives the causal LM itself
        layers = _first(module, _LAYERS)
        if not isinstance(layers, nn.ModuleList) or not len(layers):
            raise TargetError(
                f"{name}: no decoder blocks in {type(module).__name__} "
                f"(tried {', '.join(_LAYERS)})."
            )
        final_norm = _first(module, _FINAL_NORMS)
        if final_norm is None:
            raise TargetError(
                f"{name}: no final norm in {type(module).__name__} "
                f"(tried {', '.join(_FINAL_NORMS)})."
            )
        embedding, lm_head = model.get_input_embeddings(), model.get_output_embeddings()
        if embedding is None or lm_head is None:
            raise TargetError(f"{name}: it has no token embedding or no LM head.")
        return cls(module, list(layers), embedding, lm_head, final_norm)


def _first(module: nn.Module, names: Sequence[str]) -> nn.Module | None:
    for name in names:
        if isinstance(found := getattr(module, name, None), nn.Module):
            return found
    return None
