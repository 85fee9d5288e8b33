"""Datasets of the Hugging Face hub, as files on this machine."""

import logging
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from shared.errors import DataError

logger = logging.getLogger(__name__)

_NAME = re.compile(
    r"(?P<name>[^:@]+)(@(?P<revision>[^:@]+))?((:(?P<subset>[^:@]+))?:(?P<split>[^:@]+))?"
)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_FORM = "hub:OWNER/NAME[@REVISION][:SUBSET][:SPLIT]"


@dataclass(frozen=True, slots=True)
class HubDataset:
    """One split of one commit."""

    name: str
    """`OWNER/NAME@COMMIT:SUBSET:SPLIT`. A directory in the hub's layout has no commit."""

    tag: str
    """The dataset's own name."""

    files: tuple[Path, ...]
    """In Arrow's stream format, in the order of the rows."""


@cache
def fetch_dataset(text: str) -> HubDataset:
    """Fetch a dataset into the cache of the package `datasets`, or find it there.

    Once per process: what the hub gets meanwhile does not come between two readings.

    Args:
        text: `OWNER/NAME[@REVISION][:SUBSET][:SPLIT]`. Without revision the newest commit. Instead
            of a name, a directory with the files of such a repository.

    Raises:
        DataError: the name is not of this form, the package is missing, the hub does not give it,
            or there are several subsets or splits and none is named.
    """
    match = _NAME.fullmatch(text)
    if match is None:
        raise DataError(f"hub:{text}: expected {_FORM}.")
    name, revision = match["name"], match["revision"]
    try:
        import datasets
    except ImportError:
        raise DataError(
            f"hub:{text}: reading from the hub needs the package `datasets`: "
            "pip install 'draftcache[datasets]'"
        ) from None
    is_local = Path(name).is_dir()
    if is_local and revision:
        raise DataError(f"hub:{text}: {name} is a directory, which has no revisions. Leave it out.")
    commit = None if is_local else _find_commit(name, revision)
    try:
        builder = datasets.load_dataset_builder(name, match["subset"], revision=commit)
        if commit is not None and builder.hash != commit:
            raise DataError(
                f"hub:{text}: the hub cannot be reached, and the local copy is of commit "
                f"{builder.hash[:12]}, not {commit[:12]}. Fetch that one where there is a network."
            )
        if is_local:  # what it made of a directory once, it would take for current for ever
            builder.download_and_prepare(
                download_mode="force_redownload", verification_mode="no_checks"
            )
        else:
            builder.download_and_prepare()
    except DataError:
        raise
    except Exception as error:  # of the hub's client, Arrow, and every reader of `datasets`
        raise DataError(
            f"hub:{text}: `datasets` cannot load it ({_one_line(error)}). Expected {_FORM}."
        ) from error
    split = _choose_split(text, match["split"], list(builder.info.splits or ()))
    return HubDataset(
        name=f"{name}@{commit}:{builder.config.name}:{split}"
        if commit
        else f"{name}:{builder.config.name}:{split}",
        tag=Path(name).name,
        files=_files(builder, split),
    )


def _find_commit(name: str, revision: str | None) -> str:
    """The commit that `revision` means now."""
    from huggingface_hub import HfApi

    try:
        commit: str | None = HfApi().dataset_info(name, revision=revision).sha
    except Exception as error:  # whatever its HTTP client raises without a network
        if revision is not None and _COMMIT.fullmatch(revision):
            logger.info("hub:%s: %s; looking for a local copy", name, _one_line(error))
            return revision
        raise DataError(
            f"hub:{name}: the hub does not give it ({_one_line(error)}). Check name and network; "
            "without a network name a commit that was fetched before: "
            f"hub:{name}@COMMIT, 40 hexadecimal digits."
        ) from error
    assert commit is not None, "the hub names a commit unless it is asked not to"
    logger.info("hub:%s is at commit %s", name, commit)
    return commit


def _choose_split(text: str, wanted: str | None, splits: list[str]) -> str:
    if wanted is None and len(splits) == 1:
        return splits[0]
    if wanted in splits:
        return str(wanted)
    raise DataError(
        f"hub:{text}: it has the splits {', '.join(map(repr, splits))}. Name one, as in "
        f"{_FORM}; for a part of one there are `weight` and `limit`."
    )


def _files(builder: Any, split: str) -> tuple[Path, ...]:
    rows = builder.as_dataset(split, in_memory=False)
    return tuple(Path(entry["filename"]) for entry in rows.cache_files)


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
