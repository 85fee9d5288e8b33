"""The file of a projection: what is read is what was written, or it is refused in a line."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor

from shared.codec import PRESETS
from shared.errors import CacheError, CacheIncompatibleError
from shared.projection import Projection, Provenance, read_provenance
from shared.spec import CaptureSpec, ProjectionSpec
from tests.test_shared.made import make_spec

KEY = "draftcache.projection"


def make_projection(rank: int = 12, **provenance: Any) -> Projection:
    """For two blocks of a target of 8 values."""
    generator = torch.Generator().manual_seed(0)
    made = Provenance(
        kind="pilot",
        is_orthonormal=True,
        target_name="made",
        config_sha256="1" * 64,
        weights_sha256="2" * 64,
        target_layer_ids=(0, 2),
        hidden_size=8,
        rank=rank,
        step=7,
        fingerprint="5" * 64,
        num_tokens=100,
    )
    return Projection(
        torch.randn(rank, 16, generator=generator),
        torch.randn(8, rank, generator=generator),
        torch.rand(16, generator=generator) + 0.5,
        replace(made, **provenance),
    )


def parts(projection: Projection) -> tuple[dict[str, Tensor], dict[str, Any]]:
    data = projection.to_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return load(data), json.loads(header["__metadata__"][KEY])


def test_what_is_read_is_what_was_written() -> None:
    projection = make_projection()
    data = projection.to_bytes()
    assert data == make_projection().to_bytes()
    again = Projection.from_bytes(data, "here")
    assert again.provenance == projection.provenance
    for name in ("matrix_RF", "start_DR", "channel_rms_F"):
        assert torch.equal(getattr(again, name), getattr(projection, name))
    header = data[8 : 8 + int.from_bytes(data[:8], "little")]
    assert read_provenance(header, "here") == projection.provenance


def test_it_is_applied_in_float32() -> None:
    projection = make_projection()
    states_TLD = (1e4 * torch.randn(70, 3, 8)).bfloat16()
    rows_TLR = projection.rows(states_TLD)
    assert rows_TLR.shape == (70, 2, 12)
    assert rows_TLR.dtype == torch.bfloat16
    exact_TR = states_TLD[:, :2].flatten(1).double() @ projection.matrix_RF.double().T
    assert torch.equal(rows_TLR[:, 0], projection.apply(states_TLD[:, :2].flatten(1)).bfloat16())
    largest = exact_TR.abs().max()
    assert (projection.apply(states_TLD[:, :2].flatten(1)) - exact_TR).abs().max() < 1e-6 * largest
    assert torch.equal(rows_TLR[:, 1, :8], states_TLD[:, 2])
    assert not rows_TLR[:, 1, 8:].any()
    assert projection.rows(states_TLD[:, :2]).shape == (70, 1, 12)


def test_many_tokens_are_widened_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    projection, features_TF = make_projection(), torch.randn(50, 16)
    whole_TR = projection.apply(features_TF)
    monkeypatch.setattr("shared.projection._APPLY_VALUES", 7 * 16)
    torch.testing.assert_close(projection.apply(features_TF), whole_TR)


def with_nan(name: str) -> Callable[[dict[str, Tensor], dict[str, Any]], None]:
    def change(tensors: dict[str, Tensor], fields: dict[str, Any]) -> None:
        tensors[name].view(-1)[3] = torch.nan

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (with_nan("matrix"), "'matrix' has values that are not finite"),
        (with_nan("start"), "'start' has values that are not finite"),
        (
            lambda tensors, fields: tensors.update(matrix=tensors["matrix"][:-1].clone()),
            r"'matrix' is float32 \[11, 16\], expected float32 \[12, 16\]",
        ),
        (
            lambda tensors, fields: tensors.update(start=tensors["start"].half()),
            r"'start' is float16 \[8, 12\], expected float32 \[8, 12\]",
        ),
        (lambda tensors, fields: tensors.pop("channel_rms"), "'channel_rms' is nothing"),
        (lambda tensors, fields: tensors.update(more=torch.ones(1)), "'more' is float32"),
        (lambda tensors, fields: tensors["channel_rms"].zero_(), "'channel_rms' must be positive"),
        (lambda tensors, fields: fields.update(format_version=2), "of format version 2"),
        (lambda tensors, fields: fields.update(kind="guess"), "not a projection"),
        (lambda tensors, fields: fields.pop("step"), "missing key 'step'"),
        (lambda tensors, fields: fields.update(more=1), "unknown key 'more'"),
    ],
)
def test_a_damaged_one_is_refused(change: Any, message: str) -> None:
    tensors, fields = parts(make_projection())
    change(tensors, fields)
    with pytest.raises(CacheError, match=message) as caught:
        Projection.from_bytes(save(tensors, {KEY: json.dumps(fields)}), "here")
    assert str(caught.value).startswith("here: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "data",
    [b"", b"no", b"\xff" * 64, save({"a": torch.ones(1)}), make_projection().to_bytes()[:-1]],
)
def test_anything_else_is_no_projection(data: bytes) -> None:
    with pytest.raises(CacheError, match="here: not a projection"):
        Projection.from_bytes(data, "here")


@pytest.mark.parametrize(
    ("provenance", "message"),
    [
        ({"weights_sha256": "9" * 64}, "weights_sha256: '2{64}' here, '9{64}' there"),
        ({"config_sha256": "9" * 64}, "config_sha256"),
        ({"target_layer_ids": (0, 3)}, r"target_layer_ids: \[0, 2\] here, \[0, 3\] there"),
        ({"hidden_size": 16}, "hidden_size: 8 here, 16 there"),
    ],
)
def test_other_states_are_refused(provenance: dict[str, Any], message: str) -> None:
    spec = make_spec(PRESETS["lossless"])
    make_projection().require_fit(spec.target, spec.target_layer_ids, "here")
    projection = make_projection()
    other = replace(projection, provenance=replace(projection.provenance, **provenance))
    with pytest.raises(CacheIncompatibleError, match=message) as caught:
        other.require_fit(spec.target, spec.target_layer_ids, "here")
    assert "there it is made" in str(caught.value)


def test_the_spec_says_what_is_stored() -> None:
    plain = make_spec(PRESETS["lossless"], last_hidden="post_norm")
    spec = replace(plain, projection=ProjectionSpec(sha256="6" * 64, rank=12))
    assert (spec.num_taps, spec.num_feature_rows, spec.num_captured) == (2, 1, 2)
    assert (spec.width, spec.num_features, spec.row_bytes_per_token) == (12, 12, 2 * 12 * 2)
    assert spec.raw_bytes_per_token == plain.raw_bytes_per_token == 3 * 8 * 2
    assert spec.layer_names == ("projection of blocks 0, 2", "last hidden state")
    assert [layer["layer_id"] for layer in spec.describe_layers()] == [None, None]
    assert spec.fingerprint != plain.fingerprint
    assert spec.unprojected() == plain
    assert CaptureSpec.from_dict(spec.to_dict(), "here") == spec
    other = replace(spec, projection=ProjectionSpec(sha256="7" * 64, rank=12))
    with pytest.raises(CacheIncompatibleError, match=r"capture\.projection: 'to 12 values by 7777"):
        other.require_equal(spec, "here")
    with pytest.raises(CacheIncompatibleError, match=r"capture\.projection: 'none' asked for"):
        plain.require_equal(spec, "here")


def test_a_spec_without_one_is_what_it_was() -> None:
    fields = make_spec(PRESETS["lossless"]).to_dict()
    assert "projection" not in fields
    with pytest.raises(CacheIncompatibleError, match="two fingerprints"):
        CaptureSpec.from_dict({**fields, "projection": None}, "here")
    for rank in (7, 17):
        projection = {"sha256": "6" * 64, "rank": rank}
        with pytest.raises(CacheIncompatibleError, match=rf"\[8, 16\], got {rank}"):
            CaptureSpec.from_dict({**fields, "projection": projection}, "here")
    with pytest.raises(CacheIncompatibleError, match="sha256 'x' is none"):
        CaptureSpec.from_dict({**fields, "projection": {"sha256": "x", "rank": 8}}, "here")
