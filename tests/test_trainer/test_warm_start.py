"""A drafter in z-lab's layout as first weights: bit for bit, or refused."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from shared import config as configs
from shared.errors import DraftCacheError, RunError
from tests.test_trainer.test_stop import CONFIG
from trainer.checkpoint import save
from trainer.cli import main
from trainer.config import TrainConfig
from trainer.export import export_dflash
from trainer.run import Run
from trainer.train import Training, train

MakeTrain = Callable[..., TrainConfig]


@pytest.fixture(scope="module")
def drafter(
    tiny_train: MakeTrain, tiny_cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The export of a short training."""
    path = tmp_path_factory.mktemp("runs") / "first"
    train(tiny_train(path, tiny_cache, steps=3))
    return export_dflash(Run(path), path / "export" / "dflash")


@pytest.fixture
def warm(tiny_train: MakeTrain, tiny_cache: Path, tmp_path: Path) -> Callable[..., TrainConfig]:
    """Makes a configuration that starts from a directory, with another seed."""

    def make(start: Path, **settings: Any) -> TrainConfig:
        tree = configs.to_dict(tiny_train(tmp_path / "run", tiny_cache, steps=4))
        tree["train"] |= {"init_from": str(start), "seed": 7}
        tree["loss"]["gamma"] = 4.0
        for key, value in settings.items():
            section, name = key.split("__")
            tree[section][name] = value
        return configs.build(TrainConfig, tree)

    return make


def save_start(config: TrainConfig) -> Run:
    """The run with a checkpoint of its first weights, before any step."""
    training = Training(config)
    save(config.run.path, training.learner.snapshot(None, {"unlogged": None}), keep=2)
    return training.run


def test_what_comes_in_goes_out_bit_for_bit(
    drafter: Path, warm: Callable[..., TrainConfig], tmp_path: Path, caplog: Any
) -> None:
    caplog.set_level("INFO")
    again = export_dflash(save_start(warm(drafter)), tmp_path / "again")
    for name in ("model.safetensors", "config.json"):
        assert (again / name).read_bytes() == (drafter / name).read_bytes()
    assert "drafter.fitted_start does not apply" in caplog.text
    assert f"| started from | {drafter}, weights sha256 " in (again / "README.md").read_text()


def test_a_run_remembers_where_it_started_and_goes_on_without_it(
    drafter: Path, warm: Callable[..., TrainConfig], tmp_path: Path
) -> None:
    start = tmp_path / "start"
    shutil.copytree(drafter, start)
    config = warm(start)
    run = save_start(config)
    shutil.rmtree(start)
    train(config)
    snapshot = run.require_checkpoint()
    assert snapshot.step == 4
    assert snapshot.state["init_from"]["path"] == str(start)
    assert len(snapshot.state["init_from"]["weights_sha256"]) == 64
    assert snapshot.config["train"]["init_from"] == str(start)
    trained = load_file(export_dflash(run, tmp_path / "out") / "model.safetensors")
    assert not torch.equal(
        trained["fc.weight"], load_file(drafter / "model.safetensors")["fc.weight"]
    )


def test_weights_in_several_files_of_another_type_are_read(
    drafter: Path, warm: Callable[..., TrainConfig], tmp_path: Path
) -> None:
    start = tmp_path / "start"
    shutil.copytree(drafter, start)
    tensors = load_file(start / "model.safetensors")
    (start / "model.safetensors").unlink()
    for number, part in enumerate((list(tensors)[::2], list(tensors)[1::2]), 1):
        file = start / f"model-0000{number}-of-00002.safetensors"
        save_file({name: tensors[name].float() for name in part}, file)
    again = export_dflash(save_start(warm(start)), tmp_path / "again")
    assert (again / "model.safetensors").read_bytes() == (
        drafter / "model.safetensors"
    ).read_bytes()


def test_a_config_of_the_published_kind_is_understood(
    drafter: Path, warm: Callable[..., TrainConfig], tmp_path: Path
) -> None:
    """Older ones have no `rope_parameters`, newer ones the block size inside `dflash_config`."""
    start = tmp_path / "start"
    shutil.copytree(drafter, start)
    config = json.loads((start / "config.json").read_text())
    del config["rope_parameters"], config["layer_types"]
    config["dflash_config"]["block_size"] = config.pop("block_size")
    config["rope_theta"] = 10000
    (start / "config.json").write_text(json.dumps(config))
    assert save_start(warm(start)).require_checkpoint().step == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"drafter__block_size": 7}, "drafter.block_size: 7 asked for, 8 there"),
        ({"drafter__num_layers": 2}, "drafter.num_layers: 2 asked for, 1 there"),
        ({"drafter__mask_token_id": 1}, "drafter.mask_token_id: 1 asked for, 3 there"),
        ({"drafter__rope_theta": 1e6}, r"drafter.rope_theta: 1000000.0 asked for, 10000.0 there"),
        ({"drafter__rms_norm_eps": 1e-5}, "drafter.rms_norm_eps: 1e-05 asked for, 1e-06 there"),
        ({"drafter__num_kv_heads": 1}, "drafter.num_kv_heads: 1 asked for, 2 there"),
        (
            {"drafter__layer_types": ["sliding_attention"], "drafter__sliding_window": 9},
            "drafter.sliding_window: 9 asked for, None there",
        ),
        (
            {"drafter__rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            "drafter.rope_scaling",
        ),
    ],
)
def test_another_drafter_is_refused_before_there_is_a_run(
    drafter: Path, warm: Callable[..., TrainConfig], settings: dict[str, Any], message: str
) -> None:
    config = warm(drafter, **settings)
    with pytest.raises(RunError, match=message):
        Training(config)
    assert not config.run.path.exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"dflash_config": {"mask_token_id": 3, "target_layer_ids": [1, 3]}},
            r"\[0, 2\] asked for",
        ),
        ({"hidden_size": 32}, "hidden_size: 64 asked for, 32 there"),
        ({"vocab_size": 300}, "vocab_size: 272 asked for, 300 there"),
        ({"num_target_layers": 5}, "num_target_layers: 4 asked for, 5 there"),
        ({"attention_bias": True}, "trained here: attention_bias True"),
        ({"is_causal": True}, "is_causal True"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1, got 0.5"),
        (
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "partial_rotary_factor must be 1, got 0.5",
        ),
        ({"input_embedding_scale": 8.0}, "input_embedding_scale 8.0"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0"),
        ({"is_neox_style": False}, "is_neox_style False"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type: expected one of"),
        ({"dflash_config": {"selector_rank": 8}}, "dflash_config.selector_rank"),
        ({"head_dim": None}, "head_dim: expected int"),
    ],
)
def test_a_directory_of_another_drafter_is_refused(
    drafter: Path,
    warm: Callable[..., TrainConfig],
    tmp_path: Path,
    change: dict[str, Any],
    message: str,
) -> None:
    start = tmp_path / "start"
    shutil.copytree(drafter, start)
    fields = json.loads((start / "config.json").read_text())
    (start / "config.json").write_text(json.dumps(fields | change))
    with pytest.raises(RunError, match=message) as caught:
        Training(warm(start))
    assert "\n" not in str(caught.value)
    assert str(start) in str(caught.value)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("absent", "no drafter here"),
        ("pickled", "Pickled weights are not read"),
        ("cut", "cannot be read"),
        ("missing", "norm.weight nothing, expected \\[64\\]"),
        ("extra", r"lm_head.weight \[2\], expected nothing"),
        ("shape", r"norm.weight \[63\], expected \[64\]"),
        ("nan", "norm.weight with values that are not finite"),
        ("quantised", "norm.weight torch.int8, expected a float"),
        ("twice", "tensor 'fc.weight' is in another file"),
    ],
)
def test_weights_that_do_not_fit_are_refused(
    drafter: Path, warm: Callable[..., TrainConfig], tmp_path: Path, fault: str, message: str
) -> None:
    start = tmp_path / "start"
    shutil.copytree(drafter, start)
    file = start / "model.safetensors"
    tensors = load_file(file)
    match fault:
        case "absent":
            shutil.rmtree(start)
        case "pickled":
            file.rename(start / "pytorch_model.bin")
        case "cut":
            file.write_bytes(file.read_bytes()[:-1])
        case "twice":
            save_file({"fc.weight": tensors["fc.weight"]}, start / "more.safetensors")
        case "missing":
            del tensors["norm.weight"]
        case "extra":
            tensors["lm_head.weight"] = torch.zeros(2)
        case "shape":
            tensors["norm.weight"] = tensors["norm.weight"][:-1].clone()
        case "nan":
            tensors["norm.weight"][0] = torch.nan
        case "quantised":
            tensors["norm.weight"] = tensors["norm.weight"].to(torch.int8)
    if fault in ("missing", "extra", "shape", "nan", "quantised"):
        save_file(tensors, file)
    with pytest.raises(RunError, match=message):
        Training(warm(start))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("train.init_from={path}/nothing", "nothing: no drafter here"),
        ("train.init_from={path}/run/export/dflash", "lies in the run .*which --fresh deletes"),
        (
            "sampler.tokens_per_batch=100",
            r"sample \d+ of \d+ tokens exceeds tokens_per_batch = 100",
        ),
        ("loss.kind=kl", "needs the target's last hidden state"),
        ("drafter.mask_token_id=87", "mask_token_id 87 occurs in the text"),
        ("drafter.intermediate_size=1000000000", "parameters need .* GiB to be trained"),
        ("anchors.per_sample=100000000", "training needs about"),
    ],
)
def test_a_fresh_start_that_is_refused_does_not_cost_the_run_that_is_there(
    drafter: Path,
    tiny_cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    setting: str,
    message: str,
) -> None:
    if "anchors" in setting:
        monkeypatch.setattr("trainer.footprint.memory_of", lambda device: 1000)
    run, file = tmp_path / "run", tmp_path / "run.toml"
    shutil.copytree(drafter.parent.parent, run)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert any(path.name == "state.json" for path in before)
    file.write_text(CONFIG.format(run=run, cache=tiny_cache))
    arguments = ["train", "--config", str(file), "--set", setting.format(path=tmp_path)]
    result = CliRunner().invoke(main, [*arguments, "--fresh"])
    assert isinstance(result.exception, DraftCacheError)
    assert re.search(message, str(result.exception))
    after = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert after == before


def test_a_fresh_start_leaves_nothing_of_the_run_before(
    drafter: Path, tiny_train: MakeTrain, tiny_cache: Path, tmp_path: Path
) -> None:
    config = tiny_train(tmp_path / "run", tiny_cache)
    shutil.copytree(drafter.parent.parent, config.run.path)
    start = replace(config.train, steps=1, init_from=drafter)
    train(replace(config, train=start), is_fresh=True)
    run = Run(config.run.path)
    assert [path.name for path in (run.path / "checkpoints").iterdir()] == ["step-00000001"]
    assert [evaluation["step"] for evaluation in run.evaluations(9)] == [0, 1]
    assert not (run.path / "export").exists()
    assert run.require_checkpoint().state["init_from"]["path"] == str(drafter)
