"""What learns: the drafter with its optimizer, one optimizer step at a time."""

import logging
import math
from collections.abc import Iterator
from typing import Any

import torch

from shared import config as configs
from shared.errors import DraftCacheError, NonFiniteError, RunError
from shared.memory import trim_heap
from trainer.batch import Batch, require_no_mask_token
from trainer.compiled import compile_layers_
from trainer.drafter import fit_start_
from trainer.loss import weighing
from trainer.noise import add_noise, noise_scale
from trainer.optim import (
    build_optimizer,
    describe,
    learning_rate,
    scale_and_clip_,
    set_learning_rate,
)
from trainer.ranks import Ranks
from trainer.run import Run
from trainer.session import Session
from trainer.snapshot import Snapshot, restore, take_snapshot
from trainer.step import autocast, batch_loss, forward_blocks
from trainer.teacher import teacher_of
from trainer.totals import StepTotals
from trainer.warm_start import WarmStart

logger = logging.getLogger(__name__)

_STEPS_PER_TRIM = 20
"""A trim costs 50 ms, and as much again for the pages that the next step asks for."""


class Learner:
    """The drafter of a session while it is trained.

    Attributes:
        step: optimizer steps done.
        epoch: of the last micro-batch; None before the first.
        num_nonfinite: steps left out among them, because their loss or gradient was not finite.
        init_from: where the first weights came from; None where they were drawn.
    """

    def __init__(self, session: Session, run: Run, ranks: Ranks) -> None:
        self.config = session.config
        self.session = session
        self.run = run
        self.ranks = ranks
        if self.config.train.compile:
            compile_layers_(session.drafter)
        self.optimizer = build_optimizer(session.drafter.named_parameters(), self.config.optimizer)
        self.weigh = weighing(self.config.loss, self.config.drafter.block_size, session.device)
        self.step = 0
        self.epoch: int | None = None
        self.num_nonfinite = 0
        self.init_from: dict[str, Any] | None = None

    def begin(self, warm_start: WarmStart | None) -> None:
        """Take the first weights from `warm_start`, or fit those that were drawn to the target."""
        if warm_start is not None:
            warm_start.load(self.session)
            self.init_from = warm_start.describe()
        elif self.config.drafter.fitted_start:
            session = self.session
            head, projection = session.head.lm_head_VD, session.cache.projection()
            fit_start_(session.drafter, head, session.channel_rms(), projection)

    def restore(self, snapshot: Snapshot) -> None:
        """Go on from `snapshot`.

        Raises:
            RunError: it does not fit the configuration.
        """
        restore(snapshot, self.session.drafter, self.optimizer)
        self.step = snapshot.step
        self.epoch = snapshot.state.get("epoch")
        self.num_nonfinite = snapshot.state["nonfinite_steps"]
        self.init_from = snapshot.state.get("init_from")

    def snapshot(self, score: float | None, state: dict[str, Any]) -> Snapshot:
        """All of this in host memory, and what the loop must remember as well."""
        return take_snapshot(
            step=self.step,
            batch_position=self.step * self.config.train.batches_per_step,
            drafter=self.session.drafter,
            optimizer=self.optimizer,
            config=configs.to_dict(self.config),
            cache=self.session.cache.describe(),
            state={
                "epoch": self.epoch,
                "nonfinite_steps": self.num_nonfinite,
                "init_from": self.init_from,
                "optimizer": describe(self.optimizer),
                **state,
            },
            score=score,
        )

    def train_step(self, batches: Iterator[Batch]) -> dict[str, Any]:
        """Take the next optimizer step from `batches`, this rank's; returns its metrics.

        Raises:
            NonFiniteError: loss or gradient is not finite and the policy says stop. The weights,
                and `step`, are those before it.
            RunError: another rank is gone.
        """
        config, drafter, ranks = self.config, self.session.drafter, self.ranks
        set_learning_rate(
            self.optimizer, learning_rate(self.step, config.train.steps, config.optimizer)
        )
        scale = noise_scale(self.step, config.noise)
        totals = StepTotals(config.drafter.block_size, self.session.device)
        first = self.step * config.train.batches_per_step
        for number in range(first + ranks.rank, first + config.train.batches_per_step, ranks.size):
            batch = next(batches)
            try:
                self._add_gradients(batch, number, scale, totals)
            except torch.OutOfMemoryError as error:
                raise self._too_large(batch, error) from error
        totals.sum_(ranks)
        ranks.sum_(weight.grad for weight in drafter.parameters() if weight.grad is not None)
        grad_norm = math.nan
        if totals.weight_sum > 0:  # weights of `dpace` can all vanish
            grad_norm = scale_and_clip_(
                drafter.parameters(), totals.weight_sum, config.optimizer.max_grad_norm
            )
        if math.isfinite(totals.loss_sum) and math.isfinite(grad_norm):
            self.optimizer.step()
        else:
            self._refuse_step(totals, grad_norm)
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        if self.step % _STEPS_PER_TRIM == 0:
            trim_heap()
        metrics = totals.metrics()
        self.epoch = metrics["train/epoch"]
        return metrics | {
            "train/grad_norm": grad_norm,
            "train/lr": self.optimizer.param_groups[0]["lr"],  # as it was in force
            "train/noise_scale": scale,
            "train/nonfinite_steps": self.num_nonfinite,
        }

    def _add_gradients(self, batch: Batch, number: int, scale: float, totals: StepTotals) -> None:
        """Forward and backward of the run's micro-batch `number`, counted from 0."""
        config, session = self.config, self.session
        require_no_mask_token(batch, config.drafter.mask_token_id)
        batch = batch.to(session.device)
        features_SLD, last_hidden_SD = session.features.split(batch)
        # Noise of its own for each micro-batch, whichever rank has it.
        generator = torch.Generator(session.device).manual_seed((config.train.seed << 32) + number)
        features_SLD = add_noise(features_SLD, scale, generator)
        if config.train.zero_features:
            features_SLD = torch.zeros_like(features_SLD)
        for part in batch.parts(config.anchors.per_forward):
            with autocast(session.device, config.train.compute_dtype):
                forward = forward_blocks(
                    session.drafter, session.head, part, features_SLD, config.drafter.mask_token_id
                )
            loss = batch_loss(
                forward,
                session.head,
                self.weigh,
                teacher_of(config.loss, session.head, last_hidden_SD, forward.blocks),
                anchors_per_chunk=config.loss.anchors_per_chunk,
                with_liger=session.with_liger,
            )
            loss.loss_sum.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            totals.add_loss(forward, loss)
        totals.add_batch(batch)

    def _too_large(self, batch: Batch, error: torch.OutOfMemoryError) -> RunError:
        reason = str(error).splitlines()[0][:200]
        return RunError(
            f"step {self.step + 1}: {self.session.device} does not hold a micro-batch of "
            f"{batch.num_tokens} tokens and {len(batch.anchor_A)} anchors ({reason}). Set "
            "anchors.per_forward, or lower it, and run the same command again; where much is "
            "reserved but not allocated, PYTORCH_ALLOC_CONF=expandable_segments:True helps too."
        )

    def _refuse_step(self, totals: StepTotals, grad_norm: float) -> None:
        """Write down the samples of a step that must not reach the weights; stop or go on."""
        message = (
            f"step {self.step + 1}: loss {totals.loss_sum}, gradient norm {grad_norm}; the step "
            "was not applied"
        )
        if self.ranks.is_main:
            try:
                path = self.run.write_nonfinite(
                    self.step + 1, totals.loss_sum, grad_norm, totals.sample_ids
                )
                message += f", its samples are in {path}"
            except DraftCacheError as error:  # a full disk must not hide what happened
                logger.warning("%s", error)
                message += f", its samples begin with {', '.join(totals.sample_ids[:8])}"
        settings = self.config.train
        if settings.on_nonfinite == "stop":
            raise NonFiniteError(
                f"{message}. Look at them; to leave such steps out, set train.on_nonfinite = "
                "'skip' and run the same command again. cache.exclude leaves samples out of a new "
                "run."
            )
        if self.num_nonfinite >= settings.max_nonfinite_steps:
            raise NonFiniteError(
                f"{message}. {self.num_nonfinite} steps were left out before it, as many as "
                "train.max_nonfinite_steps allows. Look at the samples, or raise the limit."
            )
        self.num_nonfinite += 1
        logger.warning("%s (%d so far)", message, self.num_nonfinite)
