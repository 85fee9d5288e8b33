"""Run directories of made-up trainings, written by the trainer's own writers."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shared import config as configs
from trainer import config as training
from trainer.checkpoint import save
from trainer.interleave import interleave
from trainer.noise import noise_scale
from trainer.optim import build_optimizer, describe, learning_rate
from trainer.run import Run
from trainer.snapshot import Snapshot, take_snapshot
from trainer.tracking import Tracker

Line = dict[str, Any]
BUCKET_LOSS = (2.5, 3.0, 5.0)
BUCKET_SHARE = (2, 3, 5)
STEPS_PER_EPOCH = 100
STEP_SECONDS = 0.5


def make_config(path: Path, *, steps: int = 200, **sections: Any) -> training.TrainConfig:
    """The recipe, block size 16, and whatever section is given instead."""
    given = {
        "drafter": training.DrafterConfig(
            mask_token_id=3,
            intermediate_size=8,
            num_heads=1,
            num_kv_heads=1,
            head_dim=2,
            rope_theta=1e4,
        ),
        **sections,
    }
    return training.TrainConfig(
        run=training.RunConfig(path=path),
        cache=training.CacheConfig(path=path / "cache"),
        sampler=training.SamplerConfig(tokens_per_batch=512, num_buckets=3),
        train=training.StepConfig(steps=steps),
        checkpoint=training.CheckpointConfig(every_steps=50),
        **given,
    )


def healthy_line(config: training.TrainConfig, step: int, bucket: int) -> Line:
    """What the loop logs after `step`, of a training that goes well."""
    rng = np.random.default_rng(step)
    level = BUCKET_LOSS[bucket] * (0.6 + 0.4 * float(np.exp(-step / 60)))
    was_saved = step > 1 and (step - 1) % config.checkpoint.every_steps == 0
    return {
        "train/loss": level + 0.1 * rng.standard_normal(),
        "train/accuracy": 0.1,
        "train/grad_norm": float(np.exp(0.3 * rng.standard_normal())),
        "train/lr": learning_rate(step - 1, config.train.steps, config.optimizer),
        "train/noise_scale": noise_scale(step - 1, config.noise),
        "train/nonfinite_steps": 0,
        "train/epoch": (step - 1) // STEPS_PER_EPOCH,
        "train/buckets": [bucket],
        "train/samples": [f"{step:032x}"],
        "train/tokens": 500,
        "data/queue_depth": config.loader.queue_batches,
        "data/wait_share": 0.001,
        "speed/step_seconds": STEP_SECONDS,
        "speed/tokens_per_second": 500 / STEP_SECONDS,
        "time/uptime_seconds": STEP_SECONDS * step + 0.01 * ((step - 1) // 50),
        "time/unix_seconds": 1.8e9 + STEP_SECONDS * step,
        "time/evaluate_seconds": 0.0,
        "time/checkpoint_seconds": 0.01 if was_saved else 0.0,
    }


def make_run(
    path: Path,
    *,
    config: training.TrainConfig | None = None,
    change: Callable[[int, Line], Line | None] = lambda step, line: line,
    until: int | None = None,
    saved: Iterable[int] = (100, 200),
    weights: Callable[[int, dict[str, torch.Tensor]], None] = lambda step, tensors: None,
    state: dict[str, Any] | None = None,
    taus: Iterable[tuple[int, float]] = ((0, 1.0), (100, 1.4), (200, 1.6)),
) -> Run:
    """A run of `config.train.steps` steps, logged up to `until`.

    Args:
        change: what becomes of the healthy line of a step; None leaves it out.
        weights: may change the tensors of a checkpoint before they are written.
        state: replaces parts of the checkpoints' state.
        taus: evaluations, as (step, walk acceptance length).
    """
    config = config or make_config(path)
    run = Run(path)
    run.begin(config, None)
    until = until or config.train.steps
    epochs = -(-until // STEPS_PER_EPOCH)
    count = np.array(BUCKET_SHARE) * (STEPS_PER_EPOCH // sum(BUCKET_SHARE))
    order = [interleave(count, np.random.default_rng(epoch)) for epoch in range(epochs)]
    buckets = np.concatenate(order).tolist()
    with Tracker(path, config.tracking, configs.flatten(configs.to_dict(config))) as tracker:
        for step in range(1, until + 1):
            line = change(step, healthy_line(config, step, buckets[step - 1]))
            if line is not None:
                tracker.log(step, line)
    for step in saved:
        if step <= until:
            snapshot = _snapshot(config, step, state or {})
            weights(step, snapshot.drafter)
            save(path, snapshot, keep=9)
    for step, tau in taus:
        if step <= until:
            run.write_evaluation(step, evaluation(tau))
    return run


def evaluation(tau: float, **changes: Any) -> dict[str, Any]:
    """What `evaluate` returns, as far as anything reads it."""
    return {
        "loss": 5.0 - tau,
        "tau_walk": tau,
        "tau_chain": tau + 0.1,
        "tau_tree": {"8": tau + 0.2, "64": tau + 0.5},
        "accuracy_per_slot": [0.3] * 15,
        "num_samples": 64,
        "num_anchors": 1000,
        "heldout_sha256": "ab" * 32,
        "index_sha256": "ef" * 32,
        **changes,
    }


def _snapshot(config: training.TrainConfig, step: int, state: dict[str, Any]) -> Snapshot:
    """A drafter of two tensors whose optimizer has done `step` updates."""
    torch.manual_seed(step)
    drafter = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.LayerNorm(3))
    optimizer = build_optimizer(drafter.named_parameters(), config.optimizer)
    for parameter in drafter.parameters():
        optimizer.state[parameter] = {
            "step": torch.tensor(float(step)),
            "exp_avg": 0.1 * torch.randn_like(parameter),
            "exp_avg_sq": 0.1 * torch.rand_like(parameter),
        }
    return replace(
        take_snapshot(
            step=step,
            batch_position=step,
            drafter=drafter,
            optimizer=optimizer,
            config=configs.to_dict(config),
            cache={
                "fingerprint": "cd" * 32,
                "generation": 1,
                "index_sha256": "ef" * 32,
                "target_layer_ids": [0, 2],
                "hidden_size": 64,
            },
            state={
                "epoch": (step - 1) // STEPS_PER_EPOCH,
                "nonfinite_steps": 0,
                "optimizer": describe(optimizer),
                "unlogged": None,
                **state,
            },
            score=1.5,
        )
    )
