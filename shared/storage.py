"""Where a cache lies: the few reads and writes that everything above needs.

Keys are paths inside the cache. What is put is whole or absent, and durable when the call returns.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from shared.errors import (
    CacheError,
    CacheLockedError,
    ShardCorruptError,
)
from shared.files import (
    json_bytes,
)
from shared.location import Location, S3Url

Bytes = npt.NDArray[np.uint8]


class OpenObject(Protocol):
    """One object, open for reading. Without a position: threads may read it at once."""

    def read_into(self, buffer: memoryview, start: int) -> None:
        """Fill `buffer` with the bytes from `start`.

        Raises:
            ShardCorruptError: it is missing, cannot be read or ends earlier.
        """

    def pieces(self, bounds: Sequence[int]) -> Iterator[Bytes]:
        """The bytes from each of `bounds` to the next, uint8, in order.

        A piece is the caller's until it asks for the next one. Raises ShardCorruptError, as
        `read_into`.
        """


class Storage(Protocol):
    """The files of one cache. `str()` is where they lie.

    Raises, all methods:
        CacheError: a key would leave the cache.
        StorageError: an object store cannot be reached, or refuses; or a disk refuses to be read,
            for want of rights, file numbers or memory. It says nothing about what is stored.
        DraftCacheError: a file cannot be written.
    """

    @property
    def location(self) -> Location: ...

    def exists(self, key: str) -> bool: ...

    def names(self, key: str | None) -> list[str]:
        """Sorted names directly under `key`, files and directories; None is the cache itself."""

    def sizes(self, key: str) -> dict[str, int]:
        """Bytes of every file under `key`, at any depth, by its path from there."""

    def read(self, key: str) -> bytes:
        """All bytes of `key`. Raises ShardCorruptError: it is missing or cannot be read."""

    def read_many(self, keys: Iterable[str]) -> list[bytes]:
        """All bytes of each key, as `read`; at the same time where that is faster."""

    def open(self, key: str) -> OpenObject:
        """`key`, open for reading until the last reference to it is dropped."""

    def read_range(self, key: str, start: int, size: int) -> bytes:
        """`size` bytes of `key` from `start`. Raises ShardCorruptError, as `read_into`."""

    def sha256(self, key: str) -> str:
        """Digest of `key`, read in pieces. Raises ShardCorruptError, as `read`."""

    def version(self, key: str) -> str | None:
        """What `put_over` compares; None where there is no such file."""

    def put(self, key: str, data: bytes) -> None:
        """Create or replace `key`."""

    def put_over(self, key: str, data: bytes, version: str | None) -> str:
        """Replace `key` if it has that version, or create it if that is None.

        Returns:
            The new version.

        Raises:
            CacheLockedError: it has another one: another writer was there in between.
        """

    def put_tree(self, directory: Path, key: str, look: Callable[[], None] = lambda: None) -> None:
        """Move the files of a finished `directory` of this machine under `key`; others there go.

        Args:
            look: called before whatever changes something there; what it raises ends it.
        """

    def delete(self, *keys: str) -> None:
        """Remove files, those that are there."""

    def delete_trees(self, *keys: str) -> None:
        """Remove everything under each key."""

    def remove_partials(self, *keys: str | None) -> None:
        """Remove what writers that were killed left of files right under each key."""


def open_storage(location: Location) -> Storage:
    """The files of the cache at `location`."""
    if isinstance(location, S3Url):
        from shared.object_storage import ObjectStorage

        return ObjectStorage(location)
    from shared.local_storage import LocalStorage

    return LocalStorage(location)


def put_json(storage: Storage, key: str, value: Any) -> None:
    """Create or replace `key` by `value` as JSON."""
    storage.put(key, json_bytes(value))


def check_key(where: object, key: str) -> tuple[str, ...]:
    """The parts of `key`.

    Raises:
        CacheError: it would leave the cache.
    """
    parts = PurePosixPath(key).parts
    if not parts or key.startswith("/") or ".." in parts or "\0" in key:
        raise CacheError(f"{where}: name {key!r} leaves the cache. The metadata is damaged.")
    return parts


def ends_early(where: str, size: int, start: int, found: int) -> ShardCorruptError:
    return ShardCorruptError(
        f"{where}: expected {size:,} bytes at {start:,}, found {found:,}. "
        "The file is truncated. Run `cache-builder repair`."
    )


def was_replaced(where: str) -> CacheLockedError:
    return CacheLockedError(
        f"{where}: another builder wrote it meanwhile. What is committed is kept: wait for it, "
        "then run the same command again."
    )
