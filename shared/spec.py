"""CaptureSpec: everything that decides what a stored state is, and its fingerprint.

Two caches hold comparable states exactly when their fingerprints are equal. Paths and names are
not part of it: a cache may move, and a target is its weights.
"""

import re
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from shared import config
from shared.chunk import CHUNK_TOKENS
from shared.codec import PRESETS, Codec, codec_from_dict
from shared.errors import CacheIncompatibleError, ConfigError
from shared.files import canonical_json, sha256_bytes

FORMAT_VERSION = 2
_SETTINGS = {
    "target.config_sha256": "target.path (config.json)",
    "target.weights_sha256": "target.path (weights)",
    "target.model_type": "target.path (model_type)",
    "target.quantization": "target.path (quantization)",
    "target.num_layers": "target.path (num_layers)",
    "target.hidden_size": "target.path (hidden_size)",
    "target.vocab_size": "target.path (vocab_size)",
    "tokens.tokenizer_sha256": "target.path (tokenizer files)",
    "tokens.template_sha256": "target.path (chat template)",
    "tokens.eos_token_ids": "target.path (eos_token_ids)",
    "tokens.pad_token_id": "target.path (pad_token_id)",
    "tokens.max_length": "data.max_length",
    "tokens.truncation": "data.truncation",
    "target_layer_ids": "capture.target_layer_ids",
    "last_hidden": "capture.last_hidden",
    "projection": "capture.projection",
}
"""The setting of stage one that decides a field of the spec, where it has another name."""

_DIGEST = re.compile(r"[0-9a-f]{64}")

LastHidden: TypeAlias = Literal["none", "pre_norm", "post_norm"]
"""Whether the last hidden state is stored, and on which side of the final norm it was taken."""

LAYER_CONVENTION = "output of decoder block k, 0-based, before the final norm"


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetSpec:
    """The model whose states are stored."""

    config_sha256: str
    weights_sha256: str
    model_type: str
    dtype: str
    """Type of the weights and of the computation."""

    quantization: str | None
    attention: str
    """Attention kernel the states were computed with."""

    num_layers: int
    hidden_size: int
    vocab_size: int
    """Rows of the embedding."""

    def __post_init__(self) -> None:
        for name in ("num_layers", "hidden_size", "vocab_size"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenSpec:
    """How text became ids."""

    tokenizer_sha256: str
    template_sha256: str
    template_arguments: dict[str, bool | int | str]
    max_length: int
    truncation: str
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class ProjectionSpec:
    """The matrix that the states of the tapped blocks were multiplied with before they were stored.

    It lies in the cache: see `shared.projection`.
    """

    sha256: str
    """Of `projection.safetensors`."""

    rank: int
    """Values stored of each token, R, instead of those of all tapped blocks."""

    def __post_init__(self) -> None:
        if not _DIGEST.fullmatch(self.sha256):
            raise ValueError(f"sha256 {self.sha256[:80]!r} is none")
        if self.rank <= 0:
            raise ValueError(f"rank must be positive, got {self.rank}")

    def __str__(self) -> str:
        return f"to {self.rank} values by {self.sha256[:16]}"


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptureSpec:
    """What is stored, of which target, from which ids, by which codec.

    Stored are, of each token, `num_captured` rows of `width` values: the states of each tapped
    block, or one row that a projection made of all of them; then the last hidden state if it is
    asked, with zeros behind it where a row is wider.
    """

    target: TargetSpec
    tokens: TokenSpec
    target_layer_ids: tuple[int, ...]
    codec: dict[str, int | float | str]

    last_hidden: LastHidden = "none"
    """Stored as one more layer behind the blocks. It is for losses, never a feature."""

    projection: ProjectionSpec | None = None
    """Applied to the blocks, side by side; None stores them as they are."""

    layer_convention: str = LAYER_CONVENTION
    chunk_tokens: int = CHUNK_TOKENS
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        ids = self.target_layer_ids
        if not ids or list(ids) != sorted(set(ids)):
            raise ValueError(f"target_layer_ids must ascend without repeats, got {list(ids)}")
        if ids[0] < 0 or ids[-1] >= self.target.num_layers:
            raise ValueError(
                f"target_layer_ids must lie in 0..{self.target.num_layers - 1}, got {list(ids)}"
            )
        if self.layer_convention != LAYER_CONVENTION:
            raise ValueError(f"layer_convention {self.layer_convention!r} is unknown")
        if self.chunk_tokens != CHUNK_TOKENS:
            raise ValueError(f"chunk_tokens must be {CHUNK_TOKENS}, got {self.chunk_tokens}")
        if self.projection is not None:
            least, most = self.target.hidden_size, self.num_taps * self.target.hidden_size
            if not least <= self.projection.rank <= most:
                raise ValueError(
                    f"projection.rank must be in [{least}, {most}], got {self.projection.rank}"
                )

    @property
    def num_taps(self) -> int:
        """Blocks whose states a drafter is given, as they are or projected."""
        return len(self.target_layer_ids)

    @property
    def num_feature_rows(self) -> int:
        """Stored rows that are the drafter's features: the first ones."""
        return self.num_taps if self.projection is None else 1

    @property
    def num_captured(self) -> int:
        """Rows stored of each token, L: the features, and the last hidden state if it is asked."""
        return self.num_feature_rows + (self.last_hidden != "none")

    @property
    def width(self) -> int:
        """Values of one stored row: the hidden size, or the rank of the projection."""
        return self.target.hidden_size if self.projection is None else self.projection.rank

    @property
    def row_sizes(self) -> tuple[int, ...]:
        """Values of each stored row, without the zeros behind a last hidden state."""
        sizes = (self.width,) * self.num_feature_rows
        return sizes if self.last_hidden == "none" else (*sizes, self.target.hidden_size)

    @property
    def num_features(self) -> int:
        """Values of one token that a drafter's `fc` reads."""
        return self.num_feature_rows * self.width

    @property
    def layer_names(self) -> tuple[str, ...]:
        """What to call each stored row, in the order in which they are stored."""
        blocks = tuple(f"block {layer_id}" for layer_id in self.target_layer_ids)
        if self.projection is not None:
            blocks = (f"projection of blocks {', '.join(map(str, self.target_layer_ids))}",)
        return blocks if self.last_hidden == "none" else (*blocks, "last hidden state")

    def describe_layers(self) -> list[dict[str, Any]]:
        """Name of each stored row for people, and the block's id for programs, else null."""
        ids = [*self.target_layer_ids, None] if self.projection is None else [None, None]
        return [
            {"layer_id": layer_id, "name": name}
            for layer_id, name in zip(ids, self.layer_names, strict=False)
        ]

    def unprojected(self) -> "CaptureSpec":
        """The same without the projection: what the target gives."""
        return replace(self, projection=None)

    @property
    def raw_bytes_per_token(self) -> int:
        """Bytes of one token's states as the target gives them, as plain bfloat16."""
        return (self.num_taps + (self.last_hidden != "none")) * self.target.hidden_size * 2

    @property
    def row_bytes_per_token(self) -> int:
        """Bytes of one token's rows as plain bfloat16: what the codec is given."""
        return self.num_captured * self.width * 2

    def build_codec(self) -> Codec:
        return codec_from_dict(dict(self.codec))

    @property
    def fingerprint(self) -> str:
        return sha256_bytes(canonical_json(self.to_dict()))

    def to_dict(self) -> dict[str, Any]:
        fields: dict[str, Any] = config.to_dict(self)
        # Left out so that caches of before keep their fingerprint.
        if self.last_hidden == "none":
            del fields["last_hidden"]
        if self.projection is None:
            del fields["projection"]
        return fields

    @classmethod
    def from_dict(cls, fields: Any, where: str) -> "CaptureSpec":
        """Parse what `to_dict` wrote.

        Raises:
            CacheIncompatibleError: another format version, or fields that do not fit.
        """
        if not isinstance(fields, dict):
            raise CacheIncompatibleError(f"{where}: expected a table, got {fields!r}")
        if (version := fields.get("format_version")) != FORMAT_VERSION:
            raise CacheIncompatibleError(
                f"{where}: format version {version!r}, this version reads {FORMAT_VERSION}. "
                "Use the version of draftcache that wrote the cache."
            )
        if fields.get("last_hidden") == "none":
            raise CacheIncompatibleError(
                f"{where}: last_hidden 'none' is written by leaving it out, or the same settings "
                "would have two fingerprints."
            )
        if "projection" in fields and fields["projection"] is None:
            raise CacheIncompatibleError(
                f"{where}: no projection is written by leaving it out, or the same settings would "
                "have two fingerprints."
            )
        try:
            spec = config.build(cls, fields)
            spec.build_codec()
        except (ConfigError, CacheIncompatibleError) as error:
            raise CacheIncompatibleError(f"{where}: {error}") from None
        return spec

    def require_equal(self, stored: "CaptureSpec", where: str) -> None:
        """Refuse to mix two fingerprints in one cache.

        Raises:
            CacheIncompatibleError: naming every setting that differs.
        """
        lines = config.differences(self.to_settings(), stored.to_settings())
        if lines:
            raise CacheIncompatibleError(
                f"{where}: built with other settings ({'; '.join(lines)}). "
                "Give the new settings a cache of their own (cache.path), or restore these."
            )

    def to_settings(self) -> dict[str, Any]:
        """The spec by the settings of stage one that decide its fields, for messages."""
        projection = "none" if self.projection is None else str(self.projection)
        fields = self.to_dict() | {"last_hidden": self.last_hidden, "projection": projection}
        codec = fields.pop("codec")
        presets = {name: preset.to_dict() for name, preset in PRESETS.items()}
        arguments = fields["tokens"].pop("template_arguments")
        settings = {_SETTINGS.get(key, key): value for key, value in config.flatten(fields).items()}
        settings["codec.preset"] = next((n for n in presets if presets[n] == codec), str(codec))
        return {**settings, **{f"data.template_arguments.{k}": v for k, v in arguments.items()}}
