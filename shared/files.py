"""Files that are whole or absent: atomic JSON, durable directories, digests."""

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from shared.errors import CacheError, DraftCacheError, OutOfSpaceError

_FULL = (errno.ENOSPC, errno.EDQUOT)


def canonical_json(value: Any) -> bytes:
    """The one byte string of `value`: sorted keys, no spaces, no NaN. What digests are taken of."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def sha256_bytes(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def sha256_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_directory(path: Path) -> None:
    """Make the names in `path` durable. Without it a rename may be lost with the power."""
    sync_file(path)


def write_bytes(path: Path, data: bytes) -> None:
    """Replace `path` in one step: a reader sees the old file or the new one."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    with writing(path):
        try:
            with partial.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
        except BaseException:
            with suppress(OSError):
                partial.unlink()  # a full disk needs the space back
            raise
        sync_directory(path.parent)


def json_bytes(value: Any) -> bytes:
    """`value` as JSON that people can read. What files hold."""
    return (json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n").encode()


def write_json(path: Path, value: Any) -> None:
    """Replace `path` by `value` as JSON in one step, readable by people."""
    write_bytes(path, json_bytes(value))


def read_json(path: Path, *, remedy: str = "") -> Any:
    """Parse `path`.

    Args:
        remedy: what to do where it is missing or damaged, for the message.

    Raises:
        CacheError: missing, or not JSON.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise CacheError(f"{path}: missing. {remedy}".rstrip()) from None
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise CacheError(f"{path}: cannot be read ({reason}). Look at what lies there.") from error
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CacheError(
            f"{path}: not JSON ({error}). {remedy or 'The file is damaged.'}"
        ) from None


def parse_json(data: bytes, where: str) -> Any:
    """Parse JSON, without NaN and infinities.

    Raises:
        CacheError: it is none.
    """
    try:
        return json.loads(data, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise CacheError(f"{where}: not JSON ({error}). The file is damaged.") from None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number")


def listed(directory: Path) -> list[Path]:
    """What lies in `directory`, in the order of names; nothing where there is none.

    `Path.glob` takes one that may not be read, or lies on a disk that is not there, for empty.

    Raises:
        DraftCacheError: it cannot be read, is no directory, or a link that leads nowhere.
    """
    try:
        return sorted(directory.iterdir())
    except FileNotFoundError:
        if not directory.is_symlink():
            return []
        reason = f"it leads to {directory.readlink()}, which is not there"
    except OSError as error:
        reason = os.strerror(error.errno or 0)
    raise DraftCacheError(f"{directory}: cannot be read ({reason}). Look at what lies there.")


def remove_partials(directory: Path) -> int:
    """Delete what `write_bytes` left behind in `directory` when its process was killed."""
    count = 0
    for partial in directory.glob("*.partial"):
        if not partial.is_dir():
            partial.unlink(missing_ok=True)
            count += 1
    return count


def commit_directory(source: Path, target: Path) -> None:
    """Move the finished directory `source` to `target`, durably: whole or absent."""
    for path in sorted(source.rglob("*")):
        sync_file(path)
    sync_file(source)
    source.rename(target)
    sync_directory(target.parent)
    if source.parent != target.parent:
        sync_directory(source.parent)


def remove_tree(path: Path) -> None:
    """Remove what lies at `path`, if anything does. A link goes; what it leads to stays."""
    with writing(path):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


@contextmanager
def staging_directory(target: Path) -> Iterator[Path]:
    """An empty directory beside `target`, in which one process at a time makes its next content.

    Who comes second waits. What a killed process left there is removed, and so is the directory
    when the block ends.

    Raises:
        DraftCacheError: it cannot be written.
    """
    target = target.absolute()
    staging = target.with_name(f".{target.name}.partial")
    with writing(staging):
        descriptor = _lock_directory(staging)
    try:
        for leftover in staging.iterdir():
            remove_tree(leftover)
        yield staging
    finally:
        remove_tree(staging)
        os.close(descriptor)


def _lock_directory(path: Path) -> int:
    """Make `path`, hold it alone, and return its open descriptor."""
    while True:
        path.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        except FileNotFoundError:
            pass  # whoever held it has removed it
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def replace_directory(source: Path, target: Path) -> None:
    """Move the finished directory `source` to `target`; what lay there goes, but not before.

    `source` lies in a staging directory of `target`. Killed between, that has both.
    """
    aside = source.with_name("replaced")
    is_there = target.exists()
    if is_there:
        target.rename(aside)
    try:
        commit_directory(source, target)
    except OSError:
        if is_there:
            aside.rename(target)
        raise


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn what the disk answers while writing `path` into an error that says what to do.

    Raises:
        OutOfSpaceError: the disk or the quota is full.
        DraftCacheError: the path cannot be written.
    """
    try:
        yield
    except DraftCacheError:
        raise
    except OSError as error:
        raise _refused(path, error.errno or 0, str(error)) from error
    except SafetensorError as error:  # what its writer makes of a full disk, too
        found = re.search(r"os error (\d+)", str(error))
        raise _refused(path, int(found[1]) if found else 0, str(error)) from error


def _refused(path: Path, number: int, text: str) -> DraftCacheError:
    """What the answer `number` of the disk means; `text` says it where there is no number."""
    if number in _FULL:
        return OutOfSpaceError(
            f"{path}: no space left on the disk. What is committed is kept: free some space "
            "and run the same command again."
        )
    return DraftCacheError(
        f"{path}: cannot be written ({os.strerror(number) if number else text}). "
        "Choose another path, or look at its permissions and its disk."
    )
