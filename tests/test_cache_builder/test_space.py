"""Nobody finds out after days that the disk is too small, and a full disk loses nothing."""

import os
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cache_builder.build import build
from cache_builder.commit import committed_shards
from cache_builder.config import BuildConfig
from cache_builder.estimate import estimate, rows
from cache_builder.space import free_bytes, require_fit, require_floor
from shared.cache import Cache
from shared.errors import CacheIncompatibleError, DraftCacheError, OutOfSpaceError
from tests.conftest import conversations, write_jsonl

MakeBuild = Callable[..., BuildConfig]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 3 MB of its own."""
    path = tmp_path / "disk"
    path.mkdir()
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    command = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(path)]
    if subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("this machine does not let root mount a file system")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)  # a traceback may hold open files


@pytest.mark.parametrize("preset", ["lossless", "balanced"])
def test_the_estimate_is_close_to_what_is_built(
    tiny_build: MakeBuild, tmp_path: Path, preset: str
) -> None:
    config = tiny_build(tmp_path / "cache", preset=preset)
    facts = estimate(config)
    assert not (tmp_path / "cache").exists()
    assert not list(tmp_path.glob(".estimate-*"))
    totals = build(config).manifest.totals
    assert facts["num_tokens"] == totals.num_tokens
    assert facts["needed_bytes"] == pytest.approx(totals.stored_bytes, rel=0.15)
    assert facts["fits"]
    assert facts["hours"] > 0
    assert len(rows(facts)) == 7


def test_the_estimate_counts_new_samples_only(
    tiny_build: MakeBuild, tiny_cache: Path, tiny_data: Path, tmp_path: Path
) -> None:
    assert estimate(tiny_build(tiny_cache))["num_tokens"] == 0
    more = write_jsonl(tmp_path / "more.jsonl", conversations(range(50, 60)))
    facts = estimate(tiny_build(tiny_cache, data=[tiny_data, more]))
    assert facts["num_samples"] == 10
    assert facts["already_cached"] == 48


def test_the_estimate_refuses_what_the_build_would(tiny_build: MakeBuild, tiny_cache: Path) -> None:
    """Samples of a cache of other settings are none that the build has already."""
    with pytest.raises(CacheIncompatibleError, match="built with other settings"):
        estimate(tiny_build(tiny_cache, preset="small"))


def test_an_estimate_where_nothing_can_be_written_is_one_line(
    tiny_build: MakeBuild, small_disk: Path
) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(DraftCacheError, match=rf"{small_disk}: cannot be written \(Read-only"):
        estimate(tiny_build(small_disk / "cache"))


def test_an_estimate_says_what_it_is_at(
    tiny_build: MakeBuild, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """On a CPU it takes a minute and more."""
    caplog.set_level("INFO")
    facts = estimate(tiny_build(tmp_path / "cache"))
    line = f"capturing {facts['sampled_tokens']:,} tokens on cpu, to measure"
    assert line in caplog.messages


def test_what_cannot_fit_is_refused_with_the_numbers(tmp_path: Path) -> None:
    free = free_bytes(tmp_path / "not" / "there" / "yet")
    require_fit(tmp_path, free / 2, 0)
    with pytest.raises(OutOfSpaceError, match=r"B needed.*B are free"):
        require_fit(tmp_path, free * 2, 0)
    with pytest.raises(OutOfSpaceError, match=r"cache\.min_free_gb"):
        require_floor(tmp_path, free * 2)


def test_a_build_that_cannot_fit_does_not_begin(tiny_build: MakeBuild, tmp_path: Path) -> None:
    config = tiny_build(tmp_path / "cache")
    config = replace(config, cache=replace(config.cache, min_free_gb=1e6))
    with pytest.raises(OutOfSpaceError, match="needed"):
        build(config)
    assert not committed_shards(tmp_path / "cache")


def test_a_build_stops_at_the_floor_and_goes_on_when_there_is_space(
    tiny_build: MakeBuild, small_disk: Path, tmp_path: Path
) -> None:
    """Something else fills the disk while the build runs."""
    cache = small_disk / "cache"
    config = tiny_build(cache)
    config = replace(
        config,
        cache=replace(config.cache, min_free_gb=0.0005),
        plan=replace(config.plan, shard_mib=0.125),
    )
    other = small_disk / "other"

    from cache_builder import capture

    original = capture.commit_shard

    def commit_and_fill(path: Path, *rest: Any, **named: Any) -> Any:
        record = original(path, *rest, **named)
        if len(committed_shards(path)) == 3:
            other.write_bytes(b"\0" * (free_bytes(small_disk) - 300_000))
        return record

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capture, "commit_shard", commit_and_fill)
        with pytest.raises(OutOfSpaceError, match="must stay free"):
            build(config)
    assert len(committed_shards(cache)) == 3
    other.unlink()
    build(config)
    straight = build(replace(config, cache=replace(config.cache, path=tmp_path / "straight")))
    assert Cache(cache).manifest.records == straight.manifest.records


def test_a_disk_that_is_full_at_once_is_one_line(tiny_build: MakeBuild, small_disk: Path) -> None:
    config = tiny_build(small_disk / "cache", preset="lossless")
    (small_disk / "other").write_bytes(b"\0" * (free_bytes(small_disk) - 40_000))
    with pytest.raises(OutOfSpaceError):
        build(config)
