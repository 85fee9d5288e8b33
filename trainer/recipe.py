"""The recipe: the settings that decide what a drafter is and how it learns.

A default is written here, or in `trainer.config`, and nowhere else.
"""

from dataclasses import dataclass
from typing import Literal

GAMMA_BY_BLOCK_SIZE = {16: 7.0, 10: 5.0, 8: 4.0}
"""Decay of the slot weights by block size. Source: DFlash, arXiv 2602.06036, training recipe."""


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
