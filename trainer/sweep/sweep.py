"""The sweep: trials drawn, run as processes, judged, ended early, gone on with."""

import json
import logging
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import TrialState

from shared import config as configs
from shared.cgroup import num_cores
from shared.errors import ConfigError, RunError
from shared.files import write_bytes, writing
from trainer.config import TrainConfig
from trainer.run import HELDOUT, INDEX, Run
from trainer.stop import StopRequest
from trainer.sweep.config import SweepConfig
from trainer.sweep.process import Traffic, TrialProcess
from trainer.sweep.space import Space
from trainer.sweep.study import FINISHED, database_errors, open_study

logger = logging.getLogger(__name__)

BASE = "train.toml"
_POLL_SECONDS = 0.2
_STOPPED_CODES = (128 + signal.SIGINT, 128 + signal.SIGTERM)
_YOUNG_CODES = (-signal.SIGINT, -signal.SIGTERM)
"""Of a trial that is stopped before it has set up how it stops."""


@dataclass(eq=False, slots=True)
class _Running:
    """A trial in progress."""

    trial: optuna.Trial
    run: Run
    config: TrainConfig
    process: TrialProcess
    slot: int
    last_step: int
    """Of the evaluations seen."""

    is_pruned: bool = False
    is_stopped: bool = False
    """By the sweep, whatever for."""

    error: str | None = None
    """Why it was stopped as failed."""

    last: dict[str, Any] = field(default_factory=dict)
    """The newest evaluation."""

    def stop(self) -> None:
        """Have it save and end. To be called once."""
        self.is_stopped = True
        self.process.stop()

    def has_stopped(self, code: int) -> bool:
        """Whether `code` is that of a trial that was stopped, and is as it was to be left."""
        return code in _STOPPED_CODES or (self.is_stopped and code in _YOUNG_CODES)


class Sweep:
    """A sweep in a directory: `sweep.db`, and `trial-0000`, its log and so on for each trial."""

    def __init__(self, directory: Path, sweep: SweepConfig, base: Path, overrides: Sequence[str]):
        """Open or begin it; call under `locked`.

        Raises:
            ConfigError: the space does not fit the configuration.
            RunError: the sweep was begun with other settings.
        """
        self.directory, self.sweep = directory, sweep
        self._overrides = list(overrides)
        space = Space(sweep, base, overrides)
        with database_errors(directory):
            self.study = open_study(directory, sweep, space.config)
        with writing(directory / BASE):  # a file that is edited meanwhile changes no trial
            write_bytes(directory / BASE, base.read_bytes())
        self._space = Space(sweep, directory / BASE, overrides)
        self.config = self._space.config
        self._running: list[_Running] = []
        self._left = [t.number for t in self.study.get_trials(states=[TrialState.RUNNING])]
        """Numbers of trials that an earlier sweep left unfinished."""
        self._num_drawn = len(self.study.trials)
        if self._num_drawn:
            logger.info(
                "going on with %d trials: %d finished, %d to be resumed",
                self._num_drawn,
                self._num_drawn - len(self._left),
                len(self._left),
            )

    def run(self) -> signal.Signals | None:
        """Run trials until there are `trials` of them, or until SIGINT or SIGTERM.

        Returns:
            The signal that stopped it; its trials are saved, and the next call resumes them.

        Raises:
            RunError: the database or a process fails. Trials in progress are stopped and saved.
        """
        with StopRequest() as stop, database_errors(self.directory):
            try:
                while stop.signal is None and self._is_unfinished():
                    self._start()
                    for running in list(self._running):
                        self._look(running)
                    time.sleep(_POLL_SECONDS)
            finally:
                self._stop_all()
        return stop.signal

    def _is_unfinished(self) -> bool:
        return bool(self._running or self._left or self._num_drawn < self.sweep.trials)

    def _start(self) -> None:
        """Fill the free jobs: trials left over first, then new ones."""
        for number in list(self._left):
            if len(self._running) == self.sweep.jobs:
                return
            if not Run(self._path(number)).is_locked():  # else its process outlived a sweep
                self._left.remove(number)
                trial_id = self.study.trials[number]._trial_id
                self._launch(optuna.Trial(self.study, trial_id))
        while len(self._running) < self.sweep.jobs and self._num_drawn < self.sweep.trials:
            self._num_drawn += 1
            self._launch(self.study.ask())

    def _path(self, number: int) -> Path:
        return self.directory / f"trial-{number:04d}"

    def _launch(self, trial: optuna.Trial) -> None:
        path = self._path(trial.number)
        slots = {running.slot for running in self._running}
        slot = next(i for i in range(self.sweep.jobs) if i not in slots)
        drawn = self._space.draw(trial)
        overrides = [*self._overrides, *drawn, f"run.path={json.dumps(str(path))}"]
        if self.sweep.devices:
            device = self.sweep.devices[slot % len(self.sweep.devices)]
            overrides.append(f"train.device={json.dumps(device)}")
        if self.config.tracking.wandb != "off":
            overrides.append(f"tracking.name={json.dumps(f'{self.directory.name}/{path.name}')}")
        try:
            config = configs.load(TrainConfig, self.directory / BASE, overrides)
        except ConfigError as error:  # values that only together do not fit
            self._fail(trial, " ".join(str(error).split()), Traffic())
            return
        logger.info("trial %d: %s", trial.number, ", ".join(drawn))
        arguments = ["--config", str(self.directory / BASE)]
        for override in overrides:
            arguments += ["--set", override]
        reported = self.study.trials[trial.number].intermediate_values
        running = _Running(
            trial=trial,
            run=Run(path),
            config=config,
            process=TrialProcess(arguments, path.with_suffix(".log"), self._environment()),
            slot=slot,
            last_step=max(reported, default=-1),
        )
        self._running.append(running)

    def _environment(self) -> dict[str, str]:
        """That of the trials: jobs share the cores, unless somebody shared them already."""
        if self.sweep.jobs == 1:
            return dict(os.environ)
        return {"OMP_NUM_THREADS": str(max(1, num_cores() // self.sweep.jobs)), **os.environ}

    def _look(self, running: _Running) -> None:
        """Take note of what a trial has done since the last time."""
        code = running.process.poll()  # before the evaluations: what it wrote last is then there
        self._judge(running)
        if code is not None:
            self._running.remove(running)
            self._finish(running, code)

    def _judge(self, running: _Running) -> None:
        """Report new evaluations, and stop a trial that is to be pruned or cannot be compared."""
        steps = running.config.train.steps
        for evaluation in running.run.evaluations(steps, after=running.last_step):
            running.last, step = evaluation, int(evaluation["step"])
            running.last_step = step
            problem = self._compare_samples(evaluation)
            value = _figure(evaluation, self.sweep.metric)
            if running.is_pruned or running.error:
                continue
            if problem:
                running.error = problem
                running.stop()
            elif 0 < step < steps and value is not None:
                running.trial.report(value, step)
                if running.trial.should_prune():
                    logger.info("trial %d: pruned at step %d", running.trial.number, step)
                    running.is_pruned = True
                    running.stop()

    def _compare_samples(self, evaluation: dict[str, Any]) -> str | None:
        """Why figures of other trials must not be compared with this one's; None if they may."""
        if not self._is_as_first(HELDOUT, evaluation[HELDOUT]):
            return (
                "its held-out samples are not those of the first trial: leave cache.* and "
                "evaluate.max_samples out of the space, and the cache as it is"
            )
        is_varied = "cache.path" in self.sweep.space
        if not is_varied and not self._is_as_first(INDEX, evaluation.get(INDEX)):
            return (
                "its cache holds other samples than that of the first trial: a trial that learned "
                "from more would win by that. Begin another sweep, or leave the cache as it is"
            )
        return None

    def _is_as_first(self, name: str, ours: Any) -> bool:
        """Whether `ours` is what the first trial had; of the first one, remembers it."""
        first = self.study.user_attrs.get(name)
        if first is None:
            self.study.set_user_attr(name, ours)
        return first is None or first == ours

    def _finish(self, running: _Running, code: int) -> None:
        """Record how a trial ended."""
        trial, traffic = running.trial, running.process.traffic
        value = _figure(running.last, self.sweep.metric)
        if running.error is None and code == 0:
            if running.last_step != running.config.train.steps or value is None:
                self._fail(trial, f"its last evaluation has no {self.sweep.metric}", traffic)
                return
            self._remember(trial, running.last_step, traffic)
            self.study.tell(trial, value)
            logger.info("trial %d: %s %.4f", trial.number, self.sweep.metric, value)
        elif running.error is not None:
            self._fail(trial, running.error, traffic)
        elif running.is_pruned and running.has_stopped(code):
            self._remember(trial, running.last_step, traffic)
            self.study.tell(trial, state=TrialState.PRUNED)
        elif running.has_stopped(code):
            self._remember(trial, running.last_step, traffic)
            logger.warning("trial %d: stopped and saved; the next sweep resumes it", trial.number)
        else:
            reason = running.process.last_error()
            if code < 0:
                reason = f"killed by {signal.Signals(-code).name}; it said last: {reason}"
            self._fail(trial, reason, traffic)

    def _fail(self, trial: optuna.Trial, reason: str, traffic: Traffic) -> None:
        trial.set_user_attr("error", reason)
        self._remember(trial, None, traffic)
        self.study.tell(trial, state=TrialState.FAIL)
        logger.warning("trial %d failed: %s", trial.number, reason)

    def _remember(self, trial: optuna.Trial, step: int | None, traffic: Traffic) -> None:
        """Keep what the table shows; the traffic of a resumed trial adds up."""
        before = Traffic(*trial.user_attrs.get("traffic", []))
        total = before + traffic
        trial.set_user_attr("traffic", [total.read, total.from_disk, total.written])
        if step is not None and step >= 0:
            trial.set_user_attr("step", step)

    def _stop_all(self) -> None:
        """Have all trials save and end, and wait for them. They stay unfinished, to be resumed."""
        for running in self._running:
            if not (running.is_pruned or running.error):
                running.stop()
        for running in self._running:
            running.process.wait()
        for running in list(self._running):
            self._look(running)

    def counts(self) -> dict[TrialState, int]:
        """Trials by how they ended."""
        return {state: len(self.study.get_trials(states=[state])) for state in FINISHED}

    def require_one(self) -> None:
        """Refuse to call a sweep done of which nothing came.

        Raises:
            RunError: no trial was completed or pruned.
        """
        counts = self.counts()
        if counts[TrialState.FAIL] and not (
            counts[TrialState.COMPLETE] or counts[TrialState.PRUNED]
        ):
            last = self.study.get_trials(states=[TrialState.FAIL])[-1]
            raise RunError(
                f"{self.directory}: all {counts[TrialState.FAIL]} trials failed; trial "
                f"{last.number}: {last.user_attrs['error']}"
            )


def _figure(evaluation: dict[str, Any], metric: str) -> float | None:
    value = configs.flatten(evaluation).get(metric)
    return None if value is None else float(value)
