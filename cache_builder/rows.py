"""The rows of a dataset's files, hashed so that what is read is what was planned."""

import gzip
import hashlib
import io
import json
import zlib
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from cache_builder.sources import DataFile
from cache_builder.tables import count_table_rows, is_table, read_table
from shared.errors import DataError
from shared.files import sha256_file

CHANGED = (
    "changed while it was read. Nothing was captured from it: wait until whatever writes the data "
    "is done, and run the same command again."
)
_BUFFER_BYTES = 2**20

HASHES = 2**64
"""Hashes of rows lie below it."""

_SPARE_HASHES = 2**16
"""Held beyond twice `limit` before the larger ones are let go."""

NOT_CHOSEN = object()
"""Stands for a row that `weight` or `limit` leave out."""


class _Hashed(io.RawIOBase):
    """A file that hashes what is read of it."""

    def __init__(self, file: Path) -> None:
        self._file = file.open("rb", buffering=0)
        self.digest = hashlib.sha256()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self._file.readinto(buffer) or 0
        self.digest.update(memoryview(buffer)[:count])
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


def digest_file(file: Path) -> str:
    """SHA-256 of a file of the dataset.

    Raises:
        DataError: it cannot be read.
    """
    try:
        return sha256_file(file)
    except OSError as error:
        raise DataError(f"{file}: cannot be read ({error}).") from error


def choose_below(files: Iterable[DataFile], *, weight: float, limit: int | None) -> int:
    """The bound below which the hash of a row must lie for the row to be taken.

    Depends on the contents of the rows only, not on their order or number: a row that is taken
    stays so while others are added, as long as `limit` is not reached.

    Args:
        weight: share of the rows.
        limit: rows at most; equal ones count once. Memory: 16 bytes each.
    """
    below = int(weight * HASHES)
    if limit is None:
        return below
    held = array("Q")

    def drop_larger(below: int) -> int:
        smallest = np.unique(np.frombuffer(held, np.uint64))[: limit + 1]
        held[:] = array("Q", smallest.tobytes())
        return held[limit] if len(held) > limit else below

    for file in files:
        for _, row in _read(file):
            if (number := _row_hash(row)) < below:
                held.append(number)
                if len(held) >= 2 * limit + _SPARE_HASHES:
                    below = drop_larger(below)
    return drop_larger(below)


def read_rows(
    file: DataFile, *, digest: str | None = None, below: int = HASHES
) -> Iterator[tuple[int, Any]]:
    """Number, from 1, and JSON value of every row. In a text file, lines that are blank count too.

    Args:
        digest: what the bytes of the file must hash to; compared when all are read.
        below: as `choose_below` gave it; rows that are not taken come as `NOT_CHOSEN`.

    Raises:
        DataError: a line is not JSON in UTF-8, the file cannot be read, or it has other bytes than
            `digest` says.
    """
    for number, row in _read(file, digest):
        if below < HASHES and _row_hash(row) >= below:
            yield number, NOT_CHOSEN
        else:
            yield number, _parse(file, number, row) if isinstance(row, bytes) else row


def count_rows(file: DataFile) -> int:
    """Rows of a file; in a text file, lines that are not blank.

    Raises:
        DataError: the file cannot be read.
    """
    if not is_table(file.path):
        return sum(1 for _ in _read_lines(file))
    try:
        return count_table_rows(file.path)
    except (OSError, ValueError) as error:
        raise _unreadable(file, 0, error) from error


def _row_hash(row: bytes | dict[str, Any]) -> int:
    if isinstance(row, bytes):
        text = row.strip()
    else:
        try:
            text = json.dumps(row, sort_keys=True, default=repr).encode()
        except TypeError:  # a map whose keys are dates or bytes
            text = repr(row).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big")


def _read(
    file: DataFile, digest: str | None = None
) -> Iterator[tuple[int, bytes] | tuple[int, dict[str, Any]]]:
    return _read_table(file, digest) if is_table(file.path) else _read_lines(file, digest)


def _read_table(file: DataFile, digest: str | None) -> Iterator[tuple[int, dict[str, Any]]]:
    """Rows of a table, which is not read from front to back: it is hashed again behind the last."""
    number = 0
    try:
        for number, row in enumerate(read_table(file.path), 1):
            yield number, row
    except DataError:
        raise
    except (OSError, ValueError, RecursionError) as error:  # the last of a column of JSON
        raise _unreadable(file, number, error) from error
    if digest is not None and digest_file(file.path) != digest:
        raise DataError(f"{file}: {CHANGED}")


def _read_lines(file: DataFile, digest: str | None = None) -> Iterator[tuple[int, bytes]]:
    number = 0
    try:
        with _Hashed(file.path) as raw, io.BufferedReader(raw, _BUFFER_BYTES) as data:
            with gzip.open(data) if file.path.suffix == ".gz" else data as lines:
                for number, line in enumerate(lines, 1):
                    if line.strip():
                        yield number, line
            if digest is not None and raw.digest.hexdigest() != digest:
                raise DataError(f"{file}: {CHANGED}")
    except (OSError, EOFError, zlib.error) as error:
        raise _unreadable(file, number, error) from error


def _unreadable(file: DataFile, number: int, error: Exception) -> DataError:
    found = " ".join(str(error).split())[:300]
    return DataError(f"{file}: cannot be read after row {number} ({found}).")


def _parse(file: DataFile, number: int, line: bytes) -> Any:
    try:
        return json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
    except (ValueError, RecursionError) as error:
        hint = "Fix or delete the line."
        if isinstance(error, UnicodeDecodeError):
            hint = "Write the file as UTF-8, for example by `iconv -f ENCODING -t UTF-8`."
        elif number == 1 and line.lstrip().startswith(b"["):
            hint = "The file looks like one JSON array: write one object per line instead."
        raise DataError(
            f"{file}:{number}: expected one JSON object per line, found {error}. {hint}"
        ) from error
