"""The target's keys and values of one text, which can forget drafts that were not accepted."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from shared.errors import TargetError


class KeyValueCache:
    """Rows of every attention layer, one a token of the text, then of the drafts under test."""

    def __init__(self, config: Any) -> None:
        """An empty cache for a target of the transformers configuration `config`."""
        self.rows = DynamicCache(config=config)
        for layer in self.rows.layers:
            if hasattr(layer, "activate_past_recording"):  # a window: keep what crop brings back
                layer.activate_past_recording()

    def __len__(self) -> int:
        return int(self.rows.get_seq_length())

    @torch.inference_mode()
    def keep(self, begin: int, kept: Sequence[int]) -> None:
        """Of the rows from `begin` on, keep those of `kept`, ascending, and forget the others.

        Other rows than the first ones are kept only of plain attention: see `require_plain`.
        """
        end = begin + len(kept)
        if list(kept) != list(range(len(kept))):
            for layer in self.rows.layers:
                chosen = begin + torch.tensor(kept, device=layer.keys.device)
                for rows in (layer.keys, layer.values):
                    rows[:, :, begin:end] = rows[:, :, chosen]
        # Of nothing too: only then does a window let go of what has left it.
        self.rows.crop(end - len(self))


def require_croppable(config: Any, name: str) -> None:
    """Refuse a target with layers that cannot go back to before a rejected draft.

    Raises:
        TargetError: naming the kind of layer.
    """
    for number, layer in enumerate(DynamicCache(config=config).layers):
        if not isinstance(layer, DynamicLayer) or hasattr(layer, "update_recurrent_state"):
            raise TargetError(
                f"{name}: layer {number} ({type(layer).__name__}) keeps a state that cannot be "
                "rolled back to before a rejected draft. Speculative decoding of recurrent targets "
                "is not supported here: evaluate from a cache (without --target)."
            )


def require_plain(config: Any, name: str) -> None:
    """Refuse a target for trees: branches need attention that an ancestor mask describes.

    Raises:
        TargetError: naming the kind of layer.
    """
    for number, layer in enumerate(DynamicCache(config=config).layers):
        if type(layer) is not DynamicLayer:
            raise TargetError(
                f"{name}: layer {number} ({type(layer).__name__}) is not plain full attention, so "
                "that a tree cannot be verified in one forward. Leave out --tree-budget."
            )
