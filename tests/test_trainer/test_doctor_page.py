"""The page stands alone, marks what was found, and loses no spike."""

import builtins
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shared.errors import RunError
from tests.test_trainer.runs import Line, make_run
from trainer.doctor.diagnosis import diagnose
from trainer.doctor.page import write_page
from trainer.doctor.panels import thinned
from trainer.doctor.plots import figure
from trainer.doctor.view import RunView


def page(path: Path, **made: Any) -> str:
    view = RunView.read(make_run(path, **made))
    write_page(path / "doctor.html", view, diagnose(view))
    return (path / "doctor.html").read_text()


def spiked(step: int, line: Line) -> Line:
    if 120 <= step < 140:
        line["train/loss"] += 5.0
    return line


def test_the_page_needs_no_network(tmp_path: Path) -> None:
    text = page(tmp_path)
    outside = re.findall(r"""<(?:script|link|img|iframe)[^>]*\s(?:src|href)=["']([^"']+)""", text)
    assert outside == []
    assert "No fault found." in text
    assert "Step 200 of 200; 2 checkpoints, 3 evaluations." in text


def test_findings_are_in_the_table_and_in_the_plots(tmp_path: Path) -> None:
    text = page(tmp_path, change=spiked)
    assert "<b>loss-jump</b><br>steps 120-139" in text
    assert "coincides with nothing known" in text
    view = RunView.read(make_run(tmp_path / "again", change=spiked))
    drawn = figure(view, diagnose(view).findings)
    marks = {(shape.x0, shape.x1) for shape in drawn.layout.shapes}
    assert marks == {(119.5, 139.5)}
    assert len(drawn.layout.shapes) == 10  # every panel
    assert [note.text for note in drawn.layout.annotations].count("1") == 10


def test_a_finding_about_one_metric_is_marked_in_its_panel_only(tmp_path: Path) -> None:
    def change(step: int, line: Line) -> Line:
        return line | {"data/queue_depth": 0, "data/wait_share": 0.3}

    view = RunView.read(make_run(tmp_path, change=change))
    drawn = figure(view, diagnose(view).findings)
    (mark,) = drawn.layout.shapes
    titles = [note.text for note in drawn.layout.annotations if note.text != "1"]
    row = titles.index("share of the step spent waiting for data") + 1
    assert mark.xref == f"x{row}"


def test_what_the_run_is_called_is_no_markup(tmp_path: Path) -> None:
    (tmp_path / "<script>alert(1)").mkdir()
    text = page(tmp_path / "<script>alert(1)")
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert(1)" in text


def test_panels_are_those_that_the_run_has_data_for(tmp_path: Path) -> None:
    def old(step: int, line: Line) -> Line:
        return {k: v for k, v in line.items() if not k.startswith(("time/", "data/"))}

    view = RunView.read(make_run(tmp_path, change=old, taus=[]))
    titles = [note.text for note in figure(view, []).layout.annotations]
    assert "training loss" in titles
    assert "held-out acceptance length" not in titles
    assert "loader queue, micro-batches" not in titles


def test_a_run_before_its_first_step_has_a_page(tmp_path: Path) -> None:
    assert "Step 0 of 200" in page(tmp_path, change=lambda step, line: None, saved=[], taus=[])


def test_a_thinned_curve_keeps_its_spikes() -> None:
    value = np.random.default_rng(0).standard_normal(90_000)
    value[[4229, 70_001]] = 99.0, -99.0
    value[500:600] = np.nan
    kept = thinned(value)
    assert len(kept) <= 4002
    assert {0, 4229, 70_001, 89_999} <= set(kept.tolist())
    assert (np.diff(kept) > 0).all()


def test_a_smoothed_curve_does_not_rise_before_a_jump(tmp_path: Path) -> None:
    view = RunView.read(make_run(tmp_path, change=spiked))
    loss = next(t for t in figure(view, []).data if t.name == "mean of the last 33")
    before, jump = loss.y[:119], loss.y[119:135]
    assert before[100:].max() < 3.0
    assert (np.diff(jump) > 0).all()


def test_without_plotly_the_message_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def refuse(name: str, *arguments: Any, **more: Any) -> Any:
        if name.startswith("plotly"):
            raise ModuleNotFoundError(name)
        return real(name, *arguments, **more)

    view = RunView.read(make_run(tmp_path))
    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(RunError, match=r"pip install 'draftcache\[report\]'"):
        figure(view, [])
