"""Several runs in one table: the same metrics on the same held-out anchors, or why not."""

from collections.abc import Callable, Sequence
from typing import Any

from shared import config as configs
from shared.errors import RunError
from trainer.recipe import LossConfig
from trainer.run import Run

_IGNORED = ("run.path", "tracking.name", "tracking.wandb", "tracking.project")
"""Settings that differ between any two runs and change nothing."""


def compare(runs: Sequence[Run]) -> dict[str, Any]:
    """Facts about `runs`, JSON-able: each one's last evaluation that a checkpoint has, what
    differs in their settings, and what must not be compared.

    Raises:
        RunError: one has no checkpoint or no evaluation, or fewer than two are given.
    """
    if len(runs) < 2:
        raise RunError(f"expected two runs or more to compare, found {len(runs)}.")
    facts = [_facts(run) for run in runs]
    flat = [configs.flatten(fact.pop("config")) for fact in facts]
    keys = sorted({key for tree in flat for key in tree} - set(_IGNORED))
    settings = {key: [tree.get(key) for tree in flat] for key in keys}
    differences = {key: values for key, values in settings.items() if _vary(values)}
    problems, remarks = _not_alike(facts)
    return {
        "comparable": not problems,
        "problems": problems,
        "remarks": remarks,
        "runs": facts,
        "differences": differences,
    }


def lines(result: dict[str, Any]) -> list[str]:
    """The table for people: a column per run, then what differs, then what to beware of."""
    runs = result["runs"]
    budgets = list(runs[0]["tau_tree"])
    for run in runs[1:]:
        budgets = [budget for budget in budgets if budget in run["tau_tree"]]
    table: list[list[str]] = [["", *(run["path"] for run in runs)]]

    def row(name: str, value: Callable[[dict[str, Any]], str]) -> None:
        table.append([name, *(value(run) for run in runs)])

    row("step", lambda run: f"{run['step']:,}")
    row("held-out loss", lambda run: _number(run["loss"], 4))
    row("tau walk", lambda run: _number(run["tau_walk"]))
    row("tau chain", lambda run: _number(run["tau_chain"]))
    for budget in sorted(budgets, key=int):
        row(f"tau tree, B={budget}", lambda run, b=budget: _number(run["tau_tree"][b]))  # type: ignore[misc]  # mypy takes no default in a lambda
    row("accuracy, slot 1", lambda run: _number(run["accuracy_per_slot"][0]))
    row("samples", lambda run: f"{run['num_samples']:,}")
    row("anchors", lambda run: f"{run['num_anchors']:,}")
    if result["differences"]:
        table.append(["settings that differ", *[""] * len(runs)])
        for key, values in result["differences"].items():
            table.append([f"  {key}", *map(_text, values)])
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        *(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in table
        ),
        *(f"note: {remark}" for remark in result["remarks"]),
        *(f"not comparable: {problem}" for problem in result["problems"]),
    ]


def _facts(run: Run) -> dict[str, Any]:
    snapshot = run.require_checkpoint()
    evaluations = run.evaluations(snapshot.step)
    if not evaluations:
        raise RunError(f"{run.path}: no evaluation up to step {snapshot.step}. Run `make train`.")
    last = evaluations[-1]
    names = ("step", "loss", "tau_walk", "tau_chain", "tau_tree", "accuracy_per_slot")
    return {
        "path": str(run.path),
        **{name: last[name] for name in names},
        "num_samples": last["num_samples"],
        "num_anchors": last["num_anchors"],
        "heldout_sha256": last.get("heldout_sha256"),
        "checkpoint_step": snapshot.step,
        "cache": snapshot.cache,
        "config": snapshot.config,
        "loss_weights": _loss_weights(snapshot.config),
        "block_size": snapshot.config["drafter"]["block_size"],
    }


def _loss_weights(config: dict[str, Any]) -> str:
    """What the losses of a run are, by the settings that are in force."""
    loss = configs.build(LossConfig, config["loss"])
    if loss.kind == "dpace":
        return f"dpace, alpha {loss.dpace_alpha:g}"
    return f"{loss.kind}, gamma {loss.resolve_gamma(config['drafter']['block_size']):g}"


def _not_alike(facts: list[dict[str, Any]]) -> tuple[list[str], list[str]]:
    """What forbids a comparison, and what to know about one."""
    problems, remarks = [], []

    def differ(name: str) -> list[Any] | None:
        values = [fact[name] for fact in facts]
        return values if _vary(values) else None

    def cache_differs(name: str) -> bool:
        return _vary([fact["cache"].get(name) for fact in facts])

    if counts := differ("num_anchors") or differ("num_samples"):
        problems.append(
            f"the held-out sets differ ({_listed(counts)} anchors or samples): the same text must "
            "be asked. Give all runs the same cache.heldout_fraction, cache.sources and "
            "evaluate.max_samples, or use `trainer evaluate RUN --cache CACHE --samples N`."
        )
    elif any(fact["heldout_sha256"] is None for fact in facts):
        remarks.append(
            "the held-out sets have equal counts, but an earlier release recorded no digest of "
            "one of them: whether they hold the same samples is not proven."
        )
    elif differ("heldout_sha256"):
        problems.append(
            "the held-out sets hold other samples, although equally many: the caches do not hold "
            "the same data, or cache.sources differs."
        )
    if cache_differs("fingerprint"):
        remarks.append(
            "the caches have different fingerprints ("
            f"{_listed([fact['cache']['fingerprint'][:16] for fact in facts])}): each drafter "
            "is asked on the states of its own cache."
        )
    elif cache_differs("index_sha256"):
        remarks.append("the caches hold different samples or generations, of one fingerprint.")
    if blocks := differ("block_size"):
        remarks.append(
            f"block sizes differ ({_listed(blocks)}): acceptance lengths are bounded by them, and "
            "the losses are of different slots."
        )
    if differ("loss_weights") or blocks:
        remarks.append("losses are weighted differently and must not be compared: read tau.")
    if steps := differ("step"):
        remarks.append(f"evaluated at different steps ({_listed(steps)}).")
    for fact in facts:
        if fact["step"] != fact["checkpoint_step"]:
            remarks.append(
                f"{fact['path']}: evaluated at step {fact['step']}, its newest checkpoint is of "
                f"step {fact['checkpoint_step']}."
            )
    return problems, remarks


def _vary(values: list[Any]) -> bool:
    return any(value != values[0] for value in values[1:])


def _listed(values: list[Any]) -> str:
    return ", ".join(map(str, values))


def _number(value: float | None, digits: int = 3) -> str:
    return "none" if value is None else f"{value:.{digits}f}"


def _text(value: Any) -> str:
    return "unset" if value is None else str(value)
