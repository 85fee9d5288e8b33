"""The settings that vary: checked against the configuration, drawn by Optuna."""

import json
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Union

import optuna

from shared import config as configs
from shared.errors import ConfigError
from trainer.config import TrainConfig
from trainer.metrics import AcceptanceTotals
from trainer.sweep.config import Choice, Dimension, SweepConfig

_OURS = ("run.path", "tracking.name")
"""Settings that the sweep gives each trial itself, whatever the configuration has."""

_WEIGHING = ("loss.kind", "loss.gamma", "loss.dpace_alpha", "drafter.block_size")
"""Settings with which a loss is another quantity."""


class Space:
    """What a trial may be: every value of it fits the configuration that it is laid over."""

    def __init__(self, sweep: SweepConfig, base: Path, overrides: Sequence[str]) -> None:
        """Check all of `sweep` against the run configured by `base` and `overrides`.

        Raises:
            ConfigError: a setting is not one of a run, or cannot take a value it is to take.
        """
        self._dimensions = dict(sweep.space)
        self._base, self._overrides = base, overrides
        self._check_overrides(sweep)
        self.config = configs.load(TrainConfig, base, self._with_device(sweep.devices[:1]))
        self._is_integer = {key: self._check_kind(key) for key in self._dimensions}
        for key, dimension in self._dimensions.items():
            for value in _ends(dimension):
                self._check_value(key, value)
        for device in sweep.devices:
            configs.load(TrainConfig, base, self._with_device([device]))
        _check_metric(sweep.metric, self.config)
        if sweep.metric == "loss" and (varied := [key for key in _WEIGHING if key in sweep.space]):
            raise ConfigError(
                f"sweep.metric loss: {', '.join(varied)} of the space changes how a loss is "
                "weighted, so that the losses of two trials cannot be compared. Take tau_walk or "
                "another acceptance length."
            )

    def draw(self, trial: optuna.Trial) -> list[str]:
        """The overrides `key=value` of `trial`; of one drawn before, the same ones again."""
        return [_override(key, self._suggest(trial, key)) for key in self._dimensions]

    def _suggest(self, trial: optuna.Trial, key: str) -> Any:
        dimension = self._dimensions[key]
        if dimension.choices:  # lists are no values to Optuna: as text, which TOML reads again
            return trial.suggest_categorical(key, [_plain(choice) for choice in dimension.choices])
        low, high = _limits(dimension)
        if self._is_integer[key]:
            step = 1 if dimension.step is None else int(dimension.step)
            return trial.suggest_int(key, int(low), int(high), step=step, log=dimension.log)
        return trial.suggest_float(key, low, high, step=dimension.step, log=dimension.log)

    def _with_device(self, devices: Sequence[str]) -> list[str]:
        return [*self._overrides, *(_override("train.device", device) for device in devices)]

    def _check_overrides(self, sweep: SweepConfig) -> None:
        """Refuse what one part of the command says and another would replace without a word."""
        given = [override.partition("=")[0].strip() for override in self._overrides]
        for key in given:
            if key in _OURS:
                raise ConfigError(f"--set {key}: a sweep gives each trial its own. Leave it out.")
            if varied := [k for k in self._dimensions if f"{key}.".startswith(f"{k}.")]:
                raise ConfigError(
                    f"--set {key}: sweep.space varies {varied[0]}. Fix it or vary it, not both."
                )
        if sweep.devices and "train.device" in (*given, *self._dimensions):
            raise ConfigError(
                "train.device is given by sweep.devices, and also by --set or sweep.space. Keep "
                "one of them."
            )

    def _check_kind(self, key: str) -> bool:
        """Whether the setting `key` is an integer."""
        if key in _OURS:
            raise ConfigError(f"sweep.space: {key} is set by the sweep and cannot be varied.")
        try:
            kind = _without_none(configs.kind_of(TrainConfig, key))
        except ConfigError as error:
            raise ConfigError(f"sweep.space: {error}") from None
        dimension = self._dimensions[key]
        if not dimension.choices and kind not in (int, float):
            raise ConfigError(f"sweep.space: {key} is no number: give it choices, not a range.")
        if not dimension.choices and kind is int:
            for name in ("low", "high", "step"):
                if isinstance(value := getattr(dimension, name), float):
                    raise ConfigError(f"sweep.space: {key} is an integer, got {name} = {value}.")
        return kind is int

    def _check_value(self, key: str, value: Choice) -> None:
        """Refuse a value that fits neither the base nor the first values of the other settings.

        Two settings may need each other; whether each pair of values fits is left to the trial.
        """
        first = [_override(k, _ends(d)[0]) for k, d in self._dimensions.items() if k != key]
        errors = []
        for others in ([], first):
            try:
                configs.load(
                    TrainConfig, self._base, [*self._overrides, *others, _override(key, value)]
                )
            except ConfigError as error:
                errors.append(str(error))
        if len(errors) == 2:
            raise ConfigError(f"sweep.space: {errors[0]}")


def _check_metric(metric: str, config: TrainConfig) -> None:
    """Refuse a metric that no evaluation has, before hours are spent on it."""
    summary = AcceptanceTotals(
        num_slots=1, num_ranks=1, budgets=config.evaluate.tree_budgets
    ).summary()
    flat = configs.flatten({name: value for name, value in summary.items() if name != "undefined"})
    known = sorted(
        name for name, value in flat.items() if not isinstance(value, list) and "num_" not in name
    )
    if metric not in known:
        raise ConfigError(f"sweep.metric: unknown {metric!r}{configs.suggest(metric, known)}")


def _ends(dimension: Dimension) -> Sequence[Choice]:
    return dimension.choices or _limits(dimension)


def _limits(dimension: Dimension) -> tuple[int | float, int | float]:
    assert dimension.low is not None  # as `Dimension` made sure
    assert dimension.high is not None
    return dimension.low, dimension.high


def _plain(choice: Choice) -> bool | int | float | str:
    return json.dumps(choice) if isinstance(choice, tuple) else choice


def _override(key: str, value: Choice) -> str:
    """`key=value` as `--set` takes it: JSON's scalars and lists are TOML's."""
    is_list = isinstance(value, str) and value.startswith("[")
    return f"{key}={value if is_list else json.dumps(value, ensure_ascii=False)}"


def _without_none(kind: Any) -> Any:
    if typing.get_origin(kind) in (Union, types.UnionType):
        kinds = [one for one in typing.get_args(kind) if one is not type(None)]
        return kinds[0] if len(kinds) == 1 else kind
    return kind
