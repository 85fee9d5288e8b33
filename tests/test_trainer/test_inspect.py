"""What a checkpoint holds is shown, and a damaged one is refused."""

from pathlib import Path

import pytest
import torch

from shared.errors import RunError
from tests.test_trainer.runs import make_run
from trainer.inspect import inspect_checkpoint, rows, tensor_lines


def test_a_checkpoint_is_described(tmp_path: Path) -> None:
    make_run(tmp_path)
    facts = inspect_checkpoint(tmp_path / "checkpoints" / "step-00000100")
    assert facts["step"] == 100
    assert facts["epoch"] == 0
    assert facts["batch_position"] == 100
    assert facts["optimizer_updates"] == 100
    assert facts["optimizer_live"]["groups"][0]["betas"] == [0.9, 0.95]
    assert facts["cache"]["fingerprint"] == "cd" * 32
    assert facts["num_parameters"] == 4 * 3 + 3 + 3 + 3
    assert (facts["num_nan"], facts["num_inf"]) == (0, 0)
    table = dict(rows(facts))
    assert table["step"] == "100 of 200"
    assert table["epoch"] == "0"
    assert table["not finite"] == "none"
    assert table["files"].endswith("digests match")
    live = table["  live"]
    assert live.count("betas [0.9, 0.95], eps 1e-08, weight_decay 0.0") == 2
    assert "(12 parameters)" in live


def test_tensors_have_norms_and_counts(tmp_path: Path) -> None:
    def change(step: int, tensors: dict[str, torch.Tensor]) -> None:
        tensors["0.weight"].zero_()
        tensors["0.weight"][0, :2] = torch.tensor([3.0, -4.0])
        tensors["1.bias"][:] = torch.tensor([float("nan"), float("inf"), -2.0])

    make_run(tmp_path, weights=change, saved=[200])
    facts = inspect_checkpoint(tmp_path)  # the newest one of the run
    assert (facts["num_nan"], facts["num_inf"]) == (1, 1)
    by_name = {tensor["name"]: tensor for tensor in facts["tensors"]["drafter.safetensors"]}
    assert by_name["0.weight"]["norm"] == 5.0
    assert by_name["0.weight"]["largest"] == 4.0
    assert by_name["0.weight"]["shape"] == [3, 4]
    assert by_name["1.bias"]["norm"] == 2.0
    assert dict(rows(facts))["not finite"] == "1 NaN, 1 Inf"
    header, *lines = tensor_lines(facts)
    assert header.split() == [
        *("tensor", "shape", "dtype", "norm", "largest", "exp_avg", "exp_avg_sq", "NaN", "Inf"),
    ]
    assert [line.split()[0] for line in lines] == ["0.bias", "0.weight", "1.bias", "1.weight"]
    assert lines[1].split()[1:5] == ["3x4", "float32", "5", "4"]
    assert lines[2].split()[-2:] == ["1", "1"]


@pytest.mark.parametrize("name", ["drafter.safetensors", "optimizer.safetensors", "state.json"])
def test_damage_is_an_error(tmp_path: Path, name: str) -> None:
    make_run(tmp_path, saved=[100])
    path = tmp_path / "checkpoints" / "step-00000100" / name
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(RunError, match=name):
        inspect_checkpoint(path.parent)


@pytest.mark.parametrize("name", ["", "absent", "checkpoints/step-00000007"])
def test_what_is_no_checkpoint(tmp_path: Path, name: str) -> None:
    with pytest.raises(RunError, match=r"no checkpoint here|expected a checkpoint directory"):
        inspect_checkpoint(tmp_path / name)


def test_a_run_without_a_checkpoint(tmp_path: Path) -> None:
    make_run(tmp_path, until=3)
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(RunError, match="no checkpoint yet"):
        inspect_checkpoint(tmp_path)
