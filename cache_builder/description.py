"""`cache.json` and the skeleton of a cache: what it is a cache of, before anything is in it."""

import re
from pathlib import Path
from typing import Any

from cache_builder.config import BuildConfig
from cache_builder.projecting import describe_projection
from cache_builder.taps import default_layer_ids
from cache_builder.target_config import load_config
from cache_builder.target_files import describe_target, hub_revision
from cache_builder.template import ChatTemplate
from cache_builder.tokens import TOKENIZER_FILES, describe_tokens
from cache_builder.worker import Job, Prepared
from cache_builder.workspace import workspace
from shared.chunk import check_chunk_bytes
from shared.codec import PRESETS
from shared.errors import CacheError, DataError
from shared.files import sha256_bytes, writing
from shared.layout import (
    CALIBRATIONS,
    DESCRIPTION,
    FORMAT,
    GENERATIONS,
    HEAD,
    MANIFEST,
    PLANS,
    PROJECTION,
    RECORDS,
    TARGET,
    WIP,
)
from shared.location import Location, S3Url
from shared.metadata import read_description
from shared.shard import GROUP
from shared.spec import CaptureSpec
from shared.storage import open_storage, put_json

_TARGET_FILES = (
    "config.json",
    "generation_config.json",
    *TOKENIZER_FILES,
    "chat_template.jinja",
)
_DIRECTORIES = (PLANS, RECORDS, GENERATIONS, CALIBRATIONS, WIP, TARGET, GROUP)
_OWN_NAMES = {*_DIRECTORIES, "builder.lock", "workers.lock", HEAD, PROJECTION}
_OWN_PARTIAL = re.compile(
    rf"({'|'.join(map(re.escape, (DESCRIPTION, HEAD, PROJECTION)))})\.[0-9]+\.partial"
)
"""What a builder leaves that is killed while it writes one of these."""


def describe_capture(config: BuildConfig, target_path: Path, template: ChatTemplate) -> CaptureSpec:
    """Everything that decides what will be stored.

    Raises:
        TargetError: a tap is out of range.
        CacheError: `capture.projection` is none of this target and these blocks.
    """
    target = describe_target(target_path, config.target)
    layer_ids = config.capture.target_layer_ids or default_layer_ids(
        target.num_layers, config.capture.num_layers
    )
    codec = PRESETS[config.codec.preset]
    tokens = describe_tokens(target_path, config.data, template, load_config(target_path))
    try:
        spec = CaptureSpec(
            target=target,
            tokens=tokens,
            target_layer_ids=layer_ids,
            last_hidden=config.capture.last_hidden,
            projection=describe_projection(config, target, layer_ids),
            codec=codec.to_dict(),
        )
    except ValueError as error:
        raise DataError(f"capture: {error}") from None
    check_chunk_bytes(codec, spec.num_captured, spec.width)
    return spec


def open_or_create(path: Location, spec: CaptureSpec) -> Prepared | None:
    """Check the cache at `path` against `spec`; None if it must still be prepared.

    Raises:
        CacheError: `cache.json` is damaged, or was built with other settings.
        DataError: the directory has other files.
    """
    if open_storage(path).exists(DESCRIPTION):
        stored, prepared = read_prepared(path)
        create_directories(path)  # copies of a cache may lack the empty ones
        spec.require_equal(stored, str(path))
        return prepared
    foreign = [
        name
        for name in open_storage(path).names(None)
        if name not in _OWN_NAMES and not _OWN_PARTIAL.fullmatch(name)
    ]
    if MANIFEST in foreign:
        raise CacheError(
            f"{path}/{DESCRIPTION}: missing, though a cache was built here. Run `cache-builder "
            "repair` with its configuration."
        )
    if foreign:
        raise DataError(
            f"{path}: not a cache and not empty (it has {', '.join(sorted(foreign)[:8])}). "
            "Choose an empty directory."
        )
    create_directories(path)
    return None


def read_prepared(path: Location) -> tuple[CaptureSpec, Prepared]:
    """What a described cache is of, and what its first build prepared.

    Raises:
        CacheError: `cache.json` is missing or damaged.
    """
    description = read_description(open_storage(path))
    where = f"{path}/{DESCRIPTION}"
    spec = CaptureSpec.from_dict(description["spec"], where)
    calibration = description["calibration"]
    if spec.build_codec().needs_calibration != (calibration is not None):
        raise CacheError(
            f"{where}: field 'calibration' is {calibration!r}, which does not go with its codec "
            f"{spec.codec['name']!r}. The file is damaged."
        )
    return spec, Prepared(description["head_sha256"], calibration)


def create_directories(path: Location) -> None:
    """The skeleton of a cache; harmless if it is there."""
    place = workspace(path)
    with writing(place):
        for name in (PLANS, WIP) if isinstance(path, S3Url) else _DIRECTORIES:
            (place / name).mkdir(exist_ok=True)
    put_json(
        open_storage(path),
        f"{GROUP}/zarr.json",
        {"zarr_format": 3, "node_type": "group", "attributes": {"format": FORMAT}},
    )


def write_description(job: Job, prepared: Prepared, origin: dict[str, Any] | None = None) -> None:
    """Write `cache.json`: from now on this directory is a cache of this fingerprint.

    Args:
        origin: where imported states come from; None where they are captured here.
    """
    files = [name for name in _TARGET_FILES if (job.target_path / name).is_file()]
    digests = [copy_target_file(job.target_path, job.cache, name) for name in files]
    put_json(
        open_storage(job.cache),
        DESCRIPTION,
        {
            "format": FORMAT,
            "format_version": job.spec.format_version,
            "fingerprint": job.spec.fingerprint,
            "spec": job.spec.to_dict(),
            "head_sha256": prepared.head_sha256,
            "calibration": prepared.calibration,
            "target_name": job.target.path,
            "target_revision": hub_revision(job.target, job.target_path),
            "target_files": dict(zip(files, digests, strict=True)),
            **({} if origin is None else {"origin": origin}),
        },
    )


def copy_target_file(target_path: Path, cache: Location, name: str) -> str:
    """Copy one file of the target into the cache; returns its digest."""
    data = (target_path / name).read_bytes()
    open_storage(cache).put(f"{TARGET}/{name}", data)
    return sha256_bytes(data)
