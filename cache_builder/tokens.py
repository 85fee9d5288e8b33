"""The target's tokenizer, and what of it decides the ids."""

from pathlib import Path
from typing import Any

from cache_builder.config import DataConfig
from cache_builder.template import ChatTemplate
from shared.errors import TargetError
from shared.files import canonical_json, read_json, sha256_bytes, sha256_file
from shared.spec import TokenSpec

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
)
_GENERATION_CONFIG = "generation_config.json"


def load_template(path: Path, config: DataConfig) -> ChatTemplate:
    """The chat template of the target in `path`.

    Raises:
        TargetError: there is no tokenizer, or its template does not compile.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except (ValueError, OSError, KeyError) as error:
        raise TargetError(f"{path}: transformers cannot load its tokenizer ({error}).") from error
    return ChatTemplate(tokenizer, config.template_arguments)


def describe_tokens(
    path: Path, config: DataConfig, template: ChatTemplate, model_config: Any
) -> TokenSpec:
    """Identify the tokenizer and template by their content."""
    files = {name: sha256_file(path / name) for name in _TOKENIZER_FILES if (path / name).is_file()}
    generation = (
        read_json(path / _GENERATION_CONFIG) if (path / _GENERATION_CONFIG).is_file() else {}
    )
    text = model_config.get_text_config()
    eos = generation.get("eos_token_id", getattr(text, "eos_token_id", None))
    eos_ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
    return TokenSpec(
        tokenizer_sha256=sha256_bytes(canonical_json(files)),
        template_sha256=template.sha256,
        template_arguments=dict(config.template_arguments),
        max_length=config.max_length,
        truncation=config.truncation,
        eos_token_ids=tuple(eos_ids),
        pad_token_id=generation.get("pad_token_id", getattr(text, "pad_token_id", None)),
    )
