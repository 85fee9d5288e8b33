"""Where a cache lies: the few reads that everything above needs."""

import os
from pathlib import Path, PurePosixPath

from shared.errors import CacheError, ShardCorruptError


class LocalStorage:
    """A cache in a directory of a local or shared file system."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def __str__(self) -> str:
        return str(self.root)

    def path(self, key: str) -> Path:
        """The file of `key`.

        Raises:
            CacheError: the key would leave the cache.
        """
        parts = PurePosixPath(key).parts
        if not parts or key.startswith("/") or ".." in parts:
            raise CacheError(
                f"{self.root}: name {key!r} leaves the cache. The metadata is damaged."
            )
        return self.root.joinpath(*parts)

    def exists(self, key: str) -> bool:
        return self.path(key).is_file()

    def names(self, key: str) -> list[str]:
        """Sorted names directly under `key`; none where there is no such directory."""
        directory = self.path(key)
        return sorted(entry.name for entry in directory.iterdir()) if directory.is_dir() else []

    def read(self, key: str) -> bytes:
        """All bytes of `key`.

        Raises:
            ShardCorruptError: it is missing or cannot be read.
        """
        try:
            return self.path(key).read_bytes()
        except OSError as error:
            raise ShardCorruptError(f"{self.root}/{key}: {_why(error)}") from error

    def open(self, key: str) -> "StoredObject":
        """`key`, open for reading until the last reference to it is dropped.

        Raises:
            ShardCorruptError: it is missing or cannot be read.
        """
        return StoredObject(self.path(key), f"{self.root}/{key}")

    def read_range(self, key: str, start: int, size: int) -> bytes:
        """`size` bytes of `key` from `start`.

        Raises:
            ShardCorruptError: it is missing, cannot be read or ends earlier.
        """
        data = bytearray(size)
        self.open(key).read_into(memoryview(data), start)
        return bytes(data)


class StoredObject:
    """One open file. Without a position: threads and forked processes may read it at once."""

    def __init__(self, path: Path, name: str) -> None:
        self._name = name
        self._descriptor = -1
        try:
            self._descriptor = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise ShardCorruptError(f"{name}: {_why(error)}") from error

    def __del__(self) -> None:
        # Not by a method: a thread may still read what another one has evicted from its cache,
        # and a number closed too early may already belong to another file.
        if self._descriptor >= 0:
            os.close(self._descriptor)

    def read_into(self, buffer: memoryview, start: int) -> None:
        """Fill `buffer` with the bytes from `start`.

        Raises:
            ShardCorruptError: it cannot be read or ends earlier.
        """
        done = 0
        try:
            while done < len(buffer) and (
                count := os.preadv(self._descriptor, [buffer[done:]], start + done)
            ):
                done += count
        except OSError as error:
            raise ShardCorruptError(f"{self._name}: {_why(error)}") from error
        if done != len(buffer):
            raise ShardCorruptError(
                f"{self._name}: expected {len(buffer):,} bytes at {start:,}, found {done:,}. "
                "The file is truncated. Run `cache-builder repair`."
            )


def _why(error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return "missing. Run `cache-builder repair`."
    return f"cannot be read ({error.strerror})."
