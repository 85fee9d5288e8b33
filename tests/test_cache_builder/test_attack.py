"""Whatever lies in a cache in the place of what should: one line of ours, and nothing is lost."""

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cache_builder.build import build
from cache_builder.config import BuildConfig, TargetConfig
from cache_builder.inspect import inspect_cache
from cache_builder.merge import merge
from cache_builder.prune import prune
from cache_builder.repair import repair
from cache_builder.verify import verify_cache
from shared.cache import Cache
from shared.errors import CacheError, DraftCacheError, ShardCorruptError, StorageError
from shared.layout import DESCRIPTION, PLANS, WIP, record_key
from shared.shard import GROUP
from tests.test_cache_builder.stored import Killer, assert_clean, contents, tree, without
from tests.test_shared.made import flip

pytestmark = pytest.mark.slow

MakeBuild = Callable[..., BuildConfig]


@pytest.fixture
def copy(tiny_cache: Path, tmp_path: Path) -> Path:
    path = tmp_path / "copy"
    shutil.copytree(tiny_cache, path)
    return path


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A directory with a file that no command may touch."""
    path = tmp_path / "elsewhere"
    path.mkdir()
    (path / "thesis.tex").write_text("x")
    return path


def _directory(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.mkdir(parents=True)


def _file(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    path.write_text("x")


def _loop(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(path.name)


@pytest.mark.parametrize(
    ("put", "name"),
    [
        pytest.param(_directory, "plans/0001/plan.json", id="directory-for-plan"),
        pytest.param(_loop, "plans/0001/plan.json", id="loop-for-plan"),
        pytest.param(_file, "plans/0001", id="file-for-plans-directory"),
        pytest.param(_file, "plans/0002", id="file-among-plans"),
        pytest.param(_file, "plans/0002.wip", id="file-for-unfinished-plan"),
        pytest.param(_directory, "workers.lock", id="directory-for-lock"),
        pytest.param(_loop, "workers.lock", id="loop-for-lock"),
        pytest.param(_file, "wip", id="file-for-wip"),
        pytest.param(_file, "wip/.nfs0001", id="file-in-wip"),
        pytest.param(_directory, "records/x.partial", id="directory-for-partial-file"),
        pytest.param(_directory, "records/0009-00000.json", id="directory-for-record"),
        pytest.param(_file, "shards.zarr/.DS_Store", id="file-among-shards"),
        pytest.param(_loop, "manifest.json", id="loop-for-manifest"),
        pytest.param(_loop, "retired.json", id="loop-for-journal"),
        pytest.param(_directory, "generations/0001.json", id="directory-for-generation"),
        pytest.param(_loop, "shards.zarr/0009-00000", id="loop-among-shards"),
    ],
)
def test_the_wrong_kind_of_file_is_no_traceback(
    copy: Path,
    tiny_cache: Path,
    tiny_build: MakeBuild,
    put: Callable[[Path], None],
    name: str,
    tmp_path: Path,
) -> None:
    put(copy / name)
    config = tiny_build(copy)
    absent = replace(config, target=TargetConfig(path=str(tmp_path / "absent")))
    for operation in (
        lambda: verify_cache(copy, deep=False),
        lambda: inspect_cache(copy),
        lambda: merge(copy, [tiny_cache]),
        lambda: repair(absent),
        lambda: build(config),
    ):
        with contextlib.suppress(DraftCacheError):
            operation()
    expected = contents(tiny_cache)
    with contextlib.suppress(CacheError):
        assert contents(copy) == expected


def test_links_in_the_workplace_go_and_what_they_lead_to_stays(
    copy: Path, tiny_cache: Path, elsewhere: Path
) -> None:
    for name in ("wip/0001-00000", f"{GROUP}/0009-00000", "plans/0007.wip"):
        (copy / name).symlink_to(elsewhere)
    merge(copy, [tiny_cache])
    assert [path.name for path in elsewhere.iterdir()] == ["thesis.tex"]
    assert_clean(copy)


def test_a_copy_without_the_empty_directories_is_whole(
    copy: Path, tiny_cache: Path, tiny_build: MakeBuild, tiny_data: Path, tmp_path: Path
) -> None:
    """`rsync -m` leaves them out, and so does anything that knows files only."""
    shutil.rmtree(copy / WIP)
    merge(copy, [tiny_cache])
    shutil.rmtree(copy / WIP)
    prune(tiny_build(copy, data=[without(tiny_data, range(1, 17), tmp_path / "less.jsonl")]))
    assert_clean(copy)


@pytest.mark.parametrize("name", ["x" * 300, "/".join(["y" * 200] * 25)], ids=["name", "path"])
def test_a_path_that_is_too_long_is_one_line(
    tiny_build: MakeBuild, tiny_cache: Path, tmp_path: Path, name: str
) -> None:
    path = tmp_path / name
    for operation in (
        Cache,
        inspect_cache,
        lambda path: verify_cache(path, deep=False),
        lambda path: merge(path, [tiny_cache]),
        lambda path: merge(tiny_cache, [path]),
        lambda path: repair(tiny_build(path)),
        lambda path: prune(tiny_build(path)),
        lambda path: build(tiny_build(path)),
    ):
        with pytest.raises(DraftCacheError, match="File name too long"):
            operation(path)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EMFILE])
def test_what_the_disk_refuses_is_not_called_damage(
    copy: Path, tiny_build: MakeBuild, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A repair would capture the shard again, and find the same."""
    victim = record_key(Cache(copy).shard_ids[1])
    before, read_bytes = tree(copy), Path.read_bytes

    def refuse(path: Path) -> bytes:
        if path == copy / victim:
            raise OSError(number, os.strerror(number))
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", refuse)
    for operation in (lambda: verify_cache(copy, deep=False), lambda: repair(tiny_build(copy))):
        with pytest.raises(StorageError, match=rf"{victim}.*{os.strerror(number)}.*permissions"):
            operation()
    monkeypatch.undo()
    assert tree(copy) == before


def test_a_shard_that_may_not_be_looked_into_is_not_called_missing(
    copy: Path, tiny_build: MakeBuild, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim = copy / GROUP / Cache(copy).shard_ids[1]
    before, scandir = tree(copy), os.scandir

    def refuse(path: Any) -> Any:
        if Path(path) == victim:
            raise PermissionError(errno.EACCES, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    for operation in (lambda: verify_cache(copy, deep=False), lambda: repair(tiny_build(copy))):
        with pytest.raises(StorageError, match=rf"{victim.name}: cannot be read \(Permission"):
            operation()
    monkeypatch.undo()
    assert tree(copy) == before


def test_a_cache_that_is_moved_while_it_is_read_is_said_to_be(copy: Path, tmp_path: Path) -> None:
    cache = Cache(copy)
    cache.read(0)
    copy.rename(tmp_path / "moved")
    with pytest.raises(ShardCorruptError, match="moved or deleted while it was read"):
        cache.read(len(cache.index) - 1)
    Cache(tmp_path / "moved").read(len(cache.index) - 1)


HOSTILE = [
    "../../x",
    "/etc/passwd",
    "a\0b",
    "x" * 300,
    "a/../../b",
    "",
    ".",
    "..",
    "a/b",
]


@pytest.mark.parametrize("name", HOSTILE)
def test_names_of_the_targets_files_stay_in_their_directory(
    copy: Path, tiny_build: MakeBuild, name: str
) -> None:
    """No reader takes them, and a repair writes the names of the target's own files."""
    before = tree(copy)
    fields = json.loads((copy / DESCRIPTION).read_text())
    fields["target_files"][name] = "0" * 64
    (copy / DESCRIPTION).write_text(json.dumps(fields))
    for operation in (Cache, inspect_cache):
        with pytest.raises(CacheError, match="'target_files': expected digests by file name"):
            operation(copy)
    assert repair(tiny_build(copy)) == []
    assert tree(copy) == before


@pytest.mark.parametrize("field", ["calibration", "head_sha256"])
@pytest.mark.parametrize("name", HOSTILE)
def test_what_should_be_a_digest_is_one(copy: Path, field: str, name: str) -> None:
    fields = json.loads((copy / DESCRIPTION).read_text())
    (copy / DESCRIPTION).write_text(json.dumps({**fields, field: name}))
    with pytest.raises(CacheError, match=f"field '{field}': expected a digest"):
        Cache(copy)
    (problem,) = verify_cache(copy, deep=False)
    assert problem.piece == "description"


@pytest.mark.parametrize("origin", [None, 5, [], {}, {"kind": "x"}, {"kind": 3, "same_as": False}])
def test_an_origin_that_cannot_be_is_refused(copy: Path, origin: Any) -> None:
    fields = json.loads((copy / DESCRIPTION).read_text())
    (copy / DESCRIPTION).write_text(json.dumps({**fields, "origin": origin}))
    with pytest.raises(CacheError, match="field 'origin'"):
        Cache(copy)


def test_a_repair_that_is_killed_goes_on_to_the_same_cache(
    copy: Path, tiny_build: MakeBuild, tiny_cache: Path, tmp_path: Path
) -> None:
    """Two shards are damaged, and the index is lost."""
    intact, damaged = tree(tiny_cache), tmp_path / "damaged"
    first, second = Cache(copy).shard_ids[1:3]
    flip(copy / GROUP / first / "token_ids/c/0", 3)
    (copy / record_key(second)).unlink()
    (copy / "generations/0001.index.safetensors").unlink()
    copy.rename(damaged)
    killer = Killer(repair, tmp_path)
    shutil.copytree(damaged, copy)
    total = killer.count(tiny_build(copy))
    assert tree(copy) == intact
    for part in (0.1, 0.3, 0.5, 0.7, 0.85, 0.95, 0.99):
        shutil.rmtree(copy)
        shutil.copytree(damaged, copy)
        assert killer.run(tiny_build(copy), kill_at=max(1, int(part * total))) == -9
        repair(tiny_build(copy))
        assert tree(copy) == intact
        assert_clean(copy)
    assert (copy / PLANS).is_dir()
