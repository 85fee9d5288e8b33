"""All checks over one run."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trainer.doctor import buckets, loss, pace, recipe, weights
from trainer.doctor.finding import SEVERITIES, Finding, NotCheckedError, format_steps
from trainer.doctor.view import RunView

Check = Callable[[RunView], list[Finding]]

CHECKS: dict[str, Check] = {
    "checkpoint files": weights.damaged_checkpoints,
    "NaN and Inf in checkpoints": weights.nonfinite_weights,
    "weights that move": weights.unmoved_weights,
    "non-finite steps": weights.nonfinite_steps,
    "loss jumps": loss.loss_jumps,
    "bucket runs": buckets.bucket_runs,
    "held-out acceptance": loss.heldout_acceptance,
    "optimizer settings": recipe.optimizer_settings,
    "gamma": recipe.gamma,
    "learning rate": recipe.learning_rate_schedule,
    "noise": recipe.noise_schedule,
    "projection": recipe.projection,
    "loader queue": pace.queue,
    "checkpoint stalls": pace.checkpoint_stalls,
    "gaps in the log": pace.silence,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    findings: list[Finding]
    """Errors first, then warnings, then notes; by step within each."""

    checked: list[str]
    not_checked: dict[str, str]
    """Checks that had nothing to look at, and what they lacked."""

    @property
    def is_healthy(self) -> bool:
        return not any(finding.is_fault for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "ok": self.is_healthy,
            "findings": [finding.to_dict() for finding in self.findings],
            "checked": self.checked,
            "not_checked": self.not_checked,
        }


def diagnose(view: RunView) -> Diagnosis:
    """Run every check on `view`."""
    findings: list[Finding] = []
    not_checked: dict[str, str] = {}
    for name, check in CHECKS.items():
        try:
            findings += check(view)
        except NotCheckedError as reason:
            not_checked[name] = str(reason)
    findings.sort(key=lambda f: (SEVERITIES.index(f.severity), f.steps[:1]))
    return Diagnosis(
        findings=findings,
        checked=[name for name in CHECKS if name not in not_checked],
        not_checked=not_checked,
    )


def describe_run(view: RunView) -> dict[str, Any]:
    """What there was to look at. JSON-able."""
    return {
        "run": str(view.path),
        "steps": view.last_step,
        "steps_configured": view.config.train.steps,
        "checkpoints": [checkpoint.step for checkpoint in view.checkpoints],
        "evaluations": len(view.evaluations),
        "restarts": view.restarts,
    }


def lines(view: RunView, diagnosis: Diagnosis) -> list[str]:
    """The diagnosis for people; one line for a healthy run, and one for what was not checked."""
    seen = (
        f"{view.path}: step {view.last_step:,} of {view.config.train.steps:,}, "
        f"{len(view.checkpoints)} checkpoints, {len(view.evaluations)} evaluations"
    )
    told = []
    for finding in diagnosis.findings:
        told += [
            f"{finding.severity}: {finding.name}, {format_steps(finding.steps)}",
            f"    {finding.evidence}",
            f"    -> {finding.advice}",
        ]
    counts = [
        f"{number} {severity}{'s' if number > 1 else ''}"
        for severity in SEVERITIES
        if (number := sum(f.severity == severity for f in diagnosis.findings))
    ]
    verdict = ", ".join(counts) if counts else "no fault found"
    told.append(f"{seen}: {verdict}. Checked: {', '.join(diagnosis.checked)}.")
    if diagnosis.not_checked:
        reasons = "; ".join(f"{name} ({why})" for name, why in diagnosis.not_checked.items())
        told.append(f"Not checked: {reasons}.")
    return told
