"""The projection of a build: read, checked against the target, and put into the cache."""

from pathlib import Path

from cache_builder.config import BuildConfig
from shared.errors import DataError
from shared.files import sha256_bytes
from shared.layout import PROJECTION
from shared.location import Location
from shared.projection import Projection
from shared.spec import CaptureSpec, ProjectionSpec, TargetSpec
from shared.storage import open_storage


def describe_projection(
    config: BuildConfig, target: TargetSpec, layer_ids: tuple[int, ...]
) -> ProjectionSpec | None:
    """What `capture.projection` is, by its content; None where it is not set.

    Raises:
        DataError: it cannot be read.
        CacheError: it is no projection, or has values that are not finite.
        CacheIncompatibleError: it was made for another target or other blocks.
    """
    path = config.capture.projection
    if path is None:
        return None
    data, where = _read(path), f"capture.projection {path}"
    projection = Projection.from_bytes(data, where)
    projection.require_fit(target, layer_ids, where)
    return ProjectionSpec(sha256=sha256_bytes(data), rank=projection.provenance.rank)


def put_projection(cache: Location, path: Path | None, spec: CaptureSpec) -> None:
    """Put the file into the cache, from where workers and readers take it.

    Raises:
        DataError: it cannot be read, or was changed since `spec` was made.
    """
    if path is None or spec.projection is None:
        return
    data = _read(path)
    if (found := sha256_bytes(data)) != spec.projection.sha256:
        raise DataError(
            f"capture.projection {path}: expected sha256 {spec.projection.sha256[:16]}, found "
            f"{found[:16]}. It was changed meanwhile: leave it alone during a build."
        )
    open_storage(cache).put(PROJECTION, data)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(
            f"capture.projection {path}: cannot be read ({error.strerror}). Make it by "
            f"`trainer projection`; a cache that was built with it holds it as {PROJECTION}."
        ) from error
