"""A plan holds every sample once, depends on the set of samples only, and survives its reader."""

import json
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from cache_builder.config import Forward
from cache_builder.corpus import TokenizedSample
from cache_builder.plan import Plan, find_plans, micro_batches, next_plan_id
from cache_builder.plan_writer import PlanWriter, cut_shards
from shared.errors import CacheError
from shared.files import canonical_json, sha256_bytes, sha256_file, write_json
from tests.test_shared.mutate import mutated

FORWARD = Forward(batch_tokens=64, threads=1)


def samples(lengths: list[int]) -> list[TokenizedSample]:
    return [
        TokenizedSample(
            token_ids=np.arange(i, i + length, dtype=np.int32),
            loss_mask=np.ones(length, np.uint8),
            source=("a", "b")[i % 2],
            file="data.jsonl",
            row=i + 1,
            generated_by=None,
        )
        for i, length in enumerate(lengths)
    ]


def write_plan(plans: Path, lengths: list[int], shard_tokens: int = 100) -> Plan:
    writer = PlanWriter(plans, next_plan_id(plans))
    for sample in samples(lengths):
        writer.add(sample)
    return writer.commit(key="k", forward=FORWARD, shard_tokens=shard_tokens, report={})


@settings(max_examples=50)
@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=80),
    shard_tokens=st.integers(1, 1000),
)
def test_shards_hold_every_sample_once_longest_first(lengths: list[int], shard_tokens: int) -> None:
    num_tokens = np.array(lengths, np.int32)
    ids = np.random.default_rng(0).integers(0, 256, (len(lengths), 16), np.uint8)
    order, offsets = cut_shards(num_tokens, ids, shard_tokens)
    assert sorted(order.tolist()) == list(range(len(lengths)))
    assert (np.diff(num_tokens[order]) <= 0).all()
    sizes = [int(num_tokens[order[a:b]].sum()) for a, b in pairwise(offsets.tolist())]
    assert all(size >= shard_tokens for size in sizes[:-1])
    # A shard is cut at the first sample that fills it.
    for a, b in pairwise(offsets.tolist()):
        assert int(num_tokens[order[a : b - 1]].sum()) < shard_tokens


def test_shards_do_not_depend_on_the_order_of_the_data() -> None:
    rng = np.random.default_rng(1)
    num_tokens = rng.integers(1, 9, 50).astype(np.int32)
    ids = rng.integers(0, 256, (50, 16), np.uint8)
    order, offsets = cut_shards(num_tokens, ids, 20)
    shuffle = rng.permutation(50)
    other, other_offsets = cut_shards(num_tokens[shuffle], ids[shuffle], 20)
    assert np.array_equal(ids[order], ids[shuffle][other])
    assert np.array_equal(offsets, other_offsets)


@settings(max_examples=50)
@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=80), batch_tokens=st.integers(1, 900)
)
def test_micro_batches_stay_under_the_padded_budget(lengths: list[int], batch_tokens: int) -> None:
    num_tokens = np.sort(np.array(lengths, np.int32))[::-1]
    parts = list(micro_batches(num_tokens, batch_tokens))
    assert [i for part in parts for i in range(part.start, part.stop)] == list(range(len(lengths)))
    for part in parts:
        rows = num_tokens[part]
        assert len(rows) == 1 or len(rows) * rows[0] <= batch_tokens


def test_a_plan_reads_back_what_was_written(tmp_path: Path) -> None:
    lengths = [3, 70, 5, 64, 90]
    plan = write_plan(tmp_path, lengths)
    assert plan.plan_id == "0001"
    assert len(plan) == 5
    assert plan.num_tokens == sum(lengths)
    assert plan.shard_ids == ["0001-00000", "0001-00001"]
    seen = {}
    for shard_id in plan.shard_ids:
        for position in plan.shard_positions(shard_id).tolist():
            seen[position] = plan.sample(position)
    for position, expected in enumerate(samples(lengths)):
        assert seen[position].sample_id == expected.sample_id
        assert seen[position].split_key == expected.split_key
        assert np.array_equal(seen[position].token_ids, expected.token_ids)
        assert plan.provenance(position) == ("data.jsonl", position + 1, expected.source)


def test_an_empty_plan_has_no_shard(tmp_path: Path) -> None:
    plan = write_plan(tmp_path, [])
    assert plan.shard_ids == []
    assert len(plan) == 0


def test_plans_are_numbered_on_and_unfinished_ones_ignored(tmp_path: Path) -> None:
    write_plan(tmp_path, [1])
    PlanWriter(tmp_path, next_plan_id(tmp_path)).close()  # killed before its commit
    assert [path.name for path in find_plans(tmp_path)] == ["0001"]
    assert write_plan(tmp_path, [2]).plan_id == "0002"


@pytest.mark.parametrize("name", ["token_ids.i32", "loss_mask.u8", "samples.safetensors"])
def test_a_damaged_plan_is_refused_by_name(tmp_path: Path, name: str) -> None:
    plan = write_plan(tmp_path, [10, 20])
    path = plan.directory / name
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CacheError, match=name.replace(".", r"\.")):
        Plan(plan.directory)


def test_calibration_samples_spread_over_the_lengths(tmp_path: Path) -> None:
    lengths = list(range(1, 101))
    plan = write_plan(tmp_path, lengths)
    chosen = [len(plan.sample(p).token_ids) for p in plan.calibration_positions(505)]
    assert 300 < sum(chosen) < 800
    assert max(chosen) == 100
    assert min(chosen) == 1


def test_the_number_of_a_plan_or_shard_is_never_used_again(tmp_path: Path) -> None:
    plans = tmp_path / "plans"
    write_plan(plans, [5])
    (tmp_path / "records").mkdir()
    (tmp_path / "records" / "0007-00003.json").write_text("{}")
    assert next_plan_id(plans) == "0008"
    for name in ("9999", "10000"):
        (plans / name).mkdir()
    assert next_plan_id(plans) == "10001"
    assert [path.name for path in find_plans(plans)] == ["0001", "9999", "10000"]


def test_shards_can_be_given_instead_of_cut(tmp_path: Path) -> None:
    writer = PlanWriter(tmp_path, "0001")
    for sample in samples([9, 5, 7, 3]):
        writer.add(sample)
    plan = writer.commit(key="k", forward=FORWARD, report={}, shard_sizes=[2, 1, 1])
    assert [plan.shard_positions(i).tolist() for i in plan.shard_ids] == [[0, 1], [2], [3]]
    empty = PlanWriter(tmp_path, "0002").commit(key="k", forward=FORWARD, report={}, shard_sizes=[])
    assert (len(empty), empty.shard_ids, empty.num_tokens) == (0, [], 0)


def test_no_forged_plan_is_a_traceback(tmp_path: Path) -> None:
    """Signed, with a value changed in its description or in one of its arrays."""
    plan = write_plan(tmp_path, [9, 5, 7, 3], shard_tokens=12)
    description, samples_file = plan.directory / "plan.json", plan.directory / "samples.safetensors"
    fields = json.loads(description.read_text())
    del fields["sha256"]
    arrays = load_file(samples_file)

    @settings(max_examples=150)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        changed, forged = dict(arrays), json.loads(json.dumps(fields))
        if data.draw(st.booleans()):
            name = data.draw(st.sampled_from(sorted(arrays)))
            changed[name] = arrays[name].copy()
            bounds = np.iinfo(arrays[name].dtype)
            values = st.integers(int(bounds.min), int(bounds.max)) | st.integers(0, 9)
            place = data.draw(st.integers(0, arrays[name].size - 1))
            changed[name].flat[place] = data.draw(values)
        else:
            forged = data.draw(mutated(fields))
        save_file(changed, samples_file)
        if isinstance(forged.get("files"), dict):
            forged["files"]["samples.safetensors"] = sha256_file(samples_file)
        with suppress(ValueError):  # NaN
            write_json(description, {**forged, "sha256": sha256_bytes(canonical_json(forged))})
        try:
            opened = Plan(plan.directory)
        except CacheError:
            return
        for shard_id in opened.shard_ids:
            for position in opened.shard_positions(shard_id).tolist():
                assert len(opened.sample(position).token_ids) in (9, 5, 7, 3)
                assert opened.provenance(position)

    check()
