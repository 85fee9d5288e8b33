"""The held-out split depends on prompts alone; sources can be selected; nothing is lost."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cache_builder.build import build
from cache_builder.config import BuildConfig
from shared.errors import RunError
from tests.conftest import conversations, write_jsonl
from trainer.caches import Caches
from trainer.config import CacheConfig
from trainer.index import split_samples

MakeBuild = Callable[..., BuildConfig]


def test_every_usable_sample_is_on_one_side(tiny_cache: Path) -> None:
    cache = Caches([tiny_cache])
    split = split_samples(cache, CacheConfig(path=tiny_cache, heldout_fraction=0.3))
    assert sorted([*split.train, *split.heldout]) == list(range(len(cache.index)))
    assert 4 <= len(split.heldout) <= 26  # 48 samples at 0.3: 14 expected
    keys = cache.index.split_keys[split.heldout].tolist()  # which the first ones are, too
    assert keys == sorted(keys)


def test_nothing_is_held_out_at_zero(tiny_cache: Path) -> None:
    split = split_samples(Caches([tiny_cache]), CacheConfig(path=tiny_cache, heldout_fraction=0.0))
    assert len(split.heldout) == 0


def test_appended_data_move_no_sample_and_duplicated_prompts_stay_together(
    tiny_build: MakeBuild, tiny_data: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    build(tiny_build(cache))
    config = CacheConfig(path=cache, heldout_fraction=0.3)

    def sides() -> dict[str, bool]:
        opened = Caches([cache])
        split = split_samples(opened, config)
        index = opened.index
        return {index.sample_id(int(i)): True for i in split.heldout} | {
            index.sample_id(int(i)): False for i in split.train
        }

    before = sides()
    rows = conversations(range(48))
    for row in rows:  # the same prompts with other answers
        row["messages"][1]["content"] = "quite another answer"
    build(tiny_build(cache, data=[tiny_data, write_jsonl(tmp_path / "again.jsonl", rows)]))
    after = sides()
    assert len(after) == 96
    assert before.items() <= after.items()
    index = Caches([cache]).index
    by_prompt: dict[int, set[bool]] = {}
    for position in range(len(index)):
        key = int(index.split_keys[position])
        by_prompt.setdefault(key, set()).add(after[index.sample_id(position)])
    assert len(by_prompt) == 48
    assert all(len(side) == 1 for side in by_prompt.values())


def test_sources_can_be_selected_and_unknown_ones_are_refused(tiny_cache: Path) -> None:
    cache = Caches([tiny_cache])
    config = CacheConfig(path=tiny_cache, heldout_fraction=0.0, sources=("odd",))
    split = split_samples(cache, config)
    assert len(split.train) == 16
    assert split.num_other_sources == 32
    tags = {cache.sources[i] for i in cache.index.source[split.train]}
    assert tags == {"odd"}
    with pytest.raises(RunError, match=r"\['third'\].*even"):
        split_samples(cache, replace(config, sources=("odd", "third")))


def test_samples_can_be_left_out_by_id_and_unknown_ids_are_named(
    tiny_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = Caches([tiny_cache])
    whole = split_samples(cache, CacheConfig(path=tiny_cache, heldout_fraction=0.3))
    out = [int(whole.train[2]), int(whole.heldout[0]), int(whole.train[-1])]
    ids = tuple(cache.index.sample_id(position) for position in out)
    config = CacheConfig(path=tiny_cache, heldout_fraction=0.3, exclude=ids)
    split = split_samples(cache, config)
    assert split.num_excluded == 3
    assert split.train.tolist() == [n for n in whole.train.tolist() if n not in out]
    assert split.heldout.tolist() == [n for n in whole.heldout.tolist() if n not in out]
    assert caplog.text == ""
    assert split_samples(cache, replace(config, exclude=(*ids, "0" * 32))).num_excluded == 3
    assert f"1 of 4 samples are not in {tiny_cache}, the first of them {'0' * 32}" in caplog.text
    for wrong in ("abc", "x" * 32, ids[0].upper() + "0"):
        with pytest.raises(ValueError, match="exclude must name samples by 32 digits"):
            replace(config, exclude=(wrong,))


def test_samples_without_an_anchor_are_counted_not_trained(tiny_cache: Path) -> None:
    cache = Caches([tiny_cache])
    num_anchors = cache.index.num_anchors.copy()
    num_anchors[[3, 17]] = 0
    object.__setattr__(cache.index, "num_anchors", num_anchors)
    split = split_samples(cache, CacheConfig(path=tiny_cache, heldout_fraction=0.0))
    assert split.num_without_anchor == 2
    assert len(split.train) == 46
    assert not {3, 17} & set(split.train.tolist())


def test_only_held_out_samples_leave_nothing_to_train_on(tiny_cache: Path) -> None:
    cache = Caches([tiny_cache])
    index = cache.index
    object.__setattr__(index, "split_keys", np.zeros_like(index.split_keys))
    with pytest.raises(RunError, match="48 held out"):
        split_samples(cache, CacheConfig(path=tiny_cache, heldout_fraction=0.1))
