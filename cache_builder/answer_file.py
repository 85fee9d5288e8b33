"""The file that answers are collected in: JSON lines, only ever appended to."""

import json
import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from cache_builder.lock import try_lock
from shared.errors import DataError, DraftCacheError
from shared.files import writing

KEY = "prompt_key"
KEY_BYTES = 16
ORIGIN = ("generated_by", "sampling", "chat_template_kwargs", "rendered_by")
"""Fields that must be the same in every row of one file, or absent from all. `rendered_by` may be
absent all the same: versions before wrote none.
"""

logger = logging.getLogger(__name__)


class AnswerFile:
    """Rows by the key of their prompt. What is in the file when it is opened is kept."""

    def __init__(self, path: Path, origin: Mapping[str, Any]) -> None:
        """Open `path`, or create it. A last line that was cut by a kill is taken off.

        Args:
            origin: fields of `ORIGIN`.

        Raises:
            DataError: `path` holds something else, or rows of another origin, or another process
                writes it.
        """
        self.path = path
        self._keys: set[bytes] = set()
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab")
        try:
            if not try_lock(self._file.fileno(), path):  # before it is read: it may grow
                raise DataError(
                    f"{path}: another `cache-builder regenerate` writes it. Wait for it, stop it, "
                    "or give -o another file."
                )
            size = self._read(dict(origin))
            with writing(path):
                if path.stat().st_size > size:
                    logger.warning("%s: its last line was cut off and is made anew", path)
                    self._file.truncate(size)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> "AnswerFile":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            with writing(self.path):
                self._file.close()  # writes again what a full disk did not take
        except DraftCacheError:
            if error is None:
                raise

    def take(self, key: bytes) -> bool:
        """Whether the file held a row of `key` when it was opened. True only once: the key is
        forgotten then, so that memory does not hold it twice.
        """
        if key not in self._keys:
            return False
        self._keys.remove(key)
        return True

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add `rows` durably.

        Raises:
            OutOfSpaceError: the disk is full.
        """
        data = b"".join(map(_line, rows))
        if not data:
            return
        with writing(self.path):
            self._file.write(data)
            self._file.flush()
            os.fsync(self._file.fileno())

    def _read(self, origin: dict[str, Any]) -> int:
        """Take in the keys of the whole lines, and give the bytes these take."""
        size = 0
        with self.path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.endswith(b"\n"):
                    break
                try:
                    row = json.loads(line)
                    key = bytes.fromhex(row[KEY])
                except (ValueError, KeyError, TypeError, RecursionError):
                    raise DataError(
                        f"{self.path}:{number}: not a row that `cache-builder regenerate` wrote. "
                        "Give -o a file of its own."
                    ) from None
                found = {name: row[name] for name in ORIGIN if name in row}
                if "rendered_by" in origin:
                    found.setdefault("rendered_by", origin["rendered_by"])
                if found != origin:
                    raise DataError(
                        f"{self.path}:{number}: answered by {found}, and these answers would be "
                        f"by {origin}. Give -o another file, or restore the settings."
                    )
                self._keys.add(key)
                size += len(line)
        return size


def _line(row: Mapping[str, Any]) -> bytes:
    """One line of UTF-8. Half of a surrogate pair, which that cannot hold, stays a JSON escape."""
    text = json.dumps(row, ensure_ascii=False, separators=(",", ":"))
    return text.encode(errors="backslashreplace") + b"\n"
