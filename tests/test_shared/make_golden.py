"""Writes the golden caches named: `python -m tests.test_shared.make_golden small-2`.

They keep every released format version readable. They are never written again for a version that
was released; a new version gets directories of its own.
"""

import hashlib
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cache_builder.publication import publish
from shared.codec import Calibration, Codec, LevelCodec, LosslessCodec
from shared.files import sha256_bytes, write_bytes
from shared.layout import PROJECTION
from shared.projection import Projection, Provenance
from shared.shard import CapturedSample
from shared.spec import CaptureSpec, ProjectionSpec
from tests.test_shared.made import add_shard, create_cache, make_sample, make_spec

GOLDEN = Path(__file__).parent / "golden"

SHARDS = {
    "lossless-2": ((65, 3),),
    "levels-2": ((65, 3), (2,)),
    "small-2": ((65, 3),),
    "post-norm-2": ((65, 3),),
    "projected-2": ((65, 3),),
}
"""Lengths of the samples, by shard, of each golden cache. A second shard is a second generation."""

OUTLIERS = {(0, 0, 0): 0x46E3, (2, 1, 7): 0x7FC1, (2, 0, 3): 0xFF80}
"""Bit patterns by token, layer and channel of the longest sample: 29,056, a NaN and -infinity."""


CODECS: dict[str, Codec] = {
    "lossless-2": LosslessCodec(),
    "levels-2": LevelCodec(step=1 / 16),
    "small-2": LevelCodec(step=1 / 2, bits=4),
    "post-norm-2": LosslessCodec(),
    "projected-2": LosslessCodec(),
}


def golden_projection() -> Projection:
    """Of two blocks of 8 values to 8, in powers of two."""
    matrix = torch.arange(8 * 16).reshape(8, 16) / 16 - 4
    provenance = Provenance(
        kind="pilot",
        is_orthonormal=False,
        target_name="made",
        config_sha256="1" * 64,
        weights_sha256="2" * 64,
        target_layer_ids=(0, 2),
        hidden_size=8,
        rank=8,
        step=4,
        fingerprint="5" * 64,
        num_tokens=100,
    )
    return Projection(matrix, torch.eye(8), torch.full((16,), 0.5), provenance)


FIELDS: dict[str, dict[str, Any]] = {
    "post-norm-2": {"target_layer_ids": (2,), "last_hidden": "post_norm"},
    "projected-2": {
        "last_hidden": "post_norm",
        "projection": ProjectionSpec(sha256=sha256_bytes(golden_projection().to_bytes()), rank=8),
    },
}
"""Of the spec, where they are not those of `make_spec`."""


def golden_spec(name: str) -> CaptureSpec:
    return make_spec(CODECS[name], **FIELDS.get(name, {}))


def golden_calibration() -> Calibration:
    """Powers of two throughout, so that decoding is exact however it is computed."""
    mean = torch.arange(16).reshape(2, 8) / 4 - 2
    step = torch.tensor([[1 / 16], [1 / 8]]).expand(2, 8).contiguous()
    return Calibration(mean, step)


def golden_levels(num_tokens: int) -> Tensor:
    """int64 [T, 2, 8]: levels -31 to 31, a different pattern for each length."""
    t, layer, channel = (torch.arange(size) for size in (num_tokens, 2, 8))
    return (7 * t[:, None, None] + 11 * layer[:, None] + 5 * channel + num_tokens) % 63 - 31


def golden_states(num_tokens: int) -> Tensor:
    """bfloat16 [T, 2, 8]: what all golden caches hold, exactly."""
    calibration = golden_calibration()
    hidden = (calibration.mean_LD + calibration.step_LD * golden_levels(num_tokens)).bfloat16()
    if num_tokens == 65:
        for place, pattern in OUTLIERS.items():
            hidden.view(torch.int16)[place] = np.array(pattern, np.uint16).view(np.int16).item()
    return hidden


def golden_tokens(num_tokens: int) -> tuple[list[int], list[int]]:
    """Token ids and loss mask."""
    return [(3 * i) % 32 for i in range(num_tokens)], [int(i % 4 > 1) for i in range(num_tokens)]


def golden_sample(spec: CaptureSpec, num_tokens: int, source: int) -> CapturedSample:
    token_ids, loss_mask = golden_tokens(num_tokens)
    ids, mask = np.array(token_ids, "<i4").tobytes(), np.array(loss_mask, "u1").tobytes()
    identity = hashlib.sha256(b"draftcache.sample.1\0" + ids + mask).digest()[:16]
    prompt = np.array(token_ids[:2], "<i4").tobytes()
    split = hashlib.sha256(b"draftcache.split.1\0" + prompt).digest()[:8]
    sample = make_sample(
        spec,
        golden_states(num_tokens),
        token_ids=token_ids,
        loss_mask=loss_mask,
        source=source,
        calibration=golden_calibration(),
    )
    return CapturedSample(
        identity.hex(),
        int.from_bytes(split, "little"),
        source,
        sample.token_ids,
        sample.loss_mask,
        sample.packed,
    )


def write_golden(path: Path, name: str) -> None:
    spec = golden_spec(name)
    calibration = golden_calibration() if spec.build_codec().needs_calibration else None
    calibration_name = create_cache(path, spec, calibration)
    if spec.projection is not None:
        write_bytes(path / PROJECTION, golden_projection().to_bytes())
    for number, lengths in enumerate(SHARDS[name]):
        add_shard(
            path,
            spec,
            f"{number + 1:04d}-00000",
            [golden_sample(spec, length, source=i) for i, length in enumerate(lengths)],
            calibration=calibration_name,
            sources=("alpha", "beta"),
            quarantined={"ab" * 16: "states of block 2 are not finite"} if number else {},
        )
        publish(path, spec)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        shutil.rmtree(GOLDEN / name, ignore_errors=True)
        write_golden(GOLDEN / name, name)
