"""A cache with the last hidden state: every command copies, compares and shows one more layer."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from cache_builder import cli
from cache_builder.build import build
from cache_builder.config import BuildConfig
from cache_builder.estimate import estimate
from cache_builder.estimate import rows as estimate_rows
from cache_builder.inspect import inspect_cache
from cache_builder.inspect import rows as inspect_rows
from cache_builder.merge import merge
from cache_builder.prune import prune
from cache_builder.recapture import recapture
from cache_builder.repair import repair
from cache_builder.target import Target
from cache_builder.verify import verify_cache
from shared.cache import Cache
from shared.errors import CacheIncompatibleError
from shared.shard import GROUP
from tests.conftest import conversations, write_jsonl
from tests.test_cache_builder.stored import contents, one_by_one

MakeBuild = Callable[..., BuildConfig]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    directory = tmp_path_factory.mktemp("data")
    return [
        write_jsonl(directory / "left.jsonl", conversations(range(8))),
        write_jsonl(directory / "right.jsonl", conversations(range(5, 12))),
    ]


@pytest.fixture(scope="module")
def make(tiny_build: MakeBuild) -> MakeBuild:
    def make(path: Path, data: list[Path], last_hidden: str = "post_norm") -> BuildConfig:
        config = tiny_build(path, preset="balanced", data=data)
        capture = replace(config.capture, last_hidden=last_hidden)
        return one_by_one(
            replace(config, capture=capture, plan=replace(config.plan, shard_mib=0.125))
        )

    return make


@pytest.fixture(scope="module")
def built(make: MakeBuild, data: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("built") / "cache"
    build(make(path, data))
    return path


@pytest.fixture
def copy(built: Path, tmp_path: Path) -> Path:
    shutil.copytree(built, tmp_path / "copy")
    return tmp_path / "copy"


def test_prune_keeps_the_levels_of_all_layers(
    copy: Path, make: MakeBuild, data: list[Path]
) -> None:
    before = contents(copy)
    assert prune(make(copy, data[:1])).num_samples == 4
    after = contents(copy)
    assert len(after) == 8
    assert all(after[key] == before[key] for key in after)
    assert verify_cache(copy, deep=True) == []


def test_merge_copies_all_layers(
    built: Path, make: MakeBuild, data: list[Path], tmp_path: Path
) -> None:
    for name, part in (("left", data[:1]), ("right", data[1:])):
        build(make(tmp_path / name, part))
    parts = contents(tmp_path / "right") | contents(tmp_path / "left")
    merge(tmp_path / "left", [tmp_path / "right"])
    assert contents(tmp_path / "left") == parts
    assert parts.keys() == contents(built).keys()


def test_repair_captures_all_layers_again(copy: Path, make: MakeBuild, data: list[Path]) -> None:
    before = contents(copy)
    victim = Cache(copy).shard_ids[0]
    shutil.rmtree(copy / GROUP / victim)
    assert repair(make(copy, data)) == [victim]
    assert contents(copy) == before


def test_recapture_compares_the_last_hidden_state_too(
    built: Path, make: MakeBuild, data: list[Path], tiny_target: Path, tmp_path: Path
) -> None:
    report = recapture(built, tiny_target, 3)
    assert report.problems == []
    last = report.to_dict()["layers"][-1]
    assert (last["layer_id"], last["name"]) == (None, "last hidden state")
    assert 0.001 < last["largest"] < last["allowed"]
    original = Target.capture

    def scaled(self: Target, token_ids: list[object]) -> list[torch.Tensor]:
        factor = torch.tensor([1.0, 1.0, 1.25])[:, None]
        return [(state * factor).bfloat16() for state in original(self, token_ids)]  # type: ignore[arg-type]  # passed through

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Target, "capture", scaled)
        build(make(tmp_path / "cache", data[:1]))
    (problem,) = recapture(tmp_path / "cache", tiny_target, 1).problems
    assert "last hidden state differs from the target's by" in problem.message


def test_it_is_shown(built: Path, make: MakeBuild, data: list[Path], tmp_path: Path) -> None:
    facts = inspect_cache(built)
    assert facts["last_hidden"] == "post_norm"
    assert facts["target_layer_ids"] == [0, 2]
    assert [layer["layer_id"] for layer in facts["layers"]] == [0, 2, None]
    assert facts["raw_bytes"] == facts["num_tokens"] * 3 * 64 * 2
    table = dict(inspect_rows(facts))
    assert table["last hidden state"] == "post_norm"
    assert "codec error" in table["  last hidden state"]
    costs = estimate(make(tmp_path / "cache", data))
    assert costs["raw_bytes_per_token"] == 3 * 64 * 2
    assert dict(estimate_rows(costs))["stored"] == "blocks [0, 2], last hidden state: post_norm"
    result = CliRunner().invoke(cli.main, ["inspect", str(built)])
    assert result.exit_code == 0
    assert "last hidden state" in result.stdout


@pytest.mark.parametrize("last_hidden", ["none", "pre_norm"])
def test_a_cache_with_another_side_is_not_mixed_with_it(
    copy: Path, make: MakeBuild, data: list[Path], last_hidden: str
) -> None:
    with pytest.raises(
        CacheIncompatibleError,
        match=rf"\(capture\.last_hidden: '{last_hidden}' asked for, 'post_norm' in the cache\)",
    ):
        build(make(copy, data, last_hidden))
