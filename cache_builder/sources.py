"""The files of a dataset and their rows."""

import gzip
import hashlib
import heapq
import io
import json
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from shared.errors import DataError
from shared.files import sha256_file

SUFFIXES = (".jsonl", ".jsonl.gz")
CHANGED = (
    "changed while it was read. Nothing was captured from it: wait until whatever writes the data "
    "is done, and run the same command again."
)
_BUFFER_BYTES = 2**20

HASHES = 2**64
"""Hashes of rows lie below it."""

NOT_CHOSEN = object()
"""Stands for a row that `weight` or `limit` leave out."""


def find_files(path: str) -> list[Path]:
    """The files that one source names: itself, what a glob matches, or a directory's *.jsonl.

    Raises:
        DataError: there is none, or one is not JSON lines by its name.
    """
    try:
        return _find_files(path)
    except OSError as error:
        raise DataError(f"{path}: cannot be looked at ({error.strerror}).") from error
    except (ValueError, NotImplementedError) as error:
        raise DataError(f"{path}: not a pattern ({error}).") from error


def _find_files(path: str) -> list[Path]:
    place = Path(path)
    if place.is_dir():
        files = [file for file in sorted(place.iterdir()) if file.name.endswith(SUFFIXES)]
        if not files:
            raise DataError(
                f"{path}: no *.jsonl or *.jsonl.gz in this directory. Name the files, or write "
                "the dataset as JSON lines, one conversation per line."
            )
        return files
    if place.exists():
        files = [place]
    elif any(sign in path for sign in "*?["):
        root = Path(place.anchor)
        matches = root.glob(str(place.relative_to(root) if place.is_absolute() else place))
        files = sorted(file for file in matches if file.is_file())
        if not files:
            raise DataError(f"{path}: the pattern matches no file. Check it, quoted, with `ls`.")
    else:
        raise DataError(f"{path}: no such file or directory. Relative paths start at {Path.cwd()}.")
    for file in files:
        if not file.name.endswith(SUFFIXES):
            raise DataError(
                f"{file}: expected a name ending in .jsonl or .jsonl.gz. Write the dataset as "
                "JSON lines, one conversation per line."
            )
    return files


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


def choose_below(files: Iterable[Path], *, weight: float, limit: int | None) -> int:
    """The bound below which the hash of a row must lie for the row to be taken.

    Depends on the contents of the rows only, not on their order or number: a row that is taken
    stays so while others are added, as long as `limit` is not reached.

    Args:
        weight: share of the rows.
        limit: rows at most; equal ones count once.
    """
    below = int(weight * HASHES)
    if limit is None:
        return below
    smallest: list[int] = []  # negated: the root of the heap is the largest
    held: set[int] = set()
    for file in files:
        for _, line in _read_lines(file):
            number = _row_hash(line)
            if number >= below or number in held:
                continue
            held.add(number)
            heapq.heappush(smallest, -number)
            if len(smallest) > limit:
                held.remove(below := -heapq.heappop(smallest))
    return below


def read_rows(
    file: Path, *, digest: str | None = None, below: int = HASHES
) -> Iterator[tuple[int, Any]]:
    """Line number, from 1, and JSON value of every line that is not blank.

    Args:
        digest: what the bytes read must hash to; compared when all are read.
        below: as `choose_below` gave it; rows that are not taken come as `NOT_CHOSEN`.

    Raises:
        DataError: a line is not JSON in UTF-8, the file cannot be read, or it has other bytes than
            `digest` says.
    """
    for number, line in _read_lines(file, digest):
        is_chosen = below >= HASHES or _row_hash(line) < below
        yield number, _parse(file, number, line) if is_chosen else NOT_CHOSEN


def count_rows(file: Path) -> int:
    """Lines that are not blank.

    Raises:
        DataError: the file cannot be read.
    """
    return sum(1 for _ in _read_lines(file))


def _row_hash(line: bytes) -> int:
    return int.from_bytes(hashlib.sha256(line.strip()).digest()[:8], "big")


def _read_lines(file: Path, digest: str | None = None) -> Iterator[tuple[int, bytes]]:
    number = 0
    try:
        with _Hashed(file) as raw, io.BufferedReader(raw, _BUFFER_BYTES) as data:
            with gzip.open(data) if file.suffix == ".gz" else data as lines:
                for number, line in enumerate(lines, 1):
                    if line.strip():
                        yield number, line
            if digest is not None and raw.digest.hexdigest() != digest:
                raise DataError(f"{file}: {CHANGED}")
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{file}: cannot be read after line {number} ({error}).") from error


def _parse(file: Path, number: int, line: bytes) -> Any:
    try:
        return json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
    except (ValueError, RecursionError) as error:
        hint = "Fix or delete the line."
        if number == 1 and line.lstrip().startswith(b"["):
            hint = "The file looks like one JSON array: write one object per line instead."
        raise DataError(
            f"{file}:{number}: expected one JSON object per line, found {error}. {hint}"
        ) from error
