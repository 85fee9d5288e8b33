"""Several caches of one kind are read as one; of two kinds they are refused, naming the fields."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cache_builder.build import build
from cache_builder.config import BuildConfig
from shared import config as configs
from shared import index
from shared.errors import CacheError, CacheIncompatibleError, ConfigError
from tests.conftest import conversations, write_jsonl
from trainer.batch import Features
from trainer.caches import Caches
from trainer.config import CacheConfig, TrainConfig
from trainer.evaluate import evaluate_run
from trainer.export import export_dflash
from trainer.index import split_samples
from trainer.loader import Loader
from trainer.run import Run
from trainer.summary import summarize
from trainer.train import Training, train

MakeBuild = Callable[..., BuildConfig]
MakeTrain = Callable[..., TrainConfig]


@pytest.fixture(scope="module")
def second(tiny_build: MakeBuild, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixteen samples of another source, and four that `tiny_cache` has too."""
    directory = tmp_path_factory.mktemp("second")
    rows = conversations(range(28, 32), "even") + conversations(range(60, 76), "aside")
    build(tiny_build(directory / "cache", data=[write_jsonl(directory / "rows.jsonl", rows)]))
    return directory / "cache"


def test_positions_run_through_all_caches_and_every_sample_is_its_own(
    tiny_cache: Path, second: Path
) -> None:
    both, parts = Caches([tiny_cache, second]), [Caches([tiny_cache]), Caches([second])]
    assert len(both.index) == 48 + 20
    assert both.sources == ["aside", "even", "odd"]
    position = 0
    for part in parts:
        for own in range(len(part.index)):
            sample = both.read(position)
            assert sample.sample_id == both.index.sample_id(position)
            assert sample.sample_id == part.index.sample_id(own)
            tags = both.sources[both.index.source[position]], part.sources[part.index.source[own]]
            assert tags[0] == tags[1]
            assert torch.equal(both.unpack(sample), part.unpack(part.read(own)))
            position += 1


def test_shards_of_all_caches_have_numbers_of_their_own(tiny_cache: Path, second: Path) -> None:
    both = Caches([tiny_cache, second])
    names = [
        (number, part.shard_ids[shard])
        for number, part in enumerate(both.parts)
        for shard in part.index.shard.tolist()
    ]
    numbers = both.shard_numbers().tolist()
    assert len(set(names)) == len(set(numbers)) == len(set(zip(names, numbers, strict=True)))


def test_a_sample_of_two_caches_is_trained_once(tiny_cache: Path, second: Path) -> None:
    cache = Caches([tiny_cache, second])
    config = CacheConfig(path=(tiny_cache, second), heldout_fraction=0.2)
    split = split_samples(cache, config)
    assert split.num_repeated == 4
    chosen = [cache.index.sample_id(p) for p in [*split.train.tolist(), *split.heldout.tolist()]]
    assert len(chosen) == len(set(chosen)) == 64
    # Repeated, but the first of them is of a source that was not asked for.
    aside = split_samples(Caches([second, tiny_cache]), replace(config, sources=("odd", "aside")))
    assert aside.num_repeated == 0
    assert len(aside.train) + len(aside.heldout) == 32


def test_a_run_on_two_caches_trains_resumes_evaluates_and_exports(
    tiny_train: MakeTrain, tiny_cache: Path, second: Path, tmp_path: Path
) -> None:
    cache = CacheConfig(path=(tiny_cache, second), heldout_fraction=0.2)
    config = replace(tiny_train(tmp_path, tiny_cache, steps=6), cache=cache)
    half = Training(config)
    step = half.learner.train_step

    def stopping(batches: Any) -> dict[str, Any]:
        if half.step == 3:
            raise KeyboardInterrupt
        return step(batches)

    half.learner.train_step = stopping  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        half.train()
    train(config)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 7))
    seen = {name for line in lines for name in line["train/samples"]}
    index = Caches([second]).index
    assert seen & {index.sample_id(i) for i in range(len(index))}
    assert Run(tmp_path).config() == config
    assert evaluate_run(Run(tmp_path), cache=None, max_samples=None)["num_samples"] == 4
    assert summarize(Run(tmp_path), tmp_path)["num_samples"] == 68
    assert export_dflash(Run(tmp_path), tmp_path / "out").is_dir()
    with pytest.raises(CacheIncompatibleError, match="1 caches, the run was started from 2"):
        train(replace(config, cache=replace(cache, path=tiny_cache)))
    with pytest.raises(CacheIncompatibleError, match="index_sha256"):
        train(replace(config, cache=replace(cache, path=(second, tiny_cache))))


def test_features_of_a_batch_over_two_caches_use_each_ones_calibration(
    tiny_train: MakeTrain, tiny_cache: Path, second: Path, tmp_path: Path
) -> None:
    cache = CacheConfig(path=(tiny_cache, second), heldout_fraction=0.0)
    run = Training(replace(tiny_train(tmp_path, tiny_cache), cache=cache))
    caches, names = run.session.cache, set()
    features = Features(caches, torch.device("cpu"))
    positions = {caches.index.sample_id(i): i for i in run.session.split.train.tolist()}
    with Loader.open(run.session, run.ranks, run.step) as loader:
        for _, batch in zip(range(12), loader, strict=False):
            states_SLD = features.unpack(batch)
            samples = [caches.read(positions[name]) for name in batch.sample_ids]
            assert torch.equal(states_SLD, torch.cat([caches.unpack(s) for s in samples]))
            names |= {sample.calibration for sample in samples}
    assert len(names) == 2


def test_caches_of_two_kinds_are_refused_naming_the_fields(
    tiny_build: MakeBuild, tiny_cache: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    build(tiny_build(other, layer_ids=(1, 2), max_length=128))
    with pytest.raises(CacheIncompatibleError) as refused:
        Caches([tiny_cache, other])
    for part in (
        f"target_layer_ids: [0, 2] in {tiny_cache}, [1, 2] in {other}",
        f"tokens.max_length: 256 in {tiny_cache}, 128 in {other}",
    ):
        assert part in str(refused.value)
    assert "dtype" not in str(refused.value)


def test_one_path_or_a_list_of_them(tiny_cache: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(tiny_cache, copy)
    assert configs.build(CacheConfig, {"path": "a"}).paths == (Path("a"),)
    assert configs.build(CacheConfig, {"path": ["a", "b"]}).paths == (Path("a"), Path("b"))
    for path in ([], ["a", "a"], ["a", ""]):
        with pytest.raises(ConfigError):
            configs.build(CacheConfig, {"path": path})
    split = split_samples(Caches([tiny_cache, copy]), CacheConfig(path=(tiny_cache, copy)))
    assert split.num_repeated == 48


def test_more_source_tags_than_an_index_tells_apart_are_refused(
    tiny_cache: Path, second: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index, "MAX_SOURCES", 2)
    Caches([tiny_cache])
    with pytest.raises(CacheError, match="3 source tags, an index can tell 2 apart"):
        Caches([tiny_cache, second])
