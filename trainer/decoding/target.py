"""The target at work: one text, its keys and values kept, some blocks tapped.

N tokens of a forward   V vocabulary   L tapped blocks   D hidden size   F = L*D
"""

import inspect
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shared import log
from shared.decoder import Decoder
from shared.errors import NonFiniteError, TargetError
from trainer.decoding.kv_cache import KeyValueCache, require_croppable, require_plain


class Output(NamedTuple):
    """What a forward gives of its tokens."""

    logits_NV: Tensor
    """Of the last token only, where no others were asked for."""

    features_NF: Tensor
    """Output of the tapped blocks, side by side."""


class Target:
    """A causal language model of transformers with taps on some of its blocks."""

    def __init__(self, model: Any, layer_ids: Sequence[int], name: str) -> None:
        """Tap `model`.

        Args:
            layer_ids: blocks, counted from 0.
            name: of the target, for messages.

        Raises:
            TargetError: no such blocks, or layers that cannot be rolled back.
        """
        self._model = model.eval().requires_grad_(False)
        self.decoder = Decoder.find(model)
        self.name = name
        self.config = self._model.config.get_text_config()
        num_layers = len(self.decoder.layers)
        if not layer_ids or min(layer_ids) < 0 or max(layer_ids) >= num_layers:
            raise TargetError(
                f"{name}: it has blocks 0..{num_layers - 1}, the drafter taps {list(layer_ids)}. "
                "Give the target that the drafter was trained for."
            )
        require_croppable(self._model.config, name)
        self.layer_ids = tuple(layer_ids)
        self._states: dict[int, Tensor] = {}
        for layer_id in self.layer_ids:
            self.decoder.layers[layer_id].register_forward_hook(self._tap(layer_id))
        self.device = next(self.decoder.embedding.parameters()).device
        # Not of a block, which may be stored quantised.
        self.dtype = next(self.decoder.embedding.parameters()).dtype
        self.eos_token_ids = _eos_token_ids(self._model)
        # Renamed within transformers 5, with a warning for the old name.
        parameters = inspect.signature(type(self._model).forward).parameters
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"

    @classmethod
    def load(
        cls, path: Path, layer_ids: Sequence[int], *, dtype: str, device: torch.device
    ) -> "Target":
        """Load the target in the directory `path`.

        Raises:
            TargetError: transformers cannot load it, or `layer_ids` are not of it.
        """
        return cls(load_model(path, dtype).to(device), layer_ids, str(path))

    @property
    def max_positions(self) -> float:
        """Tokens that a text may have; infinity where the config does not say."""
        return getattr(self.config, "max_position_embeddings", None) or math.inf

    def require_plain_attention(self) -> None:
        """Refuse a target whose attention no tree can be verified with.

        Raises:
            TargetError: naming the first layer that is not plain.
        """
        require_plain(self._model.config, self.name)

    def new_cache(self) -> KeyValueCache:
        """For a new text."""
        return KeyValueCache(self._model.config)

    @torch.inference_mode()
    def forward(
        self,
        token_ids: Sequence[int],
        cache: KeyValueCache,
        *,
        depths: Sequence[int] | None = None,
        visible_NN: Tensor | None = None,
        last_only: bool = False,
    ) -> Output:
        """Run `token_ids` behind the text in `cache`, which takes them in.

        Args:
            depths: position of each token after the text's last; they count up from 0 by default.
            visible_NN: bool, which of the tokens each one sees besides the text; the earlier ones
                by default.
            last_only: logits of the last token only.

        Raises:
            NonFiniteError: a logit is NaN or infinity. Minus infinity is a token never said.
        """
        begin = len(cache)
        offsets = range(len(token_ids)) if depths is None else depths
        positions = torch.tensor([[begin + offset for offset in offsets]], device=self.device)
        output = self._model(
            input_ids=torch.tensor([list(token_ids)], device=self.device),
            position_ids=positions,
            attention_mask=None if visible_NN is None else self._additive(visible_NN, begin),
            use_cache=True,
            logits_to_keep=1 if last_only else 0,
            **{self._cache_name: cache.rows},
        )
        if not bool(output.logits.amax(-1).isfinite().all()):
            dtype = str(self.dtype).removeprefix("torch.")
            raise NonFiniteError(
                f"{self.name}: its logits are not finite in {dtype}. Give --dtype bfloat16 or "
                "float32."
            )
        states = [self._states.pop(layer_id)[0] for layer_id in self.layer_ids]
        return Output(output.logits[0], torch.cat([s.to(self.device) for s in states], dim=-1))

    def _additive(self, visible_NN: Tensor, begin: int) -> Tensor:
        """[1, 1, N, begin + N]: nothing is added where a token sees, the least number elsewhere."""
        num_tokens = len(visible_NN)
        mask = torch.zeros((num_tokens, begin + num_tokens), dtype=self.dtype)
        mask[:, begin:].masked_fill_(~visible_NN, torch.finfo(self.dtype).min)
        return mask[None, None].to(self.device)

    def _tap(self, layer_id: int) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            self._states[layer_id] = output if isinstance(output, Tensor) else output[0]

        return hook


def load_model(path: Path, dtype: str) -> Any:
    """The whole model in `path`, on the CPU: from safetensors, and no code of its own.

    Raises:
        TargetError: there is none, or transformers cannot load it.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    if not (path / "config.json").is_file():
        raise TargetError(
            f"{path}: no target here (config.json is missing). Give the directory of a model in "
            "Hugging Face format."
        )
    if not log.shows_bars():
        disable_progress_bar()
    try:
        model, loaded = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=getattr(torch, dtype),
            trust_remote_code=False,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
        )
    except MemoryError:
        raise
    except Exception as error:  # of a config.json that may say anything
        text = " ".join(str(error).split())[:400]
        raise TargetError(f"{path}: transformers cannot load it ({text}).") from error
    if missing := sorted(loaded["missing_keys"]):
        raise TargetError(
            f"{path}: its weights lack {', '.join(missing[:3])}, which would be random. Fetch the "
            "whole model."
        )
    return model


def _eos_token_ids(model: Any) -> frozenset[int]:
    """Tokens that end a text, by the generation settings, else by the config."""
    given = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    if given is None:
        given = model.config.get_text_config().eos_token_id
    return frozenset([given] if isinstance(given, int) else given or [])
