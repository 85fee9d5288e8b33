"""A cache in a directory of a local or shared file system."""

import errno
import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

from shared.errors import (
    DraftCacheError,
    ShardCorruptError,
    StorageError,
)
from shared.files import (
    commit_directory,
    remove_partials,
    remove_tree,
    sha256_bytes,
    sha256_file,
    sync_directory,
    write_bytes,
    writing,
)
from shared.scratch import Scratch
from shared.storage import Bytes, check_key, ends_early, was_replaced

_OCCUPIED = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)
"""What a directory cannot be renamed to answers: it is there already."""

_READ_BYTES = 1 << 20
"""What is read of a file at a time."""

_read = Scratch()
"""What a thread has read last of a file."""


class LocalStorage:
    """A cache in a directory of a local or shared file system."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def __str__(self) -> str:
        return str(self.root)

    @property
    def location(self) -> Path:
        return self.root

    def path(self, key: str) -> Path:
        """The file of `key`.

        Raises:
            CacheError: the key would leave the cache.
        """
        return self.root.joinpath(*check_key(self.root, key))

    def exists(self, key: str) -> bool:
        with _reading(f"{self.root}/{key}"):
            return self.path(key).is_file()

    def names(self, key: str | None) -> list[str]:
        directory = self.root if key is None else self.path(key)
        with _reading(str(directory)):
            return sorted(entry.name for entry in directory.iterdir()) if directory.is_dir() else []

    def sizes(self, key: str) -> dict[str, int]:
        directory, found = self.path(key), {}
        with _reading(str(directory)):
            for place, _, names in os.walk(directory, onerror=_raise_unless_absent):
                for path in (Path(place, name) for name in names):
                    if path.is_file():
                        found[path.relative_to(directory).as_posix()] = path.stat().st_size
        return dict(sorted(found.items()))

    def read(self, key: str) -> bytes:
        with _reading(f"{self.root}/{key}"):
            return self.path(key).read_bytes()

    def read_many(self, keys: Iterable[str]) -> list[bytes]:
        return [self.read(key) for key in keys]

    def open(self, key: str) -> "StoredObject":
        return StoredObject(self.path(key), f"{self.root}/{key}")

    def read_range(self, key: str, start: int, size: int) -> bytes:
        data = bytearray(size)
        self.open(key).read_into(memoryview(data), start)
        return bytes(data)

    def sha256(self, key: str) -> str:
        with _reading(f"{self.root}/{key}"):
            return sha256_file(self.path(key))

    def version(self, key: str) -> str | None:
        return sha256_bytes(self.read(key)) if self.exists(key) else None

    def put(self, key: str, data: bytes) -> None:
        write_bytes(self.path(key), data)

    def put_over(self, key: str, data: bytes, version: str | None) -> str:
        """As in `Storage`; that nobody writes in between, the builder's lock sees to."""
        if self.version(key) != version:
            raise was_replaced(f"{self.root}/{key}")
        self.put(key, data)
        return sha256_bytes(data)

    def put_tree(self, directory: Path, key: str, look: Callable[[], None] = lambda: None) -> None:
        target = self.path(key)
        look()
        with writing(target):
            try:
                commit_directory(directory, target)
            except OSError as error:
                # Not removed before: without `directory`, which another worker may have taken
                # away, what is there stays.
                if error.errno not in _OCCUPIED or not directory.is_dir():
                    raise
                remove_tree(target)
                commit_directory(directory, target)

    def delete(self, *keys: str) -> None:
        with writing(self.root):
            there = [path for path in map(self.path, keys) if os.path.lexists(path)]
            for path in there:
                path.unlink(missing_ok=True)
            _sync_parents(there)

    def delete_trees(self, *keys: str) -> None:
        with writing(self.root):
            there = [path for path in map(self.path, keys) if os.path.lexists(path)]
            for path in there:
                remove_tree(path)
            _sync_parents(there)

    def remove_partials(self, *keys: str | None) -> None:
        with writing(self.root):
            for key in keys:
                remove_partials(self.root if key is None else self.path(key))


class StoredObject:
    """One open file. Forked processes may read it at once, too."""

    _close = staticmethod(os.close)  # the module is gone when the last objects are

    def __init__(self, path: Path, name: str) -> None:
        self._name = name
        self._descriptor = -1
        with _reading(name):
            self._descriptor = os.open(path, os.O_RDONLY)

    def __del__(self) -> None:
        # Not by a method: a thread may still read what another one has evicted from its cache,
        # and a number closed too early may already belong to another file.
        if self._descriptor >= 0:
            self._close(self._descriptor)

    def read_into(self, buffer: memoryview, start: int) -> None:
        done = 0
        with _reading(self._name):
            while done < len(buffer) and (
                count := os.preadv(self._descriptor, [buffer[done:]], start + done)
            ):
                done += count
        if done != len(buffer):
            raise ends_early(self._name, len(buffer), start, done)

    def pieces(self, bounds: Sequence[int]) -> Iterator[Bytes]:
        """Some at a time, so that they are still in the processor's cache when they are decoded.

        The system is told of the others: it fetches them from the disk meanwhile.
        """
        last, size = len(bounds) - 1, bounds[-1] - bounds[0]
        if size > _READ_BYTES and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._descriptor, bounds[0], size, os.POSIX_FADV_WILLNEED)
        first = 0
        while first < last:
            base = bounds[first]
            end = max(bisect_right(bounds, base + _READ_BYTES) - 1, first + 1)
            data = _read.array((bounds[end] - base,))
            self.read_into(data.data, base)
            for from_, to in pairwise(bounds[first : end + 1]):
                yield data[from_ - base : to - base]
            first = end


def _sync_parents(paths: Iterable[Path]) -> None:
    for parent in sorted({path.parent for path in paths}):
        sync_directory(parent)


def _raise_unless_absent(error: OSError) -> None:
    """What is absent has no files; what may not be looked into is not absent."""
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error


_NOT_DAMAGE = (
    *(errno.EACCES, errno.EPERM),
    *(errno.EMFILE, errno.ENFILE, errno.ENOMEM),
    errno.ENAMETOOLONG,
)
"""Answers of a file system that say nothing about what is stored: a repair would capture it anew
for nothing."""


@contextmanager
def _reading(where: str) -> Iterator[None]:
    """Turn what the disk answers into an error that says what to do.

    Raises:
        ShardCorruptError: missing, or cannot be read.
        StorageError: one of `_NOT_DAMAGE`.
    """
    try:
        yield
    except DraftCacheError:
        raise
    except FileNotFoundError as error:
        raise ShardCorruptError(f"{where}: missing. Run `cache-builder repair`.") from error
    except OSError as error:
        reason = f"{where}: cannot be read ({os.strerror(error.errno or 0)})."
        if error.errno in _NOT_DAMAGE:
            raise StorageError(
                f"{reason} It is not said to be damaged: look at the path, its permissions and "
                "the limits of this process (ulimit -n)."
            ) from error
        raise ShardCorruptError(reason) from error
