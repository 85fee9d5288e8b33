"""The training run: order, step, metrics, checkpoints."""

import logging
import math
import time
from collections.abc import Iterator
from typing import Any

import torch
from tqdm import tqdm

from shared import config as configs
from shared.errors import ConfigError, NonFiniteError, RunError
from shared.files import remove_tree, write_json
from trainer import checkpoint as checkpoints
from trainer.batch import Batch, require_no_mask_token
from trainer.checkpoint_writer import CheckpointWriter
from trainer.config import TrainConfig
from trainer.drafter import fit_start_
from trainer.evaluate import evaluate
from trainer.loader import Loader
from trainer.loss import weighing
from trainer.noise import add_noise, noise_scale
from trainer.optim import (
    build_optimizer,
    describe,
    learning_rate,
    scale_and_clip_,
    set_learning_rate,
)
from trainer.run import Run
from trainer.sampler import epoch_batches, iterate, order_report
from trainer.session import Session, require_unused_mask_token
from trainer.snapshot import Snapshot, restore, take_snapshot
from trainer.step import autocast, batch_loss, forward_blocks
from trainer.tracking import Tracker

logger = logging.getLogger(__name__)

_FEW_HELDOUT = 10
_SECONDS_PER_LINE = 30.0
"""How often a run without a terminal says where it is."""


class Training:
    """One run, from its newest checkpoint to its last step."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self.run = Run(config.run.path)
        snapshot = self.run.newest_checkpoint()
        generation = int(snapshot.cache["generation"]) if snapshot is not None else None
        self.session = Session.open(config, generation=generation)
        self.run.begin(config, snapshot)
        self.optimizer = build_optimizer(self.session.drafter.named_parameters(), config.optimizer)
        self.step = 0
        self.state: dict[str, Any] = {"nonfinite_steps": 0}
        if snapshot is not None:
            self._restore(snapshot)
        elif config.drafter.fitted_start:
            head = self.session.head.lm_head_VD
            fit_start_(self.session.drafter, head, self.session.channel_rms())
        self.weigh = weighing(config.loss, config.drafter.block_size, self.session.device)

    def train(self) -> None:
        """Train until `train.steps`.

        Raises:
            NonFiniteError: a loss or gradient was not finite and the policy says stop.
            RunError: checkpoints could not be written.
        """
        config = self.config
        if self.step == config.train.steps:
            logger.info("all %d steps are done; nothing to train", self.step)
            return
        require_unused_mask_token(config.drafter, self.session.cache)
        self._log_start()
        if self.step == 0:
            self._evaluate()
        flat = configs.flatten(configs.to_dict(config))
        with (
            self._loader() as loader,
            Tracker(config.run.path, config.tracking, flat, self.step) as tracker,
            CheckpointWriter(config.run.path, config.checkpoint) as writer,
            tqdm(total=config.train.steps, initial=self.step, unit="step", disable=None) as bar,
        ):
            batches = iter(loader)
            next_line = time.monotonic()
            while self.step < config.train.steps:
                began = time.perf_counter()
                metrics = self._train_step(batches)
                stats = loader.take_stats()
                seconds = time.perf_counter() - began
                metrics |= {
                    "data/queue_depth": stats.queue_depth,
                    "data/wait_share": stats.wait_seconds / seconds,
                    "speed/step_seconds": seconds,
                    "speed/tokens_per_second": metrics["train/tokens"] / seconds,
                }
                is_last = self.step == config.train.steps
                every = config.evaluate.every_steps
                score = None
                if is_last or (every and self.step % every == 0):
                    heldout = self._evaluate()
                    score = heldout["tau_walk"]
                    metrics |= {f"heldout/{name}": value for name, value in _scalars(heldout)}
                tracker.log(self.step, metrics)
                bar.update()
                bar.set_postfix_str(f"loss {metrics['train/loss']:.3f}", refresh=False)
                if bar.disable and time.monotonic() > next_line:  # no terminal: lines instead
                    next_line = time.monotonic() + _SECONDS_PER_LINE
                    self._log_progress(metrics)
                if is_last or self.step % config.checkpoint.every_steps == 0:
                    tracker.sync()
                    writer.submit(self._snapshot(score))

    def _log_progress(self, metrics: dict[str, Any]) -> None:
        left = (self.config.train.steps - self.step) * metrics["speed/step_seconds"]
        logger.info(
            "step %d of %d: loss %.4f, %.0f tokens/s, waited for data %.1f %%, about %.0f min left",
            self.step,
            self.config.train.steps,
            metrics["train/loss"],
            metrics["speed/tokens_per_second"],
            100 * metrics["data/wait_share"],
            left / 60,
        )

    def _train_step(self, batches: Iterator[Batch]) -> dict[str, Any]:
        config, session = self.config, self.session
        lr = learning_rate(self.step, config.train.steps, config.optimizer)
        set_learning_rate(self.optimizer, lr)
        scale = noise_scale(self.step, config.noise)
        generator = torch.Generator(session.device).manual_seed(
            (config.train.seed << 32) + self.step
        )
        loss_sum = weight_sum = num_tokens = num_anchors = 0.0
        correct = torch.zeros(config.drafter.block_size, device=session.device)
        counted = torch.zeros_like(correct)
        sample_ids: list[str] = []
        buckets: list[int] = []
        for _ in range(config.train.batches_per_step):
            batch = next(batches)
            require_no_mask_token(batch, config.drafter.mask_token_id)
            batch = batch.to(session.device)
            features_SLD = add_noise(session.features.unpack(batch), scale, generator)
            if config.train.zero_features:
                features_SLD = torch.zeros_like(features_SLD)
            with autocast(session.device, config.train.compute_dtype):
                forward = forward_blocks(
                    session.drafter,
                    session.head,
                    batch,
                    features_SLD,
                    config.drafter.mask_token_id,
                )
            loss = batch_loss(
                forward,
                session.head,
                self.weigh,
                anchors_per_chunk=config.loss.anchors_per_chunk,
            )
            loss.loss_sum.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            loss_sum += float(loss.loss_sum.detach())
            weight_sum += float(loss.weight_sum)
            correct += loss.correct_AK.sum(0)
            counted += forward.blocks.supervised_AK.sum(0)
            num_tokens += batch.num_tokens
            num_anchors += len(batch.anchor_A)
            sample_ids += batch.sample_ids
            buckets.append(batch.bucket)
        grad_norm = scale_and_clip_(
            session.drafter.parameters(), weight_sum, config.optimizer.max_grad_norm
        )
        if math.isfinite(loss_sum) and math.isfinite(grad_norm):
            self.optimizer.step()
        else:
            self._refuse_step(loss_sum, grad_norm, sample_ids)
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        accuracy = (correct / counted).tolist()  # NaN, and so null, for a slot not counted
        return {
            "train/loss": loss_sum / weight_sum,
            "train/accuracy": float(correct.sum() / counted.sum().clamp_min(1)),
            "train/accuracy_per_slot": accuracy[1:],
            "train/grad_norm": grad_norm,
            "train/lr": lr,
            "train/noise_scale": scale,
            "train/weight_sum": weight_sum,
            "train/tokens": int(num_tokens),
            "train/anchors": int(num_anchors),
            "train/nonfinite_steps": self.state["nonfinite_steps"],
            "train/epoch": batch.epoch,
            "train/buckets": buckets,
            "train/samples": sample_ids,
        }

    def _refuse_step(self, loss_sum: float, grad_norm: float, sample_ids: list[str]) -> None:
        """Write down the samples of a step that must not reach the weights; stop or go on."""
        self.state["nonfinite_steps"] += 1
        count = self.state["nonfinite_steps"]
        path = self.config.run.path / f"nonfinite-{self.step + 1:08d}.json"
        write_json(
            path, {"loss": repr(loss_sum), "grad_norm": repr(grad_norm), "samples": sample_ids}
        )
        message = (
            f"step {self.step + 1}: loss {loss_sum}, gradient norm {grad_norm}; the step was not "
            f"applied, its samples are in {path}"
        )
        settings = self.config.train
        if settings.on_nonfinite == "stop" or count > settings.max_nonfinite_steps:
            raise NonFiniteError(f"{message}. Look at them, or set train.on_nonfinite = 'skip'.")
        logger.warning("%s (%d so far)", message, count)

    def _evaluate(self) -> dict[str, Any]:
        chosen = min(len(self.session.split.heldout), self.config.evaluate.max_samples)
        with tqdm(total=chosen, desc="evaluate", unit="sample", leave=False, disable=None) as bar:
            heldout = evaluate(self.session, lambda done: bar.update(done - bar.n))
        self.run.write_evaluation(self.step, heldout)
        if heldout["loss"] is not None:
            logger.info(
                "step %d held out: loss %.4f, acceptance length chain %.3f, walk %.3f",
                self.step,
                heldout["loss"],
                heldout["tau_chain"],
                heldout["tau_walk"],
            )
        return heldout

    def _loader(self) -> Loader:
        session, config = self.session, self.config
        lengths = session.cache.index.num_tokens[session.split.train].astype("int64")
        stream = iterate(
            lengths,
            config.sampler,
            seed=config.train.seed,
            start_batch=self.step * config.train.batches_per_step,
        )
        return Loader(
            session.cache,
            session.split.train,
            stream,
            config=config.loader,
            anchors=config.anchors,
            seed=config.train.seed,
        )

    def _log_start(self) -> None:
        session, config = self.session, self.config
        for key, value in configs.flatten(configs.to_dict(config)).items():
            logger.info("%s = %s", key, value)
        if config.loss.kind == "decay":
            logger.info("gamma in force: %g", config.loss.resolve_gamma(config.drafter.block_size))
        logger.info("optimizer: %s", describe(self.optimizer))
        spec = session.cache.spec
        logger.info(
            "cache %s, generation %d, fingerprint %s; target %s in %s, blocks %s",
            session.cache.path,
            session.cache.manifest.generation,
            spec.fingerprint[:16],
            spec.target.model_type,
            spec.target.dtype,
            list(spec.target_layer_ids),
        )
        split = session.split
        logger.info(
            "%d samples to train on, %d held out, %d of other sources, %d without an anchor",
            len(split.train),
            len(split.heldout),
            split.num_other_sources,
            split.num_without_anchor,
        )
        if len(split.heldout) < _FEW_HELDOUT:
            logger.warning(
                "only %d held-out samples: acceptance will mean little. Raise "
                "cache.heldout_fraction.",
                len(split.heldout),
            )
        lengths = session.cache.index.num_tokens[split.train].astype("int64")
        try:
            plan = epoch_batches(lengths, config.sampler, seed=config.train.seed, epoch=0)
        except ValueError as error:
            raise ConfigError(f"sampler: {error}") from None
        logger.info("order: %s", order_report(plan, lengths))

    def _snapshot(self, score: float | None) -> Snapshot:
        return take_snapshot(
            step=self.step,
            batch_position=self.step * self.config.train.batches_per_step,
            drafter=self.session.drafter,
            optimizer=self.optimizer,
            config=configs.to_dict(self.config),
            cache=self.session.describe_cache(),
            state=self.state,
            score=score,
        )

    def _restore(self, snapshot: Snapshot) -> None:
        where = f"{self.config.run.path}, checkpoint of step {snapshot.step}"
        self.session.require_same_cache(snapshot.cache, where)
        if snapshot.step > self.config.train.steps:
            raise RunError(f"{where}: the run is to end at step {self.config.train.steps}.")
        restore(snapshot, self.session.drafter, self.optimizer)
        self.step = snapshot.step
        self.state = dict(snapshot.state)
        logger.info("resuming from step %d", self.step)


def train(config: TrainConfig) -> None:
    """Train, or go on training, the run that `config` describes: see `Training.train`."""
    with Run(config.run.path).locked():
        Training(config).train()


def _scalars(heldout: dict[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in heldout.items():
        if isinstance(value, dict):
            for key, inner in value.items():
                if isinstance(inner, int | float):
                    yield f"{name}/{key}", inner
        elif isinstance(value, int | float):
            yield name, value


def start_afresh(run: Run) -> None:
    """Forget what an earlier run left: checkpoints, metrics, evaluations, export.

    Raises:
        RunError: the directory is not one of a run, or another process trains there.
    """
    run.require_own()
    with run.locked():
        for name in (checkpoints.CHECKPOINTS, "evaluations", "export", "wandb"):
            remove_tree(run.path / name)
        for pattern in ("metrics.jsonl", "config.json", "wandb.json", "nonfinite-*.json"):
            for path in run.path.glob(pattern):
                path.unlink()
