"""The fingerprint of imported states: what is known of them, what is declared, and what is not."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from cache_builder.config import DataConfig, TargetConfig
from cache_builder.importing.config import ImportConfig
from cache_builder.importing.slots import Slots
from cache_builder.target_config import load_config
from cache_builder.target_files import describe_target
from cache_builder.tokens import describe_tokens, load_template
from shared.cache import Cache
from shared.chunk import check_chunk_bytes
from shared.codec import PRESETS
from shared.config import differences
from shared.errors import CacheIncompatibleError
from shared.spec import CaptureSpec

UNKNOWN = "unknown"
UNKNOWN_LENGTH = 0


def imported_attention(kind: str) -> str:
    """What stands for the attention kernel, which no source records: never that of a capture."""
    return f"{UNKNOWN}, imported from {kind}"


def describe_import(
    config: ImportConfig, target_config: TargetConfig, target_path: Path, slots: Slots
) -> CaptureSpec:
    """The spec of the cache that `config` imports into.

    Known: blocks, hidden size and codec; weights, configuration and tokenizer are those of the
    target named. Not recorded by any source: kernel, chat template, maximum length and truncation.
    They say so, and the fingerprint is not that of any captured cache; with `same_as` they are
    taken from there.

    Raises:
        CacheIncompatibleError: what is known differs from `same_as`.
        TargetError: the target cannot be read.
    """
    codec = PRESETS[config.codec.preset]
    data = DataConfig(sources=("-",), max_length=2)  # of no consequence: replaced below
    template = load_template(target_path, data)
    tokens = describe_tokens(target_path, data, template, load_config(target_path))
    target = describe_target(target_path, target_config)
    check_chunk_bytes(codec, len(slots.target_layer_ids), target.hidden_size)
    spec = CaptureSpec(
        target=replace(target, attention=imported_attention(config.kind)),
        tokens=replace(
            tokens, template_sha256=UNKNOWN, max_length=UNKNOWN_LENGTH, truncation=UNKNOWN
        ),
        target_layer_ids=slots.target_layer_ids,
        codec=codec.to_dict(),
    )
    return spec if config.same_as is None else _take_over(spec, Cache(config.same_as))


def _take_over(spec: CaptureSpec, other: Cache) -> CaptureSpec:
    theirs = other.spec
    declared = replace(
        spec,
        target=replace(spec.target, attention=theirs.target.attention),
        tokens=replace(
            spec.tokens,
            template_sha256=theirs.tokens.template_sha256,
            template_arguments=theirs.tokens.template_arguments,
            max_length=theirs.tokens.max_length,
            truncation=theirs.tokens.truncation,
        ),
    )
    lines = differences(declared.to_dict(), theirs.to_dict(), names=("here", "there"))
    if lines:
        raise CacheIncompatibleError(
            f"--same-as {other.path}: what is known of the states differs ({'; '.join(lines)}). "
            "Import without --same-as, or with the --dtype and --codec of that cache."
        )
    return declared


def describe_origin(config: ImportConfig, slots: Slots) -> dict[str, Any]:
    """`origin` of `cache.json`: equal for all that is imported into one cache."""
    return {
        "kind": config.kind,
        "declared": slots.to_dict(config.declared),
        "same_as": config.same_as is not None,
    }
