"""The curves of a run, one panel each, with its findings marked.

Drawn by plotly, whose script goes into the page: a curve of 90,000 steps is of use only if a
reader can zoom into step 4,229 and read its value.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from shared.errors import RunError
from trainer.doctor.finding import Finding, format_steps
from trainer.doctor.jumps import filled
from trainer.doctor.view import Column, RunView

if TYPE_CHECKING:
    import plotly.graph_objects as go

COLORS = {"error": "#c0392b", "warning": "#d68910", "note": "#7f8c8d"}
_BLUE = "#1f5fa8"
_SHORT_TO_LONG = ("#fde725", "#7ad151", "#22a884", "#2a788e", "#414487", "#440154")
"""Buckets of short to long samples: viridis, reversed."""

_POINTS = 4_000
"""Points drawn of a curve; of each part of a longer one its lowest and highest, so no spike is
lost."""

_SMOOTH = 33
"""Lines that a median runs over."""

Panel = tuple[str, list[Any], bool]
"""Title, traces, logarithmic axis."""


def figure(view: RunView, findings: list[Finding]) -> "go.Figure":
    """All panels over one axis of steps.

    Raises:
        RunError: plotly is not installed.
    """
    try:
        import plotly.graph_objects as go
        from plotly.subplots import make_subplots
    except ModuleNotFoundError:
        raise RunError(
            "the page is drawn by plotly, which is not installed. Install it: "
            "pip install 'draftcache[report]'."
        ) from None

    panels = _panels(view, go)
    whole = make_subplots(
        rows=len(panels),
        cols=1,
        shared_xaxes=True,
        vertical_spacing=0.28 / len(panels),
        subplot_titles=[title for title, _, _ in panels],
    )
    for row, (_, traces, is_log) in enumerate(panels, 1):
        for trace in traces:
            whole.add_trace(trace.update(legend=f"legend{row}" if row > 1 else "legend"), row, 1)
        whole.update_yaxes(type="log" if is_log else "linear", row=row, col=1)
        top = whole.layout[f"yaxis{row if row > 1 else ''}"].domain[1]
        whole.update_layout({f"legend{row if row > 1 else ''}": {"y": top, "yanchor": "top"}})
    for finding in findings:
        _mark(whole, finding)
    whole.update_xaxes(showticklabels=True, gridcolor="#eee")
    whole.update_xaxes(title_text="step", row=len(panels), col=1)
    whole.update_yaxes(gridcolor="#eee")
    whole.update_layout(
        height=240 * len(panels) + 80,
        margin={"l": 70, "r": 20, "t": 50, "b": 50},
        plot_bgcolor="white",
        font={"family": "system-ui, sans-serif", "size": 12},
        hovermode="x",
    )
    return whole


def _panels(view: RunView, go: Any) -> list[Panel]:
    """The panels that the run has something for."""
    steps = view.steps

    def curve(name: str, label: str, color: str = _BLUE) -> list[Any]:
        if name not in steps.present:
            return []
        return [_line(go, steps.step, steps[name], label, color)]

    def smoothed(name: str) -> list[Any]:
        if name not in steps.present or not len(steps):
            return []
        return [
            _line(go, steps.step, steps[name], "step", "#b9cde5"),
            _line(go, steps.step, _running_median(steps[name]), f"median of {_SMOOTH}", _BLUE),
        ]

    panels: list[Panel] = [
        ("training loss", smoothed("train/loss") + _heldout(view, go, ["loss"]), True),
        ("training loss by length bucket (running median)", _by_bucket(view, go), True),
        (
            "held-out acceptance length",
            _heldout(view, go, ["tau_walk", "tau_chain"]) + _largest_tree(view, go),
            False,
        ),
        ("gradient norm before the clip", smoothed("train/grad_norm"), True),
        ("learning rate", curve("train/lr", "in force"), False),
        ("noise scale", curve("train/noise_scale", "in force"), False),
        ("loader queue (micro-batches)", curve("data/queue_depth", "depth"), False),
        ("share of the step spent waiting for data", curve("data/wait_share", "waited"), False),
        ("tokens per second", smoothed("speed/tokens_per_second"), False),
        (
            "seconds",
            curve("speed/step_seconds", "step")
            + curve("time/checkpoint_seconds", "held up by a save", "#c0392b")
            + curve("time/evaluate_seconds", "evaluation before it", "#999"),
            False,
        ),
    ]
    return [panel for panel in panels if panel[1]]


def _line(go: Any, step: npt.NDArray[np.int64], value: Column, label: str, color: str) -> Any:
    kept = _thinned(value)
    return go.Scatter(
        x=step[kept],
        y=value[kept],
        name=label,
        mode="lines",
        line={"width": 1.3, "color": color},
    )


def _thinned(value: Column) -> npt.NDArray[np.int64]:
    """Positions to draw: all, or the lowest and highest of each of equal parts."""
    if len(value) <= _POINTS:
        return np.arange(len(value))
    kept = {0, len(value) - 1}
    for part in np.array_split(np.arange(len(value)), _POINTS // 2):
        known = part[np.isfinite(value[part])]
        if len(known):
            kept |= {int(known[value[known].argmin()]), int(known[value[known].argmax()])}
    return np.array(sorted(kept), np.int64)


def _running_median(value: Column) -> Column:
    if len(value) < _SMOOTH:
        return value
    padded = np.pad(filled(value), _SMOOTH // 2, mode="edge")
    windows = np.lib.stride_tricks.sliding_window_view(padded, _SMOOTH)
    medians: Column = np.median(windows, axis=-1)
    return medians


def _by_bucket(view: RunView, go: Any) -> list[Any]:
    """Losses of the steps that hold one bucket only."""
    steps = view.steps
    pure = np.array([step[0] if len(set(step)) == 1 else -1 for step in steps.buckets], np.int64)
    traces = []
    last = int(pure.max(initial=0))
    for bucket in sorted(set(pure.tolist()) - {-1}):
        of_bucket = pure == bucket
        loss = _running_median(steps.columns["train/loss"][of_bucket])
        color = _SHORT_TO_LONG[round(bucket / max(last, 1) * (len(_SHORT_TO_LONG) - 1))]
        traces.append(_line(go, steps.step[of_bucket], loss, f"bucket {bucket}", color))
    return traces


def _heldout(view: RunView, go: Any, names: list[str]) -> list[Any]:
    return [
        _points(go, [(e["step"], e.get(name)) for e in view.evaluations], f"held-out {name}")
        for name in names
        if any(e.get(name) is not None for e in view.evaluations)
    ]


def _largest_tree(view: RunView, go: Any) -> list[Any]:
    trees = [(e["step"], e.get("tau_tree") or {}) for e in view.evaluations]
    sizes = sorted({size for _, tree in trees for size in tree}, key=int)
    if not sizes:
        return []
    label = f"held-out tau_tree, {sizes[-1]} nodes"
    return [_points(go, [(step, tree.get(sizes[-1])) for step, tree in trees], label)]


def _points(go: Any, pairs: list[tuple[int, float | None]], label: str) -> Any:
    return go.Scatter(
        x=[step for step, _ in pairs],
        y=[value for _, value in pairs],
        name=label,
        mode="lines+markers",
    )


def _mark(whole: "go.Figure", finding: Finding) -> None:
    """Shade the steps of a finding in every panel, its name over the first."""
    if not finding.is_fault:
        return
    for first, last in finding.steps[:40]:
        whole.add_vrect(
            x0=first - 0.5,
            x1=last + 0.5,
            fillcolor=COLORS[finding.severity],
            opacity=0.15,
            line={"width": 1, "color": COLORS[finding.severity]},
            layer="below",
            row="all",
            col=1,
        )
    if finding.steps:
        first, last = finding.steps[0]
        whole.add_annotation(
            x=(first + last) / 2,
            y=1,
            xref="x",
            yref="y domain",
            yanchor="bottom",
            text=finding.name,
            hovertext=f"{format_steps(finding.steps)}: {finding.evidence}",
            showarrow=False,
            textangle=-20,
            font={"size": 10, "color": COLORS[finding.severity]},
        )
