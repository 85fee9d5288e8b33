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

    def read_range(self, key: str, start: int, size: int) -> bytes:
        """`size` bytes of `key` from `start`.

        Raises:
            ShardCorruptError: it is missing, cannot be read or ends earlier.
        """
        try:
            descriptor = os.open(self.path(key), os.O_RDONLY)
            try:
                data = os.pread(descriptor, size, start)
                while len(data) < size and (
                    more := os.pread(descriptor, size - len(data), start + len(data))
                ):
                    data += more
            finally:
                os.close(descriptor)
        except OSError as error:
            raise ShardCorruptError(f"{self.root}/{key}: {_why(error)}") from error
        if len(data) != size:
            raise ShardCorruptError(
                f"{self.root}/{key}: expected {size:,} bytes at {start:,}, found {len(data):,}. "
                "The file is truncated. Run `cache-builder repair`."
            )
        return data


def _why(error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return "missing. Run `cache-builder repair`."
    return f"cannot be read ({error.strerror})."
