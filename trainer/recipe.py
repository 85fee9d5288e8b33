"""The recipe: the settings that decide what a drafter is and how it learns.

A default is written here, or in `trainer.config`, and nowhere else.
"""

from dataclasses import dataclass
from typing import Literal

from trainer.ranges import require_range

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
        require_range(self, "intermediate_size num_heads num_kv_heads head_dim num_layers", 1)
        require_range(self, "block_size", 2, 256)
        require_range(self, "mask_token_id", 0)
        require_range(self, "rope_theta", 1.0, 1e12)
        require_range(self, "rms_norm_eps", 1e-12, 0.1)
        require_range(self, "initializer_range", 1e-6, 10.0)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads "
                f"({self.num_kv_heads})"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even, got {self.head_dim}")


@dataclass(frozen=True, kw_only=True, slots=True)
class AnchorConfig:
    per_sample: int = 512
    """Anchors drawn from one sample at most, new every epoch (paper: 512)."""

    def __post_init__(self) -> None:
        require_range(self, "per_sample", 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class LossConfig:
    kind: Literal["decay", "dpace", "kl", "tv"] = "decay"
    """`decay`: cross-entropy with weights exp(-(k-1)/gamma). `dpace`: with weights from the
    drafter's own confidence. `kl`, `tv`: the Kullback-Leibler divergence or total variation from
    the target's distribution, with the weights of `decay`; for caches that hold the last hidden
    state."""

    gamma: float | None = None
    """Decay of the slot weights; unset takes the paper's value for the block size."""

    dpace_alpha: float = 0.5
    anchors_per_chunk: int = 64
    """Blocks whose logits exist at the same time."""

    def __post_init__(self) -> None:
        require_range(self, "gamma", 1e-3, 1e6)
        require_range(self, "dpace_alpha", 0.0, 1.0)
        require_range(self, "anchors_per_chunk", 1)

    @property
    def needs_teacher(self) -> bool:
        """Whether the target's distribution is needed, and not only the tokens that it chose."""
        return self.kind in ("kl", "tv")

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
        require_range(self, "lr", 1e-12, 100.0)
        require_range(self, "eps", 1e-30, 1.0)
        require_range(self, "weight_decay", 0.0, 1.0)
        require_range(self, "warmup_fraction min_lr_fraction", 0.0, 1.0)
        require_range(self, "max_grad_norm", 1e-6, 1e12)
        if not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise ValueError(f"betas must be in [0, 1), got {self.betas}")


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
        require_range(self, "scale", 0.0, 10.0)
        require_range(self, "warmup_steps hold_steps decay_steps", 0)
