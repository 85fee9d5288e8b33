"""The memory of a sweep: an Optuna study in SQLite, and what must stay the same across restarts."""

import fcntl
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import TrialState
from sqlalchemy.exc import SQLAlchemyError

from shared import config as configs
from shared.errors import RunError
from shared.files import writing
from trainer.config import TrainConfig
from trainer.sweep.config import SweepConfig

DATABASE = "sweep.db"
_LOCK = "sweep.lock"
_NAME = "sweep"
_SETTINGS = "settings"
_FREE_SECTIONS = ("run", "loader", "checkpoint", "tracking")
_FREE_KEYS = ("cache.path", "train.device")
"""Settings that may change when a sweep goes on: they touch neither what is learned nor the
figure it is judged by."""

FINISHED = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold the sweep's directory against a second sweep. The lock goes with the process.

    Raises:
        RunError: another sweep is at work there, or it holds something else.
    """
    with writing(directory):
        names = sorted(p.name for p in directory.iterdir()) if directory.is_dir() else []
        if set(names) - {_LOCK} and DATABASE not in names:
            raise RunError(
                f"{directory}: not a sweep and not empty (it has {', '.join(names[:8])}). Give "
                "the sweep a directory of its own."
            )
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise RunError(f"{directory}: another sweep is at work here. Wait for it.") from None
    finally:
        os.close(descriptor)


@contextmanager
def database_errors(directory: Path) -> Iterator[None]:
    """Turn what the database answers into one line.

    Raises:
        RunError: it cannot be read or written.
    """
    try:
        yield
    except (optuna.exceptions.OptunaError, SQLAlchemyError) as error:
        cause = error.__cause__ or error
        raise RunError(
            f"{directory / DATABASE}: the sweep's database cannot be used ({cause}). Look at the "
            "disk; what the trials learned is in their own directories."
        ) from error


def open_study(directory: Path, sweep: SweepConfig, config: TrainConfig) -> optuna.Study:
    """The study of `directory`, made if it is not there.

    Raises:
        RunError: it was begun with settings that make its trials another thing.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        pruner: optuna.pruners.BasePruner = optuna.pruners.NopPruner()
        if sweep.prune:
            pruner = optuna.pruners.MedianPruner(n_startup_trials=sweep.startup_trials)
        study = optuna.create_study(
            storage=f"sqlite:///{directory / DATABASE}",
            study_name=_NAME,
            direction=sweep.goal,
            load_if_exists=True,
            pruner=pruner,
        )
        study.sampler = optuna.samplers.TPESampler(
            # A sampler that starts again must not draw again what it drew before.
            seed=sweep.seed + len(study.trials),
            n_startup_trials=sweep.startup_trials,
            constant_liar=True,  # trials in progress count as poor ones, so that none is twinned
        )
    settings = _settings(sweep, config)
    stored = study.user_attrs.get(_SETTINGS)
    if stored is None:
        study.set_user_attr(_SETTINGS, settings)
    elif changed := configs.differences(stored, settings, ("before", "now")):
        raise RunError(
            f"{directory}: the sweep cannot go on with other settings ({'; '.join(changed)}). "
            "Restore them, or give the sweep another directory."
        )
    return study


def _settings(sweep: SweepConfig, config: TrainConfig) -> dict[str, Any]:
    flat = configs.flatten(configs.to_dict(config))
    fixed = {
        key: value
        for key, value in flat.items()
        if key.partition(".")[0] not in _FREE_SECTIONS and key not in _FREE_KEYS
    }
    space = configs.flatten(configs.to_dict(sweep.space), "space.")
    return {**fixed, "sweep.metric": sweep.metric, "sweep.direction": sweep.goal, **space}
