"""A set of ids is a set, whatever bytes they share, and small."""

import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_builder import publication
from cache_builder.id_set import IdSet
from shared.index import SampleIndex

# Few values: parts of ids that repeat themselves, and are found across the border of two.
IDS = st.lists(st.binary(min_size=16, max_size=16).map(lambda b: bytes(x % 2 for x in b)))


@settings(max_examples=300)
@given(ids=IDS, others=IDS)
def test_it_holds_what_was_added_and_nothing_else(ids: list[bytes], others: list[bytes]) -> None:
    found, expected = IdSet(), set()
    for sample_id in ids:
        assert found.add(sample_id) == (sample_id not in expected)
        expected.add(sample_id)
    assert len(found) == len(expected)
    assert all((other in found) == (other in expected) for other in [*others, *ids])


def test_an_id_across_the_border_of_two_is_not_there() -> None:
    first, second = b"\0\0" + bytes(range(14)), b"\0\0" + bytes(range(14, 28))
    ids = IdSet([first, second])
    across = b"\0\0" + bytes(range(5, 19))
    assert across not in ids
    assert ids.add(across)
    assert len(ids) == 3


def test_quarantined_ids_are_looked_for_without_a_set_of_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num = 200_000
    ids = np.random.default_rng(0).integers(0, 256, (num, 16), np.uint8)
    ids[[5, 7, num - 1], -1] = 0
    lost = ids[:2].copy()
    ids[:2] += 1
    zeros = {name: np.zeros(num, np.int32) for name in ("shard", "row", "num_tokens")}
    zeros |= {name: np.zeros(num, np.int32) for name in ("num_supervised", "num_anchors")}
    split_keys, source = np.zeros(num, np.uint64), np.zeros(num, np.int16)
    index = SampleIndex(sample_ids=ids, split_keys=split_keys, source=source, **zeros)
    named = [*lost, ids[5], ids[num // 2], ids[num - 1]]
    record = SimpleNamespace(quarantined={row.tobytes().hex(): "why" for row in named})
    monkeypatch.setattr(publication, "_COMPARED_ROWS", 10_000)
    tracemalloc.start()
    try:
        found = publication._quarantined({"0001-00000": record}, index)  # type: ignore[dict-item]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert set(found) == {row.tobytes().hex() for row in lost}
    assert peak < 8 * num


def test_an_id_takes_no_more_than_25_bytes() -> None:
    data = np.random.default_rng(0).integers(0, 256, (500_000, 16), np.uint8).tobytes()
    tracemalloc.start()
    try:
        ids = IdSet(data[i : i + 16] for i in range(0, len(data), 16))
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(ids) == 500_000
    fixed = 65_536 * (8 + 57)  # the parts themselves
    assert used - fixed < 25 * len(ids)
