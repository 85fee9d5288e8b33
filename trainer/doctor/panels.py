"""The curves of a run, one panel each."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.doctor.jumps import filled
from trainer.doctor.view import Column, RunView

_BLUE, _PALE = "#1f5fa8", "#b9cde5"
_SHORT_TO_LONG = ("#fde725", "#7ad151", "#22a884", "#2a788e", "#414487", "#440154")
"""Buckets of short to long samples: viridis, reversed."""

_POINTS = 4_000
"""Points drawn of a curve; of each part of a longer one its lowest and highest, so no spike is
lost."""

_SMOOTH = 33
"""Lines that a mean runs over."""


@dataclass(frozen=True, eq=False, slots=True)
class Panel:
    title: str
    metrics: tuple[str, ...]
    """Findings about one of these are marked here."""

    traces: list[Any]
    is_log: bool = False


def make_panels(view: RunView, go: Any) -> list[Panel]:
    """All panels, without traces where the run has nothing for them."""
    steps = view.steps

    def curve(name: str, label: str, color: str = _BLUE) -> list[Any]:
        if name not in steps.present:
            return []
        return [_line(go, steps.step, steps[name], label, color)]

    def smoothed(name: str) -> list[Any]:
        if name not in steps.present:
            return []
        mean = _trailing_mean(steps[name])
        return [
            _line(go, steps.step, steps[name], "step", _PALE),
            _line(go, steps.step, mean, f"mean of the last {_SMOOTH}", _BLUE),
        ]

    return [
        Panel(
            "training loss",
            ("train/loss",),
            smoothed("train/loss") + _heldout(view, go, {"loss": "#2e8b57"}),
            is_log=True,
        ),
        Panel(
            f"training loss by length bucket, short to long (mean of the last {_SMOOTH})",
            ("train/loss",),
            _by_bucket(view, go),
            is_log=True,
        ),
        Panel(
            "held-out acceptance length",
            ("heldout/tau_walk",),
            _heldout(view, go, {"tau_walk": _BLUE, "tau_chain": "#2e8b57"})
            + _largest_tree(view, go),
        ),
        Panel(
            "gradient norm before the clip",
            ("train/grad_norm",),
            smoothed("train/grad_norm"),
            is_log=True,
        ),
        Panel("learning rate", ("train/lr",), curve("train/lr", "in force")),
        Panel("noise scale", ("train/noise_scale",), curve("train/noise_scale", "in force")),
        Panel(
            "loader queue, micro-batches",
            ("data/queue_depth",),
            curve("data/queue_depth", "depth"),
        ),
        Panel(
            "share of the step spent waiting for data",
            ("data/wait_share",),
            curve("data/wait_share", "waited"),
        ),
        Panel(
            "tokens per second",
            ("speed/tokens_per_second",),
            smoothed("speed/tokens_per_second"),
        ),
        Panel(
            "seconds",
            ("speed/step_seconds", "time/checkpoint_seconds"),
            curve("speed/step_seconds", "step")
            + curve("time/checkpoint_seconds", "held up by a save", "#c0392b")
            + curve("time/evaluate_seconds", "evaluation before it", "#999"),
        ),
    ]


def _line(go: Any, step: npt.NDArray[np.int64], value: Column, label: str, color: str) -> Any:
    kept = thinned(value)
    return go.Scatter(
        x=step[kept],
        y=value[kept],
        name=label,
        mode="lines",
        line={"width": 1.3, "color": color},
    )


def thinned(value: Column) -> npt.NDArray[np.int64]:
    """Positions to draw: all, or the lowest and highest of each of equal parts."""
    if len(value) <= _POINTS:
        return np.arange(len(value))
    kept = {0, len(value) - 1}
    for part in np.array_split(np.arange(len(value)), _POINTS // 2):
        known = part[np.isfinite(value[part])]
        if len(known):
            kept |= {int(known[value[known].argmin()]), int(known[value[known].argmax()])}
    return np.array(sorted(kept), np.int64)


def _trailing_mean(value: Column) -> Column:
    """Mean of each entry and those before it: one around it would rise ahead of a jump."""
    total = np.cumsum(np.concatenate([[0.0], filled(value)]))
    stop = np.arange(1, len(value) + 1)
    start = np.maximum(0, stop - _SMOOTH)
    means: Column = (total[stop] - total[start]) / (stop - start)
    return means


def _by_bucket(view: RunView, go: Any) -> list[Any]:
    """Losses of the steps that hold one bucket only."""
    steps = view.steps
    pure = np.array([step[0] if len(set(step)) == 1 else -1 for step in steps.buckets], np.int64)
    traces = []
    last = int(pure.max(initial=0))
    for bucket in sorted(set(pure.tolist()) - {-1}):
        of_bucket = pure == bucket
        loss = _trailing_mean(steps.columns["train/loss"][of_bucket])
        color = _SHORT_TO_LONG[round(bucket / max(last, 1) * (len(_SHORT_TO_LONG) - 1))]
        traces.append(_line(go, steps.step[of_bucket], loss, f"bucket {bucket}", color))
    return traces


def _heldout(view: RunView, go: Any, colors: dict[str, str]) -> list[Any]:
    return [
        _points(go, [(e["step"], e.get(name)) for e in view.evaluations], f"held-out {name}", color)
        for name, color in colors.items()
        if any(e.get(name) is not None for e in view.evaluations)
    ]


def _largest_tree(view: RunView, go: Any) -> list[Any]:
    trees = [(e["step"], e.get("tau_tree") or {}) for e in view.evaluations]
    sizes = sorted({size for _, tree in trees for size in tree}, key=int)
    if not sizes:
        return []
    label = f"held-out tau_tree, {sizes[-1]} nodes"
    return [_points(go, [(step, tree.get(sizes[-1])) for step, tree in trees], label, "#8e44ad")]


def _points(go: Any, pairs: list[tuple[int, float | None]], label: str, color: str) -> Any:
    return go.Scatter(
        x=[step for step, _ in pairs],
        y=[value for _, value in pairs],
        name=label,
        mode="lines+markers",
        line={"color": color, "width": 1.3},
    )
