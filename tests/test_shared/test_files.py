"""Files are whole or absent, durable, and say what to do when the disk refuses."""

import errno
import os
import resource
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.numpy import save_file

from shared.errors import CacheError, DraftCacheError, OutOfSpaceError
from shared.files import (
    canonical_json,
    commit_directory,
    listed,
    read_json,
    remove_partials,
    remove_tree,
    sha256_bytes,
    sha256_file,
    staging_directory,
    write_bytes,
    write_json,
    writing,
)


def fails_with(error: BaseException) -> Callable[..., NoReturn]:
    def fail(*_: object) -> NoReturn:
        raise error

    return fail


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_only_a_directory_that_is_not_there_is_listed_as_empty(tmp_path: Path) -> None:
    (tmp_path / "b").touch()
    (tmp_path / "a").symlink_to(tmp_path / "elsewhere")
    assert listed(tmp_path) == [tmp_path / "a", tmp_path / "b"]
    assert listed(tmp_path / "c") == []
    with pytest.raises(DraftCacheError, match=r"a: cannot be read .*elsewhere, which is not there"):
        listed(tmp_path / "a")
    with pytest.raises(DraftCacheError, match=r"b: cannot be read .*Not a directory"):
        listed(tmp_path / "b")


@pytest.mark.parametrize("step", ["fsync", "replace"])
@pytest.mark.parametrize("before", [pytest.param(None, id="new"), pytest.param(b"old", id="old")])
def test_an_interrupted_write_leaves_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, before: bytes | None
) -> None:
    path = tmp_path / "file"
    if before is not None:
        path.write_bytes(before)
    owner = os if step == "fsync" else Path
    monkeypatch.setattr(owner, step, fails_with(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        write_bytes(path, b"new")
    monkeypatch.undo()
    assert names(tmp_path) == ([] if before is None else ["file"])
    assert before is None or path.read_bytes() == before


def test_what_a_killed_write_left_behind_can_be_removed(tmp_path: Path) -> None:
    write_bytes(tmp_path / "kept", b"data")
    (tmp_path / "kept.123.partial").write_bytes(b"half")
    assert remove_partials(tmp_path) == 1
    assert names(tmp_path) == ["kept"]


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    write_bytes(tmp_path / "file", b"a longer text")
    write_bytes(tmp_path / "file", b"short")
    assert (tmp_path / "file").read_bytes() == b"short"
    assert names(tmp_path) == ["file"]


def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Paths in the order of their fsync; a rename appears as `rename`."""
    events: list[str] = []
    fsync, rename, replace = os.fsync, Path.rename, Path.replace

    def record_fsync(descriptor: int) -> None:
        events.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        fsync(descriptor)

    def record(move: Callable[[Path, Path], Path]) -> Callable[[Path, Path], Path]:
        def recorded(source: Path, target: Path) -> Path:
            events.append("rename")
            return move(source, target)

        return recorded

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(Path, "rename", record(rename))
    monkeypatch.setattr(Path, "replace", record(replace))
    return events


needs_proc = pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc")


def test_a_file_is_whole_when_it_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: sizes.append(os.fstat(descriptor).st_size))
    write_bytes(tmp_path / "file", bytes(100))
    assert sizes[0] == 100


@needs_proc
def test_a_file_is_synced_before_its_rename_and_its_name_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = synced(monkeypatch)
    write_bytes(tmp_path / "file", b"data")
    assert events == [f"{tmp_path}/file.{os.getpid()}.partial", "rename", str(tmp_path)]


@needs_proc
def test_a_directory_is_synced_with_all_it_holds_before_its_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = tmp_path / "wip" / "one", tmp_path / "done" / "one"
    (source / "sub").mkdir(parents=True)
    target.parent.mkdir()
    (source / "sub" / "a").write_bytes(b"a")
    (source / "b").write_bytes(b"b")
    events = synced(monkeypatch)
    commit_directory(source, target)
    middle = events.index("rename")
    assert set(events[:middle]) == {str(source / name) for name in (".", "b", "sub", "sub/a")}
    assert set(events[middle + 1 :]) == {str(target.parent), str(source.parent)}
    assert (target / "sub" / "a").read_bytes() == b"a"
    assert names(source.parent) == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT], ids=["disk", "quota"])
def test_a_full_disk_is_named_and_keeps_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    path = tmp_path / "file"
    write_bytes(path, b"old")
    monkeypatch.setattr(os, "fsync", fails_with(OSError(code, os.strerror(code))))
    with pytest.raises(OutOfSpaceError, match=r"file: no space left .*run the same command again"):
        write_bytes(path, b"new")
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["file"]


@pytest.mark.parametrize(
    "place",
    [
        pytest.param("file/below", id="below-a-file"),
        pytest.param("x" * 300, id="name-too-long"),
        pytest.param("directory", id="a-directory"),
    ],
)
def test_a_path_that_cannot_be_written_is_one_line(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "directory" / "full").mkdir(parents=True)
    with pytest.raises(DraftCacheError, match=r"cannot be written .*Choose another path"):
        write_bytes(tmp_path / place, b"data")


@pytest.mark.parametrize("code", [errno.EACCES, errno.EPERM, errno.EROFS])
def test_a_path_without_permission_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr(Path, "open", fails_with(OSError(code, os.strerror(code))))
    with pytest.raises(DraftCacheError, match=rf"cannot be written \({os.strerror(code)}\)"):
        write_bytes(tmp_path / "file", b"data")


def test_a_directory_where_a_file_lies_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DraftCacheError, match="cannot be written"), writing(tmp_path / "file"):
        (tmp_path / "file").mkdir(parents=True, exist_ok=True)


def test_any_other_answer_of_the_disk_is_one_line_with_its_cause(tmp_path: Path) -> None:
    answer = OSError(errno.EIO, os.strerror(errno.EIO))
    message = r"cannot be written \(Input/output"
    with pytest.raises(DraftCacheError, match=message) as caught, writing(tmp_path):
        raise answer
    assert caught.value.__cause__ is answer
    assert not isinstance(caught.value, OutOfSpaceError)


def test_an_error_of_ours_passes_unchanged(tmp_path: Path) -> None:
    ours = OutOfSpaceError("as it was")
    with pytest.raises(OutOfSpaceError) as caught, writing(tmp_path):
        raise ours
    assert caught.value is ours


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    # no lone surrogates: JSON readers disagree about them
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda children: st.lists(children) | st.dictionaries(st.text("ab"), children),
    max_leaves=12,
)


@settings(max_examples=40)
@given(value=json_values)
def test_written_json_reads_back(tmp_path_factory: pytest.TempPathFactory, value: object) -> None:
    path = tmp_path_factory.getbasetemp() / "value.json"
    write_json(path, value)
    assert read_json(path) == value


@pytest.mark.parametrize("write", [canonical_json, lambda v: write_json(Path("never"), v)])
def test_json_never_holds_nan(write: Callable[[object], object]) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        write({"loss": float("nan")})


def test_canonical_json_does_not_depend_on_the_order_of_keys() -> None:
    assert canonical_json({"b": 1, "a": [1.5, None, "é"]}) == rb'{"a":[1.5,null,"\u00e9"],"b":1}'
    assert canonical_json({"b": 1, "a": 2}) == canonical_json({"a": 2, "b": 1})


def test_reading_json_names_a_missing_and_a_broken_file_and_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "value.json"
    with pytest.raises(CacheError, match=r"value\.json: missing\. Look\.$"):
        read_json(path, remedy="Look.")
    path.write_bytes(b"{")
    with pytest.raises(CacheError, match=r"value\.json: not JSON \(.*\)\. Look\.$"):
        read_json(path, remedy="Look.")
    with pytest.raises(CacheError, match=r"The file is damaged\.$"):
        read_json(path)


def test_both_digests_agree_and_are_sha256(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    expected = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert sha256_file(tmp_path / "file") == sha256_bytes(b"abc") == expected


def test_removing_a_tree_that_is_not_there_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    remove_tree(tmp_path / "a")
    remove_tree(tmp_path / "a")
    assert names(tmp_path) == []


def test_two_that_make_one_directory_take_turns(tmp_path: Path) -> None:
    """The second waits, finds nothing of the first, and nothing is left in the end."""
    target, seen = tmp_path / "made", []

    def make() -> None:
        with staging_directory(target) as staging:
            assert not list(staging.iterdir())
            (staging / "half").mkdir()
            seen.append("begin")
            time.sleep(0.05)
            seen.append("end")

    (tmp_path / ".made.partial" / "left by a kill").mkdir(parents=True)
    threads = [threading.Thread(target=make) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == ["begin", "end"] * 4
    assert not list(tmp_path.iterdir())


def test_a_link_is_removed_and_not_what_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "kept")
    remove_tree(tmp_path / "link")
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_a_disk_that_safetensors_finds_full_is_one_line(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with (
            pytest.raises(DraftCacheError, match=r"tensors: cannot be written \(File too large"),
            writing(tmp_path / "tensors"),
        ):
            save_file({"a": np.zeros(10_000)}, tmp_path / "tensors")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    with pytest.raises(OutOfSpaceError, match="no space left"), writing(tmp_path):
        raise SafetensorError("I/O error: No space left on device (os error 28)")
