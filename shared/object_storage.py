"""A cache under a prefix of an S3 bucket, or of anything that speaks S3.

Endpoint, region and credentials come from the environment (`AWS_ENDPOINT_URL`, `AWS_REGION`,
`AWS_ACCESS_KEY_ID`, ...) or the machine's role. The server must compare and write in one step
(`If-None-Match: *` and `If-Match` on PUT): commit and publication rest on that.
"""

import contextlib
import hashlib
import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from shared.errors import ShardCorruptError, StorageError
from shared.files import remove_tree
from shared.location import S3Url
from shared.scratch import Scratch
from shared.storage import Bytes, check_key, ends_early, was_replaced

if TYPE_CHECKING:
    from obstore.store import S3Store

logger = logging.getLogger(__name__)

T = TypeVar("T")

_PAUSES = (0.5, 2.0, 8.0, 30.0)
"""Seconds before each new try of a request that met a fault of the network or the server. Each is
logged. A store that never answered is not asked again: its address is more likely wrong."""

_TIMEOUT_SECONDS = 60
_SLOWEST_BYTES_PER_SECOND = 1_000_000
"""Of a request that cannot be cut into parts: it may take longer by as much as it is larger."""

_CONNECT_TIMEOUT = "5s"
_PART_BYTES = 8 << 20
"""Of one request, so that none takes as long as the timeout."""

_THREADS = 8
"""Requests at once, where many files are read or written."""

_read = Scratch()
"""What a thread has read last."""

_TEMPORARY = re.compile(r"status code: (5\d\d|429|408)|HTTP error")
_CODE = re.compile(r"<Code>(\w+)</Code>")
_STATUS = re.compile(r"status code: (\d+[^:\n]*)")
_OS_MESSAGE = re.compile(r'message: "([^"]+)"|"(dns error)"|(operation timed out)')


class ObjectStorage:
    """A cache under `s3://bucket/prefix`. Thread-safe."""

    def __init__(self, url: S3Url) -> None:
        """Connects with the first request only.

        Raises:
            StorageError: the extra `s3` is not installed, or the environment is unusable.
        """
        self.url = url
        environment = tuple(sorted(i for i in os.environ.items() if i[0].startswith("AWS_")))
        self._place = url.bucket, url.prefix, environment
        self._store, self._seen = _connect(*self._place)

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
        found = self._call(
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
            meta = self._call("head", key, lambda: obstore.head(self._store, path))
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
        self._call("put", key, lambda: obstore.put(self._store, path, data, chunk_size=_PART_BYTES))

    def put_over(self, key: str, data: bytes, version: str | None) -> str:
        import obstore
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        path = self._key(key)
        mode: Any = "create" if version is None else {"e_tag": version}
        # One request, however large: in parts, no condition would hold.
        store, _ = _connect(*self._place, _timeout_for(len(data)))
        try:
            done = self._call("put", key, lambda: obstore.put(store, path, data, mode=mode))
        except (AlreadyExistsError, PreconditionError):
            # The answer to an earlier try may have been lost on its way.
            with contextlib.suppress(ShardCorruptError):
                if self.read(key) == data and (version := self.version(key)) is not None:
                    return version
            raise was_replaced(f"{self}/{key}") from None
        return str(done["e_tag"])

    def put_file(self, file: Path, key: str) -> None:
        """Create or replace `key` by a copy of a file of this machine, however large."""
        import obstore

        path = self._key(key)
        self._call("put", key, lambda: obstore.put(self._store, path, file, chunk_size=_PART_BYTES))

    def put_tree(self, directory: Path, key: str) -> None:
        files = [path for path in sorted(directory.rglob("*")) if path.is_file()]
        names = [path.relative_to(directory).as_posix() for path in files]
        # Over what is there, not after deleting it: another worker may have put it there.
        others = self.sizes(key).keys() - names
        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(self.put_file, files, [f"{key}/{name}" for name in names]))
        self.delete(*(f"{key}/{name}" for name in sorted(others)))
        remove_tree(directory)

    def delete(self, *keys: str) -> None:
        import obstore

        paths = [self._key(key) for key in keys]
        if paths:
            self._call("delete", keys[0], lambda: obstore.delete(self._store, paths))

    def delete_trees(self, *keys: str) -> None:
        import obstore

        if paths := [item["path"] for key in keys for item in self._list(key)]:
            self._call("delete", keys[0], lambda: obstore.delete(self._store, paths))

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

            data = memoryview(self._call("get", key, get, start=from_, size=len(part)))
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

        size, data = self._call("get", key, get)
        if data is not None:
            yield data
            return
        for start in range(0, size, _PART_BYTES):
            yield self.read_range(key, start, min(_PART_BYTES, size - start))

    def _list(self, key: str) -> list[Any]:
        import obstore

        prefix = self._key(key)
        items: list[Any] = self._call(
            "list", key, lambda: list(obstore.list(self._store, prefix=prefix).collect())
        )
        return items

    def _key(self, key: str) -> str:
        return "/".join(check_key(self, key))

    def _call(
        self, verb: str, key: str, request: Callable[[], T], *, start: int = 0, size: int = 0
    ) -> T:
        """Do one request; say what went wrong in our words.

        Raises:
            ShardCorruptError: there is no such object, or it ends before `start`.
            StorageError: anything else, but a condition that does not hold.
        """
        from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError

        where = f"{self}/{key}"
        for pause in (*_PAUSES, None):
            try:
                answer = request()
                self._seen.add("answer")
                return answer
            except FileNotFoundError as error:
                self._require_bucket(verb, str(error))
                self._seen.add("answer")
                raise ShardCorruptError(f"{where}: missing. Run `cache-builder repair`.") from None
            except (AlreadyExistsError, PreconditionError):
                raise
            except BaseError as error:
                text = str(error)
                if "InvalidRange" in text or "status code: 416" in text:
                    raise ends_early(where, size, start, 0) from None
                if pause is None or not (self._seen and _TEMPORARY.search(text)):
                    raise StorageError(
                        f"{where}: cannot {verb}: {_explain(text, self.url)}"
                    ) from None
                logger.warning(
                    "%s: %s failed (%s); tried again in %g s", where, verb, _reason(text), pause
                )
                time.sleep(pause)
        raise AssertionError  # the last turn returns or raises

    def _require_bucket(self, verb: str, text: str) -> None:
        """A missing bucket is no missing object. A HEAD does not say which it is."""
        import obstore
        from obstore.exceptions import BaseError

        if verb == "head" and not self._seen:
            try:
                next(iter(obstore.list(self._store, chunk_size=1)), None)
            except (BaseError, FileNotFoundError) as error:
                text = str(error)
        if "NoSuchBucket" in text:
            raise StorageError(f"{self}: {_explain(text, self.url)}") from None


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


@lru_cache(maxsize=16)
def _connect(
    bucket: str,
    prefix: str,
    environment: tuple[tuple[str, str], ...],
    timeout_seconds: int = _TIMEOUT_SECONDS,
) -> tuple["S3Store", set[str]]:
    """A store and what is known of it, shared by all storages of this process that are alike."""
    try:
        from obstore.exceptions import BaseError
        from obstore.store import S3Store
    except ImportError:
        raise StorageError(
            f"s3://{bucket}: caches in a bucket need obstore: pip install 'draftcache[s3]'."
        ) from None
    endpoint = dict(environment).get("AWS_ENDPOINT_URL", "")
    try:
        store = S3Store(
            bucket,
            prefix=prefix or None,
            client_options={
                "timeout": f"{timeout_seconds}s",
                "connect_timeout": _CONNECT_TIMEOUT,
                "allow_http": endpoint.startswith("http://"),
            },
            # Tried again here, and logged: obstore would do it without a word.
            retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=60)},
        )
    except (BaseError, ValueError) as error:
        raise StorageError(
            f"s3://{bucket}: the AWS_... variables of the environment are unusable "
            f"({_reason(str(error))})."
        ) from None
    return store, set()


def _timeout_for(size: int) -> int:
    """Seconds that a request of so many bytes may take: twice as many until it is enough, so that
    few stores are made."""
    seconds = _TIMEOUT_SECONDS
    while seconds * _SLOWEST_BYTES_PER_SECOND < size:
        seconds *= 2
    return seconds


def _reason(text: str) -> str:
    """What of an error of obstore, which has many lines, people should read."""
    parts = [
        match.group(1) or next((g for g in match.groups() if g), "")
        for pattern in (_STATUS, _CODE, _OS_MESSAGE)
        if (match := pattern.search(text))
    ]
    return ", ".join(part.strip() for part in parts) or text.splitlines()[0][:200]


def _explain(text: str, url: S3Url) -> str:
    reason = _reason(text)
    endpoint = os.environ.get("AWS_ENDPOINT_URL") or "AWS, as AWS_ENDPOINT_URL is not set"
    if "169.254.169.254" in text:
        return (
            "no credentials. Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (profiles and files "
            "of the AWS command line are not read)."
        )
    if "NoSuchBucket" in text:
        return f"no bucket {url.bucket!r} at {endpoint}. Create it, or correct the name."
    if "status code: 401" in text or "status code: 403" in text:
        return (
            f"access denied ({reason}). Look at AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, "
            "AWS_SESSION_TOKEN, AWS_REGION and the rights on the bucket."
        )
    if "status code: 301" in text or "status code: 400" in text:
        return f"refused ({reason}). Look at AWS_REGION and AWS_ENDPOINT_URL ({endpoint})."
    if "status code: 501" in text:
        return f"not supported ({reason}): the server must know conditional writes."
    return f"{reason}. Asked: {endpoint}. Look at AWS_ENDPOINT_URL and the network."
