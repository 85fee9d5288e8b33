"""The target model: what it is, and its hidden states.

T tokens of one sample   L captured layers   D hidden size
"""

import contextlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from cache_builder.config import TargetConfig
from cache_builder.decoder import Decoder
from shared.errors import TargetError
from shared.files import canonical_json, read_json, sha256_bytes, sha256_file
from shared.head import Head
from shared.quantity import count, size
from shared.spec import TargetSpec

logger = logging.getLogger(__name__)

_VOLATILE_CONFIG = ("transformers_version", "_name_or_path", "dtype", "torch_dtype", "use_cache")
"""Keys of config.json that say nothing about the model's function."""


_STAMPED = (".safetensors", ".json", ".jinja", ".model", ".txt")
"""What a target is loaded from."""

FileStamps = dict[str, tuple[int, int, int]]
"""By name: size in bytes, time of the last change in nanoseconds, and inode."""


class _LastTapReached(Exception):  # noqa: N818  # a signal, not an error
    """Unwinds the forward after the last tapped block: what lies above it is not run."""


def resolve_target(config: TargetConfig) -> Path:
    """The local directory of the target, fetched from the hub if it is a name there.

    Raises:
        TargetError: there is no such directory and the hub does not give it either.
    """
    path = Path(config.path)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise TargetError(f"{path}: no config.json; expected a model in Hugging Face format.")
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(config.path, revision=config.revision))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise TargetError(
            f"target {config.path!r}: no such directory, and the hub does not give it "
            f"({type(error).__name__}: {error}). Set target.path."
        ) from error


def load_config(path: Path) -> Any:
    """The target's transformers config.

    Raises:
        TargetError: transformers does not know it.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=False)
    except (ValueError, OSError, KeyError) as error:
        raise TargetError(f"{path}: transformers cannot read its config ({error}).") from error


def stamp_files(path: Path) -> FileStamps:
    """What shows cheaply that the files of the target in `path` are still the same."""
    try:
        found = [(f.name, f.stat()) for f in sorted(path.iterdir()) if f.suffix in _STAMPED]
    except OSError as error:
        raise TargetError(f"{path}: cannot be read ({error}).") from error
    return {name: (stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in found}


def require_unchanged(path: Path, stamps: FileStamps) -> None:
    """Refuse a target whose files are not those of `stamps`: what was hashed is not what runs.

    Raises:
        TargetError: naming the first file.
    """
    now = stamp_files(path)
    if changed := sorted(n for n in stamps.keys() | now.keys() if stamps.get(n) != now.get(n)):
        raise TargetError(
            f"{path / changed[0]}: changed since the target was hashed. Leave the target's files "
            "alone during a build, and run the same command again."
        )


def describe_target(path: Path, config: TargetConfig) -> TargetSpec:
    """Identify the target by the content of its files, without loading it.

    Raises:
        TargetError: there are no safetensors weights.
    """
    model_config = load_config(path)
    text = model_config.get_text_config()
    weights = sorted(path.glob("*.safetensors"))
    if not weights:
        raise TargetError(f"{path}: no *.safetensors weights. Convert the model first.")
    total = sum(file.stat().st_size for file in weights)
    logger.info("hashing %s, %s", count(len(weights), "weight file"), size(total))
    fields = read_json(path / "config.json")
    stable = {key: value for key, value in fields.items() if key not in _VOLATILE_CONFIG}
    quantization = getattr(model_config, "quantization_config", None)
    return TargetSpec(
        config_sha256=sha256_bytes(canonical_json(stable)),
        weights_sha256=sha256_bytes(canonical_json({f.name: sha256_file(f) for f in weights})),
        model_type=model_config.model_type,
        dtype=config.dtype,
        quantization=None if quantization is None else str(_quantization_name(quantization)),
        attention=config.attention,
        num_layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
    )


def load_model(path: Path, config: TargetConfig) -> Any:
    """The whole model in `path`, on the CPU, frozen.

    Raises:
        TargetError: transformers cannot load it.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    arguments = {
        "dtype": getattr(torch, config.dtype),
        "attn_implementation": config.attention,
        "trust_remote_code": False,
        "use_safetensors": True,  # what was hashed, and never a pickle beside it
    }
    try:
        try:
            model = AutoModelForCausalLM.from_pretrained(path, **arguments)
        except ValueError as error:
            if "Unrecognized configuration class" not in str(error):
                raise
            model = AutoModelForImageTextToText.from_pretrained(path, **arguments)
    except (ValueError, OSError, ImportError, RuntimeError) as error:
        raise TargetError(f"{path}: transformers cannot load it ({error}).") from error
    return model.eval().requires_grad_(False)


def _quantization_name(quantization: Any) -> Any:
    if isinstance(quantization, dict):
        return quantization.get("quant_method", "unknown")
    return getattr(quantization, "quant_method", "unknown")


class Target:
    """A loaded target with taps on some of its blocks."""

    def __init__(self, model: nn.Module, layer_ids: Sequence[int], device: torch.device) -> None:
        self.device = device
        self._decoder = Decoder.find(model)
        num_layers = len(self._decoder.layers)
        if not layer_ids or min(layer_ids) < 0 or max(layer_ids) >= num_layers:
            raise TargetError(
                f"target_layer_ids {list(layer_ids)}: the target has blocks 0..{num_layers - 1}."
            )
        self._layer_ids = tuple(layer_ids)
        self._states: dict[int, Tensor] = {}
        for layer_id in self._layer_ids:
            self._decoder.layers[layer_id].register_forward_hook(self._tap(layer_id))

    @classmethod
    def load(
        cls, path: Path, config: TargetConfig, layer_ids: Sequence[int], device: str
    ) -> "Target":
        """Load the target from `path` onto `device`.

        Raises:
            TargetError: transformers cannot load it, or a tap is out of range.
        """
        model = load_model(path, config)
        return cls(model.to(device), layer_ids, torch.device(device))

    def head(self) -> Head:
        """Embedding, LM head and final norm, as bfloat16 on the CPU."""

        def stored(module: nn.Module) -> Tensor:
            weight = module.weight
            assert isinstance(weight, Tensor)
            return weight.detach().to("cpu", torch.bfloat16, copy=True)

        decoder = self._decoder
        embedding = stored(decoder.embedding)
        is_tied = decoder.lm_head.weight is decoder.embedding.weight
        return Head(
            embedding, embedding if is_tied else stored(decoder.lm_head), stored(decoder.final_norm)
        )

    @torch.inference_mode()
    def capture(self, token_ids: Sequence[npt.NDArray[np.int32]]) -> list[Tensor]:
        """States of each sample, bfloat16 [T, L, D] on the target's device.

        The batch is padded on the right, so that with causal attention (or any recurrence) no
        sample sees its padding or its batch mates; no attention mask is needed then.

        Raises:
            TargetError: the model gave other rows than tokens.
        """
        longest = max(len(ids) for ids in token_ids)
        batch = torch.zeros((len(token_ids), longest), dtype=torch.int64)
        for row, ids in enumerate(token_ids):
            batch[row, : len(ids)] = torch.from_numpy(ids)
        self._states.clear()
        with contextlib.suppress(_LastTapReached):
            self._decoder.module(input_ids=batch.to(self.device), use_cache=False)
        states = [self._states.pop(layer_id) for layer_id in self._layer_ids]
        for layer_id, state in zip(self._layer_ids, states, strict=True):
            if state.shape[:2] != batch.shape:
                raise TargetError(
                    f"block {layer_id} gave states of shape {list(state.shape)} for ids of shape "
                    f"{list(batch.shape)}: a row per token was expected."
                )
        return [
            torch.stack([state[row, : len(ids)] for state in states], dim=1).to(torch.bfloat16)
            for row, ids in enumerate(token_ids)
        ]

    def _tap(self, layer_id: int) -> Any:
        is_last = layer_id == max(self._layer_ids)

        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            self._states[layer_id] = output if isinstance(output, Tensor) else output[0]
            if is_last:
                raise _LastTapReached

        return hook
