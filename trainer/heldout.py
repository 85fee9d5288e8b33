"""Held-out metrics in the middle of a run."""

import logging
from collections.abc import Iterator
from typing import Any

from shared.bar import Bar
from shared.errors import DraftCacheError
from trainer.evaluate import evaluate
from trainer.run import Run
from trainer.session import Session
from trainer.stop import StopRequest

logger = logging.getLogger(__name__)


class _StoppedError(Exception):
    """A stop was asked for while evaluating."""


def evaluate_during(
    run: Run, session: Session, step: int, stop: StopRequest
) -> dict[str, Any] | None:
    """Evaluate after `step` and keep the figures; None if a stop was asked for before the end."""
    chosen = min(len(session.split.heldout), session.config.evaluate.max_samples)
    with Bar("evaluate", "sample", chosen) as bar:

        def progress(done: int) -> None:
            bar.reach(done)
            if stop.signal is not None:
                raise _StoppedError

        try:
            heldout = evaluate(session, progress)
        except _StoppedError:
            return None
    try:
        run.write_evaluation(step, heldout)
    except DraftCacheError as error:  # a full disk, as a rule: no reason to end the run
        logger.warning("%s The evaluation's figures are in metrics.jsonl only.", error)
    if heldout["loss"] is not None:
        logger.info(
            "step %d held out: loss %.4f, acceptance length chain %.3f, walk %.3f",
            step,
            heldout["loss"],
            heldout["tau_chain"],
            heldout["tau_walk"],
        )
    return heldout


def scalars(heldout: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """The numbers among the figures of `evaluate`, by name; those of a group as `group/name`."""
    for name, value in heldout.items():
        if isinstance(value, dict):
            for key, inner in value.items():
                if isinstance(inner, int | float):
                    yield f"{name}/{key}", inner
        elif isinstance(value, int | float):
            yield name, value
