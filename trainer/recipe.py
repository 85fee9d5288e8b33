"""The recipe: the settings that decide what a drafter is and how it learns.

A default is written here, or in `trainer.config`, and nowhere else.
"""

import math
from dataclasses import dataclass, fields
from typing import Any, Literal

from trainer.ranges import require_range

GAMMA_BY_BLOCK_SIZE = {16: 7.0, 10: 5.0, 8: 4.0}
"""Decay of the slot weights by block size. Source: DFlash, arXiv 2602.06036, training recipe."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeScaling:
    """Rotary embedding stretched for long contexts: names and formulas of transformers."""

    rope_type: Literal["linear", "yarn", "llama3"]
    factor: float
    original_max_position_embeddings: int | None = None
    """Context that the unscaled frequencies were made for; of `yarn` and `llama3`."""

    beta_fast: float | None = None
    """Of `yarn`: turns over the original context from which a pair keeps its speed; unset: 32."""

    beta_slow: float | None = None
    """Of `yarn`: turns up to which a pair is slowed by the whole factor; unset: 1."""

    attention_factor: float | None = None
    """Of `yarn`: multiplies cosines and sines; unset: 0.1 ln(factor) + 1."""

    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    """Of `llama3`: turns over the original context below which a pair is slowed by the whole
    factor, and above which it keeps its speed."""

    def __post_init__(self) -> None:
        require_range(self, "factor", 1.0, 1e6)
        require_range(self, "original_max_position_embeddings", 1)
        require_range(self, "beta_fast beta_slow low_freq_factor high_freq_factor", 1e-6, 1e6)
        require_range(self, "attention_factor", 1e-3, 1e3)
        length = {"original_max_position_embeddings"}
        needed, optional = {
            "linear": (set(), set()),
            "yarn": (length, {"beta_fast", "beta_slow", "attention_factor"}),
            "llama3": (length | {"low_freq_factor", "high_freq_factor"}, set()),
        }[self.rope_type]
        given = self.parameters().keys() - {"rope_type", "factor"}
        if missing := needed - given:
            raise ValueError(f"rope_type {self.rope_type!r} needs {', '.join(sorted(missing))}")
        if foreign := given - needed - optional:
            raise ValueError(f"rope_type {self.rope_type!r} has no {', '.join(sorted(foreign))}")
        if self.rope_type == "llama3" and not self.low_freq_factor < self.high_freq_factor:  # type: ignore[operator]  # both are needed
            raise ValueError("low_freq_factor must be below high_freq_factor")
        fast, slow = self.turns
        if fast < slow:
            raise ValueError(f"beta_fast ({fast:g}) must not be below beta_slow ({slow:g})")

    @property
    def turns(self) -> tuple[float, float]:
        """`beta_fast` and `beta_slow` in force."""
        return self.beta_fast or 32.0, self.beta_slow or 1.0

    @property
    def gain(self) -> float:
        """What cosines and sines are multiplied by: 1 but for `yarn`."""
        return self.default_gain if self.attention_factor is None else self.attention_factor

    @property
    def default_gain(self) -> float:
        """The gain where none is set."""
        return 0.1 * math.log(self.factor) + 1.0 if self.rope_type == "yarn" else 1.0

    def parameters(self) -> dict[str, Any]:
        """What is set, as in a `config.json`."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}


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
    """Fit the first weights to the target's states and LM head: `trainer.drafter.fit_start_`.
    Does not apply where `train.init_from` gives the first weights."""

    layer_types: tuple[Literal["full_attention", "sliding_attention"], ...] | None = None
    """Of each draft layer; unset: full attention in all. A sliding layer sees `sliding_window`
    positions, and within the block none after its own."""

    sliding_window: int | None = None
    """Positions that a sliding layer sees, its own included."""

    rope_scaling: RopeScaling | None = None
    partial_rotary_factor: float | None = None
    """Only 1 is accepted: the published model and the servers turn whole heads."""

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
        require_range(self, "sliding_window", 1)
        if self.layer_types is not None and len(self.layer_types) != self.num_layers:
            raise ValueError(
                f"layer_types must name all {self.num_layers} layers, got {len(self.layer_types)}"
            )
        has_sliding = "sliding_attention" in (self.layer_types or ())
        if has_sliding != (self.sliding_window is not None):
            raise ValueError(
                "sliding_window goes with a 'sliding_attention' among layer_types: set both or none"
            )
        if self.partial_rotary_factor not in (None, 1.0):
            raise ValueError(
                f"partial_rotary_factor must be 1, got {self.partial_rotary_factor}: the published "
                "dflash model, SGLang and vLLM turn whole heads of a drafter, whatever its target "
                "does. Leave it out"
            )

    @property
    def slides(self) -> tuple[bool, ...]:
        """Of each draft layer, whether it has the window."""
        if self.layer_types is None:
            return (False,) * self.num_layers
        return tuple(kind == "sliding_attention" for kind in self.layer_types)


@dataclass(frozen=True, kw_only=True, slots=True)
class AnchorConfig:
    per_sample: int = 512
    """Anchors drawn from one sample at most, new every epoch (paper: 512)."""

    per_forward: int | None = None
    """Anchors of a micro-batch that go through the drafter together; unset: all. Fewer take less
    memory, and as much more time as the context takes again. Only rounding depends on it."""

    def __post_init__(self) -> None:
        require_range(self, "per_sample per_forward", 1)


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

    kernel: Literal["auto", "torch"] = "auto"
    """What reduces the logits: `auto` takes Liger's kernel on a GPU where liger-kernel is
    installed, but torch's operators elsewhere, and for `kl` and `tv`. Only rounding depends on
    it."""

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
    """Steps at `scale` between warm-up and decay. Without `decay_steps` it stays to the end."""

    decay_steps: int = 0
    """Steps over which the scale falls back to 0 after the hold; 0 never decays."""

    def __post_init__(self) -> None:
        require_range(self, "scale", 0.0, 10.0)
        require_range(self, "warmup_steps hold_steps decay_steps", 0)
