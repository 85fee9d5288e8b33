"""The fingerprint of a cache: what changes it, what does not, and what a spec refuses."""

import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from shared.codec import LevelCodec, LosslessCodec
from shared.config import flatten
from shared.errors import CacheIncompatibleError, DraftCacheError
from shared.spec import CaptureSpec
from tests.test_shared.made import make_cache, make_spec
from tests.test_shared.mutate import json_values, mutated

SPEC = make_spec(LevelCodec(step=1 / 16))

CHANGED: dict[str, Any] = {
    "target.config_sha256": "a" * 64,
    "target.weights_sha256": "a" * 64,
    "target.model_type": "other",
    "target.dtype": "float32",
    "target.quantization": "fp8",
    "target.attention": "eager",
    "target.num_layers": 5,
    "target.hidden_size": 16,
    "target.vocab_size": 33,
    "tokens.tokenizer_sha256": "a" * 64,
    "tokens.template_sha256": "a" * 64,
    "tokens.template_arguments.enable_thinking": True,
    "tokens.max_length": 257,
    "tokens.truncation": "drop",
    "tokens.eos_token_ids": [2, 3],
    "tokens.pad_token_id": None,
    "target_layer_ids": [0, 3],
    "codec.name": "lossless",
    "codec.step": 0.125,
    "last_hidden": "post_norm",
}
NAMED = {
    "target.dtype": "target.dtype",
    "target.attention": "target.attention",
    "target.config_sha256": "target.path (config.json)",
    "target.weights_sha256": "target.path (weights)",
    "tokens.tokenizer_sha256": "target.path (tokenizer files)",
    "tokens.template_sha256": "target.path (chat template)",
    "tokens.template_arguments.enable_thinking": "data.template_arguments.enable_thinking",
    "tokens.max_length": "data.max_length",
    "tokens.truncation": "data.truncation",
    "target_layer_ids": "capture.target_layer_ids",
    "codec.name": "codec.preset",
    "codec.step": "codec.preset",
    "last_hidden": "capture.last_hidden",
}
CONSTANT = {"layer_convention", "chunk_tokens", "format_version"}


def test_every_field_of_the_spec_is_in_the_table_of_changes() -> None:
    every = replace(SPEC, last_hidden="pre_norm")
    assert set(flatten(every.to_dict())) == set(CHANGED) | CONSTANT


def test_a_spec_without_last_hidden_state_is_written_as_before_there_was_one() -> None:
    assert "last_hidden" not in SPEC.to_dict()
    with pytest.raises(CacheIncompatibleError, match=r"^here: last_hidden 'none' is written by"):
        CaptureSpec.from_dict(SPEC.to_dict() | {"last_hidden": "none"}, "here")


@pytest.mark.parametrize("key", CHANGED)
def test_every_field_changes_the_fingerprint_and_is_named_where_it_differs(key: str) -> None:
    fields = deepcopy(SPEC.to_dict())
    *sections, last = key.split(".")
    node = fields
    for section in sections:
        node = node[section]
    node[last] = CHANGED[key]
    if key == "codec.name":
        del fields["codec"]["step"]
    other = CaptureSpec.from_dict(fields, "here")
    assert other.fingerprint != SPEC.fingerprint
    named = NAMED.get(key, f"target.path ({key.rpartition('.')[2]})")
    with pytest.raises(CacheIncompatibleError) as caught:
        other.require_equal(SPEC, "here")
    assert str(caught.value).startswith(f"here: built with other settings ({named}: ")
    assert str(caught.value).count(" asked for, ") == 1


def test_codecs_are_named_by_their_presets() -> None:
    with pytest.raises(CacheIncompatibleError, match="'lossless' asked for, 'balanced' in the"):
        make_spec(LosslessCodec()).require_equal(SPEC, "here")


def test_the_fingerprint_is_the_sha256_of_the_sorted_compact_json() -> None:
    """FORMAT.md says so, and another program must come to the same digest."""
    import hashlib

    text = json.dumps(SPEC.to_dict(), sort_keys=True, separators=(",", ":"))
    assert SPEC.fingerprint == hashlib.sha256(text.encode()).hexdigest()


def test_equal_specs_are_accepted() -> None:
    SPEC.require_equal(make_spec(LevelCodec(step=1 / 16)), "here")


def test_the_fingerprint_does_not_depend_on_where_the_cache_lies(tmp_path: Path) -> None:
    found = {make_cache(tmp_path / name, SPEC, [[3]]).fingerprint for name in ("a", "b/c")}
    assert found == {SPEC.fingerprint}


@pytest.mark.parametrize("codec", [LosslessCodec(), LevelCodec(step=1 / 8)], ids=lambda c: c.name)
def test_a_spec_reads_back_from_json(codec: Any) -> None:
    spec = make_spec(codec)
    found = CaptureSpec.from_dict(json.loads(json.dumps(spec.to_dict())), "here")
    assert found == spec
    assert found.fingerprint == spec.fingerprint
    assert found.build_codec() == codec


@pytest.mark.parametrize(
    "ids",
    [(), (0, 0), (2, 0), (-1, 0), (0, 4)],
    ids=["none", "twice", "unsorted", "below", "above"],
)
def test_layer_ids_that_cannot_be_are_refused(ids: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"target_layer_ids must .* got \["):
        replace(SPEC, target_layer_ids=ids)
    with pytest.raises(CacheIncompatibleError, match=r"^here: target_layer_ids must"):
        CaptureSpec.from_dict({**SPEC.to_dict(), "target_layer_ids": list(ids)}, "here")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(
            {"format_version": 1},
            "format version 1, this version reads 2. Use the version of draftcache that wrote",
            id="other-version",
        ),
        pytest.param({"format_version": None}, "format version None", id="no-version"),
        pytest.param({"format_version": True}, "format version True, this", id="true"),
        pytest.param({"layer_convention": "inputs"}, "'inputs' is unknown", id="convention"),
        pytest.param({"chunk_tokens": 32}, "chunk_tokens must be 64, got 32", id="chunk"),
        pytest.param({"codec": {"name": "gzip"}}, "codec {'name': 'gzip'} is unknown", id="codec"),
        pytest.param({"targets": 1}, "unknown key 'targets', did you mean", id="unknown-key"),
    ],
)
def test_a_spec_of_another_format_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CacheIncompatibleError) as caught:
        CaptureSpec.from_dict(SPEC.to_dict() | change, "here")
    assert str(caught.value).startswith("here: ")
    assert message in str(caught.value)


@pytest.mark.parametrize("name", ["num_layers", "hidden_size", "vocab_size"])
def test_a_target_has_positive_sizes(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be positive, got 0"):
        replace(SPEC.target, **{name: 0})


def test_sizes_follow_from_the_spec() -> None:
    assert SPEC.num_captured == 2
    assert SPEC.raw_bytes_per_token == 2 * 8 * 2
    assert SPEC.layer_names == ("block 0", "block 2")
    more = replace(SPEC, last_hidden="post_norm")
    assert (more.num_taps, more.num_captured, more.raw_bytes_per_token) == (2, 3, 3 * 8 * 2)
    assert more.describe_layers() == [
        {"layer_id": 0, "name": "block 0"},
        {"layer_id": 2, "name": "block 2"},
        {"layer_id": None, "name": "last hidden state"},
    ]


@settings(max_examples=200)
@given(json_values | mutated(SPEC.to_dict()))
def test_no_json_makes_from_dict_fail_in_another_way(fields: Any) -> None:
    try:
        spec = CaptureSpec.from_dict(fields, "here")
    except DraftCacheError:
        return
    assert CaptureSpec.from_dict(spec.to_dict(), "here") == spec
