"""The files of a dataset: those that a source names, in the order in which they are read."""

import json
import logging
import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from shared.errors import DataError

logger = logging.getLogger(__name__)

SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet", ".arrow")
HUB = "hub:"

_SAVED = "state.json"
"""In a directory that `datasets` wrote by `save_to_disk`."""

_SAVED_SPLITS = "dataset_dict.json"
_MAX_NAMED = 8
_KINDS = ", ".join(f"*{suffix}" for suffix in SUFFIXES)


@dataclass(frozen=True, slots=True)
class DataFile:
    path: Path

    name: str
    """What messages and plans call it: the path, or where on the hub it comes from."""

    tag: str
    """Source of its samples where neither the configuration nor the row names one."""

    def __str__(self) -> str:
        return self.name


def find_files(path: str) -> list[DataFile]:
    """The files that one source names.

    Args:
        path: a file, a glob, a directory of data files, a directory that `datasets` saved, or a
            dataset of the hub: `hub:OWNER/NAME[@REVISION][:SUBSET][:SPLIT]`.

    Raises:
        DataError: there is none, or one is of no known kind by its name.
    """
    if path.startswith(HUB):
        from cache_builder.hub import fetch_dataset

        dataset = fetch_dataset(path.removeprefix(HUB))
        return [
            DataFile(file, f"{HUB}{dataset.name}/{file.name}", dataset.tag)
            for file in dataset.files
        ]
    try:
        return _find_files(path)
    except DataError:
        raise
    except OSError as error:
        raise DataError(f"{path}: cannot be looked at ({error.strerror}).") from error
    except (ValueError, NotImplementedError) as error:
        raise DataError(f"{path}: not a pattern ({error}).") from error


def _find_files(path: str) -> list[DataFile]:
    place = Path(path)
    if place.is_dir():
        return _in_directory(place)
    if place.exists():
        files = [place]
    elif any(sign in path for sign in "*?["):
        files = _matches(place)
        if not files:
            raise DataError(f"{path}: the pattern matches no file. Check it, quoted, with `ls`.")
    else:
        raise DataError(f"{path}: no such file or directory. Relative paths start at {Path.cwd()}.")
    for file in files:
        if not file.name.endswith(SUFFIXES):
            raise DataError(
                f"{file}: expected one of {_KINDS}. Write the dataset as JSON lines, one "
                "conversation per line, or as Parquet."
            )
    return [DataFile(file, str(file), file.name.partition(".")[0]) for file in files]


def _matches(place: Path) -> list[Path]:
    """The files of a pattern. `Path.glob` is silent about directories that it may not read."""
    root = Path(place.anchor)
    parts = place.relative_to(root).parts
    for length in range(1, len(parts)):
        for directory in root.glob(str(Path(*parts[:length]))):
            if directory.is_dir() and not os.access(directory, os.R_OK | os.X_OK):
                raise DataError(f"{directory}: cannot be read, and {place} may have files in it.")
    matches = sorted(root.glob(str(Path(*parts))))
    if lost := [match for match in matches if not match.exists()]:
        raise DataError(f"{lost[0]}: a link to {lost[0].readlink()}, which is not there.")
    return [match for match in matches if match.is_file()]


def _in_directory(place: Path) -> list[DataFile]:
    if (place / _SAVED_SPLITS).is_file():
        splits = sorted(file.parent.name for file in place.glob(f"*/{_SAVED}"))
        raise DataError(
            f"{place}: a saved dataset of {len(splits)} splits ({', '.join(splits)}). Name the "
            f"directory of one, {place / (splits or ['SPLIT'])[0]}, or several as several sources."
        )
    if (place / _SAVED).is_file():
        return [
            DataFile(file, str(file), place.resolve().name) for file in _saved_files(place / _SAVED)
        ]
    entries = sorted(place.iterdir())
    files = [file for file in entries if file.name.endswith(SUFFIXES)]
    if not files:
        raise DataError(
            f"{place}: expected one of {_KINDS} in this directory, found none. Name the files, "
            "or write the dataset as JSON lines, one conversation per line."
        )
    others = [
        f"{entry.name}/" if entry.is_dir() else entry.name
        for entry in entries
        if not entry.name.startswith(".") and not entry.name.endswith((*SUFFIXES, ".md"))
    ]
    if others:
        _warn_of_others(str(place), tuple(others))
    return [DataFile(file, str(file), file.name.partition(".")[0]) for file in files]


@lru_cache(maxsize=64)  # once: a directory is looked through by whoever hashes it and reads it
def _warn_of_others(place: str, names: tuple[str, ...]) -> None:
    more = ", ..." * (len(names) > _MAX_NAMED)
    logger.warning(
        "%s: %s passed over (%s): of a directory, data are the %s directly in it. Others are "
        "sources of their own.",
        place,
        "1 entry is" if len(names) == 1 else f"{len(names):,} entries are",
        ", ".join(names[:_MAX_NAMED]) + more,
        _KINDS,
    )


def _saved_files(state: Path) -> list[Path]:
    """Those that make up the dataset: what `datasets` caches beside them does not belong to it."""
    try:
        fields = json.loads(state.read_bytes())
        names = [entry["filename"] for entry in fields["_data_files"]]
        is_selection = bool(fields.get("_indices_data_files"))
        files = [state.parent / name for name in names]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise DataError(
            f"{state}: expected the state of a saved dataset ({error!r}). Save it again with "
            "`save_to_disk`."
        ) from error
    if is_selection:
        raise DataError(
            f"{state}: an old `datasets` saved a selection of rows as indices. Load the dataset "
            "and save it again with a newer one."
        )
    if missing := [file for file in files if not file.is_file()]:
        raise DataError(
            f"{missing[0]}: missing; {state.name} lists {len(files)} files of the saved dataset. "
            "Copy the directory again, whole."
        )
    return files
