"""A run directory: its configuration, evaluations and checkpoints."""

import dataclasses
import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shared import config as configs
from shared.errors import ConfigError, RunError
from shared.files import listed, read_json, remove_tree, write_json, writing
from trainer import checkpoint as checkpoints
from trainer.config import TrainConfig
from trainer.snapshot import Snapshot
from trainer.tracking import finite

_CONFIG = "config.json"
_EVALUATIONS = "evaluations"
_LOCK = "trainer.lock"
_NONFINITE = "nonfinite-{}.json"
_FREE_SECTIONS = ("run", "loader", "evaluate", "checkpoint", "tracking")
"""Settings that may change when a run is resumed: they do not touch what is learned."""

_FREE_KEYS = (
    "anchors.per_forward",
    "cache.path",
    "train.device",
    "train.on_nonfinite",
    "train.max_nonfinite_steps",
)


HELDOUT = "heldout_sha256"
"""Of an evaluation: digest of the ids of its samples."""

INDEX = "index_sha256"
"""Of an evaluation: digest of the index of the cache, or of each of several."""

NEWEST = "newest"
BEST = "best"
"""Of the highest held-out acceptance length: `tau_walk`."""


def _defaults(config: TrainConfig) -> dict[str, Any]:
    """What settings of `config` have where nobody sets them; without those that must be set."""
    found = {}
    for section in dataclasses.fields(config):
        for field in dataclasses.fields(getattr(config, section.name)):
            if field.default is not dataclasses.MISSING:
                found[f"{section.name}.{field.name}"] = configs.to_dict(field.default)
    return found


class Run:
    """The directory of one training run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def newest_checkpoint(self) -> Snapshot | None:
        """The newest whole checkpoint; None before the first."""
        path = checkpoints.newest_valid(self.path)
        return None if path is None else checkpoints.load(path, verify=False)

    def require_same_settings(self, config: TrainConfig, snapshot: Snapshot) -> None:
        """Refuse to go on with settings that would change what is learned.

        Raises:
            RunError: naming the keys that differ.
        """
        stored = configs.flatten(snapshot.config)
        asked = configs.flatten(configs.to_dict(config))
        # A release that did not know a setting did what its default says.
        stored = _defaults(config) | stored
        changed = [
            f"{key}: {stored.get(key)!r} before, {asked.get(key)!r} now"
            for key in sorted(stored.keys() | asked.keys())
            if stored.get(key) != asked.get(key)
            and key.partition(".")[0] not in _FREE_SECTIONS
            and key not in _FREE_KEYS
        ]
        if changed:
            raise RunError(
                f"{self.path}: cannot resume with other settings ({'; '.join(changed)}). "
                "Restore them, give the run another path, or begin anew with --fresh."
            )

    def begin(self, config: TrainConfig, snapshot: Snapshot | None) -> None:
        """Record the configuration, and forget what was found after `snapshot`.

        Raises:
            RunError: the directory holds something else than a run.
        """
        self.require_own()
        with writing(self.path):
            start = -1 if snapshot is None else snapshot.step
            # Of steps that are about to be done again.
            for step, path in [*self._evaluated().items(), *self.nonfinite().items()]:
                if step > start:
                    path.unlink()
            (self.path / _EVALUATIONS).mkdir(parents=True, exist_ok=True)
        write_json(self.path / _CONFIG, configs.to_dict(config))

    def require_own(self) -> None:
        """Refuse a directory that holds something else than a run.

        Raises:
            RunError: naming what is there.
        """
        if not self.path.is_dir() or not (names := sorted(p.name for p in self.path.iterdir())):
            return
        fields = read_json(self.path / _CONFIG) if _CONFIG in names else {}
        is_own = isinstance(fields, dict) and "drafter" in fields and "run" in fields
        if not is_own and set(names) - {_LOCK, _EVALUATIONS}:
            raise RunError(
                f"{self.path}: not a run and not empty (it has {', '.join(names[:8])}). "
                "Give the run a directory of its own."
            )

    def require_outside(self, start: Path) -> None:
        """Refuse to begin anew from what lies in this run, since that is deleted first.

        Raises:
            ConfigError: naming both.
        """
        if start.resolve().is_relative_to(self.path.resolve()):
            raise ConfigError(
                f"train.init_from {start}: lies in the run {self.path}, which --fresh deletes. "
                "Copy it elsewhere, or give the new run another path."
            )

    def start_afresh(self) -> None:
        """Forget what an earlier run left: checkpoints, metrics, evaluations, export.

        Call under `locked`.

        Raises:
            RunError: the directory is not one of a run.
        """
        self.require_own()
        for name in (checkpoints.CHECKPOINTS, _EVALUATIONS, "export", "wandb"):
            remove_tree(self.path / name)
        # The configuration last: killed before, the directory is still known as a run's.
        for pattern in ("metrics.jsonl", "wandb.json", _NONFINITE.format("*"), _CONFIG):
            for path in self.path.glob(pattern):
                with writing(path):
                    path.unlink()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the run against a second trainer. The lock goes with the process.

        A directory that was not there before and holds nothing but the lock afterwards, because
        the run was refused, is removed again.

        Raises:
            RunError: another process trains here.
        """
        with writing(self.path):
            is_new = not self.path.exists()
            self.path.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        except BlockingIOError:
            raise RunError(
                f"{self.path}: another process trains this run. Wait for it, stop it, or give "
                "this run another path."
            ) from None
        finally:
            if (
                is_new
                and self.path.is_dir()
                and [path.name for path in self.path.iterdir()] == [_LOCK]
            ):
                remove_tree(self.path)
            os.close(descriptor)

    def is_locked(self) -> bool:
        """Whether a process trains here now."""
        try:
            with (self.path / _LOCK).open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        return False

    def config(self) -> TrainConfig:
        """The configuration that the run was started with.

        Raises:
            RunError: there is no run here.
        """
        if not (self.path / _CONFIG).is_file():
            raise RunError(f"{self.path}: no run here ({_CONFIG} is missing). Run `make train`.")
        try:
            return configs.build(TrainConfig, read_json(self.path / _CONFIG))
        except ConfigError as error:
            raise RunError(f"{self.path / _CONFIG}: {error}") from error

    def require_checkpoint(self, which: str = NEWEST) -> Snapshot:
        """A checkpoint: the newest whole one, the best (`best`), or that of a step.

        Raises:
            RunError: there is none, or not that one, or it is damaged.
        """
        if which == BEST:
            return checkpoints.load(checkpoints.best_valid(self.path), verify=False)
        if which != NEWEST:
            kept = {checkpoints.step_of(path): path for path in checkpoints.all_paths(self.path)}
            if not which.isdecimal() or int(which) not in kept:
                steps = ", ".join(map(str, kept)) or "none"
                raise RunError(
                    f"{self.path}: no checkpoint {which!r}. There are those of steps {steps}; "
                    f"{NEWEST} and {BEST} name one of them."
                )
            return checkpoints.load(kept[int(which)])
        if (snapshot := self.newest_checkpoint()) is None:
            raise RunError(f"{self.path}: no checkpoint yet. Run `make train`.")
        return snapshot

    def write_nonfinite(
        self, step: int, loss: float, grad_norm: float, sample_ids: list[str]
    ) -> Path:
        """Keep what made step `step` not finite; returns the file."""
        path = self.path / _NONFINITE.format(f"{step:08d}")
        write_json(path, {"loss": repr(loss), "grad_norm": repr(grad_norm), "samples": sample_ids})
        return path

    def nonfinite(self) -> dict[int, Path]:
        """What `write_nonfinite` has written, by step."""
        return _by_step(self.path, r"nonfinite-(\d+)\.json")

    def _evaluated(self) -> dict[int, Path]:
        """Files of evaluations by step."""
        return _by_step(self.path / _EVALUATIONS, r"step-(\d+)\.json")

    def write_evaluation(self, step: int, heldout: dict[str, Any]) -> None:
        """Keep one evaluation. What is not finite becomes null."""
        path = self.path / _EVALUATIONS / f"step-{step:08d}.json"
        write_json(path, finite({"step": step, **heldout}))

    def evaluations(self, last_step: int, *, after: int = -1) -> list[dict[str, Any]]:
        """The evaluations after step `after` up to `last_step`, by step."""
        remedy = "Delete it: metrics.jsonl has its figures."
        found = [
            read_json(path, remedy=remedy)
            for step, path in self._evaluated().items()
            if step > after
        ]
        return sorted((e for e in found if e["step"] <= last_step), key=lambda e: int(e["step"]))


def _by_step(directory: Path, pattern: str) -> dict[int, Path]:
    """Files of `directory` by the number in their names."""
    found = {path: re.fullmatch(pattern, path.name) for path in listed(directory)}
    return {int(match[1]): path for path, match in found.items() if match is not None}


def on_same_samples(evaluations: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those on the held-out samples of the last one, which may be compared with it.

    `evaluate.max_samples` may change when a run is resumed.
    """
    return [each for each in evaluations if each.get(HELDOUT) == evaluations[-1].get(HELDOUT)]
