"""Shards and indices whose digests are right and whose content is not: an error of ours, or data.

Damage is found by digests. These are for whoever wrote the file: another program, or an enemy.
"""

import contextlib
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numcodecs import zstd

from shared.cache import Cache
from shared.chunk import checksum
from shared.codec import LevelCodec
from shared.errors import CacheError, ShardCorruptError
from shared.files import sha256_bytes, write_json
from shared.index import SampleIndex
from shared.layout import generation_key
from shared.manifest import Manifest, ShardRecord, StoredFile
from shared.shard import GROUP, INDEX_ENTRY, SMALL_ARRAYS, STATES_OBJECT
from tests.test_shared.made import LENGTHS, make_cache, make_spec, open_shard, unpack

SHARD = "0001-00000"
SPEC = make_spec(LevelCodec(step=1 / 16))
Forge = Callable[[str, bytes], ShardRecord]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("forged") / "cache"
    make_cache(path, SPEC, [LENGTHS])
    return path


@pytest.fixture
def forge(path: Path, tmp_path: Path) -> tuple[Path, Forge]:
    """A copy of the cache, and what writes a file of its shard and signs it."""
    copy = tmp_path / "cache"
    shutil.copytree(path, copy)
    record = Cache(copy).record(SHARD)

    def write(name: str, data: bytes) -> ShardRecord:
        (copy / GROUP / SHARD / name).write_bytes(data)
        signed = StoredFile(size=len(data), sha256=sha256_bytes(data))
        return replace(record, files={**record.files, name: signed})

    return copy, write


def file_of(name: str) -> str:
    return f"{name}/c/0{'/0' if name == 'sample_ids' else ''}"


def encode(values: np.ndarray) -> bytes:
    body = bytes(zstd.compress(np.ascontiguousarray(values), 1))
    return body + checksum(body).to_bytes(4, "little")


def read_all(path: Path, record: ShardRecord) -> None:
    """Read and decode every sample: what comes out has the shape that it must have."""
    reader = open_shard(path, SPEC, record)
    for row in range(len(reader)):
        sample = reader.read(row)
        assert unpack(SPEC, sample).shape == (len(sample.token_ids), 2, 8)
        assert set(sample.loss_mask.tolist()) <= {0, 1}


@pytest.mark.parametrize("name", SMALL_ARRAYS)
def test_no_forged_array_is_a_traceback(forge: tuple[Path, Forge], name: str) -> None:
    """One value of every array replaced, or all of them, or the file by any bytes."""
    path, write = forge
    intact = open_shard(path, SPEC, Cache(path).record(SHARD)).arrays[name]
    bounds = np.iinfo(intact.dtype)
    values = st.integers(int(bounds.min), int(bounds.max)) | st.integers(
        0, min(300, int(bounds.max))
    )
    edges = st.sampled_from([0, 1, 2, int(bounds.min), int(bounds.max)])

    @settings(max_examples=60)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        changed = intact.copy()
        match data.draw(st.sampled_from(["one", "all", "length", "bytes"])):
            case "one":
                changed.flat[data.draw(st.integers(0, changed.size - 1))] = data.draw(
                    values | edges
                )
                stored = encode(changed)
            case "all":
                changed[...] = data.draw(values | edges)
                stored = encode(changed)
            case "length":
                stored = encode(changed.ravel()[: data.draw(st.integers(1, changed.size))])
            case _:
                stored = data.draw(st.binary(max_size=40))
        with contextlib.suppress(ShardCorruptError):
            read_all(path, write(file_of(name), stored))

    check()


@pytest.mark.parametrize(
    ("name", "position", "value"),
    [
        pytest.param("token_ids", 3, 32, id="token-outside-the-vocabulary"),
        pytest.param("token_ids", 3, -1, id="negative-token"),
        pytest.param("loss_mask", 3, 2, id="mask-of-two"),
        pytest.param("sample_offsets", 0, 1, id="tokens-before-the-first-sample"),
        pytest.param("outlier_offsets", 0, 1, id="outliers-before-the-first-sample"),
        pytest.param("outlier_offsets", 2, 0, id="descending-outliers"),
        pytest.param("outlier_positions", 0, 16, id="outlier-behind-its-sample"),
        pytest.param("outlier_positions", 0, -1, id="negative-outlier"),
        pytest.param("sample_sources", 1, 1, id="source-without-a-tag"),
    ],
)
def test_values_that_no_writer_writes_are_refused(
    forge: tuple[Path, Forge], name: str, position: int, value: int
) -> None:
    """The first sample has one token: 16 values. On a GPU such an index ends the process."""
    path, write = forge
    values = open_shard(path, SPEC, Cache(path).record(SHARD)).arrays[name].copy()
    values[position] = value
    with pytest.raises(ShardCorruptError, match=f"shard {SHARD}: its arrays disagree"):
        open_shard(path, SPEC, write(file_of(name), encode(values)))


@settings(max_examples=100)
@given(
    row=st.integers(0, 19),
    field=st.sampled_from(["offset", "size"]),
    value=st.integers(0, 2**64 - 1) | st.integers(2**64 - 300, 2**64 - 1),
    is_chained=st.booleans(),
)
def test_no_forged_chunk_index_is_a_traceback(
    path: Path, row: int, field: str, value: int, is_chained: bool
) -> None:
    """Signed, with a right checksum; sizes that wrap around among them."""
    record, states = Cache(path).record(SHARD), path / GROUP / SHARD / STATES_OBJECT
    intact = states.read_bytes()
    num_chunks = len(open_shard(path, SPEC, record).arrays["chunk_crc32c"])
    size = num_chunks * INDEX_ENTRY.itemsize
    entries = np.frombuffer(intact[-size - 4 : -4], INDEX_ENTRY).copy()
    row %= num_chunks
    before = entries[row].copy()
    entries[row][field] = value
    if is_chained and row + 1 < num_chunks:  # the next chunk begins where this one now ends
        order = np.arange(num_chunks).reshape(2, -1).T.ravel()  # as they lie in the file
        place = int(np.flatnonzero(order == row)[0])
        if place + 1 < num_chunks:
            following = order[place + 1]
            end = (int(entries[row]["offset"]) + int(entries[row]["size"])) % 2**64
            was = int(entries[following]["offset"]) + int(entries[following]["size"])
            entries[following]["offset"] = end
            entries[following]["size"] = (was - end) % 2**64
    forged = entries.tobytes()
    data = intact[: -size - 4] + forged + checksum(forged).to_bytes(4, "little")
    signed = StoredFile(size=len(data), sha256=sha256_bytes(data))
    try:
        states.write_bytes(data)
        if entries[row] == before:
            return
        with pytest.raises(ShardCorruptError, match=SHARD):
            read_all(path, replace(record, files={**record.files, STATES_OBJECT: signed}))
    finally:
        states.write_bytes(intact)


def sign_index(path: Path, index: SampleIndex) -> None:
    """Put `index` into the cache, and its digest into the manifest."""
    manifest, data = Cache(path, check_index=False).manifest, index.to_bytes()
    (path / generation_key(1, "index.safetensors")).write_bytes(data)
    signed = replace(manifest, index=StoredFile(size=len(data), sha256=sha256_bytes(data)))
    assert Manifest.from_dict(signed.to_dict(), "here") == signed
    write_json(path / "manifest.json", signed.to_dict())


@settings(max_examples=60)
@given(
    name=st.sampled_from(["shard", "row", "num_tokens", "source"]),
    position=st.integers(0, len(LENGTHS) - 1),
    value=st.integers(-(2**15), 2**15 - 1) | st.integers(-3, 8),
)
def test_no_forged_sample_index_is_a_traceback(
    path: Path, name: str, position: int, value: int
) -> None:
    manifest = (path / "manifest.json").read_bytes()
    index = Cache(path).index
    values = getattr(index, name).copy()
    values[position] = value
    is_right = value == getattr(index, name)[position] or (name == "num_tokens" and value >= 0)
    try:
        sign_index(path, replace(index, **{name: values}))
        if is_right:
            Cache(path).read(position)
        else:
            with pytest.raises(CacheError, match=str(path)):
                Cache(path).read(position)
    finally:
        sign_index(path, index)
        assert (path / "manifest.json").read_bytes() == manifest
