"""The diagnosis as one HTML file that needs no network."""

from html import escape
from pathlib import Path

from trainer.doctor.diagnosis import Diagnosis
from trainer.doctor.finding import Finding, format_steps
from trainer.doctor.plots import COLORS, figure
from trainer.doctor.view import RunView
from trainer.page import plot_html
from trainer.page import write_page as write


def write_page(path: Path, view: RunView, diagnosis: Diagnosis) -> None:
    """Write the page to `path`, whole or not at all.

    Raises:
        RunError: plotly is not installed.
        DraftCacheError: the path cannot be written.
    """
    plots = "<p>No step and no evaluation to plot yet.</p>"
    if len(view.steps) or view.evaluations:
        plots = plot_html(figure(view, diagnosis.findings))
    skipped = "".join(
        f" Not checked: {name} ({why})." for name, why in diagnosis.not_checked.items()
    )
    restarts = f", resumed at step {', '.join(map(str, view.restarts))}" if view.restarts else ""
    summary = (
        f"Step {view.last_step:,} of {view.config.train.steps:,}{restarts}; "
        f"{len(view.checkpoints)} checkpoints, {len(view.evaluations)} evaluations."
    )
    checked = f"Checked: {', '.join(diagnosis.checked)}.{skipped}"
    body = (
        f"<p>{escape(summary)}</p>{_table(diagnosis.findings)}{plots}"
        f'<p class="small">{escape(checked)}</p>'
    )
    write(path, f"doctor: {view.path}", body)


def _table(findings: list[Finding]) -> str:
    if not findings:
        return "<p>No fault found.</p>"
    rows = "".join(
        f"<tr><td>{number}</td>"
        f'<td><span class="severity" style="background:{COLORS[finding.severity]}">'
        f"{finding.severity}</span></td>"
        f"<td><b>{escape(finding.name)}</b><br>{escape(format_steps(finding.steps))}</td>"
        f"<td>{escape(finding.evidence)}"
        f'<div class="advice">{escape(finding.advice)}</div></td></tr>'
        for number, finding in enumerate(findings, 1)
    )
    return f"<table>{rows}</table>"
