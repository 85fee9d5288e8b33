"""A page of facts about a cache."""

from typing import Any

import numpy as np

from shared import config as configs
from shared.cache import Cache
from shared.location import Location
from shared.quantity import count, size

_LENGTH_EDGES = (0, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 2**31)


def inspect_cache(path: Location) -> dict[str, Any]:
    """Facts for people and, as JSON, for programs. Reads metadata only.

    Raises:
        CacheError: there is no cache, or its metadata are damaged.
    """
    cache = Cache(path)
    spec, totals = cache.spec, cache.manifest.totals
    raw_bytes = totals.num_tokens * spec.raw_bytes_per_token
    counts, _ = np.histogram(cache.index.num_tokens, bins=np.array(_LENGTH_EDGES) + 0.5)
    sources = np.bincount(cache.index.source, minlength=len(cache.manifest.sources))
    return {
        "path": str(path),
        "fingerprint": spec.fingerprint,
        "generation": cache.manifest.generation,
        "num_shards": totals.num_shards,
        "num_samples": totals.num_samples,
        "num_tokens": totals.num_tokens,
        "num_supervised": totals.num_supervised,
        "num_without_anchor": int((cache.index.num_anchors == 0).sum()),
        "num_quarantined": totals.quarantined,
        "codec": cache.codec.to_dict(),
        "stored_bytes": totals.stored_bytes,
        "raw_bytes": raw_bytes,
        "stored_over_raw": totals.stored_bytes / raw_bytes if raw_bytes else None,
        "target_layer_ids": list(spec.target_layer_ids),
        "last_hidden": spec.last_hidden,
        "projection": _projection(cache),
        "hidden_size": spec.target.hidden_size,
        "vocab_size": spec.target.vocab_size,
        "target": cache.description.get("target_name"),
        "target_dtype": spec.target.dtype,
        "origin": cache.description.get("origin"),
        "max_length": spec.tokens.max_length,
        "lengths": {
            f"{low + 1}-{high}": int(count)
            for low, high, count in zip(_LENGTH_EDGES[:-1], _LENGTH_EDGES[1:], counts, strict=True)
            if count
        },
        "sources": {
            tag: int(count) for tag, count in zip(cache.manifest.sources, sources, strict=True)
        },
        "layers": _layers(cache),
    }


def _layers(cache: Cache) -> list[dict[str, Any]]:
    """Per captured layer over all shards: rms, largest value, relative error of the codec."""
    records = [cache.record(shard_id) for shard_id in cache.shard_ids]
    layers = []
    for number, layer in enumerate(cache.spec.describe_layers()):
        parts = [(r.num_tokens, r.layers[number]) for r in records if r.num_tokens]
        tokens = sum(count for count, _ in parts) or 1
        square = sum(count * part.rms**2 for count, part in parts) / tokens
        error = sum(count * (part.rms * part.relative_error) ** 2 for count, part in parts) / tokens
        layers.append(
            {
                **layer,
                "rms": square**0.5,
                "max_abs": max((part.max_abs for _, part in parts), default=0.0),
                "relative_error": (error / square) ** 0.5 if square else 0.0,
            }
        )
    return layers


def rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """`facts` as a table of names and values."""
    per_token = facts["stored_bytes"] / max(facts["num_tokens"], 1)
    ratio = facts["stored_over_raw"]
    table = [
        ("cache", facts["path"]),
        ("fingerprint", facts["fingerprint"][:16]),
        ("generation", str(facts["generation"])),
        ("shards", f"{facts['num_shards']:,}"),
        ("samples", f"{facts['num_samples']:,} ({facts['num_quarantined']} quarantined)"),
        ("tokens", f"{facts['num_tokens']:,} ({facts['num_supervised']:,} supervised)"),
        ("without anchor", count(facts["num_without_anchor"], "sample")),
        ("codec", ", ".join(f"{key} {value}" for key, value in facts["codec"].items())),
        (
            "stored",
            f"{size(facts['stored_bytes'])}, {per_token:,.0f} bytes per token"
            + ("" if ratio is None else f", {ratio:.3f} of bf16"),
        ),
        ("target", f"{facts['target']}, {facts['target_dtype']}"),
        *([("imported", _origin(facts["origin"]))] if facts["origin"] else []),
        ("blocks", f"{facts['target_layer_ids']} of hidden size {facts['hidden_size']}"),
        *([("projection", _projected(facts["projection"]))] if facts["projection"] else []),
        ("last hidden state", facts["last_hidden"]),
        ("lengths", ", ".join(f"{key}: {count}" for key, count in facts["lengths"].items())),
        ("sources", ", ".join(f"{tag}: {count}" for tag, count in facts["sources"].items())),
    ]
    for layer in facts["layers"]:
        table.append(
            (
                f"  {layer['name']}",
                f"rms {layer['rms']:.3g}, max {layer['max_abs']:.3g}, "
                f"codec error {100 * layer['relative_error']:.2f} %",
            )
        )
    return table


def _projection(cache: Cache) -> dict[str, Any] | None:
    """Digest of the projection and how it was made."""
    spec, made = cache.spec.projection, cache.projection_provenance()
    return None if spec is None else {"sha256": spec.sha256, **configs.to_dict(made)}


def _projected(projection: dict[str, Any]) -> str:
    made = "principal directions" if projection["kind"] == "principal" else "the fc of a pilot"
    if projection["step"] is not None:
        made += f" of {projection['step']:,} steps"
    rows = "orthogonal rows" if projection["is_orthonormal"] else "rows as they were"
    return f"to {projection['rank']:,} values by {made}, {rows}, {projection['sha256'][:16]}"


def _origin(origin: dict[str, Any]) -> str:
    declared = origin["declared"]
    text = (
        f"from {origin['kind']}, layer ids {declared.get('layer_ids')} counted as "
        f"{declared.get('layer_numbering')}"
    )
    if declared.get("left_out"):
        text += f", {declared['left_out']} ({declared.get('last_hidden')}) left out"
    return text + (", declared equal to a captured cache" if origin["same_as"] else "")
