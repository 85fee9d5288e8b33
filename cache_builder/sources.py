"""The files of a dataset and their rows."""

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shared.errors import DataError

SUFFIXES = (".jsonl", ".jsonl.gz")


def find_files(path: str) -> list[Path]:
    """The files that one source names: itself, what a glob matches, or a directory's *.jsonl.

    Raises:
        DataError: there is none, or one is not JSON lines by its name.
    """
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


def read_rows(file: Path) -> Iterator[tuple[int, Any]]:
    """Line number, from 1, and JSON value of every line that is not blank.

    Raises:
        DataError: a line is not JSON in UTF-8, or the file cannot be read.
    """
    number = 0
    try:
        with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield number, _parse(file, number, line)
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
