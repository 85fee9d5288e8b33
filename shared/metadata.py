"""Reading what describes a cache, each file checked before it is believed."""

import re
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from shared.codec import Calibration
from shared.errors import (
    CacheError,
    CacheIncompatibleError,
    CacheNotFoundError,
)
from shared.files import canonical_json, parse_json, sha256_bytes
from shared.index import SampleIndex
from shared.layout import (
    DESCRIPTION,
    FORMAT,
    MANIFEST,
    PROJECTION,
    calibration_key,
    generation_key,
)
from shared.manifest import Manifest, ShardRecord
from shared.projection import Projection
from shared.spec import FORMAT_VERSION, CaptureSpec
from shared.storage import Storage

_NONE = type(None)
_DIGEST = re.compile(r"[0-9a-f]{64}")
_TARGET_FILE = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")
_DESCRIPTION_FIELDS: dict[str, tuple[type, ...]] = {
    "spec": (dict,),
    "fingerprint": (str,),
    "head_sha256": (str,),
    "calibration": (str, _NONE),
    "target_name": (str,),
    "target_revision": (str, _NONE),
}


def calibration_to_bytes(calibration: Calibration) -> bytes:
    return bytes(
        save({"mean": calibration.mean_LD.contiguous(), "step": calibration.step_LD.contiguous()})
    )


def read_index(storage: Storage, manifest: Manifest) -> SampleIndex:
    """The index of a generation, checked against its manifest.

    Raises:
        CacheError: it is missing or damaged.
    """
    key = generation_key(manifest.generation, "index.safetensors")
    data = storage.read(key)
    require_digest(data, manifest.index.sha256, f"{storage}/{key}")
    index = SampleIndex.from_bytes(data, f"{storage}/{key}")
    if len(index) != manifest.totals.num_samples:
        raise CacheError(
            f"{storage}/{key}: {len(index):,} samples, the manifest counts "
            f"{manifest.totals.num_samples:,}."
        )
    index.require_within(len(manifest.records), len(manifest.sources), f"{storage}/{key}")
    return index


def require_layers(record: ShardRecord, spec: CaptureSpec, where: str) -> None:
    """Refuse a record whose statistics are not of the layers that `spec` has.

    Raises:
        CacheError: naming both counts.
    """
    if len(record.layers) != spec.num_captured:
        raise CacheError(
            f"{where}: statistics of {len(record.layers)} layers, expected {spec.num_captured}. "
            "The record is damaged."
        )


def read_projection(storage: Storage, spec: CaptureSpec) -> Projection | None:
    """The projection of a cache of `spec`; None where it has none.

    Raises:
        CacheError: missing, changed or of another target.
    """
    if spec.projection is None:
        return None
    data, where = storage.read(PROJECTION), f"{storage}/{PROJECTION}"
    require_digest(data, spec.projection.sha256, where)
    projection = Projection.from_bytes(data, where)
    projection.require_fit(spec.target, spec.target_layer_ids, where)
    return projection


def read_calibration(storage: Storage, name: str | None, spec: CaptureSpec) -> Calibration | None:
    """The quantiser's channels by the name that a record gives; None for a lossless codec.

    Raises:
        CacheError: missing, changed or of another shape.
    """
    if name is None:
        return None
    key = calibration_key(name)
    data = storage.read(key)
    require_digest(data, name, f"{storage}/{key}")
    try:
        tensors = load(data)
        mean_LD, step_LD = tensors["mean"], tensors["step"]
    except (SafetensorError, ValueError, KeyError) as error:
        raise CacheError(f"{storage}/{key}: not a calibration ({error}).") from None
    shape = (spec.num_captured, spec.width)
    for tensor in (mean_LD, step_LD):
        if tensor.shape != shape or tensor.dtype != torch.float32 or not tensor.isfinite().all():
            raise CacheError(f"{storage}/{key}: expected finite float32 tensors of shape {shape}.")
    if not (step_LD > 0).all():
        raise CacheError(f"{storage}/{key}: a step is not positive.")
    return Calibration(mean_LD, step_LD)


def read_description(storage: Storage) -> dict[str, Any]:
    """`cache.json`: its fields, checked by name, type and version.

    Raises:
        CacheNotFoundError: there is none.
        CacheIncompatibleError: another format or version.
        CacheError: a field is missing or of another type, or `spec` was changed.
    """
    if not storage.exists(DESCRIPTION):
        raise CacheNotFoundError(
            f"{storage}: no cache here ({DESCRIPTION} is missing). Build one with `make cache` or "
            "`cache-builder build`."
        )
    where = f"{storage}/{DESCRIPTION}"
    fields = parse_json(storage.read(DESCRIPTION), where)
    if not isinstance(fields, dict) or fields.get("format") != FORMAT:
        raise CacheIncompatibleError(f"{where}: not a {FORMAT} cache.")
    if (version := fields.get("format_version")) != FORMAT_VERSION:
        raise CacheIncompatibleError(
            f"{where}: format version {version!r}, this version reads {FORMAT_VERSION}. "
            "Use the version of draftcache that wrote the cache."
        )
    for name, kinds in _DESCRIPTION_FIELDS.items():
        if name not in fields or not isinstance(fields[name], kinds):
            expected = " or ".join("null" if kind is _NONE else kind.__name__ for kind in kinds)
            found = repr(fields[name])[:80] if name in fields else "nothing"
            raise CacheError(
                f"{where}: field {name!r}: expected {expected}, found {found}. The file is damaged."
            )
    for name in ("head_sha256", "calibration"):
        if fields[name] is not None and not _DIGEST.fullmatch(fields[name]):
            raise CacheError(
                f"{where}: field {name!r}: expected a digest, found {fields[name][:80]!r}. The "
                "file is damaged."
            )
    files = fields.setdefault("target_files", {})  # a cache of before has no digests of these
    if not isinstance(files, dict) or not all(
        _TARGET_FILE.fullmatch(name) and isinstance(digest, str) for name, digest in files.items()
    ):
        raise CacheError(
            f"{where}: field 'target_files': expected digests by file name. The file is damaged."
        )
    origin = fields.get("origin", {"kind": "", "declared": {}, "same_as": False})
    types = {"kind": str, "declared": dict, "same_as": bool}
    if not isinstance(origin, dict) or not all(
        isinstance(origin.get(name), kind) for name, kind in types.items()
    ):
        raise CacheError(
            f"{where}: field 'origin': expected {', '.join(types)}. The file is damaged."
        )
    found = sha256_bytes(canonical_json(fields["spec"]))
    if (stated := fields.get("fingerprint")) != found:
        raise CacheError(
            f"{where}: states fingerprint {str(stated)[:16]}, its 'spec' has {found[:16]}. It was "
            "changed or damaged after it was written. Run `cache-builder repair`."
        )
    return fields


def read_manifest(storage: Storage, generation: int | None = None) -> Manifest:
    """The newest manifest, or that of `generation`.

    Raises:
        CacheNotFoundError: nothing is published, or not that generation, or not any more.
    """
    key = MANIFEST if generation is None else generation_key(generation, "json")
    if not storage.exists(key):
        if generation is not None and 0 < generation < (
            newest := read_manifest(storage).generation
        ):
            raise CacheNotFoundError(
                f"{storage}: generation {generation} is gone: `cache-builder prune` removed shards "
                f"of it. The newest is {newest}: begin anew from that one (a run: --fresh)."
            )
        raise CacheNotFoundError(
            f"{storage}: {key} is missing: "
            + ("nothing is published yet. " if generation is None else "no such generation. ")
            + "Run `make cache` again: it resumes from the shards already there."
        )
    where = f"{storage}/{key}"
    manifest = Manifest.from_dict(parse_json(storage.read(key), where), where)
    if generation is not None and manifest.generation != generation:
        raise CacheError(f"{where}: it holds generation {manifest.generation}. It was replaced.")
    return manifest


def read_checked(storage: Storage, key: str, digest: str) -> Any:
    """JSON of `key` whose bytes must have `digest`."""
    data = storage.read(key)
    require_digest(data, digest, f"{storage}/{key}")
    return parse_json(data, f"{storage}/{key}")


def require_digest(data: bytes, digest: str, where: str) -> None:
    """Refuse bytes that are not those that were written.

    Raises:
        CacheError: naming `where` and both digests.
    """
    if (found := sha256_bytes(data)) != digest:
        raise CacheError(
            f"{where}: expected sha256 {digest[:16]}, found {found[:16]}. It was changed or "
            "damaged after it was written. Run `cache-builder verify`."
        )
