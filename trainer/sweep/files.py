"""The files of a sweep's cache, to show that no trial changes or copies them."""

from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from shared.location import Location

Listing: TypeAlias = dict[str, tuple[int, int]]
"""Size in bytes and time of the last change in ns, by path."""


def list_files(paths: Sequence[Location]) -> Listing:
    """All files below the directories of `paths`; of a bucket, none."""
    listing: Listing = {}
    for root in paths:
        if isinstance(root, Path):
            for path in root.rglob("*"):
                if path.is_file():
                    facts = path.stat()
                    listing[str(path)] = (facts.st_size, facts.st_mtime_ns)
    return listing


def num_changed(before: Listing, after: Listing) -> int:
    """Files that were added, removed or written between two listings."""
    return sum(before.get(path) != after.get(path) for path in before.keys() | after.keys())


def num_bytes(listing: Listing) -> int:
    return sum(size for size, _ in listing.values())
