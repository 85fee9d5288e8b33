"""What a shard became (ShardRecord) and the published whole (Manifest)."""

import re
from dataclasses import dataclass
from typing import Any, Self, TypeVar

from shared import config
from shared.errors import CacheError, CacheIncompatibleError, ConfigError
from shared.files import canonical_json, sha256_bytes
from shared.spec import FORMAT_VERSION

T = TypeVar("T")

_SHARD_ID = re.compile(r"[0-9]{4,}-[0-9]{5,}")
_FILE_NAME = re.compile(r"[a-z0-9_]+(/[a-z0-9_]+)*(\.json)?")
_OWN_DIGEST = "sha256"
_MAX_SIZE = 2**63 - 1
_MAX_BATCH_TOKENS = 2**31 - 1
MAX_THREADS = 1024
"""CPU threads of one forward."""

_DIGEST = re.compile(r"[0-9a-f]{64}")
_SAMPLE_ID = re.compile(r"[0-9a-f]{32}")


def is_shard_id(name: str) -> bool:
    return _SHARD_ID.fullmatch(name) is not None


def check_shard_id(shard_id: str) -> str:
    """Refuse names that could lead outside the cache.

    Raises:
        ValueError: not of the form 0001-00042.
    """
    if not is_shard_id(shard_id):
        raise ValueError(f"shard id {shard_id!r} is not of the form 0001-00042")
    return shard_id


def _check_digest(digest: str, name: str) -> None:
    if not _DIGEST.fullmatch(digest):
        raise ValueError(f"{name}: {digest!r} is not a sha256")


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredFile:
    size: int
    sha256: str

    def __post_init__(self) -> None:
        if self.size < 0:
            raise ValueError(f"size must not be negative, got {self.size}")
        if self.size > _MAX_SIZE:
            raise ValueError("size must be below 2^63")
        _check_digest(self.sha256, "sha256")


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerStatistics:
    """One captured layer over the tokens of a shard."""

    rms: float
    max_abs: float
    relative_error: float
    """L2 norm of (decoded - captured) over that of captured; 0 for a lossless codec."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardRecord:
    """One committed shard. Its presence is the commit."""

    shard_id: str
    fingerprint: str
    num_samples: int
    num_tokens: int
    num_supervised: int
    num_outliers: int
    calibration: str | None
    """Name of the calibration its levels need."""

    files: dict[str, StoredFile]
    """Every file of the shard, by its path inside the group."""

    sources: tuple[str, ...]
    """Source tags; `sample_sources` of the shard refers to them by position."""

    layers: tuple[LayerStatistics, ...]
    quarantined: dict[str, str]
    """Planned samples that could not be stored: id to reason."""

    batch_tokens: int | None = None
    """Tokens of one forward, padding included, when it was captured. In bfloat16 they decide how
    sums round, and so the bits of the states; None in a shard that was imported, or rewritten
    without a capture."""

    threads: int | None = None
    """CPU threads of the forward, which decide that too; None on a GPU, or as above."""

    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        check_shard_id(self.shard_id)
        _check_digest(self.fingerprint, "fingerprint")
        if min(self.num_samples, self.num_tokens, self.num_supervised, self.num_outliers) < 0:
            raise ValueError(f"shard {self.shard_id}: negative count")
        for name, most in (("batch_tokens", _MAX_BATCH_TOKENS), ("threads", MAX_THREADS)):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= most:
                raise ValueError(f"shard {self.shard_id}: {name} must be in [1, {most}]")
        for name in self.files:
            if not _FILE_NAME.fullmatch(name):
                raise ValueError(f"shard {self.shard_id}: file name {name!r} is not allowed")
        for sample_id in self.quarantined:
            if not _SAMPLE_ID.fullmatch(sample_id):
                raise ValueError(f"shard {self.shard_id}: {sample_id!r} is not a sample id")
        if self.calibration is not None:
            _check_digest(self.calibration, "calibration")

    @property
    def stored_bytes(self) -> int:
        return sum(file.size for file in self.files.values())

    def to_dict(self) -> dict[str, Any]:
        fields: dict[str, Any] = config.to_dict(self)
        return fields

    @classmethod
    def from_dict(cls, fields: Any, where: str) -> Self:
        return _parse(cls, fields, where)


@dataclass(frozen=True, kw_only=True, slots=True)
class Totals:
    num_shards: int = 0
    num_samples: int = 0
    num_tokens: int = 0
    num_supervised: int = 0
    stored_bytes: int = 0
    quarantined: int = 0
    """Samples that some record says could not be stored, and that no shard has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """One generation of a cache: what a reader may use. Replaced in one step, last."""

    generation: int
    fingerprint: str
    records: dict[str, str]
    """Shard id to the sha256 of its record."""

    index: StoredFile
    """`generations/<generation>.index.safetensors`."""

    sources: tuple[str, ...]
    """Source tags; the index refers to them by position."""

    totals: Totals
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        _check_digest(self.fingerprint, "fingerprint")
        if self.generation <= 0:
            raise ValueError(f"generation must be positive, got {self.generation}")
        for shard_id, digest in self.records.items():
            check_shard_id(shard_id)
            _check_digest(digest, f"record {shard_id}")

    @property
    def shard_ids(self) -> list[str]:
        return sorted(self.records)

    def to_dict(self) -> dict[str, Any]:
        """The fields and, since nothing else covers this file, a digest of them."""
        fields: dict[str, Any] = config.to_dict(self)
        return {**fields, _OWN_DIGEST: sha256_bytes(canonical_json(fields))}

    @classmethod
    def from_dict(cls, fields: Any, where: str) -> Self:
        """Parse what `to_dict` wrote.

        Raises:
            CacheError: it was changed or damaged.
        """
        digest = None
        if isinstance(fields, dict):
            digest = fields.get(_OWN_DIGEST)
            fields = {key: value for key, value in fields.items() if key != _OWN_DIGEST}
        manifest = _parse(cls, fields, where)
        if digest != (found := manifest.to_dict()[_OWN_DIGEST]):
            raise CacheError(
                f"{where}: states sha256 {str(digest)[:16]}, its fields have {found[:16]}. It was "
                "changed or damaged after it was written. Run `cache-builder verify`."
            )
        return manifest


def _parse(cls: type[T], fields: Any, where: str) -> T:
    if not isinstance(fields, dict):
        raise CacheError(f"{where}: expected a table. The file is damaged.")
    if (version := fields.get("format_version")) != FORMAT_VERSION:
        raise CacheIncompatibleError(
            f"{where}: format version {version!r}, this version reads {FORMAT_VERSION}. "
            "Use the version of draftcache that wrote the cache."
        )
    try:
        return config.build(cls, fields)
    except ConfigError as error:
        raise CacheError(f"{where}: {error}. The file is damaged.") from None
