"""The index: counts by hand, a million rows, and what is no index."""

from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.codec import LosslessCodec
from shared.errors import CacheError, DraftCacheError
from shared.index import SampleIndex
from tests.test_shared.made import (
    add_shard,
    create_cache,
    make_sample,
    make_spec,
    make_states,
    open_shard,
)
from tests.test_shared.mutate import safetensors, safetensors_files

SPEC = make_spec(LosslessCodec())
NAMES = [field.name for field in fields(SampleIndex)]

MASKS = [
    # mask, supervised, anchors: supervised positions whose next one is supervised too
    ([0, 0, 1, 1, 1], 3, 2),
    ([1], 1, 0),
    ([1, 1], 2, 1),
    ([0, 1, 0, 1, 0, 1], 3, 0),
    ([0, 0, 0], 0, 0),
    ([1, 1, 0, 1, 1, 1], 5, 3),
]


def synthetic(num: int) -> SampleIndex:
    rng = np.random.default_rng(0)
    return SampleIndex(
        sample_ids=rng.integers(0, 256, (num, 16), np.uint8),
        split_keys=rng.integers(0, 2**64, num, np.uint64),
        shard=rng.integers(0, 4000, num, np.int32),
        row=rng.integers(0, 4000, num, np.int32),
        num_tokens=rng.integers(1, 8192, num, np.int32),
        num_supervised=rng.integers(0, 8192, num, np.int32),
        num_anchors=rng.integers(0, 8192, num, np.int32),
        source=rng.integers(0, 9, num, np.int16),
    )


def assert_equal(found: SampleIndex, expected: SampleIndex) -> None:
    for name in NAMES:
        assert getattr(found, name).dtype == getattr(expected, name).dtype
        assert np.array_equal(getattr(found, name), getattr(expected, name))


def test_the_counts_of_a_shard_are_those_done_by_hand(tmp_path: Path) -> None:
    """The last token of a sample is no anchor, even where the next sample begins supervised."""
    create_cache(tmp_path, SPEC)
    samples = [
        make_sample(SPEC, make_states(SPEC, len(mask), seed=i), loss_mask=mask, source=i % 2)
        for i, (mask, _, _) in enumerate(MASKS)
    ]
    record = add_shard(
        tmp_path, SPEC, "0001-00003", samples, calibration=None, sources=("chat", "code")
    )
    reader = open_shard(tmp_path, SPEC, record)
    index = SampleIndex.of_shard(reader, 7, ["web", "code", "chat"])
    assert len(index) == len(MASKS)
    assert index.num_tokens.tolist() == [len(mask) for mask, _, _ in MASKS]
    assert index.num_supervised.tolist() == [count for _, count, _ in MASKS]
    assert index.num_anchors.tolist() == [count for _, _, count in MASKS]
    assert index.shard.tolist() == [7] * len(MASKS)
    assert index.row.tolist() == list(range(len(MASKS)))
    assert index.source.tolist() == [2, 1, 2, 1, 2, 1]
    assert [index.sample_id(i) for i in range(len(MASKS))] == [s.sample_id for s in samples]
    assert index.split_keys.tolist() == [s.split_key for s in samples]
    assert_equal(SampleIndex.from_bytes(index.to_bytes(), "here"), index)


def test_an_empty_shard_adds_no_rows(tmp_path: Path) -> None:
    create_cache(tmp_path, SPEC)
    record = add_shard(tmp_path, SPEC, "0001-00000", [], calibration=None, sources=())
    index = SampleIndex.of_shard(open_shard(tmp_path, SPEC, record), 0, [])
    assert len(index) == 0
    assert_equal(index, SampleIndex.concatenate([]))


def test_parts_are_joined_in_their_order() -> None:
    whole = synthetic(10)
    first, second = np.arange(10) < 4, np.arange(10) >= 4
    assert_equal(SampleIndex.concatenate([whole.select(first), whole.select(second)]), whole)


@pytest.mark.parametrize("num", [0, 1, 1_000_000])
def test_any_number_of_rows_round_trips_in_46_bytes_each(num: int) -> None:
    index = synthetic(num)
    data = index.to_bytes()
    assert len(data) < 46 * num + 1000
    assert_equal(SampleIndex.from_bytes(data, "here"), index)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("how", ["missing", "shorter", "wider", "other-type", "no-axis"])
def test_foreign_arrays_are_refused(name: str, how: str) -> None:
    from safetensors.numpy import save

    arrays = {key: getattr(synthetic(3), key) for key in NAMES}
    match how:
        case "missing":
            del arrays[name]
        case "shorter":
            arrays[name] = arrays[name][:2]
        case "wider":
            arrays[name] = np.stack([arrays[name]] * 2, -1)
        case "other-type":
            arrays[name] = arrays[name].astype(np.float32)
        case "no-axis":
            arrays[name] = np.array(3, arrays[name].dtype)
    with pytest.raises(CacheError, match=r"^here: expected arrays .* found"):
        SampleIndex.from_bytes(save(arrays), "here")


def test_an_array_too_many_is_refused() -> None:
    from safetensors.numpy import save

    arrays = {key: getattr(synthetic(3), key) for key in NAMES} | {"more": np.zeros(3)}
    with pytest.raises(CacheError, match="expected arrays"):
        SampleIndex.from_bytes(save(arrays), "here")


@settings(max_examples=300)
@given(
    st.binary(max_size=200)
    | safetensors_files([*NAMES, "other"])
    | st.integers(0, 300).map(lambda cut: synthetic(3).to_bytes()[:cut])
)
def test_no_bytes_make_from_bytes_fail_in_another_way(data: bytes) -> None:
    try:
        index = SampleIndex.from_bytes(data, "here")
    except DraftCacheError:
        return
    assert_equal(SampleIndex.from_bytes(index.to_bytes(), "here"), index)


def test_a_header_of_nothing_is_refused() -> None:
    for data in (b"", b"\xff" * 8, safetensors([]), safetensors({}), safetensors({"row": 1})):
        with pytest.raises(CacheError, match=r"^here: "):
            SampleIndex.from_bytes(data, "here")


def test_select_keeps_the_rows_asked_for() -> None:
    index = synthetic(6)
    chosen = index.select(index.row % 2 == 0)
    assert chosen.row.tolist() == [row for row in index.row.tolist() if row % 2 == 0]
    assert_equal(replace(index), index)
