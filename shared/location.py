"""Where a cache lies: a directory, or a prefix of an S3 bucket."""

import re
from dataclasses import dataclass, field
from pathlib import Path

from shared.errors import ConfigError

MAX_NAME_BYTES = 255
"""Of one name in a path: what the file systems of Linux allow."""

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_S3 = "s3://"
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,61}[A-Za-z0-9]")
_SEGMENT = re.compile(r"[A-Za-z0-9._=+-]+")


@dataclass(frozen=True, slots=True)
class S3Url:
    """`s3://bucket/prefix`. Endpoint and credentials are in the environment, never here."""

    bucket: str
    prefix: str = ""
    """Without slashes at its ends; empty for the bucket itself."""

    scratch: Path | None = field(default=None, compare=False)
    """Directory of this machine in which a builder works; None for the default."""

    @classmethod
    def parse(cls, text: str) -> "S3Url":
        """The URL in `text`.

        Raises:
            ConfigError: it is none, or has a part that a key of S3 should not have.
        """
        bucket, _, prefix = text.removeprefix(_S3).partition("/")
        if "@" in bucket:  # not repeated: it may be a secret
            raise ConfigError(
                "s3://...: credentials do not belong into a URL. Set AWS_ACCESS_KEY_ID and "
                "AWS_SECRET_ACCESS_KEY, and write s3://BUCKET/PREFIX."
            )
        prefix = prefix.rstrip("/")
        segments = prefix.split("/") if prefix else []
        if (
            not text.startswith(_S3)
            or not _BUCKET.fullmatch(bucket)
            or not all(_SEGMENT.fullmatch(part) and part.strip(".") for part in segments)
        ):
            raise ConfigError(
                f"{text}: expected s3://BUCKET/PREFIX, a bucket of 3 to 63 characters and a "
                "prefix of letters, digits and ._=+- between single slashes"
            )
        return cls(bucket, prefix)

    @property
    def name(self) -> str:
        """The last part, as `Path.name`."""
        return self.prefix.rpartition("/")[2] or self.bucket

    def __str__(self) -> str:
        return f"{_S3}{self.bucket}/{self.prefix}".rstrip("/")


Location = Path | S3Url
"""Where a cache lies."""


def parse_location(text: str) -> Location:
    """A directory or an S3 URL.

    Raises:
        ConfigError: a URL that is not one of S3, or a bad one.
    """
    if text.startswith(_S3):
        return S3Url.parse(text)
    return parse_path(text)


def parse_path(text: str) -> Path:
    """A path of this machine, `~` resolved.

    Raises:
        ConfigError: it is empty, or a URL.
    """
    if not text.strip():
        raise ConfigError("expected a path, got an empty text")
    if "\0" in text:
        raise ConfigError(f"expected a path without NUL, got {text[:MAX_NAME_BYTES]!r}")
    if max(len(name.encode(errors="replace")) for name in text.split("/")) > MAX_NAME_BYTES:
        raise ConfigError(f"expected names of at most {MAX_NAME_BYTES} bytes, got {text[:40]!r}...")
    if _SCHEME.match(text):
        raise ConfigError(
            f"{text.partition('://')[0]}://... is not a path. Only caches may lie elsewhere, at "
            "s3://BUCKET/PREFIX."
        )
    is_home = text == "~" or text.startswith("~/")
    return Path(text).expanduser() if is_home else Path(text)
