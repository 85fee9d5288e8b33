"""What a sweep looks for: a metric, a number of trials, and the values that settings may take."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from shared import config as configs
from shared.errors import ConfigError
from trainer.ranges import require_range, require_text

MAX_JOBS = 1024
Scalar: TypeAlias = bool | int | str | float
Choice: TypeAlias = Scalar | tuple[Scalar, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Dimension:
    """The values of one setting: a range with both ends, or a list of choices."""

    low: int | float | None = None
    high: int | float | None = None
    step: int | float | None = None
    """Values are `low` plus multiples of it; unset takes any, or every integer."""

    log: bool = False
    """Draw evenly by order of magnitude."""

    choices: tuple[Choice, ...] = ()

    def __post_init__(self) -> None:
        if self.choices:
            if self.low is not None or self.high is not None or self.step is not None or self.log:
                raise ValueError("takes either choices or low and high, got both")
            return
        if self.low is None or self.high is None:
            raise ValueError("expected low and high, or choices")
        if self.low >= self.high:
            raise ValueError(f"low must be below high, got {self.low} and {self.high}")
        if self.step is not None and not 0 < self.step <= self.high - self.low:
            raise ValueError(f"step must be in (0, high - low], got {self.step}")
        if self.log and (self.low <= 0 or self.step is not None):
            raise ValueError("log needs low above 0 and no step")


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepConfig:
    space: dict[str, Dimension]
    """Values by setting, `"optimizer.lr" = { low = 1e-4, high = 1e-2, log = true }`."""

    metric: str = "tau_walk"
    """A held-out figure of the last evaluation: `tau_chain`, `tau_tree.64`, `loss`, ..."""

    direction: Literal["maximize", "minimize"] | None = None
    """Unset minimizes `loss` and maximizes anything else."""

    trials: int = 20
    jobs: int = 1
    """Trials that run at the same time, each a process."""

    devices: tuple[str, ...] = ()
    """`train.device` of each job, in turn; empty leaves the configured one to all. Those beyond
    `jobs` stay idle."""

    seed: int = 0
    """Of the search. That of the runs is `train.seed`."""

    startup_trials: int = 10
    """Trials drawn at random before the sampler (TPE) learns from them, and completed before any
    is pruned."""

    prune: bool = True
    """End a trial early whose best evaluation so far is worse than the median of the others at
    the same step. Takes effect where `evaluate.every_steps` gives evaluations in between."""

    def __post_init__(self) -> None:
        require_range(self, "trials startup_trials", 1)
        require_range(self, "jobs", 1, MAX_JOBS)
        require_range(self, "seed", 0)
        require_text(self, "metric devices")
        if not self.space:
            raise ValueError("space must name at least one setting")

    @property
    def goal(self) -> Literal["maximize", "minimize"]:
        """The direction in force."""
        return self.direction or ("minimize" if self.metric == "loss" else "maximize")


def load_sweep(path: Path) -> SweepConfig:
    """The section `sweep` of the TOML file `path`.

    Settings of the space may be quoted (`"optimizer.lr" = ...`) or not (`optimizer.lr = ...`).

    Raises:
        ConfigError: the file cannot be read, or a key or value does not fit.
    """
    tree = configs.read_toml(path)
    section = tree.get("sweep")
    if set(tree) != {"sweep"} or not isinstance(section, Mapping):
        raise ConfigError(
            f"{path}: expected one section, [sweep], found {', '.join(sorted(tree)) or 'none'}."
        )
    if isinstance(space := section.get("space"), Mapping):
        section = {**section, "space": _by_key(space)}
    try:
        return configs.build(SweepConfig, section, "sweep")
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _by_key(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Tables of tables as one table with dotted keys; the innermost are the dimensions."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        is_section = isinstance(value, Mapping) and any(
            isinstance(inner, Mapping) for inner in value.values()
        )
        flat |= _by_key(value, f"{prefix}{name}.") if is_section else {prefix + name: value}
    return flat
