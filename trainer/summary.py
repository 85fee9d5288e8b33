"""Short tables for people: a run, and an evaluation."""

from pathlib import Path
from typing import Any

from shared.errors import RunError
from trainer.caches import Caches, generations_of
from trainer.checkpoint import newest_valid
from trainer.run import Run, on_same_samples


def summarize(run: Run, export: Path) -> dict[str, Any]:
    """Facts about a run for people and, as JSON, for programs.

    Raises:
        RunError: there is no run.
        CacheError: its cache is missing or damaged.
    """
    config = run.config()
    snapshot = run.require_checkpoint()
    cache = Caches(config.cache.paths, generations=generations_of(snapshot.cache))
    num_tokens, raw = int(cache.index.num_tokens.sum()), cache.spec.raw_bytes_per_token
    evaluations = run.evaluations(snapshot.step)
    if not evaluations:
        raise RunError(f"{run.path}: no evaluation up to step {snapshot.step}. Run `make train`.")
    first, last = on_same_samples(evaluations)[0], evaluations[-1]
    stored = cache.stored_bytes / max(num_tokens, 1)
    return {
        "num_samples": len(cache.index),
        "num_tokens": num_tokens,
        "bytes_per_token": stored,
        "raw_bytes_per_token": raw,
        "stored_over_raw": stored / raw,
        "steps": snapshot.step,
        "evaluated_at": last["step"],
        "heldout_samples": last["num_samples"],
        "heldout_loss": [first["loss"], last["loss"]],
        "tau_chain": last["tau_chain"],
        "tau_walk": last["tau_walk"],
        "tau_tree": last["tau_tree"],
        "checkpoint": str(newest_valid(run.path)),
        "export": str(export) if export.is_dir() else None,
    }


def rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """`facts` as a table of names and values."""
    first, last = facts["heldout_loss"]
    return [
        ("samples", f"{facts['num_samples']:,}"),
        ("tokens", f"{facts['num_tokens']:,}"),
        (
            "bytes per token",
            f"{facts['bytes_per_token']:,.0f} stored, {facts['raw_bytes_per_token']:,} as bf16 "
            f"({facts['stored_over_raw']:.3f})",
        ),
        ("steps", f"{facts['steps']:,}"),
        (
            "held-out loss",
            f"{_number(first, 4)} -> {_number(last, 4)} ({facts['heldout_samples']} samples, "
            f"step {facts['evaluated_at']:,})",
        ),
        *_acceptance_rows(facts),
        ("checkpoint", facts["checkpoint"]),
        ("export", facts["export"] or "none yet"),
    ]


def evaluation_rows(result: dict[str, Any]) -> list[tuple[str, str]]:
    """What `evaluate` measured as a table of names and values; `--json` has the rest."""
    slots = ", ".join(_number(value) for value in result["accuracy_per_slot"])
    reached = ", ".join(_number(value) for value in result["conditional_accuracy_per_slot"])
    return [
        ("step", f"{result['step']:,}"),
        ("held-out samples", f"{result['num_samples']:,}, {result['num_anchors']:,} anchors"),
        ("loss", _number(result["loss"], 4)),
        *_acceptance_rows(result),
        ("accuracy by slot", slots),
        ("  of those reached", reached),
    ]


def _acceptance_rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    by_size = sorted(facts["tau_tree"].items(), key=lambda item: int(item[0]))
    trees = ", ".join(f"{_number(tau)} (B={size})" for size, tau in by_size)
    return [
        (
            "acceptance length",
            f"chain {_number(facts['tau_chain'])}, walk {_number(facts['tau_walk'])}",
        ),
        ("  of trees", trees),
    ]


def _number(value: float | None, digits: int = 3) -> str:
    return "none" if value is None else f"{value:.{digits}f}"
