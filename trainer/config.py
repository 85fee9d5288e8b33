"""The configuration of one training run, one frozen dataclass per concern.

A default is written here and nowhere else. What both stages must agree on (layers, hidden
size, vocabulary) is not repeated: it is read from the cache's manifest and checked.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

GAMMA_BY_BLOCK_SIZE = {16: 7.0, 10: 5.0, 8: 4.0}
"""Decay of the slot weights by block size. Source: DFlash, arXiv 2602.06036, training recipe."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    path: Path
    """Directory of the run: config, metrics, checkpoints, export."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheConfig:
    path: Path
    """The cache to train from."""

    sources: tuple[str, ...] = ()
    """Source tags to train on; empty takes all."""

    heldout_fraction: float = 0.05
    """Share of the samples kept for evaluation, chosen by a hash of their prompt."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.heldout_fraction < 1.0:
            raise ValueError(f"heldout_fraction must be in [0, 1), got {self.heldout_fraction}")


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplerConfig:
    tokens_per_batch: int
    """Context tokens in one micro-batch: whole samples packed into one row."""

    bucket_edges: tuple[int, ...] = ()
    """Length edges of the buckets, ascending; empty takes quantiles of the tokens."""

    num_buckets: int = 6
    """Number of quantile buckets when `bucket_edges` is empty."""

    def __post_init__(self) -> None:
        if self.tokens_per_batch <= 0:
            raise ValueError(f"tokens_per_batch must be positive, got {self.tokens_per_batch}")
        if self.num_buckets <= 0:
            raise ValueError(f"num_buckets must be positive, got {self.num_buckets}")
        if list(self.bucket_edges) != sorted(set(self.bucket_edges)):
            raise ValueError(f"bucket_edges must ascend, got {list(self.bucket_edges)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderConfig:
    num_threads: int = 2
    """Threads that read and decode samples."""

    queue_batches: int = 8
    """Micro-batches held ready at most."""

    def __post_init__(self) -> None:
        for name in ("num_threads", "queue_batches"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterConfig:
    mask_token_id: int
    """Id whose embedding fills slots 1..K-1. Must exist in the target and never occur in text."""

    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    num_layers: int = 5
    block_size: int = 16
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    fitted_start: bool = True
    """Fit the first weights to the target's states and LM head: `trainer.drafter.fit_start_`."""

    def __post_init__(self) -> None:
        for name in ("intermediate_size", "num_heads", "num_kv_heads", "head_dim", "num_layers"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.block_size < 2:
            raise ValueError(f"block_size must be at least 2, got {self.block_size}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads "
                f"({self.num_kv_heads})"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even, got {self.head_dim}")
        if self.mask_token_id < 0:
            raise ValueError(f"mask_token_id must not be negative, got {self.mask_token_id}")
        for name in ("rope_theta", "rms_norm_eps", "initializer_range"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class AnchorConfig:
    per_sample: int = 512
    """Anchors drawn from one sample at most, new every epoch (paper: 512)."""

    def __post_init__(self) -> None:
        if self.per_sample <= 0:
            raise ValueError(f"per_sample must be positive, got {self.per_sample}")


@dataclass(frozen=True, kw_only=True, slots=True)
class LossConfig:
    kind: Literal["decay", "dpace"] = "decay"
    """`decay`: weights exp(-(k-1)/gamma). `dpace`: weights from the drafter's own confidence."""

    gamma: float | None = None
    """Decay of the slot weights; unset takes the paper's value for the block size."""

    dpace_alpha: float = 0.5
    anchors_per_chunk: int = 64
    """Blocks whose logits exist at the same time."""

    def __post_init__(self) -> None:
        if self.gamma is not None and self.gamma <= 0:
            raise ValueError(f"gamma must be positive, got {self.gamma}")
        if not 0.0 <= self.dpace_alpha <= 1.0:
            raise ValueError(f"dpace_alpha must be in [0, 1], got {self.dpace_alpha}")
        if self.anchors_per_chunk <= 0:
            raise ValueError(f"anchors_per_chunk must be positive, got {self.anchors_per_chunk}")

    def resolve_gamma(self, block_size: int) -> float:
        """`gamma` if set, else the paper's value for `block_size`.

        Raises:
            ValueError: the paper has no value for this block size and none is set.
        """
        if self.gamma is not None:
            return self.gamma
        if block_size not in GAMMA_BY_BLOCK_SIZE:
            known = ", ".join(f"{k}: {v:g}" for k, v in sorted(GAMMA_BY_BLOCK_SIZE.items()))
            raise ValueError(
                f"loss.gamma: no published value for block_size {block_size} (known: {known}). "
                "Set loss.gamma."
            )
        return GAMMA_BY_BLOCK_SIZE[block_size]


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    lr: float = 6e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    warmup_fraction: float = 0.04
    """Share of the steps with a linear warm-up; cosine to `min_lr_fraction` after it."""

    min_lr_fraction: float = 0.0
    max_grad_norm: float = 1.0

    def __post_init__(self) -> None:
        if self.lr <= 0:
            raise ValueError(f"lr must be positive, got {self.lr}")
        if self.eps <= 0 or self.weight_decay < 0:
            raise ValueError("eps must be positive and weight_decay must not be negative")
        if not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise ValueError(f"betas must be in [0, 1), got {self.betas}")
        if not 0.0 <= self.warmup_fraction <= 1.0:
            raise ValueError(f"warmup_fraction must be in [0, 1], got {self.warmup_fraction}")
        if not 0.0 <= self.min_lr_fraction <= 1.0:
            raise ValueError(f"min_lr_fraction must be in [0, 1], got {self.min_lr_fraction}")
        if self.max_grad_norm <= 0:
            raise ValueError(f"max_grad_norm must be positive, got {self.max_grad_norm}")


@dataclass(frozen=True, kw_only=True, slots=True)
class NoiseConfig:
    scale: float = 0.0
    """Peak half-width of uniform noise on the target features, in units of their RMS."""

    warmup_steps: int = 0
    """Steps over which the scale rises from 0 to `scale`."""

    hold_steps: int = 0
    """Steps at `scale` after the warm-up; 0 holds to the end unless `decay_steps` is set."""

    decay_steps: int = 0
    """Steps over which the scale falls back to 0 after the hold; 0 never decays."""

    def __post_init__(self) -> None:
        for name in ("scale", "warmup_steps", "hold_steps", "decay_steps"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class StepConfig:
    steps: int
    """Optimizer steps of the whole run."""

    batches_per_step: int = 1
    """Micro-batches accumulated into one optimizer step."""

    seed: int = 0
    device: str = "auto"
    """`auto` takes cuda if there is one, else cpu."""

    compute_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of the matrix products; weights and moments stay float32."""

    zero_features: bool = False
    """Control experiment: train as if the target's states were all zero."""

    on_nonfinite: Literal["stop", "skip"] = "stop"
    """What a non-finite loss or gradient does. It never reaches the weights."""

    max_nonfinite_steps: int = 10
    """Steps that `skip` may leave out before the run stops."""

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**31:
            raise ValueError(f"seed must be in [0, 2**31), got {self.seed}")
        for name in ("steps", "batches_per_step"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluateConfig:
    every_steps: int = 500
    """Steps between two passes over held-out samples; 0 evaluates at start and end only."""

    max_samples: int = 256
    """Held-out samples used, the same ones at every evaluation."""

    tree_budgets: tuple[int, ...] = (8, 16, 32, 64, 256)
    """Node budgets of the tree acceptance length."""

    def __post_init__(self) -> None:
        if self.every_steps < 0 or self.max_samples <= 0:
            raise ValueError("every_steps must not be negative and max_samples must be positive")
        if not self.tree_budgets or min(self.tree_budgets) <= 0:
            raise ValueError(f"tree_budgets must be positive, got {list(self.tree_budgets)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    every_steps: int = 500
    keep: int = 2
    """Checkpoints kept besides the best one."""

    max_failures: int = 3
    """Saves that may fail in a row before the run stops."""

    def __post_init__(self) -> None:
        if self.every_steps <= 0 or self.keep <= 0 or self.max_failures <= 0:
            raise ValueError("every_steps, keep and max_failures must be positive")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackingConfig:
    wandb: Literal["off", "offline", "online"] = "off"
    project: str = "draftcache"
    name: str | None = None


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
        if self.loss.kind == "decay":
            self.loss.resolve_gamma(self.drafter.block_size)
