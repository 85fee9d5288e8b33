"""The target's tokenizer, and what of it decides the ids."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cache_builder.config import DataConfig
from cache_builder.target_config import read_target_json
from cache_builder.template import ChatTemplate
from shared.errors import ConfigError, TargetError
from shared.files import canonical_json, sha256_bytes, sha256_file
from shared.spec import TokenSpec

TOKENIZER_CONFIG = "tokenizer_config.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    TOKENIZER_CONFIG,
)
"""What AutoTokenizer may read of most targets, besides the chat template."""

_VOLATILE_CONFIG = ("chat_template", "name_or_path", "processor_class", "transformers_version")
"""Keys of tokenizer_config.json that change no id, or are hashed by themselves."""

_GENERATION_CONFIG = "generation_config.json"


def load_template(path: Path, config: DataConfig) -> ChatTemplate:
    """The chat template of the target in `path`.

    Raises:
        TargetError: there is no tokenizer, or its template does not compile.
        ConfigError: `template_arguments` names what is passed to the template anyway.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except (ValueError, OSError, KeyError) as error:
        raise TargetError(f"{path}: transformers cannot load its tokenizer ({error}).") from error
    eos_ids = _token_ids(_generation_config(path).get("eos_token_id"))
    try:
        return ChatTemplate(tokenizer, config.template_arguments, end_ids=eos_ids)
    except ValueError as error:
        raise ConfigError(f"data.template_arguments: {error}") from None


def describe_tokens(
    path: Path, config: DataConfig, template: ChatTemplate, model_config: Any
) -> TokenSpec:
    """Identify the tokenizer and template by their content.

    Raises:
        ConfigError: samples may become longer than the target has positions.
    """
    text = model_config.get_text_config()
    positions = max_positions(text)
    if positions is not None and config.max_length > positions:
        raise ConfigError(
            f"data.max_length {config.max_length}: the target in {path} has {positions} positions "
            f"(max_position_embeddings). Set data.max_length to {positions} or less."
        )
    generation = _generation_config(path)
    return TokenSpec(
        tokenizer_sha256=_tokenizer_sha256(path, template),
        template_sha256=template.sha256,
        template_arguments=dict(config.template_arguments),
        max_length=config.max_length,
        truncation=config.truncation,
        eos_token_ids=_token_ids(
            generation.get("eos_token_id", getattr(text, "eos_token_id", None))
        ),
        pad_token_id=generation.get("pad_token_id", getattr(text, "pad_token_id", None)),
    )


def describe_rendering(path: Path, template: ChatTemplate) -> str:
    """A short digest of tokenizer and template of the target in `path`, arguments left out."""
    digests = [_tokenizer_sha256(path, template), template.sha256]
    return sha256_bytes(canonical_json(digests))[:16]


def end_token_ids(path: Path, model_config: Any) -> frozenset[int]:
    """Tokens that end an answer of the target in `path`.

    Raises:
        TargetError: its files name none.
    """
    default = getattr(model_config.get_text_config(), "eos_token_id", None)
    ids = _token_ids(_generation_config(path).get("eos_token_id", default))
    if not ids:
        raise TargetError(
            f"{path}: neither generation_config.json nor config.json has an eos_token_id, so no "
            "answer would end. Add it there."
        )
    return frozenset(ids)


def max_positions(text_config: Any) -> int | None:
    """Positions the target was made for. None: its config names no limit.

    `max_position_embeddings` counts scaled positions already, except with YaRN switched on by
    hand: there the limit is that of the original positions times the factor.
    """
    positions: int | None = getattr(text_config, "max_position_embeddings", None)
    if positions is None:
        return None
    scaling = [getattr(text_config, name, None) for name in ("rope_scaling", "rope_parameters")]
    scaling += [part for parts in scaling if isinstance(parts, dict) for part in parts.values()]
    for part in scaling:
        if isinstance(part, dict):
            original = part.get("original_max_position_embeddings")
            factor = part.get("factor")
            if original and factor:
                positions = max(positions, int(original * factor))
    return positions


def _tokenizer_sha256(path: Path, template: ChatTemplate) -> str:
    return sha256_bytes(canonical_json(dict(_digests(path, template))))


def _digests(path: Path, template: ChatTemplate) -> Iterator[tuple[str, str]]:
    """Name and digest of every file that the tokenizer is made from."""
    for name in sorted({*TOKENIZER_FILES, *template.vocabulary_files}):
        if not (path / name).is_file():
            continue
        if name == TOKENIZER_CONFIG:
            fields = read_target_json(path / name)
            stable = {key: fields[key] for key in fields if key not in _VOLATILE_CONFIG}
            yield name, sha256_bytes(canonical_json(stable))
        else:
            yield name, sha256_file(path / name)


def _generation_config(path: Path) -> dict[str, Any]:
    file = path / _GENERATION_CONFIG
    return read_target_json(file) if file.is_file() else {}


def _token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """Ids as a config of transformers writes them: none, one, or a list."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)
