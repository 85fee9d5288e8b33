"""The frozen tensors of the target: exact to the bit, and whole or refused."""

import json
import math
from collections.abc import Callable
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from shared.codec import LosslessCodec
from shared.errors import CacheError, DraftCacheError
from shared.head import Head, Readout
from shared.spec import CaptureSpec
from tests.test_shared.made import bits, make_head, make_spec
from tests.test_shared.mutate import json_values, safetensors, safetensors_files

SPEC = make_spec(LosslessCodec())
SHAPE = (SPEC.target.vocab_size, SPEC.target.hidden_size)

TENSORS = ("embedding_VD", "lm_head_VD", "final_norm_D")
POST = replace(SPEC, last_hidden="post_norm")
PRE = replace(SPEC, last_hidden="pre_norm")

Tensors = dict[str, torch.Tensor]


def tensors() -> Tensors:
    head = make_head(SPEC)
    return {
        "embedding": head.embedding_VD,
        "lm_head": head.lm_head_VD,
        "final_norm": head.final_norm_D,
    }


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_head_comes_back_to_the_bit(tied: bool) -> None:
    head = make_head(SPEC, tied=tied)
    head.embedding_VD.view(torch.int16)[0, :3] = torch.tensor([0x7FC1, 0x7F80, -0x8000])
    data = head.to_bytes()
    found = Head.from_bytes(data, SPEC, "here")
    assert found.is_tied is tied
    for name in TENSORS:
        assert np.array_equal(bits(getattr(found, name)), bits(getattr(head, name)))
    assert found.readout is None
    assert found.to_bytes() == data


def test_a_tied_head_is_stored_once() -> None:
    saved = len(make_head(SPEC).to_bytes()) - len(make_head(SPEC, tied=True).to_bytes())
    assert saved >= 2 * SHAPE[0] * SHAPE[1]


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_moving_a_head_keeps_it_tied_or_not(tied: bool) -> None:
    moved = make_head(SPEC, tied=tied).to("cpu", torch.float32)
    assert moved.is_tied is tied
    assert {getattr(moved, name).dtype for name in TENSORS} == {torch.float32}


def without(name: str) -> Callable[[Tensors], Tensors]:
    return lambda t: {key: value for key, value in t.items() if key != name}


def with_(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Tensors]:
    return lambda t: t | {name: change(t.get(name, torch.zeros(SHAPE).bfloat16())).contiguous()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(without("embedding"), "tensor 'embedding' is missing", id="no-embedding"),
        pytest.param(without("final_norm"), "tensor 'final_norm' is missing", id="no-norm"),
        pytest.param(without("lm_head"), "it says tied = 'false', its tensors", id="no-lm-head"),
        pytest.param(
            with_("lm_head", lambda t: t[:-1]),
            "'lm_head' has shape [31, 8], expected [32, 8]",
            id="row-less",
        ),
        pytest.param(
            with_("embedding", lambda t: t.T), "shape [8, 32], expected [32, 8]", id="transposed"
        ),
        pytest.param(
            with_("final_norm", lambda t: t[None]), "shape [1, 8], expected [8]", id="norm-of-2d"
        ),
        pytest.param(
            with_("embedding", torch.Tensor.float), "is torch.float32, expected bf", id="float32"
        ),
        pytest.param(with_("bias", lambda t: t), "'bias' has shape [32, 8], expected []", id="odd"),
    ],
)
def test_a_missing_or_odd_tensor_is_refused(
    change: Callable[[Tensors], Tensors], message: str
) -> None:
    data = save(change(tensors()), {"tied": "false"})
    with pytest.raises(CacheError) as caught:
        Head.from_bytes(data, SPEC, "here")
    assert str(caught.value).startswith("here: ")
    assert message in str(caught.value).replace("bfloat16", "bf")


@pytest.mark.parametrize("tied", ["true", "yes", None])
def test_a_head_that_says_otherwise_than_it_is_is_refused(tied: str | None) -> None:
    metadata = {} if tied is None else {"tied": tied}
    with pytest.raises(CacheError, match=f"it says tied = {tied!r}, its tensors are embedding"):
        Head.from_bytes(save(tensors(), metadata), SPEC, "here")


@settings(max_examples=200)
@given(
    st.binary(max_size=200)
    | safetensors_files(["embedding", "lm_head", "final_norm", "other"])
    | st.integers(0, 300).map(lambda cut: make_head(SPEC).to_bytes()[:cut])
)
def test_no_bytes_make_from_bytes_fail_in_another_way(data: bytes) -> None:
    with pytest.raises(DraftCacheError):
        Head.from_bytes(data, SPEC, "here")


def test_a_header_with_odd_metadata_is_refused_or_read() -> None:
    for header in ({}, {"__metadata__": None}, {"__metadata__": {}}, {"__metadata__": {"a": "b"}}):
        with pytest.raises(CacheError, match=r"^here: "):
            Head.from_bytes(safetensors(header), SPEC, "here")


@pytest.mark.parametrize("spec", [POST, PRE], ids=["post_norm", "pre_norm"])
def test_a_readout_comes_back_and_stays_when_moved(spec: CaptureSpec) -> None:
    head = make_head(spec)
    found = Head.from_bytes(head.to_bytes(), spec, "here").to("cpu", torch.float32)
    assert found.readout == head.readout
    assert head.readout is not None


def as_tensor(text: str) -> torch.Tensor:
    return torch.tensor(list(text.encode(errors="replace")), dtype=torch.uint8)


def test_equal_heads_have_equal_bytes() -> None:
    assert len({make_head(PRE).to_bytes() for _ in range(20)}) == 1


def test_logits_by_hand() -> None:
    embedding = torch.tensor([[1.0, 0.0], [0.0, 2.0], [3.0, 4.0]])
    final_norm_D = torch.tensor([1.0, 0.5])

    def logits(**fields: float | None) -> list[float]:
        readout = Readout(
            **{"scale": 1.0, "soft_cap": None, "norm_eps": None, "norm_offset": 0.0} | fields
        )
        head = Head(embedding, embedding, final_norm_D, readout)
        (found,) = head.logits(torch.tensor([[1.0, 7.0]])).tolist()
        return list(found)

    assert logits() == [1, 14, 31]
    assert logits(scale=0.5) == [0.5, 7, 15.5]
    capped = [10 * math.tanh(x / 10) for x in (0.5, 7, 15.5)]
    assert logits(scale=0.5, soft_cap=10.0) == pytest.approx(capped)
    # The mean square of (1, 7) is 25, with eps 11 it is 36: the unit state is (1, 7) / 6.
    assert logits(norm_eps=11.0) == pytest.approx([1 / 6, 7 / 6, 3 / 6 + 14 / 6])
    assert logits(norm_eps=11.0, norm_offset=1.0) == pytest.approx([2 / 6, 21 / 6, 1 + 7])


@pytest.mark.parametrize(
    ("change", "stored", "spec", "message"),
    [
        pytest.param({}, SPEC, POST, "None, which does not go with .* 'post_norm'", id="none"),
        pytest.param({}, POST, SPEC, "does not go with .* 'none'", id="too-much"),
        pytest.param({}, POST, PRE, "does not go with .* 'pre_norm'", id="other-side"),
        pytest.param({}, PRE, POST, "does not go with .* 'post_norm'", id="another-side"),
        pytest.param({"scale": 0}, POST, POST, "damaged .*scale must be positive", id="zero"),
        pytest.param({"soft_cap": -1}, POST, POST, "soft_cap must be positive", id="cap"),
        pytest.param({"norm_offset": 2}, POST, POST, "norm_offset must be 0 or 1", id="offset"),
        pytest.param({"bias": 1}, POST, POST, "unknown key 'bias'", id="unknown"),
    ],
)
def test_a_readout_that_is_not_of_this_cache_is_refused(
    change: dict[str, float], stored: CaptureSpec, spec: CaptureSpec, message: str
) -> None:
    head = make_head(stored)
    data = head.to_bytes()
    if change:
        assert head.readout is not None
        text = json.dumps(asdict(head.readout) | change)
        data = save(tensors() | {"readout": as_tensor(text)}, {"tied": "false"})
    with pytest.raises(CacheError, match=f"^here: its readout is .*{message}"):
        Head.from_bytes(data, spec, "here")


def test_a_readout_of_another_type_is_refused() -> None:
    with pytest.raises(CacheError, match=r"^here: its readout is damaged"):
        Head.from_bytes(save(tensors() | {"readout": torch.zeros(2).bfloat16()}), POST, "here")


@settings(max_examples=100)
@given(st.text(max_size=50) | json_values.map(json.dumps))
def test_no_readout_makes_from_bytes_fail_in_another_way(text: str) -> None:
    with pytest.raises(DraftCacheError):
        Head.from_bytes(save(tensors() | {"readout": as_tensor(text)}, {"tied": "false"}), POST, "")
