"""What an import is told. A default is written here and nowhere else."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from cache_builder.config import CacheConfig, CaptureConfig, CodecConfig, PlanConfig
from cache_builder.distance import NOISE
from shared import config
from shared.errors import ConfigError
from shared.location import Location, S3Url


@dataclass(frozen=True, kw_only=True, slots=True)
class DeclaredConfig:
    """What the files do not say. Unset is an error that says how to find it out."""

    layer_ids: tuple[int, ...] = ()
    """One id per stored state, in the order stored, as the capturing tool was given them."""

    layer_numbering: Literal["block", "hidden-states"] | None = None
    """`block`: id k is the output of decoder block k, from 0 (z-lab, SGLang, SpecForge).
    `hidden-states`: id k is entry k of transformers' hidden_states, whose 0 is the embedding
    (speculators, vLLM)."""

    last_hidden: Literal["before-norm", "after-norm"] | None = None
    """Where the last block's output was taken. Needed only where an id names that block."""

    keep_last: bool = False
    """Keep the last block's output as one more captured block; by default it is left out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckConfig:
    """Some samples go through the target again before anything is written."""

    num_samples: int = 8
    """Samples compared; 0 compares none."""

    tolerance: float = NOISE
    """Relative distance allowed per block; see `block_distances`."""

    seed: int = 0
    """Chooses the samples."""

    def __post_init__(self) -> None:
        if self.num_samples < 0:
            raise ValueError(f"num_samples must not be negative, got {self.num_samples}")
        if self.seed < 0:
            raise ValueError(f"seed must not be negative, got {self.seed}")
        if not 0 < self.tolerance < 1:
            raise ValueError(f"tolerance must lie between 0 and 1, got {self.tolerance}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportConfig:
    kind: Literal["speculators", "specforge"]
    source: Path
    """The other tool's directory. It is only read."""

    states: Path | None = None
    """speculators: directory of the hs_*.safetensors; unset is SOURCE/hidden_states."""

    tag: str = ""
    """Source tag of the samples, by which the trainer can select them; empty is `kind`."""

    on_mismatch: Literal["stop", "skip"] = "stop"
    """Samples whose states, token ids and mask do not belong together: an error, or counted."""

    max_quarantined_fraction: float = CaptureConfig().max_quarantined_fraction
    """Share of samples with unusable states above which the import fails, as a build does."""

    same_as: Location | None = None
    """A cache whose unrecorded facts (kernel, template, lengths) are declared to be these too."""

    cache: CacheConfig
    target: str
    """The target's directory in Hugging Face format, or its name on the hub."""

    revision: str | None = None
    """Commit, branch or tag of a hub model; unset takes the newest."""

    dtype: Literal["bfloat16", "float32"] | None = None
    """Type the target computed in; unset is the type that the states are stored in."""

    declared: DeclaredConfig = field(default_factory=DeclaredConfig)
    codec: CodecConfig = field(default_factory=CodecConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    check: CheckConfig = field(default_factory=CheckConfig)

    def __post_init__(self) -> None:
        CaptureConfig(max_quarantined_fraction=self.max_quarantined_fraction)  # checks its range

    @property
    def source_tag(self) -> str:
        return self.tag or self.kind


def read_options(
    *,
    layer_ids: str | None,
    layer_numbering: str | None,
    last_hidden: str | None,
    keep_last: bool,
    cache: Location,
    scratch: Path | None,
    codec: str | None,
    min_free_gb: float | None,
    shard_mib: float | None,
    num_samples: int | None,
    no_recapture: bool,
    tolerance: float | None,
    seed: int | None,
    skip_mismatched: bool,
    **options: Any,
) -> ImportConfig:
    """The options of the command line, None where one is not given, as a configuration.

    Raises:
        ConfigError: a value does not fit.
    """
    checks = {"--recapture K": num_samples, "--tolerance": tolerance, "--seed": seed}
    given = [name for name, value in checks.items() if value is not None]
    if no_recapture and given:
        raise ConfigError(f"{given[0]} and --no-recapture exclude each other")
    sections: dict[str, dict[str, Any]] = {
        "cache": {"path": cache, "scratch": scratch, "min_free_gb": min_free_gb},
        "declared": {
            "layer_ids": None if layer_ids is None else _integers(layer_ids),
            "layer_numbering": layer_numbering,
            "last_hidden": last_hidden,
            "keep_last": keep_last,
        },
        "codec": {"preset": codec},
        "plan": {"shard_mib": shard_mib},
        "check": {
            "num_samples": 0 if no_recapture else num_samples,
            "tolerance": tolerance,
            "seed": seed,
        },
    }
    tree: dict[str, Any] = {**options, "on_mismatch": "skip" if skip_mismatched else "stop"}
    tree |= {name: _given(section) for name, section in sections.items()}
    return config.build(ImportConfig, _given(tree))


def _given(values: dict[str, Any]) -> dict[str, Any]:
    """Without what is not given; paths and locations as text."""
    return {
        key: str(value) if isinstance(value, Path | S3Url) else value
        for key, value in values.items()
        if value is not None
    }


def _integers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--layer-ids {text}: expected numbers with commas, as 2,18,33") from None
