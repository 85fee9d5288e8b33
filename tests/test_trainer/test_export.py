"""What is exported loads in the published client and computes what was trained."""

import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from shared import files
from shared.errors import DraftCacheError, RunError
from tests.test_cache_builder.stored import Killer, tree
from trainer.batch import collate
from trainer.config import TrainConfig
from trainer.export import check_dflash, dflash_shapes, export_dflash
from trainer.run import Run
from trainer.session import Session
from trainer.step import forward_blocks
from trainer.train import train

MakeTrain = Callable[..., TrainConfig]


@pytest.fixture(scope="module")
def run(tiny_train: MakeTrain, tiny_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    path = tmp_path_factory.mktemp("runs") / "exported"
    train(tiny_train(path, tiny_cache, steps=3))
    return Run(path)


@pytest.fixture(scope="module")
def exported(run: Run) -> Path:
    return export_dflash(run, run.path / "export" / "dflash")


def test_it_holds_exactly_the_published_tensors_in_bfloat16(run: Run, exported: Path) -> None:
    tensors = load_file(exported / "model.safetensors")
    trained = run.require_checkpoint().drafter
    assert len(tensors) == 3 + 11 * 1
    assert tensors.keys() == trained.keys()
    for name, tensor in tensors.items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, trained[name].to(torch.bfloat16))


def test_the_config_says_what_consumers_read(exported: Path) -> None:
    config = json.loads((exported / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"]
    assert config["dflash_config"] == {"mask_token_id": 3, "target_layer_ids": [0, 2]}
    assert config["block_size"] == 8
    assert config["num_target_layers"] == 4
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 10000.0
    assert config["layer_types"] == ["full_attention"]
    assert config["vocab_size"] == 272
    assert config["max_position_embeddings"] == 512
    assert config["tie_word_embeddings"] is False
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"


def test_the_published_client_loads_it_and_agrees(run: Run, exported: Path) -> None:
    from dflash.model import DFlashDraftModel

    model, info = DFlashDraftModel.from_pretrained(
        exported, dtype=torch.float32, output_loading_info=True
    )
    assert not any(info.values()), info
    session = Session.open(run.config())
    session.drafter.load_state_dict(
        {name: t.float() for name, t in load_file(exported / "model.safetensors").items()}
    )
    sample = session.cache.read(int(session.split.train[0]))
    anchors = np.array([70, 75, 90])
    batch = collate([sample], [anchors], epoch=0, bucket=0)
    states_SLD = session.features.unpack(batch)
    with torch.no_grad():
        ours_AKD = forward_blocks(session.drafter, session.head, batch, states_SLD, 3).hidden_AKD
        for i, anchor in enumerate(anchors.tolist()):
            ids = torch.tensor([int(sample.token_ids[anchor]), *[3] * 7])
            theirs_KD = model(
                position_ids=torch.arange(anchor + 8)[None],
                noise_embedding=session.head.embedding_VD[ids][None],
                target_hidden=states_SLD[:anchor].flatten(1).float()[None],
            )[0]
            assert (ours_AKD[i] - theirs_KD).abs().max() <= 1e-4


def test_exporting_twice_gives_the_same_bytes(run: Run, exported: Path, tmp_path: Path) -> None:
    again = export_dflash(run, tmp_path / "again")
    for path in exported.iterdir():
        assert (again / path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("fault", ["missing", "extra", "shape", "bits"])
def test_a_hole_in_the_export_is_found(exported: Path, tmp_path: Path, fault: str) -> None:
    tensors = load_file(exported / "model.safetensors")
    trained = dict(tensors)
    (tmp_path / "config.json").write_bytes((exported / "config.json").read_bytes())
    match fault:
        case "missing":
            del tensors["layers.0.mlp.up_proj.weight"]
        case "extra":
            tensors["lm_head.weight"] = torch.zeros(2, 2, dtype=torch.bfloat16)
        case "shape":
            tensors["norm.weight"] = tensors["norm.weight"][:-1].clone()
        case "bits":
            tensors["fc.weight"] = tensors["fc.weight"] + 1
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(RunError, match="tensor"):
        check_dflash(tmp_path, trained)


def test_the_table_of_shapes_is_that_of_a_published_drafter() -> None:
    """Qwen3-8B-DFlash-b16: 58 tensors."""
    shapes = dflash_shapes(
        {
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "head_dim": 128,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "num_hidden_layers": 5,
            "dflash_config": {"target_layer_ids": [1, 9, 17, 25, 33]},
        }
    )
    assert len(shapes) == 58
    assert shapes["fc.weight"] == (4096, 20480)
    assert shapes["layers.4.self_attn.k_proj.weight"] == (1024, 4096)


def test_a_run_without_a_checkpoint_cannot_be_exported(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no checkpoint yet"):
        export_dflash(Run(tmp_path), tmp_path / "out")


def test_an_export_replaces_nothing_but_an_export(run: Run, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="holds other files"):
        export_dflash(run, run.path)
    assert run.newest_checkpoint() is not None
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(RunError, match=r"thesis\.tex"):
        export_dflash(run, tmp_path)
    out = export_dflash(run, tmp_path / "out")
    assert export_dflash(run, out) == out


def test_an_export_that_is_killed_keeps_the_old_one_or_makes_the_new(
    run: Run, tmp_path: Path
) -> None:
    """SIGKILL before each of the last writes, and some before: nothing whole is lost."""
    old, out = tmp_path / "old", tmp_path / "made" / "dflash"
    new = tree(export_dflash(run, old))
    (old / "README.md").write_text("of an earlier step")
    shutil.copytree(old, out)
    killer = Killer(export_dflash, tmp_path)
    total = killer.count(run, out)
    for kill_at in (1, total // 2, *range(total - 8, total + 1)):
        shutil.rmtree(out.parent)
        shutil.copytree(old, out)
        assert killer.run(run, out, kill_at=kill_at) == -9
        staging = out.parent / ".dflash.partial"
        places = (out, staging / "new", staging / "replaced")
        assert any(place.is_dir() and tree(place) in (new, tree(old)) for place in places)
        assert tree(export_dflash(run, out)) == new
        assert [path.name for path in out.parent.iterdir()] == ["dflash"]


def test_an_export_that_cannot_be_put_in_place_keeps_the_old_one(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = export_dflash(run, tmp_path / "out")
    (out / "README.md").write_text("of an earlier step")
    before = tree(out)

    def refuse(source: Path, target: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(files, "commit_directory", refuse)
    with pytest.raises(DraftCacheError, match="Input/output error"):
        export_dflash(run, out)
    assert tree(out) == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
