"""The panels of a run over one axis of steps, with its findings marked.

Drawn by plotly, whose script goes into the page: a curve of 90,000 steps is of use only if a
reader can zoom into step 4,229 and read its value.
"""

from typing import TYPE_CHECKING

from trainer.doctor.finding import Finding, format_steps
from trainer.doctor.panels import make_panels
from trainer.doctor.view import RunView
from trainer.page import import_plotly

if TYPE_CHECKING:
    import plotly.graph_objects as go

COLORS = {"error": "#c0392b", "warning": "#d68910", "note": "#7f8c8d"}
_MARKS = 40
"""Ranges of one finding that are shaded."""


def figure(view: RunView, findings: list[Finding]) -> "go.Figure":
    """All panels over one axis of steps; `findings` carry their numbers, from 1.

    Raises:
        RunError: plotly is not installed.
    """
    go, make_subplots = import_plotly()
    panels = [panel for panel in make_panels(view, go) if panel.traces]
    whole = make_subplots(
        rows=len(panels),
        cols=1,
        shared_xaxes=True,
        vertical_spacing=0.28 / len(panels),
        subplot_titles=[panel.title for panel in panels],
    )
    for row, panel in enumerate(panels, 1):
        legend = f"legend{row if row > 1 else ''}"
        for trace in panel.traces:
            whole.add_trace(trace.update(legend=legend), row, 1)
        top = whole.layout[f"yaxis{row if row > 1 else ''}"].domain[1]
        whole.update_layout({legend: {"y": top, "yanchor": "top"}})
        whole.update_yaxes(
            type="log" if panel.is_log else "linear", exponentformat="e", row=row, col=1
        )
        for number, finding in enumerate(findings, 1):
            if finding.is_fault and (not finding.metric or finding.metric in panel.metrics):
                _mark(whole, row, number, finding)
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


def _mark(whole: "go.Figure", row: int, number: int, finding: Finding) -> None:
    """Shade the steps of a finding in one panel, its number at the top of the first of them."""
    color = COLORS[finding.severity]
    for first, last in finding.steps[:_MARKS]:
        whole.add_vrect(
            x0=first - 0.5,
            x1=last + 0.5,
            fillcolor=color,
            opacity=0.15,
            line={"width": 1, "color": color},
            layer="below",
            row=row,
            col=1,
        )
    for first, last in finding.steps[:1]:
        whole.add_annotation(
            x=(first + last) / 2,
            y=1,
            yref="y domain",
            yanchor="top",
            text=str(number),
            hovertext=f"{finding.name}, {format_steps(finding.steps)}",
            showarrow=False,
            font={"size": 11, "color": "white"},
            bgcolor=color,
            row=row,
            col=1,
        )
