"""Free disk space: enough to begin, and a floor below which a build stops cleanly."""

import shutil
from pathlib import Path

from shared.errors import OutOfSpaceError
from shared.location import Location, S3Url
from shared.quantity import size


def free_bytes(path: Path) -> int:
    """Free space of the file system that holds `path`, or will."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def bytes_here(cache: Location, total: float, largest: float, num_writers: int = 1) -> float:
    """What a cache that grows by `total` bytes needs of this machine's disk.

    In a bucket it is the shards in progress only: at most `largest` bytes for each writer.
    """
    return min(total, largest * num_writers) if isinstance(cache, S3Url) else total


def require_floor(path: Path, floor_bytes: int) -> None:
    """Stop before the disk is full: what is committed stays whole and readable.

    Raises:
        OutOfSpaceError: less than `floor_bytes` are free.
    """
    if (free := free_bytes(path)) < floor_bytes:
        raise OutOfSpaceError(
            f"{path}: {size(free)} free, {size(floor_bytes)} must stay free "
            "(cache.min_free_gb). What is committed is kept: free some space and run the same "
            "command again."
        )


def require_fit(path: Path, needed_bytes: float, floor_bytes: int) -> None:
    """Refuse to begin what cannot fit.

    Raises:
        OutOfSpaceError: `needed_bytes` and the floor together exceed what is free.
    """
    free = free_bytes(path)
    if needed_bytes + floor_bytes > free:
        raise OutOfSpaceError(
            f"{path}: about {size(needed_bytes)} needed and {size(floor_bytes)} to "
            f"stay free (cache.min_free_gb), {size(free)} are free. Free some space, choose "
            "another disk, or a smaller codec.preset."
        )
