"""What another tool captured becomes the cache that a build makes, and nothing of it is guessed."""

import json
import random
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from cache_builder import cli
from cache_builder.build import build
from cache_builder.config import BuildConfig, CacheConfig, CodecConfig, PlanConfig
from cache_builder.importing.config import CheckConfig, DeclaredConfig, ImportConfig
from cache_builder.importing.importer import import_states, rows
from cache_builder.inspect import inspect_cache
from cache_builder.merge import merge
from cache_builder.recapture import recapture
from cache_builder.repair import repair
from cache_builder.verify import verify_cache
from shared.cache import Cache
from shared.errors import (
    CacheError,
    CacheIncompatibleError,
    CacheNotFoundError,
    CaptureError,
    ConfigError,
    DataError,
)
from shared.layout import DESCRIPTION, MANIFEST
from shared.location import S3Url
from shared.shard import GROUP, STATES_OBJECT
from tests.conftest import Projected, conversations, write_jsonl
from tests.test_cache_builder.peers import (
    Captured,
    mask_and_ids,
    run_target,
    write_specforge,
    write_speculators,
)
from tests.test_cache_builder.stored import Killer, assert_clean, contents, one_by_one, tree
from trainer.config import TrainConfig
from trainer.train import train

MakeBuild = Callable[..., BuildConfig]
MakeImport = Callable[..., ImportConfig]

NUM_SAMPLES = 24
BLOCKS = (0, 2)
ENTRIES = (1, 3, 4)
"""The same blocks as entries of hidden_states, and the last block, whose number is 4."""

DECLARED = {
    "speculators": DeclaredConfig(
        layer_ids=ENTRIES, layer_numbering="hidden-states", last_hidden="before-norm"
    ),
    "specforge": DeclaredConfig(layer_ids=BLOCKS, layer_numbering="block"),
}
KINDS = pytest.mark.parametrize("kind", ["speculators", "specforge"])


@pytest.fixture(scope="module")
def built(tiny_build: MakeBuild, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A lossless cache of the tiny target; a sample's states do not depend on its batch."""
    directory = tmp_path_factory.mktemp("captured")
    data = write_jsonl(directory / "data.jsonl", conversations(range(NUM_SAMPLES)))
    build(one_by_one(tiny_build(directory / "cache", preset="lossless", data=[data])))
    return directory / "cache"


@pytest.fixture(scope="module")
def captured(built: Path, tiny_target: Path) -> list[Captured]:
    """The samples of that cache, shuffled, run by transformers without any of our code."""
    samples = mask_and_ids(built)
    random.Random(0).shuffle(samples)
    return run_target(tiny_target, samples)


@pytest.fixture(scope="module")
def written(captured: list[Captured], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Those samples in each layout. Read them only; copy them to change them."""
    directory = tmp_path_factory.mktemp("peers")
    return {
        "speculators": write_speculators(directory / "speculators", captured, ENTRIES),
        "specforge": write_specforge(directory / "specforge", captured, BLOCKS),
    }


@pytest.fixture
def make_import(written: dict[str, Path], tiny_target: Path, tmp_path: Path) -> MakeImport:
    """Makes an ImportConfig: `make_import(kind, preset=..., declared=..., source=...)`."""

    def make(kind: str, *, preset: Any = "lossless", path: Path | None = None, **more: Any) -> Any:
        declared = replace(DECLARED[kind], **more.pop("declared", {}))
        given = {
            "source": written[kind],
            "target": str(tiny_target),
            "dtype": "float32",
            "cache": CacheConfig(path=path or tmp_path / "cache", min_free_gb=0.0),
            "codec": CodecConfig(preset=preset),
            "plan": PlanConfig(shard_mib=1.0),
            **more,
        }
        return ImportConfig(kind=kind, declared=declared, **given)  # type: ignore[arg-type]

    return make


def states_and_tokens(path: Path) -> dict[str, tuple[Any, ...]]:
    """`contents` but for the source tag and the calibration."""
    return {key: (*v[:5], v[6], v[8]) for key, v in contents(path).items()}


@KINDS
def test_an_import_is_what_a_build_captures(
    kind: str, built: Path, make_import: MakeImport, written: dict[str, Path]
) -> None:
    before = tree(written[kind])
    config = make_import(kind, plan=PlanConfig(shard_mib=0.25))
    report = import_states(config)
    ours, theirs = Cache(config.cache.path), Cache(built)
    assert states_and_tokens(ours.path) == states_and_tokens(built)
    assert ours.spec.target_layer_ids == theirs.spec.target_layer_ids == BLOCKS
    assert ours.description["head_sha256"] == theirs.description["head_sha256"]
    assert ours.manifest.sources == (kind,)
    assert report.num_new_shards > 2
    assert report.check is not None
    assert report.check.num_samples == 8
    assert max(report.check.largest) < 0.01
    assert_clean(ours.path)
    assert tree(written[kind]) == before


def test_the_account_of_an_import(make_import: MakeImport, captured: list[Captured]) -> None:
    num_tokens = sum(len(sample.token_ids) for sample in captured)
    scan = import_states(make_import("specforge")).plan.description["report"]
    longest = [
        max(len(s.token_ids) for s in captured[i // 4 * 4 :][:4]) for i in range(len(captured))
    ]
    assert scan["num_seen"] == scan["num_kept"] == NUM_SAMPLES
    assert scan["num_tokens"] == num_tokens
    assert scan["num_supervised_tokens"] == sum(sum(s.loss_mask) for s in captured)
    assert scan["num_padding"] == sum(longest) - num_tokens > 0
    assert scan["dtypes"] == {"bfloat16": NUM_SAMPLES}
    assert scan["skipped"] == {}


def test_float32_states_are_rounded_and_counted(
    captured: list[Captured], built: Path, make_import: MakeImport, tmp_path: Path
) -> None:
    source = write_speculators(tmp_path / "source", captured, ENTRIES, dtype=torch.float32)
    report = import_states(make_import("speculators", source=source, dtype=None))
    assert states_and_tokens(tmp_path / "cache") == states_and_tokens(built)
    assert Cache(tmp_path / "cache").spec.target.dtype == "float32"
    assert ("rounded", f"float32 to bfloat16 in {NUM_SAMPLES} samples") in rows(report)


def test_the_order_stored_need_not_ascend(
    captured: list[Captured], built: Path, make_import: MakeImport, tmp_path: Path
) -> None:
    source = write_specforge(tmp_path / "source", captured, BLOCKS[::-1])
    declared = {"layer_ids": BLOCKS[::-1]}
    import_states(make_import("specforge", source=source, declared=declared))
    assert states_and_tokens(tmp_path / "cache") == states_and_tokens(built)


def test_the_last_block_is_kept_where_asked_for(
    captured: list[Captured], make_import: MakeImport, tiny_target: Path, tmp_path: Path
) -> None:
    import_states(make_import("speculators", declared={"keep_last": True}))
    cache = Cache(tmp_path / "cache")
    assert cache.spec.target_layer_ids == (0, 2, 3)
    by_tokens = {tuple(sample.token_ids): sample for sample in captured}
    for position in range(len(cache.index)):
        sample = cache.read(position)
        expected = by_tokens[tuple(sample.token_ids.tolist())].blocks_TND[:, [0, 2, 3]]
        assert torch.equal(cache.unpack(sample), expected)
    assert recapture(cache.path, tiny_target, 5).problems == []


@KINDS
def test_balanced_states_are_within_the_codecs_error_and_train(
    kind: str,
    make_import: MakeImport,
    tiny_target: Path,
    tiny_train: Callable[..., TrainConfig],
    tmp_path: Path,
) -> None:
    import_states(make_import(kind, preset="balanced"))
    report = recapture(tmp_path / "cache", tiny_target, NUM_SAMPLES)
    assert (report.num_samples, report.problems) == (NUM_SAMPLES, [])
    assert 0.001 < max(report.largest) < 0.04
    train(tiny_train(tmp_path / "run", tmp_path / "cache", steps=2))
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line).get("train/loss") for line in lines]
    assert len([loss for loss in losses if loss is not None and np.isfinite(loss)]) == 2


MISSING = [
    ({"layer_ids": ()}, "--layer-ids is missing.*3 states per token.*2,2,1,4 for this target"),
    ({"layer_numbering": None}, "--layer-numbering is missing.*`block`.*`hidden-states`"),
    ({"last_hidden": None}, "--last-hidden is missing: id 4.*before-norm.*after-norm"),
    ({"layer_ids": (1, 3)}, "2 ids, but the files hold 3 states"),
    ({"layer_ids": (1, 1, 4)}, "named twice"),
    ({"layer_ids": (0, 3, 4)}, r"0 is out of range: the target has 4 blocks.* 1 to 4\.$"),
    ({"layer_ids": (0, 2, 3)}, r"0 is out of range.* 1 to 4\. All of them fit `block`"),
    ({"layer_ids": (1, 3, 5)}, r"5 is out of range.* 1 to 4\.$"),
    (
        {"layer_numbering": "block"},
        r"4 is out of range: the target has 4 blocks, in the numbering `block` 0 to 3\. "
        "All of them fit `hidden-states`",
    ),
    ({"last_hidden": "after-norm", "keep_last": True}, "after the final norm, which cannot be"),
    (
        {"layer_ids": (1, 2, 3), "keep_last": True},
        "--keep-last: none of .* 1,2,3 is the last block",
    ),
]


@pytest.mark.parametrize(("declared", "message"), MISSING)
def test_nothing_is_guessed(
    make_import: MakeImport, declared: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=message):
        import_states(make_import("speculators", declared=declared))
    assert not (tmp_path / "cache").exists()


WRONG = [
    pytest.param(
        "specforge",
        {"layer_ids": (1, 3), "layer_numbering": "block", "last_hidden": "before-norm"},
        "are in the other numbering, --layer-numbering hidden-states",
        id="counted-from-one",
    ),
    pytest.param(
        "specforge",
        {"layer_ids": (1, 2), "layer_numbering": "hidden-states"},
        "those of the blocks 0, 2 where 0, 1 are declared: correct --layer-ids",
        id="another-layer",
    ),
    pytest.param(
        "specforge",
        {"layer_ids": (2, 0)},
        "those of the blocks 2, 0 where 0, 2 are declared|0, 2 where 2, 0|2, 0 where",
        id="swapped",
    ),
]


@pytest.mark.parametrize(("kind", "declared", "message"), WRONG)
def test_a_wrong_declaration_is_found_before_anything_is_written(
    make_import: MakeImport, kind: str, declared: dict[str, Any], message: str, tmp_path: Path
) -> None:
    keep = {"keep_last": True} if "last_hidden" in declared else {}
    with pytest.raises(DataError, match=message):
        import_states(make_import(kind, declared=declared | keep))
    with pytest.raises(CacheNotFoundError):
        Cache(tmp_path / "cache")


def test_the_nearest_block_tells_where_the_tolerance_does_not(
    make_import: MakeImport, tmp_path: Path
) -> None:
    config = make_import(
        "specforge", declared={"layer_ids": (1, 2)}, check=CheckConfig(tolerance=0.99)
    )
    with pytest.raises(DataError, match=r"block 1 .*from its block 0 by 0\.\d % only.*correct"):
        import_states(config)
    import_states(make_import("specforge"))  # declared rightly, the same command goes on
    assert_clean(tmp_path / "cache")


def test_states_of_another_model_or_shifted_by_a_token_are_found(
    captured: list[Captured], make_import: MakeImport, tmp_path: Path
) -> None:
    shifted = [replace(s, blocks_TND=s.blocks_TND.roll(1, 0)) for s in captured]
    source = write_specforge(tmp_path / "source", shifted, BLOCKS)
    config = make_import("specforge", source=source)
    with pytest.raises(DataError, match=r"No block gives it .*other weights.*--tolerance"):
        import_states(config)
    import_states(replace(config, check=CheckConfig(num_samples=0)))  # told not to look
    assert len(recapture(tmp_path / "cache", Path(config.target), 3).problems) == 6


def damage(source: Path, number: int) -> Path:
    return source / "hidden_states" / f"hs_{number}.safetensors"


def test_what_cannot_be_imported_is_counted_by_reason_and_named(
    captured: list[Captured], make_import: MakeImport, tmp_path: Path
) -> None:
    samples = [*captured, captured[5]]  # a duplicate
    samples[9] = replace(samples[9], loss_mask=[0] * len(samples[9].loss_mask))
    outside = [*samples[10].token_ids[:-1], 272]
    samples[10] = replace(samples[10], token_ids=outside)
    source = write_speculators(tmp_path / "source", samples, ENTRIES)
    damage(source, 3).unlink()
    damage(source, 4).write_bytes(damage(source, 4).read_bytes()[:-100])
    damage(source, 6).write_bytes(b"")
    report = import_states(make_import("speculators", source=source))
    scan = report.plan.description["report"]
    assert {reason: entry["count"] for reason, entry in scan["skipped"].items()} == {
        "no_states": 1,
        "unreadable": 2,
        "too_short": 1,
        "id_out_of_range": 1,
        "duplicate": 1,
    }
    assert (scan["num_seen"], scan["num_kept"]) == (NUM_SAMPLES + 1, NUM_SAMPLES - 5)
    table = dict(rows(report))
    assert f"{NUM_SAMPLES - 5} usable" in table["read"]
    assert "6 skipped" in table["read"]
    assert "hs_3.safetensors is missing" in table["  no_states"]
    assert "hs_4.safetensors" in table["  unreadable"]
    assert "id 272 at position" in table["  id_out_of_range"]
    lines = (report.plan.directory / "dropped.jsonl").read_text().splitlines()
    dropped = [json.loads(line) for line in lines]
    assert sorted((row["reason"], row["row"]) for row in dropped) == [
        ("duplicate", NUM_SAMPLES),
        ("id_out_of_range", 10),
        ("no_states", 3),
        ("too_short", 9),
        ("unreadable", 4),
        ("unreadable", 6),
    ]
    assert dropped[0]["file"] == str(damage(source, 3))
    kept = {tuple(sample.token_ids) for sample in captured} - {
        tuple(captured[i].token_ids) for i in (3, 4, 6, 9, 10)
    }
    assert {tuple(ids.tolist()) for ids, _ in mask_and_ids(tmp_path / "cache")} == kept


def test_missing_states_are_added_by_the_next_import(
    captured: list[Captured],
    make_import: MakeImport,
    built: Path,
    tiny_build: MakeBuild,
    tmp_path: Path,
) -> None:
    source = write_speculators(tmp_path / "source", captured, ENTRIES)
    aside = tmp_path / "aside"
    aside.mkdir()
    for number in range(10, NUM_SAMPLES):
        damage(source, number).rename(aside / damage(source, number).name)
    config = make_import("speculators", source=source)
    assert Cache(import_states(config).manifest and tmp_path / "cache").manifest.generation == 1
    for path in aside.iterdir():
        path.rename(source / "hidden_states" / path.name)
    second = import_states(config)
    assert (len(second.plan), second.manifest.generation) == (NUM_SAMPLES - 10, 2)
    assert second.plan.description["report"]["num_cached"] == 10
    assert states_and_tokens(tmp_path / "cache") == states_and_tokens(built)
    third = import_states(config)
    assert (third.num_new_shards, third.manifest.generation, third.check) == (0, 2, None)
    # A shard that the newest plan left out as stored is let go of.
    cache = Cache(tmp_path / "cache")
    (cache.path / GROUP / cache.shard_ids[0] / STATES_OBJECT).write_bytes(b"x")
    repair(tiny_build(cache.path, preset="lossless"), drop_lost=True)
    assert import_states(config).num_new_shards == 1
    assert states_and_tokens(tmp_path / "cache") == states_and_tokens(built)


def change(path: Path, **tensors: Callable[[torch.Tensor], torch.Tensor]) -> None:
    stored = load_file(path)
    save_file({k: tensors.get(k, lambda t: t)(v).contiguous() for k, v in stored.items()}, path)


MISMATCHED = [
    ({"hidden_states": lambda t: t[:-1]}, "rows_differ", "rows of states for"),
    ({"token_ids": lambda t: t.flip(0)}, "tokens_differ", "are not the input_ids of row 7"),
]


@pytest.mark.parametrize(("tensors", "reason", "message"), MISMATCHED)
def test_states_that_are_not_of_their_tokens_stop_the_import(
    captured: list[Captured],
    make_import: MakeImport,
    tmp_path: Path,
    tensors: dict[str, Any],
    reason: str,
    message: str,
) -> None:
    source = write_speculators(tmp_path / "source", captured, ENTRIES)
    change(damage(source, 7), **tensors)
    config = make_import("speculators", source=source)
    with pytest.raises(DataError, match=rf"hs_7\.safetensors: .*{message}.*--skip-mismatched"):
        import_states(config)
    report = import_states(replace(config, on_mismatch="skip"))
    assert report.plan.description["report"]["skipped"][reason]["count"] == 1
    assert report.manifest.totals.num_samples == NUM_SAMPLES - 1


def test_a_data_set_prepared_anew_is_noticed(
    captured: list[Captured], make_import: MakeImport, tmp_path: Path
) -> None:
    source = write_speculators(tmp_path / "source", captured, ENTRIES)
    fewer = write_speculators(tmp_path / "fewer", captured[:20], ENTRIES)
    config = make_import("speculators", source=fewer, states=source / "hidden_states")
    with pytest.raises(DataError, match=r"hs_20\.safetensors: the data set has 20 rows only"):
        import_states(config)
    other = write_speculators(tmp_path / "other", captured[::-1], ENTRIES)
    config = make_import("speculators", source=other, states=source / "hidden_states")
    with pytest.raises(DataError, match=r"hs_0\.safetensors: its token_ids.*prepared anew"):
        import_states(config)


SHAPES = [
    (lambda t: t[:, :2], r"hs_7\.safetensors: 2 states of 64 .* the first file has 3 of 64"),
    (lambda t: t[:, :, :32], r"hs_7\.safetensors: 3 states of 32"),
    (lambda t: t.float(), r"hs_7\.safetensors: .*float32.*bfloat16"),
    (lambda t: t.half(), r"hs_7\.safetensors: states are float16.*Massive activations"),
    (lambda t: t.flatten(1), r"hs_7\.safetensors: hidden_states has shape \[\d+, 192\]"),
]


@pytest.mark.parametrize(("reshape", "message"), SHAPES)
def test_a_file_of_another_shape_is_an_error_with_its_name(
    captured: list[Captured],
    make_import: MakeImport,
    tmp_path: Path,
    reshape: Callable[[torch.Tensor], torch.Tensor],
    message: str,
) -> None:
    source = write_speculators(tmp_path / "source", captured[:10], ENTRIES)
    change(damage(source, 7), hidden_states=reshape)
    with pytest.raises(DataError, match=message):
        import_states(make_import("speculators", source=source))


def test_unusable_states_are_quarantined_and_fail_the_import(
    captured: list[Captured], make_import: MakeImport, tmp_path: Path
) -> None:
    source = write_speculators(tmp_path / "source", captured, ENTRIES)
    change(damage(source, 7), hidden_states=lambda t: t.index_fill(0, torch.tensor([1]), np.nan))
    config = make_import("speculators", source=source, check=CheckConfig(num_samples=0))
    with pytest.raises(CaptureError, match=r"1 of 24 .* states of block 0 are not finite"):
        import_states(config)
    with pytest.raises(CacheNotFoundError):
        Cache(tmp_path / "cache")
    totals = import_states(replace(config, max_quarantined_fraction=0.05)).manifest.totals
    assert (totals.num_samples, totals.quarantined) == (NUM_SAMPLES - 1, 1)
    change(damage(source, 7), hidden_states=lambda t: t.nan_to_num(0.5))  # the file is replaced
    totals = import_states(config).manifest.totals
    assert (totals.num_samples, totals.quarantined) == (NUM_SAMPLES, 0)
    with pytest.raises(ValueError, match="max_quarantined_fraction"):
        replace(config, max_quarantined_fraction=2.0)


def test_a_pickle_with_code_is_not_run(
    captured: list[Captured], make_import: MakeImport, tmp_path: Path
) -> None:
    source = write_specforge(tmp_path / "source", captured[:8], BLOCKS)
    proof = tmp_path / "proof"

    class Evil:
        def __reduce__(self) -> Any:
            return (exec, (f"open({str(proof)!r}, 'w').close()",))

    torch.save({"input_ids": Evil()}, source / "rows_0-10" / "data_4.ckpt")
    with pytest.raises(DataError, match=r"data_4\.ckpt: holds more than tensors"):
        import_states(make_import("specforge", source=source))
    assert not proof.exists()


def test_damaged_and_foreign_records_of_specforge(
    captured: list[Captured], make_import: MakeImport, tmp_path: Path
) -> None:
    source = write_specforge(tmp_path / "source", captured, BLOCKS)
    folder = source / "rows_0-10"
    for name in ("data_1.ckpt", "data_3.ckpt.gz"):
        (folder / name).write_bytes((folder / name).read_bytes()[:-200])
    (folder / "data_2.ckpt").write_bytes(b"")
    shutil.copy(folder / "data_4.ckpt", source / "data_999.ckpt")  # as its multi-GPU capture does
    scan = import_states(make_import("specforge", source=source)).plan.description["report"]
    found = {reason: entry["count"] for reason, entry in scan["skipped"].items()}
    assert found == {"unreadable": 3, "duplicate": 1}
    torch.save({"aux_hidden_state": torch.zeros(1)}, folder / "data_7.ckpt")
    with pytest.raises(DataError, match=r"data_7\.ckpt: expected a record of tensors input_ids"):
        import_states(make_import("specforge", source=source, path=tmp_path / "other"))


def test_the_wrong_target_or_directory_is_one_line(
    make_import: MakeImport, written: dict[str, Path], target_dir: Path, tmp_path: Path
) -> None:
    for kind, other in (("speculators", "specforge"), ("specforge", "speculators")):
        with pytest.raises(DataError, match="expected the "):
            import_states(make_import(kind, source=written[other]))
    with pytest.raises(DataError, match=r"states of 64 values.*hidden size 576"):
        import_states(make_import("speculators", target=str(target_dir)))
    with pytest.raises(DataError, match=r"data_\d.* expected \[1, tokens, layers x 576\]"):
        import_states(make_import("specforge", target=str(target_dir)))
    old = tmp_path / "old"
    shutil.copytree(written["speculators"], old)
    shutil.rmtree(old / "hidden_states")
    with pytest.raises(DataError, match="no such directory; expected the hs_"):
        import_states(make_import("speculators", source=old))
    (old / "hidden_states").mkdir()
    torch.save({}, old / "hidden_states" / "data_0.pt")
    with pytest.raises(DataError, match=r"data_0\.pt: states as pickles, of an old version"):
        import_states(make_import("speculators", source=old))
    with pytest.raises(DataError, match="--states is for speculators"):
        import_states(make_import("specforge", states=old))


def test_a_missing_package_says_what_to_install(
    make_import: MakeImport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"pip install 'draftcache\[import\]'"):
        import_states(make_import("speculators"))


def test_an_import_says_that_it_is_one(
    make_import: MakeImport, built: Path, tiny_build: MakeBuild, tmp_path: Path
) -> None:
    import_states(config := make_import("speculators"))
    ours, theirs = Cache(config.cache.path), Cache(built)
    assert ours.description["origin"] == {
        "kind": "speculators",
        "declared": {
            "layer_ids": [1, 3, 4],
            "layer_numbering": "hidden-states",
            "last_hidden": "before-norm",
            "left_out": [4],
        },
        "same_as": False,
    }
    assert "origin" not in theirs.description
    assert ours.spec.target.weights_sha256 == theirs.spec.target.weights_sha256
    assert ours.spec.tokens.tokenizer_sha256 == theirs.spec.tokens.tokenizer_sha256
    assert ours.spec.fingerprint != theirs.spec.fingerprint
    assert inspect_cache(ours.path)["origin"]["kind"] == "speculators"
    shutil.copytree(built, tmp_path / "into")
    with pytest.raises(CacheIncompatibleError, match=r"target\.attention: 'unknown, imported from"):
        merge(tmp_path / "into", [ours.path])
    with pytest.raises(CacheIncompatibleError, match="built with other settings"):
        build(tiny_build(ours.path, preset="lossless"))
    with pytest.raises(CacheIncompatibleError, match="built with other settings"):
        import_states(make_import("speculators", path=tmp_path / "into"))
    before, victim = contents(ours.path), Cache(ours.path).shard_ids[0]
    (ours.path / GROUP / victim / STATES_OBJECT).write_bytes(b"damaged")
    with pytest.raises(CacheError, match=rf"{victim} are damaged.*were imported from speculators"):
        repair(tiny_build(ours.path, preset="lossless"))
    repair(tiny_build(ours.path, preset="lossless"), drop_lost=True)
    assert victim not in Cache(ours.path).shard_ids
    assert import_states(config).num_new_shards == 1  # the damaged one, from its source
    assert contents(ours.path) == before
    assert_clean(ours.path)
    with pytest.raises(CacheIncompatibleError, match="Declare the same"):
        import_states(
            make_import("speculators", declared={"last_hidden": "after-norm"}, path=ours.path)
        )


def test_declared_equal_to_a_capture_it_can_be_merged_and_repaired(
    make_import: MakeImport,
    tiny_build: MakeBuild,
    built: Path,
    tiny_projected: Projected,
    tmp_path: Path,
) -> None:
    data = write_jsonl(tmp_path / "other.jsonl", conversations(range(60, 70)))
    other = one_by_one(tiny_build(tmp_path / "other", preset="lossless", data=[data]))
    build(other)
    with pytest.raises(CacheIncompatibleError, match=r"--same-as .*codec\.name"):
        import_states(make_import("specforge", preset="balanced", same_as=other.cache.path))
    with pytest.raises(
        CacheIncompatibleError, match=r"--same-as .*projection\.rank: '\(absent\)' here, 64 there"
    ):
        import_states(make_import("specforge", same_as=tiny_projected.cache))
    import_states(config := make_import("specforge", same_as=other.cache.path))
    assert Cache(config.cache.path).spec == Cache(other.cache.path).spec
    shutil.copytree(config.cache.path, lost := tmp_path / "lost")
    (lost / "cache.json").unlink()
    with pytest.raises(CacheError, match=r"cache\.json: missing.* Its states were imported"):
        repair(replace(other, cache=replace(other.cache, path=lost)))
    assert not (lost / "cache.json").exists()
    with pytest.raises(CacheIncompatibleError, match=r"were captured here.*merge"):
        import_states(replace(config, cache=replace(config.cache, path=other.cache.path)))
    assert merge(other.cache.path, [config.cache.path]).num_samples == NUM_SAMPLES
    cache = Cache(other.cache.path)
    assert set(cache.manifest.sources) == {"made", "specforge"}
    assert states_and_tokens(built).items() <= states_and_tokens(cache.path).items()


@pytest.mark.slow
def test_killed_at_any_write_it_goes_on_to_the_same_cache(
    captured: list[Captured], make_import: MakeImport, tmp_path: Path
) -> None:
    source = write_specforge(tmp_path / "source", captured[:8], BLOCKS)

    def config(name: str) -> ImportConfig:
        return make_import(
            "specforge",
            path=tmp_path / name,
            preset="balanced",
            source=source,
            plan=PlanConfig(shard_mib=0.06),
            check=CheckConfig(num_samples=1),
        )

    killer = Killer(import_states, tmp_path)
    total = killer.count(config("undisturbed"))
    expected = contents(tmp_path / "undisturbed")
    # Plan or head; a shard, and while that is resumed; the publication.
    for number, kill_at in enumerate((total // 8, total * 6 // 10, total - 3)):
        path = tmp_path / f"killed-{number}"
        assert killer.run(config(path.name), kill_at=kill_at) == -9
        if number == 1:
            assert any((path / "records").glob("*.json")), "no kill fell between two commits"
            assert killer.run(config(path.name), kill_at=total // 20) == -9
        import_states(config(path.name))
        assert contents(path) == expected
        assert_clean(path)


def test_into_a_bucket_it_writes_what_it_writes_into_a_directory(
    written: dict[str, Path],
    make_import: MakeImport,
    tiny_target: Path,
    s3_server: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("obstore")
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    expected = import_states(make_import("specforge")).manifest
    command = ["import", "specforge", str(written["specforge"]), "s3://caches/imported"]
    command += ["--target", str(tiny_target), "--dtype", "float32", "--codec", "lossless"]
    command += ["--layer-ids", ",".join(map(str, DECLARED["specforge"].layer_ids))]
    command += ["--layer-numbering", "block"]
    command += ["--shard-mib", "1", "--min-free-gb", "0", "--scratch", str(tmp_path / "scratch")]
    result = CliRunner().invoke(cli.main, command, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    cache = S3Url("caches", "imported")
    assert Cache(cache).manifest.records == expected.records
    assert verify_cache(cache, deep=True) == []
    assert [path.name for path in (tmp_path / "scratch").iterdir()]
    assert not (tmp_path / "home").exists()


def test_its_command(
    written: dict[str, Path], tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*arguments: object) -> Any:
        command = ["import", "speculators", str(written["speculators"]), str(tmp_path / "cache")]
        command += ["--target", str(tiny_target), "--min-free-gb", "0", *map(str, arguments)]
        return CliRunner().invoke(cli.main, command)

    declared = ["--layer-ids", "1,3,4", "--layer-numbering", "hidden-states"]
    declared += ["--last-hidden", "before-norm", "--dtype", "float32"]
    assert "--layer-ids is missing" in str(run().exception)
    assert isinstance(run(*declared, "--layer-ids", "1,x").exception, ConfigError)
    assert isinstance(run(*declared, "--codec", "tiny").exception, ConfigError)
    assert isinstance(run(*declared, "--recapture", 1, "--no-recapture").exception, ConfigError)
    for option in ("--tolerance", "--seed"):  # of no consequence where nothing is compared
        error = run(*declared, "--no-recapture", option, 1).exception
        assert f"{option} and --no-recapture exclude each other" in str(error)
    assert isinstance(run(*declared, "--tolerance", 0).exception, ConfigError)
    error = run(*declared, "--revision", "main").exception
    assert "is a directory, which has no revisions" in str(error)
    assert not (tmp_path / "cache").exists()
    result = run(*declared, "--codec", "lossless", "--recapture", 3, "--shard-mib", 0.25)
    assert result.exit_code == 0, result.exception
    for text in (
        f"{NUM_SAMPLES} usable",
        "3 samples by the target",
        "states of layer id 4",
        f"{NUM_SAMPLES} samples",
    ):
        assert text in result.output
    manifest = json.loads((tmp_path / "cache" / MANIFEST).read_text())
    assert manifest["totals"]["num_samples"] == NUM_SAMPLES
    assert json.loads((tmp_path / "cache" / DESCRIPTION).read_text())["origin"]
    result = CliRunner().invoke(cli.main, ["inspect", str(tmp_path / "cache")])
    assert "from speculators, layer ids [1, 3, 4] counted as hidden-states" in result.output
