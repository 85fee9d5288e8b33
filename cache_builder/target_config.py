"""The target's configuration files, as transformers and others write them."""

import json
from pathlib import Path
from typing import Any

from cache_builder.gguf import RECORD
from shared.errors import TargetError


def read_target_json(path: Path) -> dict[str, Any]:
    """The fields of one of the target's files, without a float that digests could not be taken of.

    Infinity and NaN become what newer versions of transformers write for them: both spellings of
    one configuration have one digest.

    Raises:
        TargetError: missing, or no JSON object.
    """
    try:
        fields = json.loads(path.read_bytes(), parse_constant=lambda name: {"__float__": name})
    except (OSError, ValueError, RecursionError) as error:
        raise TargetError(
            f"{path}: cannot be read as JSON ({error}). Fetch the target's files anew."
        ) from None
    if not isinstance(fields, dict):
        raise TargetError(f"{path}: expected a JSON object, found {type(fields).__name__}.")
    return fields


def load_config(path: Path) -> Any:
    """The target's transformers config.

    Raises:
        TargetError: transformers does not know it, or it is not that of a language model.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    except (ValueError, OSError, KeyError) as error:
        raise TargetError(
            f"{path}: transformers cannot read its config ({one_line(error)})."
        ) from error
    text = config.get_text_config()
    for name in ("num_hidden_layers", "hidden_size", "vocab_size"):
        if not isinstance(getattr(text, name, None), int):
            raise TargetError(
                f"{path / 'config.json'}: no {name} (model_type {config.model_type!r}). "
                "Expected a language model, plain or wrapped."
            )
    return config


def describe_quantization(path: Path, config: Any) -> str | None:
    """How the weights of the target in `path` are or once were quantized; None: they are not.

    Args:
        config: what `load_config` gave of it.

    Raises:
        TargetError: the record of a conversion from GGUF is damaged.
    """
    record = read_target_json(path / RECORD) if (path / RECORD).is_file() else {}
    if isinstance(kind := record.get("quantization"), str):
        return f"gguf {kind}"
    for part in (config, config.get_text_config()):
        found = getattr(part, "quantization_config", None)
        if found is not None:
            fields = found if isinstance(found, dict) else found.to_dict()
            method = fields.get("quant_method", "unknown")
            return str(getattr(method, "value", method))
    return None


def one_line(error: Exception) -> str:
    """What transformers says, without its line breaks and the rest of an essay."""
    text = " ".join(str(error).split())
    return text if len(text) <= 400 else f"{text[:400]} ..."
