"""What a sweep found: a table of trials, and a page of plots that needs no network."""

import warnings
from html import escape
from pathlib import Path
from typing import Any

import optuna
import plotly  # noqa: F401  # Optuna imports it only when it draws, after hours
from optuna.trial import FrozenTrial, TrialState

from trainer.page import plot_html, table_html
from trainer.page import write_page as write
from trainer.sweep.config import SweepConfig
from trainer.sweep.files import Listing, num_bytes, num_changed
from trainer.sweep.process import Traffic

_MIN_IMPORTANCE = 4
"""Complete trials below which an importance of settings means nothing."""
_UNFINISHED = "unfinished"


def trial_rows(study: optuna.Study, sweep: SweepConfig) -> list[list[str]]:
    """A header and a row for each trial, best first, those without a figure last."""
    keys = list(sweep.space)
    header = ["trial", "state", sweep.metric, "step", "read", "written", *keys, "error"]
    return [header, *(_row(trial, keys) for trial in _ranked(study))]


def _ranked(study: optuna.Study) -> list[FrozenTrial]:
    sign = -1.0 if study.direction == optuna.study.StudyDirection.MAXIMIZE else 1.0

    def rank(trial: FrozenTrial) -> tuple[bool, bool, float, int]:
        value = trial.value if trial.value is not None else 0.0
        is_complete = trial.state == TrialState.COMPLETE
        return not is_complete, trial.value is None, sign * value, trial.number

    return sorted(study.trials, key=rank)


def _row(trial: FrozenTrial, keys: list[str]) -> list[str]:
    state = trial.state.name.lower() if trial.state.is_finished() else _UNFINISHED
    traffic = Traffic(*trial.user_attrs.get("traffic", []))
    return [
        str(trial.number),
        {"fail": "failed"}.get(state, state),
        "-" if trial.value is None else f"{trial.value:.4f}",
        str(trial.user_attrs.get("step", "-")),
        _mib(traffic.read),
        _mib(traffic.written),
        *(_short(trial.params.get(key, "-")) for key in keys),
        trial.user_attrs.get("error", ""),
    ]


def table_lines(rows: list[list[str]]) -> list[str]:
    """Columns as wide as their widest entry; the last one, the error, as it is."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    widths[-1] = 0
    return [
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def summary_lines(
    study: optuna.Study, sweep: SweepConfig, directory: Path, before: Listing, after: Listing
) -> list[str]:
    """The best trial, and what the trials did to the cache."""
    lines = []
    if complete := study.get_trials(states=[TrialState.COMPLETE]):
        best = study.best_trial
        settings = " ".join(f"--set {key}={_short(v, 17)}" for key, v in best.params.items())
        lines.append(
            f"best of {len(complete)} complete: trial {best.number}, {sweep.metric} "
            f"{best.value:.4f}, {directory / f'trial-{best.number:04d}'}: {settings}"
        )
    moved = [Traffic(*trial.user_attrs.get("traffic", [])) for trial in study.trials]
    total = sum(moved, Traffic())
    if before and total.read:
        changed = num_changed(before, after)
        state = f"{changed} CHANGED meanwhile" if changed else "none changed"
        lines.append(
            f"cache: {len(after)} files of {_mib(num_bytes(after))}, {state}; {len(moved)} trials "
            f"read {_mib(total.read)} (programs included; {_mib(total.from_disk)} came from the "
            f"disk, the rest was in memory) and wrote {_mib(total.written)} of their own"
        )
    return lines


def write_page(path: Path, study: optuna.Study, rows: list[list[str]], summary: list[str]) -> None:
    """Write the page to `path`, whole or not at all.

    Raises:
        DraftCacheError: the path cannot be written.
    """
    lines = "".join(f"<p>{escape(line)}</p>" for line in summary)
    write(path, f"sweep: {path.parent}", lines + table_html(rows) + _plots(study, rows[0][2]))


def _plots(study: optuna.Study, metric: str) -> str:
    complete = study.get_trials(states=[TrialState.COMPLETE])
    if not complete:
        return "<p>No complete trial to plot.</p>"
    draw = optuna.visualization
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        figures: list[Any] = [draw.plot_optimization_history(study, target_name=metric)]
        if any(trial.intermediate_values for trial in study.trials):
            figures.append(draw.plot_intermediate_values(study))
        figures.append(draw.plot_parallel_coordinate(study, target_name=metric))
        figures.append(draw.plot_slice(study, target_name=metric))
        if len(complete) >= _MIN_IMPORTANCE and len({trial.value for trial in complete}) > 1:
            # The default evaluator of importance needs scikit-learn.
            evaluator = optuna.importance.PedAnovaImportanceEvaluator()
            figures.append(draw.plot_param_importances(study, evaluator, target_name=metric))
    return "".join(
        plot_html(figure, with_script=number == 0) for number, figure in enumerate(figures)
    )


def _short(value: Any, digits: int = 4) -> str:
    return f"{value:.{digits}g}" if isinstance(value, float) else str(value)


def _mib(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"
