"""Where a builder works on this machine: the cache's own directory, or scratch beside a bucket."""

import hashlib
import os
from pathlib import Path

from shared.location import Location, S3Url


def workspace(cache: Location) -> Path:
    """The directory with the builder's plans, the shards in progress and its lock.

    A cache in a directory is that itself. For one in a bucket it is a directory of its own in
    `cache.scratch`, by default in the user's cache directory; what is in it can be deleted when no
    builder is at work.
    """
    return _scratch(cache) if isinstance(cache, S3Url) else cache


def _scratch(url: S3Url) -> Path:
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    place = f"{os.environ.get('AWS_ENDPOINT_URL', '')} {url}"
    digest = hashlib.sha256(place.encode()).hexdigest()
    return (url.scratch or home / "draftcache") / f"{url.bucket}-{url.name[:64]}-{digest[:12]}"
