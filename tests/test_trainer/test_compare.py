"""Runs are compared on the same held-out samples, or the table says why not."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shared.errors import RunError
from tests.test_trainer.runs import evaluation, make_config, make_run
from trainer import config as training
from trainer.compare import compare, lines
from trainer.run import Run


def made(path: Path, tau: float, **sections: Any) -> Run:
    return make_run(path, config=make_config(path, **sections), taus=[(0, 1.0), (200, tau)])


def evaluated(run: Run, **changes: Any) -> Run:
    run.write_evaluation(200, evaluation(1.5, **changes))
    return run


def test_runs_that_differ_in_one_setting(tmp_path: Path) -> None:
    runs = [
        made(tmp_path / "a", 1.5),
        made(tmp_path / "b", 1.7, optimizer=training.OptimizerConfig(lr=1e-3)),
    ]
    result = compare(runs)
    assert result["comparable"]
    assert [run["tau_walk"] for run in result["runs"]] == [1.5, 1.7]
    assert result["differences"] == {
        "cache.path": [str(tmp_path / "a" / "cache"), str(tmp_path / "b" / "cache")],
        "optimizer.lr": [6e-4, 1e-3],
    }
    assert result["remarks"] == []
    table = {line.split("  ")[0]: line for line in lines(result)}
    assert table["tau walk"].split() == ["tau", "walk", "1.500", "1.700"]
    assert table["tau tree, B=64"].split()[-2:] == ["2.000", "2.200"]
    assert any(line.split() == ["optimizer.lr", "0.0006", "0.001"] for line in lines(result))


def test_other_heldout_samples_are_not_compared(tmp_path: Path) -> None:
    runs = [made(tmp_path / "a", 1.5), evaluated(made(tmp_path / "b", 1.5), num_anchors=900)]
    result = compare(runs)
    assert not result["comparable"]
    assert "1000, 900" in result["problems"][0]
    assert lines(result)[-1].startswith("not comparable: the held-out sets differ")


def test_as_many_but_other_samples_are_not_compared(tmp_path: Path) -> None:
    runs = [made(tmp_path / "a", 1.5), evaluated(made(tmp_path / "b", 1.5), heldout_sha256="00")]
    result = compare(runs)
    assert not result["comparable"]
    assert "hold other samples" in result["problems"][0]


def test_an_unknown_heldout_set_is_said(tmp_path: Path) -> None:
    runs = [made(tmp_path / "a", 1.5), evaluated(made(tmp_path / "b", 1.5), heldout_sha256=None)]
    result = compare(runs)
    assert result["comparable"]
    assert "not proven" in result["remarks"][0]


def test_losses_of_another_weighting_are_not_read(tmp_path: Path) -> None:
    config = make_config(tmp_path / "b")
    config = replace(config, drafter=replace(config.drafter, block_size=8))
    runs = [
        made(tmp_path / "a", 1.5),
        make_run(tmp_path / "b", config=config, taus=[(0, 1.0), (200, 1.6)]),
        made(tmp_path / "c", 1.5, loss=training.LossConfig(kind="dpace")),
    ]
    result = compare(runs)
    assert result["comparable"]
    assert "block sizes differ (16, 8, 16)" in result["remarks"][0]
    assert "read tau" in result["remarks"][1]
    assert result["differences"]["drafter.block_size"] == [16, 8, 16]
    assert result["differences"]["loss.kind"] == ["decay", "decay", "dpace"]


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        ({"kind": "dpace"}, {"kind": "dpace", "dpace_alpha": 0.25}, False),
        ({"kind": "dpace"}, {"kind": "dpace", "gamma": 4.0}, True),
        ({"kind": "decay"}, {"kind": "decay", "gamma": 7.0}, True),
        ({"kind": "decay"}, {"kind": "decay", "gamma": 4.0}, False),
        ({"kind": "decay"}, {"kind": "kl"}, False),
    ],
)
def test_losses_are_compared_by_the_weights_in_force(
    tmp_path: Path, one: dict[str, Any], other: dict[str, Any], alike: bool
) -> None:
    """Published at the block size of these runs is a gamma of 7; `dpace` has none."""
    runs = [
        made(tmp_path / name, 1.5, loss=training.LossConfig(**loss))
        for name, loss in (("a", one), ("b", other))
    ]
    said = any("weighted differently" in remark for remark in compare(runs)["remarks"])
    assert said is not alike


def test_evaluations_at_other_steps_are_said(tmp_path: Path) -> None:
    runs = [made(tmp_path / "a", 1.5), make_run(tmp_path / "b", taus=[(100, 1.4)])]
    remarks = compare(runs)["remarks"]
    assert "evaluated at different steps (200, 100)." in remarks
    assert any("its newest checkpoint is of step 200" in remark for remark in remarks)


def test_one_run_is_not_enough(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="two runs or more"):
        compare([made(tmp_path / "a", 1.5)])


def test_a_run_without_an_evaluation(tmp_path: Path) -> None:
    runs = [made(tmp_path / "a", 1.5), make_run(tmp_path / "b", taus=[])]
    with pytest.raises(RunError, match="no evaluation"):
        compare(runs)
