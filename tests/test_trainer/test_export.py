"""What is exported loads in the published client and computes what was trained."""

import errno
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from cache_builder.build import build
from cache_builder.config import BuildConfig
from shared import config as configs
from shared import files
from shared.errors import ConfigError, DraftCacheError, RunError
from tests.test_cache_builder.stored import Killer, tree
from trainer.batch import collate
from trainer.config import TrainConfig
from trainer.export import export_dflash, export_speculators
from trainer.exporting.checks import check_forward, check_readings, check_tensors
from trainer.exporting.readings import CONSUMERS, read_dflash, read_sglang, read_vllm
from trainer.exporting.speculators import as_dflash
from trainer.exporting.zlab import dflash_shapes
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
    require_agreement(run.config(), load_file(exported / "model.safetensors"), model)


def test_exporting_twice_gives_the_same_bytes(run: Run, exported: Path, tmp_path: Path) -> None:
    again = export_dflash(run, tmp_path / "again")
    for path in exported.iterdir():
        assert (again / path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("fault", ["missing", "extra", "shape", "bits"])
def test_a_hole_in_the_export_is_found(exported: Path, tmp_path: Path, fault: str) -> None:
    tensors = load_file(exported / "model.safetensors")
    trained = dict(tensors)
    shapes = dflash_shapes(json.loads((exported / "config.json").read_text()))
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
        check_tensors(tmp_path, shapes, trained)


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


@pytest.fixture(scope="module")
def in_speculators(run: Run) -> Path:
    return export_speculators(run, run.path / "export" / "speculators", target="owner/tiny")


def test_the_speculators_format_holds_the_same_tensors(
    exported: Path, in_speculators: Path
) -> None:
    """Also what speculators 0.9.0 saves: a whole vocabulary is left to the target."""
    theirs = load_file(in_speculators / "model.safetensors")
    ours = load_file(exported / "model.safetensors")
    assert theirs.keys() == ours.keys()
    for name, tensor in theirs.items():
        assert torch.equal(tensor.view(torch.int16), ours[name].view(torch.int16))


def test_the_speculators_config_says_what_its_consumers_read(in_speculators: Path) -> None:
    config = json.loads((in_speculators / "config.json").read_text())
    assert config["speculators_model_type"] == "dflash"
    assert config["aux_hidden_state_layer_ids"] == [1, 3]  # blocks 0 and 2, plus 1
    assert config["block_size"] == 8
    assert config["mask_token_id"] == 3
    assert config["sliding_window_non_causal"] is True
    assert config["draft_vocab_size"] == config["transformer_layer_config"]["vocab_size"] == 272
    assert config["transformer_layer_config"]["rope_parameters"]["rope_theta"] == 10000.0
    assert config["speculators_config"]["proposal_methods"] == [
        {
            "accept_tolerance": 0.0,
            "proposal_type": "greedy",
            "speculative_tokens": 7,
            "verifier_accept_k": 1,
        }
    ]
    assert config["speculators_config"]["verifier"] == {
        "architectures": ["Qwen3ForCausalLM"],
        "name_or_path": "owner/tiny",
    }


def test_both_formats_say_the_same_drafter(exported: Path, in_speculators: Path) -> None:
    ours = json.loads((exported / "config.json").read_text())
    theirs = as_dflash(json.loads((in_speculators / "config.json").read_text()))
    assert theirs == {key: ours[key] for key in theirs}
    assert theirs["dflash_config"]["target_layer_ids"] == [0, 2]


@pytest.mark.parametrize(
    ("form", "change", "message"),
    [
        (
            "dflash",
            {"dflash_config": {"mask_token_id": 3, "target_layer_ids": [1, 3]}},
            "layer_ids",
        ),
        ("dflash", {"dflash_config": {"target_layer_ids": [0, 2]}}, "mask_token_id None"),
        ("dflash", {"block_size": None, "dflash_config": {"block_size": 16}}, "block_size 16"),
        ("dflash", {"is_causal": True}, "would read another drafter: layers"),
        ("dflash", {"rope_theta": 1e6}, "dflash on transformers 4 would"),
        ("dflash", {"rope_parameters": {"rope_theta": 1e6}}, "dflash would read another"),
        ("dflash", {"eagle_aux_hidden_state_layer_ids": [0, 2]}, "vLLM would read another"),
        ("dflash", {"layer_types": ["sliding_attention"], "sliding_window": 4}, "layers"),
        ("speculators", {"sliding_window_non_causal": False}, "vLLM would read.*layers"),
        ("speculators", {"aux_hidden_state_layer_ids": [0, 2]}, r"target_layer_ids \(-1, 1\)"),
        ("speculators", {"mask_token_id": 4}, "mask_token_id 4, trained 3"),
    ],
)
def test_a_config_that_an_engine_would_misread_is_found(
    run: Run,
    exported: Path,
    in_speculators: Path,
    form: str,
    change: dict[str, Any],
    message: str,
) -> None:
    directory = {"dflash": exported, "speculators": in_speculators}[form]
    config = json.loads((directory / "config.json").read_text())
    drafter = run.config().drafter
    check_readings(config, form, drafter, (0, 2), "here")
    draft = {**config.get("dflash_config", {}), **change.pop("dflash_config", {})}
    if message == "mask_token_id None":
        draft.pop("mask_token_id")
    config |= change | ({"dflash_config": draft} if form == "dflash" else {})
    with pytest.raises(RunError, match=message):
        check_readings(config, form, drafter, (0, 2), "here")


def test_engines_disagree_about_a_causality_for_all_layers() -> None:
    config = {
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 9,
        "is_causal": False,
        "dflash_config": {"target_layer_ids": [1], "mask_token_id": 0},
    }
    assert read_vllm(config).layers == ((9, False), (None, False))
    assert read_sglang(config).layers == ((9, True), (None, False))
    assert read_sglang(config).rope == {"rope_type": "default", "rope_theta": 10_000.0}
    assert {name for form in CONSUMERS.values() for name in form} >= {"SGLang", "vLLM"}


def test_a_config_that_computes_something_else_is_found(run: Run, exported: Path) -> None:
    config = json.loads((exported / "config.json").read_text())
    drafter = Session.open(run.config()).drafter
    drafter.load_state_dict(
        {name: t.float() for name, t in load_file(exported / "model.safetensors").items()}
    )
    check_forward(exported, config, drafter)
    config["rms_norm_eps"] = 0.05
    with pytest.raises(RunError, match="computes something else"):
        check_forward(exported, config, drafter)


def test_rounding_does_not_hide_a_config_that_is_off_by_little(
    run: Run, exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In whatever order float32 adds up: the forwards are compared in float64."""
    config = json.loads((exported / "config.json").read_text())
    drafter = Session.open(run.config()).drafter
    weights = load_file(exported / "model.safetensors")
    drafter.load_state_dict({name: tensor.float() for name, tensor in weights.items()})
    monkeypatch.setattr("trainer.exporting.checks._MAX_DIFFERENCE", 1e-12)
    check_forward(exported, config, drafter)
    assert drafter.fc.weight.dtype == torch.float32
    monkeypatch.undo()
    config["rms_norm_eps"] = 1e-4
    with pytest.raises(RunError, match="computes something else"):
        check_forward(exported, config, drafter)


def test_a_reduced_vocabulary_keeps_the_most_frequent_tokens(run: Run, tmp_path: Path) -> None:
    out = export_speculators(run, tmp_path / "out", target="owner/tiny", draft_vocab_size=20)
    tensors = load_file(out / "model.safetensors")
    config = json.loads((out / "config.json").read_text())
    assert config["draft_vocab_size"] == 20
    kept = torch.arange(20) + tensors["d2t"]
    assert torch.equal(kept, tensors["t2d"].nonzero().flatten())
    assert (kept.diff() > 0).all()
    session = Session.open(run.config())
    assert torch.equal(tensors["lm_head.weight"], session.cache.head().lm_head_VD[kept])
    counts = torch.zeros(272, dtype=torch.int64)
    for position in session.split.train.tolist():
        sample = session.cache.read(position)
        counts += torch.from_numpy(
            np.bincount(sample.token_ids[sample.loss_mask.astype(bool)], minlength=272)
        )
    assert 2 in kept.tolist()  # the end token
    others = kept[kept != 2]
    assert counts[others].min() >= counts[[i for i in range(272) if i not in kept]].max()
    share = 100 * counts[kept].sum() / counts.sum()
    card = (out / "README.md").read_text()
    assert f"20 tokens, {share:.2f} % of the supervised tokens" in card
    assert "Measured with the whole vocabulary" in card


@pytest.mark.parametrize("size", [272, 1000])
def test_a_vocabulary_that_is_not_reduced_is_refused(run: Run, tmp_path: Path, size: int) -> None:
    with pytest.raises(ConfigError, match=f"--draft-vocab {size}: must be below the target's 272"):
        export_speculators(run, tmp_path / "out", draft_vocab_size=size)
    assert list(tmp_path.iterdir()) == []


def test_a_target_named_by_a_path_is_warned_about(
    run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    export_speculators(run, tmp_path / "out")
    assert "which is a path. Give its hub id by --target" in caplog.text


@pytest.mark.parametrize(
    ("name", "revision", "expected"),
    [
        ("models/qwen", None, "./models/qwen"),
        ("lab/qwen", "0123abcd", "lab/qwen"),
        ("/models/qwen", None, "/models/qwen"),
    ],
)
def test_a_directory_cannot_be_taken_for_a_name_on_the_hub(
    run: Run, tmp_path: Path, name: str, revision: str | None, expected: str
) -> None:
    """A card that named another model as its base would be wrong, and links to it."""
    from huggingface_hub import ModelCard

    origin = Session.open
    with pytest.MonkeyPatch.context() as patch:

        def opened(*arguments: Any, **options: Any) -> Session:
            session = origin(*arguments, **options)
            description = session.cache.parts[0].description
            description |= {"target_name": name, "target_revision": revision}
            return session

        patch.setattr(Session, "open", opened)
        out = export_dflash(run, tmp_path / "out")
    card = ModelCard((out / "README.md").read_text())
    assert f"vllm serve {expected} " in card.text
    assert card.data.to_dict().get("base_model") == (expected if revision else None)


def test_the_card_tells_where_the_drafter_comes_from(run: Run, exported: Path) -> None:
    from huggingface_hub import ModelCard

    session = Session.open(run.config())
    card = ModelCard((exported / "README.md").read_text())
    head = card.data.to_dict()
    assert head["library_name"] == "dflash"
    assert head["tags"] == ["speculative-decoding", "draft-model", "dflash"]
    assert "license" not in head  # the user's to say
    text = card.text
    assert session.cache.spec.fingerprint in text
    assert session.cache.parts[0].description["target_name"] in text
    [evaluation] = run.evaluations(3)[-1:]
    assert f"| walk | {evaluation['tau_walk']:.3f} |" in text
    assert "over 4 held-out samples after step 3" in text
    index = session.cache.index
    for tag, number in (("even", 32), ("odd", 16), ("all", 48)):
        assert re.search(rf"^\| {tag} \| {number} \| [\d,]+ \| [\d,]+ \|$", text, re.MULTILINE)
    assert f"| {index.num_tokens.sum():,} | {index.num_supervised.sum():,} |" in text
    assert "Answers written by (samples, when planned): unknown 48." in text
    assert "| optimizer.lr | 0.0006 |" in text
    assert '"method": "dflash"' in text
    assert '"num_speculative_tokens": 7}' in text
    assert "--speculative-num-draft-tokens 8" in text
    assert "hf upload USER/NAME ." in text
    assert "whole vocabulary" not in text


def test_a_hub_id_becomes_the_base_model(in_speculators: Path) -> None:
    from huggingface_hub import ModelCard

    card = ModelCard((in_speculators / "README.md").read_text())
    assert card.data.base_model == "owner/tiny"
    assert card.data.library_name == "speculators"
    assert "vllm serve USER/NAME\n" in card.text


FULL, SLIDING = "full_attention", "sliding_attention"
VARIANTS: dict[str, dict[str, Any]] = {
    "block 7, depth 8": {"block_size": 7, "num_layers": 8},
    "block 13, depth 3": {"block_size": 13, "num_layers": 3},
    "block 16": {"block_size": 16},
    "all slide": {"layer_types": [SLIDING], "sliding_window": 24},
    "one slides": {"layer_types": [FULL, SLIDING], "sliding_window": 24, "num_layers": 2},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "yarn": {
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "beta_fast": 16.0,
        }
    },
    "yarn of a gain": {
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "attention_factor": 1.5,
        }
    },
    "llama3": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "original_max_position_embeddings": 64,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        }
    },
}


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_is_trained_exported_and_reloaded(
    tiny_train: MakeTrain, tiny_cache: Path, tmp_path: Path, name: str
) -> None:
    from dflash.model import DFlashDraftModel

    settings = configs.to_dict(tiny_train(tmp_path / "run", tiny_cache, steps=1))
    settings["drafter"] |= {
        "initializer_range": 0.2,
        **VARIANTS[name],
    }  # attention far from uniform
    settings["loss"]["gamma"] = 4.0
    config = configs.build(TrainConfig, settings)
    train(config)
    run = Run(config.run.path)
    exported = export_dflash(run, tmp_path / "out")
    if name == "one slides":
        with pytest.raises(ConfigError, match="one causality to all layers"):
            export_speculators(run, tmp_path / "speculators")
    else:
        export_speculators(run, tmp_path / "speculators")
    model, info = DFlashDraftModel.from_pretrained(
        exported, dtype=torch.float32, output_loading_info=True
    )
    assert not any(info.values()), info
    weights = load_file(exported / "model.safetensors")
    require_agreement(config, weights, model)


@pytest.mark.parametrize("layer_ids", [(2,), (0, 1, 3)])
def test_any_taps_are_trained_exported_and_reloaded(
    tiny_build: Callable[..., BuildConfig],
    tiny_train: MakeTrain,
    tmp_path: Path,
    layer_ids: tuple[int, ...],
    caplog: pytest.LogCaptureFixture,
) -> None:
    from dflash.model import DFlashDraftModel

    build(tiny_build(tmp_path / "cache", layer_ids=layer_ids))
    config = tiny_train(tmp_path / "run", tmp_path / "cache", steps=1)
    train(config)
    exported = export_dflash(Run(config.run.path), tmp_path / "out")
    model = DFlashDraftModel.from_pretrained(exported, dtype=torch.float32)
    assert tuple(model.target_layer_ids) == layer_ids
    require_agreement(config, load_file(exported / "model.safetensors"), model)
    other = export_speculators(Run(config.run.path), tmp_path / "speculators")
    ids = json.loads((other / "config.json").read_text())["aux_hidden_state_layer_ids"]
    assert tuple(ids) == tuple(i + 1 for i in layer_ids)
    # Of the last block, 3, clients and servers give another state than the one that is captured.
    warnings = [r.getMessage() for r in caplog.records if "is the target's last" in r.message]
    places = ["capture.target_layer_ids", str(exported), str(other)] if 3 in layer_ids else []
    assert [warning.partition(":")[0] for warning in warnings] == places
    assert ("block 3 is the target's last" in (exported / "README.md").read_text()) is bool(places)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


def test_engines_have_their_own_word_for_the_gain_of_yarn() -> None:
    """By default it is 0.1 ln(4) + 1 = 1.138629; vLLM and SGLang know no `attention_factor`."""
    config = {
        "num_hidden_layers": 1,
        "rope_theta": 1e4,
        "dflash_config": {"target_layer_ids": [1], "mask_token_id": 0},
    }
    for told, of_client, of_servers in (
        ({}, 1.138629, 1.138629),
        ({"attention_factor": 1.5}, 1.5, 1.138629),
        ({"attn_factor": 2.0}, 1.138629, 2.277259),
        ({"attention_factor": 1.5, "attn_factor": 1.5 / 1.1386294}, 1.5, 1.5),
    ):
        given = config | {"rope_scaling": YARN | told}
        expected = {**YARN, "rope_theta": 1e4}
        assert read_dflash(given).rope == expected | {"attention_factor": of_client}
        for read in (read_vllm, read_sglang):
            assert read(given).rope == expected | {"attention_factor": of_servers}


def require_agreement(config: TrainConfig, weights: dict[str, torch.Tensor], model: Any) -> None:
    """Our blocks and the published model's, in the middle and at the end of a sample."""
    session = Session.open(config)
    session.drafter.load_state_dict({name: tensor.float() for name, tensor in weights.items()})
    sample = session.cache.read(int(session.split.train[0]))
    anchors = np.array([50, 70, 75])
    batch = collate([sample], [anchors], epoch=0, bucket=0)
    states_SLD = session.features.unpack(batch)
    size = config.drafter.block_size
    with torch.no_grad():
        ours_AKD = forward_blocks(session.drafter, session.head, batch, states_SLD, 3).hidden_AKD
        for i, anchor in enumerate(anchors.tolist()):
            ids = torch.tensor([int(sample.token_ids[anchor]), *[3] * (size - 1)])
            theirs_KD = model(
                position_ids=torch.arange(anchor + size)[None],
                noise_embedding=session.head.embedding_VD[ids][None],
                target_hidden=states_SLD[:anchor].flatten(1).float()[None],
            )[0]
            assert (ours_AKD[i] - theirs_KD).abs().max() <= 1e-4
