"""Checks of the settings in force against the recipe, and of schedules against their settings.

What the recipe says is what `trainer.recipe` has as defaults.
"""

from typing import Any

import numpy as np

from trainer.doctor.finding import Finding, NotCheckedError, ranges
from trainer.doctor.view import RunView
from trainer.noise import noise_scale
from trainer.optim import learning_rate
from trainer.recipe import GAMMA_BY_BLOCK_SIZE, OptimizerConfig

_TORCH_DEFAULTS: dict[str, Any] = {"betas": (0.9, 0.999), "weight_decay": 0.01}
"""What `torch.optim.AdamW` takes where nobody says otherwise, where it is not the recipe's."""

_WHY = {
    "betas": "with beta2 = 0.999 the second moment remembers about 1,000 steps: it under-reacts "
    "to a change of scale and over-steps after it",
    "weight_decay": "the recipe decays nothing",
}


def optimizer_settings(view: RunView) -> list[Finding]:
    """Settings in force that are not those configured, or not those of the recipe."""
    config, recipe = view.config.optimizer, OptimizerConfig()
    findings = _not_configured(view)
    for name, ours in _TORCH_DEFAULTS.items():
        if getattr(config, name) == ours:
            findings.append(
                Finding(
                    severity="warning",
                    name=f"default-{name.replace('_', '-')}",
                    evidence=f"optimizer.{name} = {ours}, the default of torch.optim.AdamW; the "
                    f"recipe has {getattr(recipe, name)}",
                    advice=f"Set optimizer.{name} = {_toml(getattr(recipe, name))} unless this "
                    f"was chosen: {_WHY[name]}.",
                )
            )
    if config.warmup_fraction == 0:
        findings.append(
            Finding(
                severity="warning",
                name="no-warm-up",
                steps=((1, 1),),
                evidence=f"the first step is taken at the peak learning rate {config.lr:g}",
                advice=f"Set optimizer.warmup_fraction = {recipe.warmup_fraction:g}.",
            )
        )
    told = {"betas", "weight_decay"} & {
        name for name, ours in _TORCH_DEFAULTS.items() if getattr(config, name) == ours
    }
    names = ("lr", "warmup_fraction", "betas", "eps", "weight_decay", "max_grad_norm")
    other = [
        f"{name} {getattr(config, name)} (recipe: {getattr(recipe, name)})"
        for name in names
        if getattr(config, name) != getattr(recipe, name)
        and name not in told
        and not (name == "warmup_fraction" and config.warmup_fraction == 0)
    ]
    if other:
        findings.append(
            Finding(
                severity="note",
                name="optimizer-settings",
                evidence=", ".join(other),
                advice="Nothing to do if these were chosen.",
            )
        )
    return findings


def _not_configured(view: RunView) -> list[Finding]:
    """Settings that the live optimizer had at a checkpoint and that nobody configured."""
    config = view.config.optimizer
    findings = []
    for held in view.checkpoints:
        live = held.payload.get("state", {}).get("optimizer")
        for group in [] if live is None else live["groups"]:
            wrong = [
                f"{name} {group[name]} in force, {expected} configured"
                for name, expected in (
                    ("betas", list(config.betas)),
                    ("eps", config.eps),
                )
                if group[name] != expected
            ]
            if group["weight_decay"] not in (0.0, config.weight_decay):  # vectors are not decayed
                wrong.append(
                    f"weight_decay {group['weight_decay']} in force, {config.weight_decay} "
                    "configured"
                )
            if wrong:
                findings.append(
                    Finding(
                        severity="error",
                        name="optimizer-not-as-configured",
                        steps=((held.step, held.step),),
                        evidence="; ".join(wrong),
                        advice="The run did not learn what its configuration says: find where "
                        "the optimizer is made, and begin anew.",
                    )
                )
                break
    return findings


def gamma(view: RunView) -> list[Finding]:
    """The decay of the slot weights against the block size."""
    loss, block_size = view.config.loss, view.config.drafter.block_size
    if loss.kind == "dpace":
        if loss.gamma is None:
            return []
        return [
            Finding(
                severity="note",
                name="gamma-unused",
                evidence=f"loss.gamma = {loss.gamma:g} is set, loss.kind = 'dpace' does not use it",
                advice="Remove it.",
            )
        ]
    published = GAMMA_BY_BLOCK_SIZE.get(block_size)
    ours = loss.resolve_gamma(block_size)
    if published is None or ours == published:
        return []
    half = block_size // 2
    shares = [_late_share(value, block_size) for value in (ours, published)]
    return [
        Finding(
            severity="warning",
            name="gamma-of-another-block-size",
            evidence=f"gamma {ours:g} at block size {block_size}, published is {published:g}: "
            f"slots {half}-{block_size - 1} carry {shares[0]:.1%} of the weight instead of "
            f"{shares[1]:.1%}",
            advice=f"Leave loss.gamma unset, or set {published:g}. Losses of runs with another "
            "gamma cannot be compared; acceptance lengths can.",
        )
    ]


def _late_share(gamma: float, block_size: int) -> float:
    """Share of the loss weight on the later half of the slots."""
    weight = np.exp(-np.arange(block_size - 1) / gamma)
    return float(weight[block_size // 2 - 1 :].sum() / weight.sum())


def noise_schedule(view: RunView) -> list[Finding]:
    """A noise schedule that is configured and does not move, or another one in force."""
    config, steps = view.config.noise, view.steps
    parts = {
        name: getattr(config, name)
        for name in ("warmup_steps", "hold_steps", "decay_steps")
        if getattr(config, name)
    }
    found = []
    if parts and config.scale == 0:
        found = [_dead_noise(", ".join(f"noise.{k} = {v}" for k, v in parts.items()), 0.0)]
    if config.scale == 0 and "train/noise_scale" not in steps.present:
        return found
    scale = steps["train/noise_scale"]
    expected = np.array([noise_scale(step - 1, config) for step in steps.step.tolist()])
    wrong = ~np.isclose(scale, expected, rtol=1e-6, atol=1e-12)
    if not wrong.any():
        return found
    if len(scale) > 1 and np.ptp(scale) == 0 and np.ptp(expected) > 0:
        schedule = f"a scale from {expected.min():g} to {expected.max():g} is due by now"
        return [_dead_noise(schedule, float(scale[0]), ranges(steps.step[wrong].tolist()))]
    return [
        *found,
        Finding(
            severity="error",
            name="noise-not-as-configured",
            metric="train/noise_scale",
            steps=ranges(steps.step[wrong].tolist()),
            evidence=f"the scale in force differs from the schedule at {int(wrong.sum())} steps, "
            f"by up to {np.nanmax(np.abs(scale - expected)):g}",
            advice="The schedule must be asked at each step, with the optimizer's own count.",
        ),
    ]


def _dead_noise(schedule: str, value: float, steps: tuple[tuple[int, int], ...] = ()) -> Finding:
    return Finding(
        severity="warning" if not steps else "error",
        name="noise-never-moves",
        metric="train/noise_scale",
        steps=steps,
        evidence=f"{schedule}, and the scale in force is {value:g} throughout",
        advice="Set noise.scale to what the schedule is to reach, or remove the schedule."
        if not steps
        else "The schedule must be asked at each step: a value kept from the start is all there "
        "ever is.",
    )


def projection(view: RunView) -> list[Finding]:
    """Features that a projection made: what they can show is settled with the cache."""
    caches = [held.payload.get("cache", {}) for held in view.checkpoints if held.payload]
    if not caches or (made := caches[-1].get("projection")) is None:
        return []
    return [
        Finding(
            severity="note",
            name="projected-features",
            evidence=f"the cache holds blocks {caches[-1]['target_layer_ids']} projected to "
            f"{made['rank']} values a token (by {made['sha256'][:16]})",
            advice="Nothing to do. Which blocks are tapped, and which directions of them fc can "
            "see, is frozen with the cache: another choice needs another pilot and cache.",
        )
    ]


def learning_rate_schedule(view: RunView) -> list[Finding]:
    """A learning rate in force that is not the configured one."""
    steps, total = view.steps, view.config.train.steps
    lr = steps["train/lr"]
    if not len(steps) or steps.step[-1] > total:
        raise NotCheckedError(f"lines beyond step {total}, the last of the configuration")
    expected = np.array(
        [learning_rate(step - 1, total, view.config.optimizer) for step in steps.step.tolist()]
    )
    wrong = ~np.isclose(lr, expected, rtol=1e-6, atol=1e-15)
    if not wrong.any():
        return []
    first = int(np.flatnonzero(wrong)[0])
    return [
        Finding(
            severity="error",
            name="learning-rate-not-as-configured",
            metric="train/lr",
            steps=ranges(steps.step[wrong].tolist()),
            evidence=f"{int(wrong.sum())} steps; at step {steps.step[first]} {lr[first]:g} is in "
            f"force, {expected[first]:g} due",
            advice="Was the schedule restarted by a resume, or the run prolonged? A schedule is "
            "a function of the step and of train.steps.",
        )
    ]


def _toml(value: Any) -> str:
    return str(list(value)) if isinstance(value, tuple) else f"{value:g}"
