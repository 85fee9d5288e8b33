"""The frozen tensors of the target: exact to the bit, and whole or refused."""

from collections.abc import Callable
from dataclasses import fields

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from shared.codec import LosslessCodec
from shared.errors import CacheError, DraftCacheError
from shared.head import Head
from tests.test_shared.made import bits, make_head, make_spec
from tests.test_shared.mutate import safetensors, safetensors_files, steady

SPEC = make_spec(LosslessCodec())
SHAPE = (SPEC.target.vocab_size, SPEC.target.hidden_size)

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
    for field in fields(Head):
        assert np.array_equal(bits(getattr(found, field.name)), bits(getattr(head, field.name)))
    assert found.to_bytes() == data


def test_a_tied_head_is_stored_once() -> None:
    saved = len(make_head(SPEC).to_bytes()) - len(make_head(SPEC, tied=True).to_bytes())
    assert saved >= 2 * SHAPE[0] * SHAPE[1]


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_moving_a_head_keeps_it_tied_or_not(tied: bool) -> None:
    moved = make_head(SPEC, tied=tied).to("cpu", torch.float32)
    assert moved.is_tied is tied
    assert {getattr(moved, field.name).dtype for field in fields(Head)} == {torch.float32}


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


@settings(steady, max_examples=200)
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
