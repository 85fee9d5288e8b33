"""`python -m tests.experiments.one`: one run by the product's own `train`, and its result."""

import json
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np

from shared import cli, config
from shared.files import write_json
from shared.location import Location
from tests.experiments.changes import CHANGES, Places, by_sample, evaluated_at_the_end
from trainer.caches import Caches
from trainer.config import TrainConfig
from trainer.evaluate import evaluate, evaluate_run
from trainer.run import Run
from trainer.session import Session
from trainer.snapshot import restore
from trainer.tracking import METRICS
from trainer.train import train

_WOBBLE_STEPS = 16
_HELDOUT = (
    "step",
    "loss",
    "tau_chain",
    "tau_walk",
    "tau_tree",
    "accuracy_per_slot",
    "num_samples",
    "num_anchors",
    "heldout_sha256",
)


@click.command()
@cli.config_options
@click.option("--change", type=click.Choice(sorted(CHANGES)))
@click.option("--target", type=click.Path(path_type=Path), required=True)
@click.option("--result", type=click.Path(path_type=Path), required=True)
@click.option("--also", type=click.Path(path_type=Path), help="Cache of other states to ask on.")
def main(
    path: Path,
    overrides: tuple[str, ...],
    change: str | None,
    target: Path,
    result: Path,
    also: Path | None,
) -> None:
    """Train, or go on; write what was found to RESULT."""
    settings = config.load(TrainConfig, path, overrides)
    places = Places(target=target, caches=settings.cache.paths[0].parent)
    changed = CHANGES[change](places) if change else nullcontext()
    with changed:
        facts = train_one(settings)
    if facts is None:
        raise click.exceptions.Exit(130)
    facts["cache"] = bytes_of(settings.cache.paths)
    if also is not None:
        facts["also"] = ask_on(settings, also)
    write_json(result, facts)


def train_one(settings: TrainConfig) -> dict[str, Any] | None:
    """The last held-out evaluation of the run, sample by sample too; None if it was stopped."""
    run = Run(settings.run.path)
    with evaluated_at_the_end(), by_sample() as evaluations:
        if train(settings) is not None:
            return None
        if not evaluations:  # it was done before, but its result was not written
            evaluate_run(run, cache=None, max_samples=None)
    heldout = run.evaluations(settings.train.steps)[-1]
    lines = [json.loads(line) for line in (run.path / METRICS).read_text().splitlines()]
    losses = [line["train/loss"] for line in lines]
    return {
        "heldout": _kept(heldout),
        "samples": evaluations[-1].by_sample(),
        "train": {
            "tokens": sum(line["train/tokens"] for line in lines),
            "epochs": lines[-1]["train/epoch"] + 1,
            "step_seconds": float(np.median([line["speed/step_seconds"] for line in lines])),
            "wobble": wobble(losses),
        },
        "losses": losses,
        "grad_norms": [line["train/grad_norm"] for line in lines],
    }


def bytes_of(paths: Sequence[Location]) -> dict[str, float]:
    """What the states take of which the drafter was trained."""
    cache = Caches(paths)
    stored = cache.stored_bytes / int(cache.index.num_tokens.sum())
    return {"bytes_per_token": stored, "stored_over_raw": stored / cache.spec.raw_bytes_per_token}


def ask_on(settings: TrainConfig, cache: Path) -> dict[str, Any]:
    """The newest drafter of the run on the states of `cache`, of whatever codec."""
    snapshot = Run(settings.run.path).require_checkpoint()
    session = Session.open(replace(settings, cache=replace(settings.cache, path=cache)))
    restore(snapshot, session.drafter)
    with by_sample() as evaluations:
        heldout = {"step": snapshot.step, **evaluate(session)}
    return {"heldout": _kept(heldout), "samples": evaluations[-1].by_sample()}


def _kept(heldout: dict[str, Any]) -> dict[str, Any]:
    return {name: heldout[name] for name in _HELDOUT}


def wobble(losses: list[float]) -> float:
    """Root mean square of the steps between successive means of 16 losses, in the second half."""
    half = np.array(losses[len(losses) // 2 :])
    means = half[: len(half) // _WOBBLE_STEPS * _WOBBLE_STEPS].reshape(-1, _WOBBLE_STEPS).mean(1)
    return float(np.sqrt(np.square(np.diff(means)).mean())) if len(means) > 1 else 0.0


if __name__ == "__main__":
    cli.run(main)
