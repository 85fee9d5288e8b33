"""A cache under a prefix of an S3 bucket, or of anything that speaks S3.

Endpoint, region and credentials come from the environment (`AWS_ENDPOINT_URL`, `AWS_REGION`,
`AWS_ACCESS_KEY_ID`, ...) or the machine's role. The server must compare and write in one step
(`If-None-Match: *` and `If-Match` on PUT): commit and publication rest on that.
"""

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise, repeat
from pathlib import Path
from typing import Any

from shared.bucket import Bucket
from shared.errors import ShardCorruptError, StorageError
from shared.files import remove_tree
from shared.location import S3Url
from shared.scratch import Scratch
from shared.storage import Bytes, check_key, ends_early, was_replaced

_PART_BYTES = 8 << 20
"""Of one request, so that none takes as long as the timeout."""

_THREADS = 8
"""Requests at once, where many files are read or written."""

_read = Scratch()
"""What a thread has read last."""


class ObjectStorage:
    """A cache under `s3://bucket/prefix`. Thread-safe."""

    def __init__(self, url: S3Url) -> None:
        """Connects with the first request only.

        Raises:
            StorageError: the extra `s3` is not installed, or the environment is unusable.
        """
        self.url = url
        self._bucket = Bucket(url)
        self._store = self._bucket.store

    def __str__(self) -> str:
        return str(self.url)

    @property
    def location(self) -> S3Url:
        return self.url

    def exists(self, key: str) -> bool:
        return self.version(key) is not None

    def names(self, key: str | None) -> list[str]:
        import obstore

        prefix = None if key is None else self._key(key)
        found = self._bucket.call(
            "list", key or "", lambda: obstore.list_with_delimiter(self._store, prefix=prefix)
        )
        paths = [*found["common_prefixes"], *(item["path"] for item in found["objects"])]
        return sorted({path.rstrip("/").rpartition("/")[2] for path in paths})

    def sizes(self, key: str) -> dict[str, int]:
        prefix = self._key(key)
        return {
            item["path"].removeprefix(f"{prefix}/"): int(item["size"]) for item in self._list(key)
        }

    def read(self, key: str) -> bytes:
        return b"".join(self._parts(key))

    def read_many(self, keys: Iterable[str]) -> list[bytes]:
        with ThreadPoolExecutor(_THREADS) as pool:
            return list(pool.map(self.read, keys))

    def open(self, key: str) -> "RemoteObject":
        self._key(key)
        return RemoteObject(self, key)

    def read_range(self, key: str, start: int, size: int) -> bytes:
        data = bytearray(size)
        self.open(key).read_into(memoryview(data), start)
        return bytes(data)

    def sha256(self, key: str) -> str:
        digest = hashlib.sha256()
        for part in self._parts(key):
            digest.update(part)
        return digest.hexdigest()

    def version(self, key: str) -> str | None:
        import obstore

        path = self._key(key)
        try:
            meta = self._bucket.call("head", key, lambda: obstore.head(self._store, path))
        except ShardCorruptError:
            return None
        if not (tag := meta["e_tag"]):
            raise StorageError(
                f"{self}/{key}: the server gives no ETag, which a commit needs. Use a store with "
                "conditional writes."
            )
        return str(tag)

    def put(self, key: str, data: bytes) -> None:
        import obstore

        path = self._key(key)
        self._bucket.call(
            "put", key, lambda: obstore.put(self._store, path, data, chunk_size=_PART_BYTES)
        )

    def put_over(self, key: str, data: bytes, version: str | None) -> str:
        import obstore
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        path = self._key(key)
        mode: Any = "create" if version is None else {"e_tag": version}
        # One request, however large: in parts, no condition would hold.
        store = self._bucket.store_for(len(data))
        try:
            done = self._bucket.call("put", key, lambda: obstore.put(store, path, data, mode=mode))
        except (AlreadyExistsError, PreconditionError):
            # The answer to an earlier try may have been lost on its way.
            with contextlib.suppress(ShardCorruptError):
                if self.read(key) == data and (version := self.version(key)) is not None:
                    return version
            raise was_replaced(f"{self}/{key}") from None
        return str(done["e_tag"])

    def put_file(self, file: Path, key: str, look: Callable[[], None] = lambda: None) -> None:
        """Create or replace `key` by a copy of a file of this machine, however large.

        Args:
            look: called before each part and before they become an object; what it raises ends it.
        """
        import obstore

        path = self._key(key)

        def put() -> None:
            look()
            is_small = file.stat().st_size <= _PART_BYTES
            data = file if is_small else _parts_of(file, look)
            obstore.put(self._store, path, data, chunk_size=_PART_BYTES)

        self._bucket.call("put", key, put)

    def put_tree(self, directory: Path, key: str, look: Callable[[], None] = lambda: None) -> None:
        files = [path for path in sorted(directory.rglob("*")) if path.is_file()]
        names = [path.relative_to(directory).as_posix() for path in files]
        # Over what is there, not after deleting it: another worker may have put it there.
        others = self.sizes(key).keys() - names
        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(self.put_file, files, [f"{key}/{name}" for name in names], repeat(look)))
        look()
        self.delete(*(f"{key}/{name}" for name in sorted(others)))
        remove_tree(directory)

    def delete(self, *keys: str) -> None:
        import obstore

        paths = [self._key(key) for key in keys]
        if paths:
            self._bucket.call("delete", keys[0], lambda: obstore.delete(self._store, paths))

    def delete_trees(self, *keys: str) -> None:
        import obstore

        if paths := [item["path"] for key in keys for item in self._list(key)]:
            self._bucket.call("delete", keys[0], lambda: obstore.delete(self._store, paths))

    def remove_partials(self, *keys: str | None) -> None:
        """Nothing to do: an object is there when it is whole."""

    def get_into(self, key: str, buffer: memoryview, start: int) -> None:
        """As `OpenObject.read_into`."""
        import obstore

        path = self._key(key)
        for begin in range(0, len(buffer), _PART_BYTES):
            part = buffer[begin : begin + _PART_BYTES]
            from_ = start + begin

            def get(from_: int = from_, size: int = len(part)) -> Any:
                return obstore.get_range(self._store, path, start=from_, length=size)

            data = memoryview(self._bucket.call("get", key, get, start=from_, size=len(part)))
            if len(data) != len(part):
                raise ends_early(f"{self}/{key}", len(buffer), start, begin + len(data))
            part[:] = data

    def _parts(self, key: str) -> Iterator[bytes]:
        """All bytes of `key` in pieces: in one request, where it is small."""
        import obstore

        path = self._key(key)

        def get() -> tuple[int, bytes | None]:
            found = obstore.get(self._store, path)
            size = int(found.meta["size"])
            return size, bytes(found.bytes()) if size <= _PART_BYTES else None

        size, data = self._bucket.call("get", key, get)
        if data is not None:
            yield data
            return
        for start in range(0, size, _PART_BYTES):
            yield self.read_range(key, start, min(_PART_BYTES, size - start))

    def _list(self, key: str) -> list[Any]:
        import obstore

        prefix = self._key(key)
        items: list[Any] = self._bucket.call(
            "list", key, lambda: list(obstore.list(self._store, prefix=prefix).collect())
        )
        return items

    def _key(self, key: str) -> str:
        return "/".join(check_key(self, key))


def _parts_of(file: Path, look: Callable[[], None]) -> Iterator[bytes]:
    with file.open("rb") as data:
        while part := data.read(_PART_BYTES):
            look()
            yield part
    look()


class RemoteObject:
    """One object by its key. Every read is a request of its own: whoever removes the object
    removes it for its readers, too."""

    def __init__(self, storage: ObjectStorage, key: str) -> None:
        self._storage = storage
        self._key = key

    def read_into(self, buffer: memoryview, start: int) -> None:
        self._storage.get_into(self._key, buffer, start)

    def pieces(self, bounds: Sequence[int]) -> Iterator[Bytes]:
        """All in one request: each takes longer than what it brings."""
        data = _read.array((bounds[-1] - bounds[0],))
        self.read_into(data.data, bounds[0])
        for from_, to in pairwise(bounds):
            yield data[from_ - bounds[0] : to - bounds[0]]
