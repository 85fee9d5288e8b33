"""Small specs, states, shards and caches made without a target."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cache_builder.commit import commit_shard
from cache_builder.publication import publish
from shared.codec import PRESETS, Calibration, Codec
from shared.files import sha256_bytes, write_bytes, write_json
from shared.head import Head, Readout
from shared.layout import CALIBRATIONS, DESCRIPTION, FORMAT, GENERATIONS, HEAD, PLANS, RECORDS, WIP
from shared.local_storage import LocalStorage
from shared.manifest import LayerStatistics, Manifest, ShardRecord
from shared.metadata import calibration_to_bytes
from shared.shard import GROUP, CapturedSample, StoredSample
from shared.shard_reader import ShardReader
from shared.shard_writer import ShardWriter
from shared.spec import CaptureSpec, TargetSpec, TokenSpec

CODECS = list(PRESETS.values())
LENGTHS = (1, 63, 64, 65, 200)


def make_spec(codec: Codec, *, hidden_size: int = 8, **fields: Any) -> CaptureSpec:
    """Two of four blocks of a target that never was."""
    target = TargetSpec(
        config_sha256="1" * 64,
        weights_sha256="2" * 64,
        model_type="made",
        dtype="bfloat16",
        quantization=None,
        attention="sdpa",
        num_layers=4,
        hidden_size=hidden_size,
        vocab_size=32,
    )
    tokens = TokenSpec(
        tokenizer_sha256="3" * 64,
        template_sha256="4" * 64,
        template_arguments={"enable_thinking": False},
        max_length=256,
        truncation="cut",
        eos_token_ids=(2,),
        pad_token_id=0,
    )
    return CaptureSpec(
        **{"target": target, "tokens": tokens, "target_layer_ids": (0, 2)} | fields,
        codec=codec.to_dict(),
    )


def make_head(spec: CaptureSpec, *, tied: bool = False) -> Head:
    generator = torch.Generator().manual_seed(3)
    shape = (spec.target.vocab_size, spec.target.hidden_size)
    embedding, lm_head = torch.randn(2, *shape, generator=generator).bfloat16()
    readout = Readout(
        scale=0.5,
        soft_cap=30.0,
        norm_eps=1e-6 if spec.last_hidden == "pre_norm" else None,
        norm_offset=0.0,
    )
    return Head(
        embedding,
        embedding if tied else lm_head.clone(),
        torch.ones(shape[1]).bfloat16(),
        None if spec.last_hidden == "none" else readout,
    )


def make_states(spec: CaptureSpec, num_tokens: int, *, seed: int = 0) -> Tensor:
    """bfloat16 [T, L, D]: normal values, but for massive activations of the first token."""
    generator = torch.Generator().manual_seed(seed)
    shape = (num_tokens, spec.num_captured, spec.target.hidden_size)
    hidden_TLD = torch.randn(shape, generator=generator)
    hidden_TLD[0, :, 0] = 29_000.0
    return hidden_TLD.bfloat16()


def unit_calibration(spec: CaptureSpec) -> Calibration | None:
    """What `calibrate` would learn from normal values; None where the codec needs none."""
    shape = (spec.num_captured, spec.target.hidden_size)
    codec = spec.build_codec()
    if not codec.needs_calibration:
        return None
    return Calibration(torch.zeros(shape), torch.full(shape, codec.to_dict()["step"]))


def make_sample(
    spec: CaptureSpec,
    hidden_TLD: Tensor,
    *,
    token_ids: Sequence[int] | None = None,
    loss_mask: Sequence[int] | None = None,
    source: int = 0,
    calibration: Calibration | None = None,
) -> CapturedSample:
    """A sample with these states; its tokens follow from its length where none are given."""
    num = len(hidden_TLD)
    ids = np.array(np.arange(num) % 29 if token_ids is None else token_ids, np.int32)
    mask = np.array(np.arange(num) % 3 > 0 if loss_mask is None else loss_mask, np.uint8)
    digest = hashlib.sha256(hidden_TLD.view(torch.int16).numpy().tobytes()).digest()
    return CapturedSample(
        digest[:16].hex(),
        int.from_bytes(digest[16:24], "little"),
        source,
        ids,
        mask,
        spec.build_codec().pack(hidden_TLD, calibration or unit_calibration(spec)),
    )


def create_cache(
    path: Path, spec: CaptureSpec, calibration: Calibration | None = None
) -> str | None:
    """An empty cache; returns the name of its calibration."""
    calibration = calibration or unit_calibration(spec)
    for name in (PLANS, RECORDS, GENERATIONS, CALIBRATIONS, WIP, GROUP):
        (path / name).mkdir(parents=True, exist_ok=True)
    write_json(path / GROUP / "zarr.json", {"zarr_format": 3, "node_type": "group"})
    head = make_head(spec).to_bytes()
    write_bytes(path / HEAD, head)
    name = None
    if calibration is not None:
        data = calibration_to_bytes(calibration)
        name = sha256_bytes(data)
        write_bytes(path / CALIBRATIONS / f"{name}.safetensors", data)
    write_json(
        path / DESCRIPTION,
        {
            "format": FORMAT,
            "format_version": spec.format_version,
            "fingerprint": spec.fingerprint,
            "spec": spec.to_dict(),
            "head_sha256": sha256_bytes(head),
            "calibration": name,
            "target_name": "made",
            "target_revision": None,
        },
    )
    return name


def add_shard(
    path: Path,
    spec: CaptureSpec,
    shard_id: str,
    samples: Sequence[CapturedSample],
    *,
    calibration: str | None,
    sources: tuple[str, ...] = ("made",),
    quarantined: Mapping[str, str] | None = None,
) -> ShardRecord:
    """Write and commit one shard of the cache at `path`."""
    writer = ShardWriter(path / WIP / shard_id, spec, shard_id)
    for sample in samples:
        writer.add(sample)
    record = writer.finish(
        layers=(LayerStatistics(rms=1.0, max_abs=4.0, relative_error=0.0),) * spec.num_captured,
        sources=sources,
        calibration=calibration,
        quarantined=quarantined or {},
    )
    commit_shard(path, record)
    return record


def make_cache(path: Path, spec: CaptureSpec, shards: Sequence[Sequence[int]]) -> Manifest:
    """A published cache; `shards` gives the lengths of the samples of each shard."""
    name = create_cache(path, spec)
    for number, lengths in enumerate(shards):
        samples = [
            make_sample(spec, make_states(spec, length, seed=1000 * number + i))
            for i, length in enumerate(lengths)
        ]
        add_shard(path, spec, f"0001-{number:05d}", samples, calibration=name)
    return publish(path, spec)


def open_shard(path: Path, spec: CaptureSpec, record: ShardRecord) -> ShardReader:
    return ShardReader(LocalStorage(path), record, spec)


def unpack(spec: CaptureSpec, sample: StoredSample) -> Tensor:
    return spec.build_codec().unpack(sample.packed, unit_calibration(spec))


def bits(hidden: Tensor) -> np.ndarray:
    """Bit patterns of bfloat16 values: what equality of states is judged by."""
    return hidden.contiguous().view(torch.int16).numpy()


def flip(path: Path, offset: int, mask: int = 0x01) -> None:
    """Flip bits of one byte; a negative `offset` counts from the end."""
    data = bytearray(path.read_bytes())
    data[offset] ^= mask
    path.write_bytes(data)
