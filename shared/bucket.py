"""The bucket of a cache, and requests to it: tried again where that helps, explained where not."""

import logging
import os
import re
import time
from collections.abc import Callable
from datetime import timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, TypeVar

from shared.errors import ShardCorruptError, StorageError
from shared.location import S3Url
from shared.storage import ends_early

if TYPE_CHECKING:
    from obstore.store import S3Store

logger = logging.getLogger(__name__)

T = TypeVar("T")

_PAUSES = (0.5, 2.0, 8.0, 30.0)
"""Seconds before each new try of a request that met a fault of the network or the server. Each is
logged. A store that cannot be reached and never answered is not asked again: its address is more
likely wrong."""

_TIMEOUT_SECONDS = 60
_SLOWEST_BYTES_PER_SECOND = 1_000_000
"""Of a request that cannot be cut into parts: it may take longer by as much as it is larger."""

_CONNECT_TIMEOUT = "5s"

_BUSY = re.compile(r"status code: (5\d\d|429|408)")
_UNREACHED = re.compile(r"HTTP error")
_CODE = re.compile(r"<Code>(\w+)</Code>")
_STATUS = re.compile(r"status code: (\d+[^:\n]*)")
_OS_MESSAGE = re.compile(r'message: "([^"]+)"|"(dns error)"|(operation timed out)')


class Bucket:
    """A connection to `s3://bucket/prefix`, as the environment says. Thread-safe.

    Attributes:
        store: of obstore, for the requests.
    """

    def __init__(self, url: S3Url) -> None:
        """Connects with the first request only.

        Raises:
            StorageError: the extra `s3` is not installed, or the environment is unusable.
        """
        self.url = url
        environment = tuple(sorted(i for i in os.environ.items() if i[0].startswith("AWS_")))
        self._place = url.bucket, url.prefix, environment
        self.store, self._seen = _connect(*self._place)

    def store_for(self, num_bytes: int) -> "S3Store":
        """One whose requests may take as long as it takes to send so many bytes."""
        return _connect(*self._place, _timeout_for(num_bytes))[0]

    def call(
        self, verb: str, key: str, request: Callable[[], T], *, start: int = 0, size: int = 0
    ) -> T:
        """Do one request; say what went wrong in our words.

        Raises:
            ShardCorruptError: there is no such object, or it ends before `start`.
            StorageError: anything else, but a condition that does not hold.
        """
        from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError

        where = f"{self.url}/{key}"
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
                if _BUSY.search(text):
                    self._seen.add("answer")
                is_temporary = self._seen and (_BUSY.search(text) or _UNREACHED.search(text))
                if pause is None or not is_temporary:
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
                next(iter(obstore.list(self.store, chunk_size=1)), None)
            except (BaseError, FileNotFoundError) as error:
                text = str(error)
        if "NoSuchBucket" in text:
            raise StorageError(f"{self.url}: {_explain(text, self.url)}") from None


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
