"""What a checkpoint holds: tensors, settings and position, every file compared with its digest."""

from pathlib import Path
from typing import Any

from shared.errors import RunError
from trainer import checkpoint as checkpoints
from trainer.tensors import TensorFacts, read_facts

_MOMENTS = ("exp_avg", "exp_avg_sq")


def inspect_checkpoint(path: Path) -> dict[str, Any]:
    """Facts about a checkpoint directory, or about the newest checkpoint of a run. JSON-able.

    Raises:
        RunError: there is none, or a file of it is damaged.
    """
    path = _resolve(path)
    payload = checkpoints.describe(path)
    drafter = list(read_facts(path / checkpoints.DRAFTER))
    optimizer = list(read_facts(path / checkpoints.OPTIMIZER))
    updates = [facts.largest for facts in optimizer if facts.name.startswith("step.")]
    config, state = payload["config"], payload["state"]
    return {
        "path": str(path),
        "format_version": payload["format_version"],
        "step": payload["step"],
        "steps_configured": config["train"]["steps"],
        "batch_position": payload["batch_position"],
        "epoch": state.get("epoch"),
        "score": payload["score"],
        "cache": payload["cache"],
        "optimizer_updates": max(updates, default=0.0),
        "optimizer_configured": config["optimizer"],
        "optimizer_live": state.get("optimizer"),
        "nonfinite_steps": state.get("nonfinite_steps"),
        "num_parameters": sum(_size(facts) for facts in drafter),
        "num_nan": sum(facts.num_nan for facts in [*drafter, *optimizer]),
        "num_inf": sum(facts.num_inf for facts in [*drafter, *optimizer]),
        "files": payload["files"],
        "config": config,
        "tensors": {
            checkpoints.DRAFTER: [facts.to_dict() for facts in drafter],
            checkpoints.OPTIMIZER: [facts.to_dict() for facts in optimizer],
        },
    }


def rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """`facts` as a table of names and values; `tensor_lines` has the tensors."""
    cache, settings = facts["cache"], facts["optimizer_configured"]
    bad = facts["num_nan"] + facts["num_inf"]
    sizes = ", ".join(f"{name} {file['bytes']:,} bytes" for name, file in facts["files"].items())
    return [
        ("checkpoint", facts["path"]),
        ("step", f"{facts['step']:,} of {facts['steps_configured']:,}"),
        ("epoch", "not recorded" if facts["epoch"] is None else str(facts["epoch"])),
        ("next micro-batch", f"{facts['batch_position']:,} of the sampler's stream"),
        ("score", "none" if facts["score"] is None else f"{facts['score']:.4f} (held-out walk)"),
        ("cache", f"fingerprint {cache['fingerprint'][:16]}, generation {cache['generation']}"),
        ("  taps", f"blocks {cache['target_layer_ids']}, hidden size {cache['hidden_size']}"),
        *([("  projection", _projection(cache["projection"]))] if "projection" in cache else []),
        ("optimizer", ", ".join(f"{name} {value}" for name, value in settings.items())),
        ("  live", _live(facts["optimizer_live"])),
        (
            "  updates",
            f"{facts['optimizer_updates']:,.0f}, {facts['nonfinite_steps']} steps left out",
        ),
        ("parameters", f"{facts['num_parameters']:,}"),
        ("not finite", f"{facts['num_nan']:,} NaN, {facts['num_inf']:,} Inf" if bad else "none"),
        ("files", f"{sizes}; digests match"),
    ]


def tensor_lines(facts: dict[str, Any]) -> list[str]:
    """A line for each weight, with the norms of its moments beside its own."""
    moments = {facts["name"]: facts for facts in facts["tensors"][checkpoints.OPTIMIZER]}
    table = [("tensor", "shape", "dtype", "norm", "largest", *_MOMENTS, "NaN", "Inf")]
    for weight in facts["tensors"][checkpoints.DRAFTER]:
        held = [moments[f"{name}.{weight['name']}"] for name in _MOMENTS]
        every = [weight, *held]
        table.append(
            (
                weight["name"],
                "x".join(map(str, weight["shape"])),
                weight["dtype"],
                f"{weight['norm']:.4g}",
                f"{weight['largest']:.4g}",
                f"{held[0]['norm']:.3g}",
                f"{held[1]['norm']:.3g}",
                str(sum(tensor["num_nan"] for tensor in every)),
                str(sum(tensor["num_inf"] for tensor in every)),
            )
        )
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i < 3 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in table
    ]


def _resolve(path: Path) -> Path:
    if (path / checkpoints.STATE).is_file() or path.name.startswith("step-"):
        if not path.is_dir():
            raise RunError(f"{path}: no checkpoint here.")
        return path
    if not (path / checkpoints.CHECKPOINTS).is_dir():
        raise RunError(
            f"{path}: expected a checkpoint directory (RUN/checkpoints/step-...) or a run, found "
            f"{'neither' if path.exists() else 'nothing'}."
        )
    found = checkpoints.all_paths(path)
    if not found:
        raise RunError(f"{path}: no checkpoint yet.")
    return found[-1]


def _projection(made: dict[str, Any]) -> str:
    return f"to {made['rank']:,} values by {made['sha256'][:16]}"


def _size(facts: TensorFacts) -> int:
    count = 1
    for length in facts.shape:
        count *= length
    return count


def _live(live: dict[str, Any] | None) -> str:
    if live is None:
        return "not recorded by the release that wrote it"
    names = ("lr", "betas", "eps", "weight_decay")
    groups = [
        ", ".join(f"{name} {group[name]}" for name in names)
        + f" ({group['num_parameters']:,} parameters)"
        for group in live["groups"]
    ]
    return "; ".join(groups)
