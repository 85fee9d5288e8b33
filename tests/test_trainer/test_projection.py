"""A pilot's projection, a drafter trained behind it, and its export for those who know none."""

from collections.abc import Callable
from pathlib import Path

from safetensors.torch import load_file

from tests.conftest import Projected
from trainer.config import TrainConfig
from trainer.export import export_dflash
from trainer.run import Run
from trainer.train import train

MakeTrain = Callable[..., TrainConfig]


def test_flow(tiny_projected: Projected, tiny_train: MakeTrain, tmp_path: Path) -> None:
    train(tiny_train(tmp_path / "run", tiny_projected.cache, steps=4))
    out = export_dflash(Run(tmp_path / "run"), tmp_path / "out")
    assert load_file(out / "model.safetensors")["fc.weight"].shape == (64, 128)
