"""The configuration of one training run, one frozen dataclass per concern.

A default is written here, or in `trainer.recipe`, and nowhere else. What both stages must agree on
(layers, hidden size, vocabulary) is not repeated: it is read from the cache's manifest and checked.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from shared.location import Location
from trainer.ranges import require_range, require_text
from trainer.recipe import AnchorConfig, DrafterConfig, LossConfig, NoiseConfig, OptimizerConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    path: Path
    """Directory of the run: config, metrics, checkpoints, export."""

    def __post_init__(self) -> None:
        require_text(self, "path")


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheConfig:
    path: Location | tuple[Location, ...]
    """The cache to train from, or a list of caches of the same kind: directories or
    `s3://BUCKET/PREFIX`."""

    sources: tuple[str, ...] = ()
    """Source tags to train on; empty takes all."""

    heldout_fraction: float = 0.05
    """Share of the samples kept for evaluation, chosen by a hash of their prompt."""

    exclude: tuple[str, ...] = ()
    """Ids of samples to leave out, as `train/samples` and nonfinite-*.json name them."""

    def __post_init__(self) -> None:
        for sample_id in self.exclude:
            if not re.fullmatch("[0-9a-f]{32}", sample_id):
                raise ValueError(f"exclude must name samples by 32 digits, got {sample_id!r}")
        if not self.paths or len(set(self.paths)) < len(self.paths):
            raise ValueError(f"path needs one cache or several different ones, got {self.path}")
        require_text(self, "path")
        if not 0.0 <= self.heldout_fraction < 1.0:
            raise ValueError(f"heldout_fraction must be in [0, 1), got {self.heldout_fraction}")

    @property
    def paths(self) -> tuple[Location, ...]:
        return self.path if isinstance(self.path, tuple) else (self.path,)


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplerConfig:
    tokens_per_batch: int
    """Context tokens in one micro-batch: whole samples packed into one row."""

    bucket_edges: tuple[int, ...] = ()
    """Length edges of the buckets, ascending; empty takes quantiles of the tokens."""

    num_buckets: int = 6
    """Number of quantile buckets when `bucket_edges` is empty."""

    shards_in_flight: int = 0
    """Shards that are read from at a time, one for each bucket at least: for storage that is slow
    to open or to jump. Fewer mix less and pad more; 0 draws from all."""

    def __post_init__(self) -> None:
        require_range(self, "shards_in_flight", 0)
        require_range(self, "tokens_per_batch", 1)
        require_range(self, "num_buckets", 1, 1024)
        require_range(self, "bucket_edges", 0)
        if len(self.bucket_edges) == 1:
            raise ValueError(
                f"bucket_edges needs a lower and an upper edge, got {list(self.bucket_edges)}"
            )
        if list(self.bucket_edges) != sorted(set(self.bucket_edges)):
            raise ValueError(f"bucket_edges must ascend, got {list(self.bucket_edges)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderConfig:
    num_threads: int = 2
    """Threads that read and decode samples."""

    queue_batches: int = 8
    """Micro-batches held ready at most."""

    def __post_init__(self) -> None:
        require_range(self, "num_threads", 1, 1024)
        require_range(self, "queue_batches", 1, 65_536)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepConfig:
    steps: int
    """Optimizer steps of the whole run."""

    batches_per_step: int = 1
    """Micro-batches accumulated into one optimizer step."""

    seed: int = 0
    init_from: Path | None = None
    """Directory of a drafter in z-lab's layout whose weights are the first ones; unset draws them.
    `drafter.fitted_start` does not apply to them."""

    device: str = "auto"
    """`auto` takes cuda if there is one, else cpu."""

    compute_dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Type of the matrix products; weights and moments stay float32. `auto` takes bfloat16 where
    the device has units for it (CPUs with AVX512-BF16 or AMX, GPUs from Ampere on), else float32;
    the run keeps what it took."""

    compile: bool = False
    """Compile the drafter's layers, which takes a minute at the start. Meant for a GPU, where it
    has not been measured yet; on a CPU a step takes as long. Only rounding depends on it."""

    zero_features: bool = False
    """Control experiment: train as if the target's states were all zero."""

    on_nonfinite: Literal["stop", "skip"] = "stop"
    """What a non-finite loss or gradient does. It never reaches the weights."""

    max_nonfinite_steps: int = 10
    """Steps that `skip` may leave out before the run stops."""

    def __post_init__(self) -> None:
        require_range(self, "seed max_nonfinite_steps", 0)
        require_range(self, "steps batches_per_step", 1)
        require_text(self, "device init_from")


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluateConfig:
    every_steps: int = 500
    """Steps between two passes over held-out samples; 0 evaluates at start and end only."""

    max_samples: int = 256
    """Held-out samples used, the same ones at every evaluation."""

    tree_budgets: tuple[int, ...] = (8, 16, 32, 64, 256)
    """Node budgets of the tree acceptance length."""

    def __post_init__(self) -> None:
        require_range(self, "every_steps", 0)
        require_range(self, "max_samples", 1)
        require_range(self, "tree_budgets", 1, 65_536)
        if not self.tree_budgets:
            raise ValueError("tree_budgets must not be empty")


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    every_steps: int = 500
    keep: int = 2
    """Newest checkpoints that are kept. Kept too is the best one, of those that were evaluated at
    their step."""

    max_failures: int = 3
    """Saves that may fail in a row before the run stops."""

    def __post_init__(self) -> None:
        require_range(self, "every_steps keep max_failures", 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackingConfig:
    wandb: Literal["off", "offline", "online"] = "off"
    project: str = "draftcache"
    name: str | None = None

    def __post_init__(self) -> None:
        require_text(self, "project name")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    run: RunConfig
    cache: CacheConfig
    sampler: SamplerConfig
    drafter: DrafterConfig
    train: StepConfig
    anchors: AnchorConfig = field(default_factory=AnchorConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    noise: NoiseConfig = field(default_factory=NoiseConfig)
    loader: LoaderConfig = field(default_factory=LoaderConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)

    def __post_init__(self) -> None:
        if self.loss.kind != "dpace":
            self.loss.resolve_gamma(self.drafter.block_size)
