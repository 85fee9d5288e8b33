"""What is stored is what the target gives, or it is named."""

import json
import re
import shutil
from collections.abc import Callable, Sequence
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
from cache_builder.config import BuildConfig, TargetConfig
from cache_builder.distance import NOISE
from cache_builder.recapture import recapture, rows
from cache_builder.target import Target
from shared.cache import Cache
from shared.errors import CacheError, CacheIncompatibleError, TargetError
from shared.shard import GROUP, STATES_OBJECT
from tests.test_cache_builder.stored import one_by_one
from tests.test_cache_builder.test_verify import flip

MakeBuild = Callable[..., BuildConfig]


def test_lossless_states_are_equal_to_the_bit(
    tiny_build: MakeBuild, tiny_target: Path, tmp_path: Path
) -> None:
    build(one_by_one(tiny_build(tmp_path / "cache", preset="lossless")))
    report = recapture(tmp_path / "cache", tiny_target, 7)
    assert (report.num_samples, report.num_equal, report.problems) == (7, 7, [])
    assert report.largest == [0.0, 0.0]
    assert report.allowed == [NOISE, NOISE]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("preset", ["lossless", "balanced"])
def test_states_captured_in_other_batches_are_within_the_noise(
    tiny_build: MakeBuild, tiny_target: Path, tmp_path: Path, preset: str, dtype: str
) -> None:
    build(tiny_build(tmp_path / "cache", preset=preset, dtype=dtype))
    report = recapture(tmp_path / "cache", tiny_target, 1000)
    assert (report.num_samples, report.problems) == (48, [])
    assert max(report.largest) < (0.01 if preset == "lossless" else 0.04)
    if preset == "balanced":
        assert min(report.largest) > 0.001
    assert len(rows(report)) == 3


def test_the_seed_chooses_the_samples(
    tiny_cache: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bytes] = []
    original = Target.capture

    def watched(self: Target, token_ids: Sequence[np.ndarray]) -> list[torch.Tensor]:
        seen.extend(ids.tobytes() for ids in token_ids)
        return original(self, token_ids)

    monkeypatch.setattr(Target, "capture", watched)
    for seed in (0, 0, 1):
        recapture(tiny_cache, tiny_target, 5, seed=seed)
    assert seen[:5] == seen[5:10] != seen[10:]
    assert len(set(seen[:5])) == 5


DISTURBED = [
    pytest.param(lambda hidden: hidden * torch.tensor([1.0, 1.1])[:, None], {2}, id="one-layer"),
    pytest.param(lambda hidden: hidden.roll(1, 0), {0, 2}, id="off-by-one-token"),
    pytest.param(lambda hidden: hidden.flip(1), {0, 2}, id="layers-swapped"),
]


@pytest.mark.parametrize(("disturb", "blocks"), DISTURBED)
@pytest.mark.parametrize("preset", ["lossless", "balanced"])
def test_states_that_are_not_the_targets_are_named(
    tiny_build: MakeBuild,
    tiny_target: Path,
    tmp_path: Path,
    preset: str,
    disturb: Callable[[torch.Tensor], torch.Tensor],
    blocks: set[int],
) -> None:
    original = Target.capture

    def disturbed(self: Target, token_ids: Sequence[np.ndarray]) -> list[torch.Tensor]:
        return [
            disturb(state.float()).to(state.dtype).contiguous()
            for state in original(self, token_ids)
        ]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Target, "capture", disturbed)
        build(tiny_build(tmp_path / "cache", preset=preset))
    report = recapture(tmp_path / "cache", tiny_target, 4)
    found = {(p.shard, p.kind, p.message.partition("block ")[2][:1]) for p in report.problems}
    assert {int(block) for _, _, block in found} == blocks
    assert {kind for _, kind, _ in found} == {"differs"}
    assert len(report.problems) == 4 * len(blocks)
    assert {shard for shard, _, _ in found} <= set(Cache(tmp_path / "cache").shard_ids)


@pytest.mark.parametrize("preset", ["lossless", "balanced"])
def test_states_of_the_next_block_are_found_under_massive_activations(
    tiny_build: MakeBuild, tiny_target: Path, tmp_path: Path, preset: str
) -> None:
    target = tmp_path / "target"
    shutil.copytree(tiny_target, target)
    weights = load_file(target / "model.safetensors")
    weights["model.embed_tokens.weight"][1, 7] = 20_000.0  # in every block of every turn's start
    save_file(weights, target / "model.safetensors", {"format": "pt"})
    config = tiny_build(tmp_path / "right", preset=preset)
    config = replace(config, target=replace(config.target, path=str(target)))
    build(config)
    assert recapture(tmp_path / "right", target, 4).problems == []

    load = Target.load

    def shifted(path: Path, config: TargetConfig, layer_ids: Sequence[int], *rest: Any) -> Target:
        return load(path, config, [1, *layer_ids[1:]], *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Target, "load", shifted)
        build(replace(config, cache=replace(config.cache, path=tmp_path / "wrong")))
    right, wrong = Cache(tmp_path / "right"), Cache(tmp_path / "wrong")
    for position in range(4):
        blocks = [cache.unpack(cache.read(position))[:, 0].double() for cache in (right, wrong)]
        assert (blocks[0] - blocks[1]).norm() < 0.02 * blocks[0].norm()  # the whole tells nothing
    problems = recapture(tmp_path / "wrong", target, 4).problems
    assert len(problems) == 4
    for problem in problems:
        assert re.search("block 0 differs .* They are those of block 1", problem.message)


def test_another_target_is_refused_naming_what_differs(
    tiny_cache: Path, tiny_target: Path, tmp_path: Path
) -> None:
    other = tmp_path / "target"
    shutil.copytree(tiny_target, other)
    weights = load_file(other / "model.safetensors")
    weights["model.norm.weight"][0] += 1
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    with pytest.raises(CacheIncompatibleError, match="weights_sha256"):
        recapture(tiny_cache, other, 1)
    (tmp_path / "empty").mkdir()
    with pytest.raises(TargetError, match=r"no config\.json"):
        recapture(tiny_cache, tmp_path / "empty", 1)


def test_a_damaged_sample_is_a_problem_and_the_others_are_compared(
    tiny_cache: Path, tiny_target: Path, tmp_path: Path
) -> None:
    path = tmp_path / "copy"
    shutil.copytree(tiny_cache, path)
    victim = Cache(path).shard_ids[0]
    flip(path / GROUP / victim / STATES_OBJECT, 100)
    report = recapture(path, tiny_target, 48)
    ((shard, kind),) = {(p.shard, p.kind) for p in report.problems}
    assert (shard, kind) == (victim, "damaged")
    assert max(report.largest) > 0


def test_its_command(tiny_cache: Path, tiny_target: Path, tiny_build: MakeBuild) -> None:
    def run(*arguments: object) -> tuple[int, str, object]:
        command = ["verify", str(tiny_cache), *map(str, arguments)]
        result = CliRunner().invoke(cli.main, command)
        return result.exit_code, result.stdout, result.exception

    code, out, _ = run("--recapture", 3, "--target", tiny_target, "--seed", 5)
    assert code == 0
    assert "3 samples" in out
    assert "block 2" in out
    code, out, _ = run("--recapture", 3, "--target", tiny_target, "--json")
    assert code == 0
    facts = json.loads(out)
    assert facts["ok"]
    assert [layer["layer_id"] for layer in facts["recapture"]["layers"]] == [0, 2]
    assert run("--recapture", 3)[0] == 2
    assert run("--target", tiny_target)[0] == 2
    assert run("--recapture", 0, "--target", tiny_target)[0] == 2


def test_its_command_fails_where_states_differ(
    tiny_build: MakeBuild, tiny_target: Path, tmp_path: Path
) -> None:
    original = Target.capture

    def scaled(self: Target, token_ids: Sequence[np.ndarray]) -> list[torch.Tensor]:
        return [state * 1.25 for state in original(self, token_ids)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Target, "capture", scaled)
        build(tiny_build(tmp_path / "cache"))
    command = ["verify", str(tmp_path / "cache"), "--recapture", "1", "--target", str(tiny_target)]
    result = CliRunner().invoke(cli.main, command)
    assert isinstance(result.exception, CacheError)
    assert "build the cache anew" in str(result.exception)
