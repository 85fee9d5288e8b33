"""The diagnosis as one HTML file that needs no network."""

from html import escape
from pathlib import Path

from shared.files import write_bytes, writing
from trainer.doctor.diagnosis import Diagnosis
from trainer.doctor.finding import Finding, format_steps
from trainer.doctor.plots import COLORS, figure
from trainer.doctor.view import RunView

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{title}</title>
<style>
body {{ font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 1200px;
       padding: 0 1em; color: #222; }}
h1 {{ font-size: 1.4em; }}
table {{ border-collapse: collapse; width: 100%; margin: 1em 0; }}
th, td {{ text-align: left; vertical-align: top; padding: .5em .7em;
          border-bottom: 1px solid #ddd; }}
.severity {{ color: white; border-radius: 3px; padding: .1em .5em; white-space: nowrap; }}
.advice {{ color: #555; }}
.small {{ color: #555; font-size: .9em; }}
</style>
</head>
<body>
<h1>{title}</h1>
<p>{summary}</p>
{findings}
{plots}
<p class="small">{checked}</p>
</body>
</html>
"""


def write_page(path: Path, view: RunView, diagnosis: Diagnosis) -> None:
    """Write the page to `path`, whole or not at all.

    Raises:
        RunError: plotly is not installed.
        DraftCacheError: the path cannot be written.
    """
    plots = "<p>No step and no evaluation to plot yet.</p>"
    if len(view.steps) or view.evaluations:
        plots = figure(view, diagnosis.findings).to_html(
            full_html=False, include_plotlyjs=True, config={"displaylogo": False}
        )
    skipped = "".join(
        f" Not checked: {name} ({why})." for name, why in diagnosis.not_checked.items()
    )
    restarts = f", resumed at step {', '.join(map(str, view.restarts))}" if view.restarts else ""
    text = _PAGE.format(
        title=escape(f"doctor: {view.path}"),
        summary=escape(
            f"Step {view.last_step:,} of {view.config.train.steps:,}{restarts}; "
            f"{len(view.checkpoints)} checkpoints, {len(view.evaluations)} evaluations."
        ),
        findings=_table(diagnosis.findings),
        plots=plots,
        checked=escape(f"Checked: {', '.join(diagnosis.checked)}.{skipped}"),
    )
    with writing(path):
        write_bytes(path, text.encode())


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
