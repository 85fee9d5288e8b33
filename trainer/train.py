"""The training run: order, step, metrics, checkpoints."""

import logging
import math
import signal
import time
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

from tqdm import tqdm

from shared import config as configs
from shared.bar import LINE_SECONDS
from shared.errors import DraftCacheError, RunError
from shared.files import canonical_json, sha256_bytes
from shared.quantity import duration, size
from trainer.announce import announce, measure_order
from trainer.batch import Batch
from trainer.caches import generations_of
from trainer.checkpoint import SCORED_ON
from trainer.checkpoint_writer import CheckpointWriter
from trainer.compiled import compiler_errors
from trainer.config import TrainConfig
from trainer.footprint import Meter, memory_errors
from trainer.heldout import evaluate_during, scalars
from trainer.learner import Learner
from trainer.loader import Loader, LoaderStats
from trainer.pauses import Pauses
from trainer.precision import with_compute_dtype
from trainer.queue_trend import QueueTrend
from trainer.ranks import ALONE, Ranks
from trainer.run import HELDOUT, Run
from trainer.session import Session, enter_device, pick_device, require_unused_mask_token
from trainer.snapshot import Snapshot
from trainer.stop import StopRequest
from trainer.tracking import Tracker, finite
from trainer.warm_start import WarmStart

logger = logging.getLogger(__name__)

_WHEN_FULL = (
    "Lower anchors.per_forward and run the same command again: it goes on from the newest "
    "checkpoint. If that is not enough, another run needs a lower sampler.tokens_per_batch or a "
    "smaller drafter."
)


class Training:
    """One run, from its newest checkpoint to its last step."""

    def __init__(
        self, config: TrainConfig, ranks: Ranks = ALONE, *, is_fresh: bool = False
    ) -> None:
        """Load the newest checkpoint, or begin; call under `Run.locked`.

        Args:
            is_fresh: begin anew. What the run has is deleted when nothing is left to be refused.
        """
        device = pick_device(config.train.device, ranks.local_rank)
        enter_device(device)
        self.config = config = with_compute_dtype(config, device)
        self.ranks = ranks
        ranks.require_shares(config.train.batches_per_step)
        self.run = Run(config.run.path)
        self.run.require_own()
        if is_fresh and config.train.init_from is not None:
            self.run.require_outside(config.train.init_from)
        snapshot = None if is_fresh else self.run.newest_checkpoint()
        generations = None if snapshot is None else generations_of(snapshot.cache)
        self.meter = Meter(device)
        self.session = Session.open(config, generations=generations, local_rank=ranks.local_rank)
        self.order, self.footprint = measure_order(
            self.session, config.train.batches_per_step // ranks.size
        )
        self.learner = Learner(self.session, self.run, ranks)
        if snapshot is None:
            self.learner.begin(WarmStart.read(self.session))
        else:
            self._check(snapshot)
        is_done = snapshot is not None and snapshot.step == config.train.steps
        if ranks.is_main and not is_done:
            require_unused_mask_token(config.drafter, self.session.cache, config.cache.exclude)
        if is_fresh:
            ranks.gather("begin")  # none of them refuses
        if ranks.is_main:
            if is_fresh:
                self.run.start_afresh()
            self.run.begin(config, snapshot)
        self.queue_trend = QueueTrend()
        self.pauses = Pauses()
        self.unlogged: dict[str, Any] | None = None
        """Metrics of a step that is done but for its evaluation, which a stop cut short."""
        if snapshot is not None:
            self._restore(snapshot)
        if ranks.size > 1:
            ranks.require_equal("where to start", self._start())

    def train(self) -> signal.Signals | None:
        """Train until `train.steps`, or until SIGINT or SIGTERM, whose checkpoint is saved.

        Returns:
            The signal that stopped it; None if all steps are done.

        Raises:
            NonFiniteError: a loss or gradient was not finite and the policy says stop. The steps
                before it are saved.
            RunError: checkpoints could not be written.
        """
        if self._is_done():
            logger.info("all %d steps are done; nothing to train", self.step)
            return None
        if self.ranks.is_main:
            announce(self.session, self.learner.optimizer, self.order, self.footprint, self.ranks)
        with StopRequest() as stop:
            if not self.ranks.is_main:
                self._follow(stop)
            elif self.step or self._evaluate(stop) is not None:
                self._loop(stop)
            else:
                self._goes_on(stop)  # tells the other ranks
            self._say_why_it_ended()
            self.ranks.gather("saved")  # whoever started the ranks ends all when one ends
        return None if self._is_done() else stop.signal

    def _say_why_it_ended(self) -> None:
        if not self.ranks.is_main:
            return
        if (peak := self.meter.read()) is not None:
            expected = self.footprint.on(self.session.device)
            logger.info("memory: %s at the peak, %s expected", size(peak), size(expected))
        if self._is_done():
            return
        if self.step:
            logger.warning(
                "stopped: step %d is saved in %s. The same command goes on from there.",
                self.step,
                self.run.path,
            )
        else:
            logger.warning("stopped before the first step: nothing to save.")

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.learner.step

    def _is_done(self) -> bool:
        return self.step == self.config.train.steps and self.unlogged is None

    def _is_due(self, every_steps: int) -> bool:
        is_last = self.step == self.config.train.steps
        return is_last or (every_steps > 0 and self.step % every_steps == 0)

    def _loop(self, stop: StopRequest) -> None:
        config = self.config
        flat = configs.flatten(configs.to_dict(config))
        logged = self.step - (self.unlogged is not None)
        with (
            Loader.open(self.session, self.ranks, self.step) as loader,
            Tracker(config.run.path, config.tracking, flat, logged) as tracker,
            CheckpointWriter(config.run.path, config.checkpoint, tracker.is_in_place) as writer,
            tqdm(total=config.train.steps, initial=logged, unit="step", disable=None) as bar,
        ):
            batches = iter(loader)
            next_line = began = time.monotonic()
            saved = self.step
            heldout: dict[str, Any] | None = None

            def save() -> None:
                nonlocal saved
                if not tracker.is_in_place():
                    raise RunError(
                        f"{tracker.path}: is not what this run writes to any more: the run's "
                        "directory or this file was moved, deleted or replaced. Nothing is written "
                        f"to what lies there now; steps after {saved} are not saved. Moved, the "
                        "run goes on from its last checkpoint with run.path set to its new place."
                    )
                with self.pauses.measure("checkpoint"):
                    tracker.sync()
                    score, samples = (heldout or {}).get("tau_walk"), (heldout or {}).get(HELDOUT)
                    state = {
                        "unlogged": finite(self.unlogged),
                        SCORED_ON: samples,
                        "order": self.order.describe(),
                    }
                    writer.submit(self.learner.snapshot(score, state))
                saved = self.step

            try:
                while self._goes_on(stop):
                    heldout = None
                    metrics = self.unlogged or self._timed_step(batches, loader)
                    self.unlogged = metrics
                    if self._is_due(config.evaluate.every_steps):
                        with self.pauses.measure("evaluate"):
                            heldout = self._evaluate(stop)
                        if heldout is None:
                            continue
                        metrics |= {f"heldout/{name}": value for name, value in scalars(heldout)}
                    tracker.log(self.step, metrics)
                    self.unlogged = None
                    bar.update()
                    bar.set_postfix_str(f"loss {metrics['train/loss']:.3f}", refresh=False)
                    if bar.disable and time.monotonic() > next_line:  # no terminal: lines instead
                        next_line = time.monotonic() + LINE_SECONDS
                        seconds = (time.monotonic() - began) / (self.step - logged)
                        self._log_progress(metrics, seconds)
                    writer.check()
                    if self._is_due(config.checkpoint.every_steps):
                        save()
            except DraftCacheError:  # of data or of the policy: never in the middle of an update
                is_futile = writer.has_given_up or not tracker.is_in_place()
                if saved != self.step and not is_futile:
                    try:
                        save()
                    except RunError as failed:  # a full disk must not hide why it ends
                        logger.warning("%s", failed)
                raise
            if saved != self.step:
                save()

    def _follow(self, stop: StopRequest) -> None:
        """What every rank but the first does: its share of each step, and nothing else."""
        with Loader.open(self.session, self.ranks, self.step) as loader:
            batches = iter(loader)
            while self._goes_on(stop):
                if self.unlogged is None:
                    self.learner.train_step(batches)
                    self._loader_stats(loader)
                self.unlogged = None

    def _goes_on(self, stop: StopRequest) -> bool:
        """Whether there is another turn. The first rank decides, a signal to any of them counts.

        One that comes after the votes counts at the next turn: whoever heeded it alone would leave
        the others waiting.
        """
        votes = self.ranks.gather((int(stop.signal or 0), self._is_done()))
        number = max(sent for sent, _ in votes)
        if number and stop.signal is None:
            stop.signal = signal.Signals(number)
        return not number and not votes[0][1]

    def _start(self) -> dict[str, Any]:
        """What all ranks must have in common before the first step."""
        parameters = self.session.drafter.parameters()
        weights = sum(float(weight.detach().double().sum()) for weight in parameters)
        return {
            "step": self.step,
            "settings": sha256_bytes(canonical_json(configs.to_dict(self.config)))[:16],
            "order": self.order.sha256[:16],
            "samples": str(self.session.cache.describe()["index_sha256"])[:16],
            "weights": weights,
        }

    def _log_progress(self, metrics: dict[str, Any], seconds_per_step: float) -> None:
        left = (self.config.train.steps - self.step) * seconds_per_step
        logger.info(
            "step %d of %d: loss %.4f, %.0f tokens/s, waited for data %.1f %%, about %s left",
            self.step,
            self.config.train.steps,
            metrics["train/loss"],
            metrics["speed/tokens_per_second"],
            100 * metrics["data/wait_share"],
            duration(left),
        )

    def _timed_step(self, batches: Iterator[Batch], loader: Loader) -> dict[str, Any]:
        began = time.perf_counter()
        metrics = self.learner.train_step(batches)
        stats = self._loader_stats(loader)
        ended = time.perf_counter()
        seconds = ended - began
        self.queue_trend.add(ended, stats.queue_depth)
        return metrics | {
            "data/queue_depth": stats.queue_depth,
            "data/queue_slope": self.queue_trend.slope,
            "data/queue_seconds_to_empty": self.queue_trend.seconds_to_empty,
            # Seconds of the worst rank over those of this one: above 1 by what these differ.
            "data/wait_share": stats.wait_seconds / seconds,
            "speed/step_seconds": seconds,
            "speed/tokens_per_second": metrics["train/tokens"] / seconds,
            "memory/peak_bytes": self.meter.read(),
            **self.pauses.take(),
        }

    def _loader_stats(self, loader: Loader) -> LoaderStats:
        return LoaderStats.worst(self.ranks.gather(loader.take_stats()))

    def _evaluate(self, stop: StopRequest) -> dict[str, Any] | None:
        return evaluate_during(self.run, self.session, self.step, stop)

    def _check(self, snapshot: Snapshot) -> None:
        where = f"{self.config.run.path}, checkpoint of step {snapshot.step}"
        self.session.cache.require_same(snapshot.cache, where)
        self.run.require_same_settings(self.config, snapshot)
        if snapshot.step < self.config.train.steps:
            self.order.require_same(snapshot.state.get("order"), where)

    def _restore(self, snapshot: Snapshot) -> None:
        self.learner.restore(snapshot)
        if (unlogged := snapshot.state.get("unlogged")) is not None:
            self.unlogged = {
                name: math.nan if value is None else value for name, value in unlogged.items()
            }
        logger.info("resuming from step %d", self.step)


def train(
    config: TrainConfig, ranks: Ranks = ALONE, *, is_fresh: bool = False
) -> signal.Signals | None:
    """Train, or go on training, the run that `config` describes: see `Training`."""
    with (
        Run(config.run.path).locked() if ranks.is_main else nullcontext(),
        compiler_errors(str(config.run.path)),
        memory_errors(str(config.run.path), _WHEN_FULL),
    ):
        return Training(config, ranks, is_fresh=is_fresh).train()
