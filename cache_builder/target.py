"""The target model, loaded, and its hidden states.

T tokens of one sample   L captured layers   D hidden size
"""

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from cache_builder.config import TargetConfig
from cache_builder.head_tensors import read_head
from cache_builder.readout import find_readout
from cache_builder.target_config import one_line
from shared import log
from shared.decoder import Decoder
from shared.errors import TargetError
from shared.head import Head
from shared.memory import trim_heap
from shared.quantity import count
from shared.spec import LastHidden

_LAST = -1
"""Stands for the last hidden state among the ids of blocks."""

_READOUT_TOKENS = 64
"""Of one sample, on which the head must give the target's own logits."""

_WEIGHTS_SHARE = 0.9
"""Of a device's free memory, at most, where a target is spread over several: states need some."""


class _LastTapReached(Exception):  # noqa: N818  # a signal, not an error
    """Unwinds the forward after the last tapped block: what lies above it is not run."""


def load_model(path: Path, config: TargetConfig, devices: Sequence[str] = ()) -> Any:
    """The whole model in `path`, frozen: on the CPU, or block by block over several `devices`.

    Raises:
        TargetError: transformers cannot load it, or the devices do not hold it.
    """
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.utils.logging import disable_progress_bar

    arguments = {
        "dtype": getattr(torch, config.dtype),
        "attn_implementation": config.attention,
        "trust_remote_code": False,
        "use_safetensors": True,  # what was hashed, and never a pickle beside it
        "output_loading_info": True,
        **(_spread(devices) if devices else {}),
    }
    if not log.shows_bars():
        disable_progress_bar()
    try:
        try:
            model, loaded = AutoModelForCausalLM.from_pretrained(path, **arguments)
        except ValueError as error:
            if "Unrecognized configuration class" not in str(error):
                raise
            model, loaded = AutoModelForImageTextToText.from_pretrained(path, **arguments)
    except (ValueError, OSError, ImportError, RuntimeError, SafetensorError) as error:
        advice = ""
        if "attention implementation" in str(error):
            advice = " Set target.attention to another kernel ('eager' always exists)."
        raise TargetError(
            f"{path}: transformers cannot load it ({one_line(error)}).{advice}"
        ) from error
    if missing := sorted(loaded["missing_keys"]):
        raise TargetError(
            f"{path}: its weights lack {count(len(missing), 'tensor')} of {type(model).__name__} "
            f"({', '.join(missing[:3])}), which would be random. Fetch the whole model."
        )
    kinds = {torch.device(name).type for name in devices}
    elsewhere = sum(weight.device.type not in kinds for weight in model.parameters())
    if devices and elsewhere:  # accelerate lets the CPU or the disk hold the rest
        raise TargetError(
            f"{path}: {', '.join(devices)} do not hold it: {elsewhere} of its weights would lie "
            "elsewhere. Raise workers.devices_per_worker."
        )
    return model.eval().requires_grad_(False)


def _spread(devices: Sequence[str]) -> dict[str, Any]:
    """Arguments by which transformers and accelerate put as many blocks on each device."""
    free = {torch.device(name).index or 0: torch.cuda.mem_get_info(name)[0] for name in devices}
    return {
        "device_map": "balanced",
        "max_memory": {index: int(_WEIGHTS_SHARE * size) for index, size in free.items()},
    }


class Target:
    """A loaded target with taps on some of its blocks, and on its final norm if it is asked.

    It may lie on several devices, under accelerate's hooks. Token ids go to that of the embedding,
    and the states of all taps come to `device`.
    """

    def __init__(
        self,
        model: nn.Module,
        layer_ids: Sequence[int],
        device: torch.device | None = None,
        last_hidden: LastHidden = "none",
    ) -> None:
        """Tap `model`; its states come to `device`, or where the last tap is."""
        self._model: Any = model
        self._decoder = Decoder.find(model)
        self._last_hidden = last_hidden
        num_layers = len(self._decoder.layers)
        if not layer_ids or min(layer_ids) < 0 or max(layer_ids) >= num_layers:
            raise TargetError(
                f"target_layer_ids {list(layer_ids)}: the target has blocks 0..{num_layers - 1}."
            )
        self._layer_ids = tuple(layer_ids)
        self._states: dict[int, Tensor] = {}
        for layer_id in self._layer_ids:
            self._decoder.layers[layer_id].register_forward_hook(self._tap(layer_id))
        if last_hidden != "none":
            # A model may call its norm elsewhere too (nanochat: on the embedding). The last counts.
            self._decoder.final_norm.register_forward_hook(self._keep_last)
        last = self._decoder.layers[-1 if last_hidden != "none" else max(layer_ids)]
        self.device = device or next(last.parameters()).device
        self._ids_device = next(self._decoder.embedding.parameters()).device

    @classmethod
    def load(
        cls,
        path: Path,
        config: TargetConfig,
        layer_ids: Sequence[int],
        last_hidden: LastHidden,
        *devices: str,
    ) -> "Target":
        """Load the target from `path` onto a device, or spread over several GPUs.

        Raises:
            TargetError: transformers cannot load it, the devices do not hold it, or a tap is out of
                range.
        """
        if len(devices) == 1:
            device = torch.device(devices[0])
            model = load_model(path, config).to(device)
            if device.type != "cpu":
                trim_heap()  # or the process keeps what its weights took on their way
            return cls(model, layer_ids, device, last_hidden)
        return cls(load_model(path, config, devices), layer_ids, None, last_hidden)

    def head(self, text: npt.NDArray[np.int32]) -> Head:
        """Embedding, LM head and final norm, as bfloat16 on the CPU.

        Args:
            text: ids of a sample, on which the target's logits are compared with those that the
                head makes of the last hidden state, if that is captured.

        Raises:
            TargetError: they are not the same, so that the head cannot speak for the target; or a
                drafter cannot work with its embedding and LM head.
        """
        config = self._model.config.get_text_config()
        head = read_head(self._decoder, type(self._model).__name__, config)
        if self._last_hidden == "none":
            return head
        ids = torch.from_numpy(text[:_READOUT_TOKENS]).long()[None].to(self._ids_device)
        with torch.inference_mode():
            logits_NV = self._model(input_ids=ids, use_cache=False).logits[0]
            state_ND = self._states[_LAST][0].to("cpu", torch.bfloat16)
            self._states.clear()
            norm = self._decoder.final_norm
            readout = find_readout(head, config, norm, self._last_hidden, state_ND, logits_NV)
        return replace(head, readout=readout)

    @torch.inference_mode()
    def capture(self, token_ids: Sequence[npt.NDArray[np.int32]]) -> list[Tensor]:
        """States of each sample, bfloat16 [T, L, D] on the target's device: of the blocks, then
        the last hidden state if it is captured.

        The batch is padded on the right, so that with causal attention (or any recurrence) no
        sample sees its padding or its batch mates; no attention mask is needed then.

        Raises:
            TargetError: the model gave other states than one of its hidden size for each token.
        """
        longest = max(len(ids) for ids in token_ids)
        batch = torch.zeros((len(token_ids), longest), dtype=torch.int64)
        for row, ids in enumerate(token_ids):
            batch[row, : len(ids)] = torch.from_numpy(ids)
        layers = (*self._layer_ids, *[_LAST] * (self._last_hidden != "none"))
        try:
            with contextlib.suppress(_LastTapReached):
                self._decoder.module(input_ids=batch.to(self._ids_device), use_cache=False)
            states = [self._states.pop(layer).to(self.device) for layer in layers]
        finally:
            self._states.clear()  # where memory ran out, a smaller batch needs theirs
        expected = [*batch.shape, self._model.config.get_text_config().hidden_size]
        for layer, state in zip(layers, states, strict=True):
            if list(state.shape) != expected:
                name = "the final norm" if layer == _LAST else f"block {layer}"
                raise TargetError(
                    f"{type(self._model).__name__}: {name} gave states of shape "
                    f"{list(state.shape)}, expected {expected} (samples, tokens, hidden_size). "
                    "A drafter needs one state a token: take another target."
                )
        return [
            torch.stack([state[row, : len(ids)] for state in states], dim=1).to(torch.bfloat16)
            for row, ids in enumerate(token_ids)
        ]

    def _tap(self, layer_id: int) -> Any:
        is_last = layer_id == max(self._layer_ids) and self._last_hidden == "none"

        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            self._states[layer_id] = output if isinstance(output, Tensor) else output[0]
            if is_last:
                raise _LastTapReached

        return hook

    def _keep_last(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._states[_LAST] = inputs[0] if self._last_hidden == "pre_norm" else output
