"""Odd settings: refused in one line before anything is created, or they train."""

import dataclasses
import logging
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shared import config as configs
from shared.errors import ConfigError, DraftCacheError
from trainer import config as training
from trainer.caches import Caches
from trainer.config import TrainConfig
from trainer.drafter import Drafter, num_parameters
from trainer.ranges import COUNT
from trainer.session import check_size
from trainer.train import train

MakeTrain = Callable[..., TrainConfig]

EXTREMES: list[Any] = [
    *(0, -1, 10**30, COUNT, 1e300, math.nan, math.inf, -math.inf),
    *("", "\0", [], [-1], [10**30], [math.nan], [0, 0], {}),
]
ENDLESS = ("train.steps", "train.batches_per_step")  # as large as asked for, and so never done


@pytest.fixture(scope="module")
def plain(tiny_train: MakeTrain, tiny_cache: Path) -> TrainConfig:
    evaluating = training.EvaluateConfig(every_steps=0, max_samples=1, tree_budgets=(4,))
    return tiny_train(Path("never"), tiny_cache, steps=1, evaluate=evaluating)


def keys() -> list[str]:
    """Every leaf of the configuration."""
    found = []
    for section in dataclasses.fields(TrainConfig):
        for field in dataclasses.fields(section.type):  # type: ignore[arg-type]
            found.append(f"{section.name}.{field.name}")
    return found


@pytest.mark.parametrize("key", keys())
def test_an_extreme_value_is_refused_in_one_line_or_trains(
    plain: TrainConfig, tmp_path: Path, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    section, _, name = key.partition(".")
    caplog.set_level(logging.ERROR)
    for i, value in enumerate(EXTREMES):
        run = tmp_path / str(i)
        tree = configs.to_dict(plain)
        tree["run"]["path"] = str(run)
        tree[section][name] = value
        message = refusal(lambda tree=tree: start(tree, key))
        assert message != ""
        assert "\n" not in (message or "")
        assert message is None or not run.exists()


def start(tree: dict[str, Any], key: str) -> None:
    settings = configs.build(TrainConfig, tree)
    if key not in ENDLESS:
        train(settings)


def refusal(call: Callable[[], None]) -> str | None:
    """What the call was refused with; None if it was not. Anything but our errors is a bug."""
    try:
        call()
    except DraftCacheError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("path", "message"),
    [
        pytest.param("x" * 5000, "File name too long", id="too-long"),
        pytest.param("/proc/run", "/proc/run", id="unwritable"),
        pytest.param("/dev/null", "/dev/null", id="no-directory"),
    ],
)
def test_a_run_path_that_cannot_be(plain: TrainConfig, path: str, message: str) -> None:
    with pytest.raises(DraftCacheError, match=message):
        train(replace(plain, run=training.RunConfig(path=Path(path))))


@pytest.mark.parametrize("path", ["x" * 5000, "/dev/null", "absent"])
def test_a_cache_path_that_cannot_be(plain: TrainConfig, tmp_path: Path, path: str) -> None:
    run = training.RunConfig(path=tmp_path / "run")
    with pytest.raises(DraftCacheError):
        train(replace(plain, run=run, cache=replace(plain.cache, path=Path(path))))
    assert not (tmp_path / "run").exists()


def test_a_drafter_is_counted_before_it_is_built(plain: TrainConfig, tiny_cache: Path) -> None:
    config = replace(plain.drafter, num_layers=3, num_kv_heads=1)
    drafter = Drafter(config, 64, 2 * 64)
    assert num_parameters(config, 64, 2 * 64) == sum(p.numel() for p in drafter.parameters())
    huge = replace(config, num_layers=COUNT)
    with pytest.raises(ConfigError, match=r"parameters need [\d,.]+ GiB"):
        check_size(huge, Caches([tiny_cache]), torch.device("cpu"))
