"""A run as its checks see it: settings, a column per metric, checkpoints, evaluations."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shared.errors import RunError
from shared.files import read_json
from trainer import checkpoint as checkpoints
from trainer.config import TrainConfig
from trainer.doctor.finding import NotCheckedError
from trainer.run import Run
from trainer.tensors import TensorFacts, read_facts
from trainer.tracking import METRICS

Column = npt.NDArray[np.float64]

NAMES = (
    "train/loss",
    "train/accuracy",
    "train/grad_norm",
    "train/lr",
    "train/noise_scale",
    "train/nonfinite_steps",
    "train/epoch",
    "data/queue_depth",
    "data/wait_share",
    "speed/step_seconds",
    "speed/tokens_per_second",
    "time/uptime_seconds",
    "time/evaluate_seconds",
    "time/checkpoint_seconds",
    "tracking/wandb_dropped",
)
"""Metrics that are read. Sample ids are not: they would not fit into memory for a long run."""


@dataclass(frozen=True, eq=False, slots=True)
class Steps:
    """`metrics.jsonl` as columns, one entry for each of N lines."""

    step: npt.NDArray[np.int64]
    columns: dict[str, Column]
    """float64 [N] by name; NaN where the line has null, or nothing."""

    present: frozenset[str]
    """Names that at least one line has."""

    buckets: list[tuple[int, ...]]
    """Length buckets of the micro-batches of each line."""

    num_broken: int
    """Lines that are no JSON object with a step, a last one that is still being written apart."""

    def __len__(self) -> int:
        return len(self.step)

    def __getitem__(self, name: str) -> Column:
        """The metric `name`.

        Raises:
            NotCheckedError: no line has it.
        """
        if name not in self.present:
            raise NotCheckedError(f"{METRICS} has no {name}")
        return self.columns[name]

    def require(self, num_steps: int) -> None:
        """Raises:
        NotCheckedError: there are fewer lines.
        """
        if len(self) < num_steps:
            raise NotCheckedError(f"{len(self)} steps, it takes {num_steps}")


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class CheckpointView:
    path: Path
    step: int
    damage: str | None
    """What is wrong with its files; None if all match their digests."""

    payload: dict[str, Any]
    """`state.json`; empty where damaged."""

    drafter: list[TensorFacts]
    optimizer: list[TensorFacts]


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class RunView:
    path: Path
    config: TrainConfig
    steps: Steps
    checkpoints: list[CheckpointView]
    evaluations: list[dict[str, Any]]
    nonfinite: dict[int, list[str]]
    """Sample ids of the steps that were refused because they were not finite."""

    @classmethod
    def read(cls, run: Run) -> "RunView":
        """Read everything; changes nothing, so it may look at a run in progress.

        Raises:
            RunError: there is no run, or its files are not those of one.
        """
        config = run.config()
        found = [
            held
            for path in checkpoints.all_paths(run.path)
            if (held := _checkpoint(path)) is not None
        ]
        return cls(
            path=run.path,
            config=config,
            # After the checkpoints: in progress, a run must have the lines of each of them.
            steps=read_steps(run.path / METRICS),
            checkpoints=found,
            evaluations=run.evaluations(config.train.steps),
            nonfinite={
                step: list(read_json(path)["samples"]) for step, path in run.nonfinite().items()
            },
        )

    @property
    def last_step(self) -> int:
        """The last step that has a line; 0 before the first."""
        return int(self.steps.step[-1]) if len(self.steps) else 0

    @property
    def saved_after(self) -> list[int]:
        """Steps after which a checkpoint was saved, as far as lines and files tell."""
        found = {checkpoint.step for checkpoint in self.checkpoints}
        if "time/checkpoint_seconds" in self.steps.present:
            took = self.steps["time/checkpoint_seconds"]
            found |= set((self.steps.step[took > 0] - 1).tolist())
        return sorted(found)

    @property
    def restarts(self) -> list[int]:
        """Steps that another process began with than did the one before."""
        if "time/uptime_seconds" not in self.steps.present:
            return []
        uptime = self.steps["time/uptime_seconds"]
        return [int(step) for step in self.steps.step[1:][np.diff(uptime) < 0]]


def read_steps(path: Path) -> Steps:
    """The lines of a metrics file; empty if there is none yet.

    Raises:
        RunError: it cannot be read.
    """
    numbers: list[int] = []
    columns: dict[str, list[float]] = {name: [] for name in NAMES}
    buckets: list[tuple[int, ...]] = []
    present: set[str] = set()
    num_broken = 0
    try:
        if path.exists():
            with path.open("rb") as file:
                for data in file:
                    try:
                        line = json.loads(data)
                        number = int(line["step"])
                    except (ValueError, LookupError, TypeError):
                        num_broken += data.endswith(b"\n")
                        continue
                    numbers.append(number)
                    present |= columns.keys() & line.keys()
                    buckets.append(tuple(line.get("train/buckets", ())))
                    for name, column in columns.items():
                        value = line.get(name)
                        column.append(np.nan if value is None else float(value))
    except (OSError, ValueError, TypeError) as error:
        raise RunError(f"{path}: not the metrics of a run ({error}).") from error
    return Steps(
        step=np.array(numbers, np.int64),
        columns={name: np.array(column, np.float64) for name, column in columns.items()},
        present=frozenset(present),
        buckets=buckets,
        num_broken=num_broken,
    )


def _checkpoint(path: Path) -> CheckpointView | None:
    """The checkpoint at `path`; None if a run in progress deletes it meanwhile."""
    drafter: list[TensorFacts] = []
    optimizer: list[TensorFacts] = []
    payload: dict[str, Any] = {}
    damage = None
    try:
        payload = checkpoints.describe(path)
        drafter = list(read_facts(path / checkpoints.DRAFTER))
        optimizer = list(read_facts(path / checkpoints.OPTIMIZER))
    except RunError as error:
        if not path.is_dir():
            return None
        damage = str(error)
    return CheckpointView(
        path=path,
        step=checkpoints.step_of(path),
        damage=damage,
        payload=payload,
        drafter=drafter,
        optimizer=optimizer,
    )
