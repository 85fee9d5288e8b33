"""Shards: what is written comes back, through this reader and through any other, or not at all."""

import json
import math
import multiprocessing
import os
import shutil
import tracemalloc
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr

from shared.codec import PRESETS, LevelCodec
from shared.errors import OutOfSpaceError, ShardCorruptError
from shared.files import sha256_file
from shared.local_storage import LocalStorage, StoredObject
from shared.manifest import ShardRecord
from shared.shard import GROUP, SMALL_ARRAYS, STATES, STATES_OBJECT
from shared.shard_reader import ShardReader
from shared.shard_writer import ShardWriter
from shared.spec import CaptureSpec
from tests.test_shared.made import (
    CODECS,
    LENGTHS,
    add_shard,
    bits,
    create_cache,
    flip,
    make_sample,
    make_spec,
    make_states,
    open_shard,
    unpack,
)

SHARD = "0001-00000"
OTHER = "0001-00001"
CORE_CODECS = {"sharding_indexed", "bytes", "zstd", "crc32c"}

Shard = tuple[Path, CaptureSpec, ShardRecord]
WriteShard = Callable[..., ShardRecord]


@pytest.fixture(params=CODECS, ids=list(PRESETS))
def spec(request: pytest.FixtureRequest) -> CaptureSpec:
    return make_spec(request.param)


@pytest.fixture(scope="module")
def write_shard(tmp_path_factory: pytest.TempPathFactory) -> WriteShard:
    """Writes a cache with one shard of samples of the given lengths; makes each only once."""
    made: dict[tuple[str, tuple[int, ...]], tuple[Path, ShardRecord]] = {}

    def write(path: Path, spec: CaptureSpec, lengths: tuple[int, ...] = LENGTHS) -> ShardRecord:
        key = (spec.fingerprint, lengths)
        if key not in made:
            source = tmp_path_factory.mktemp("shards")
            made[key] = (source, make_shard(source, spec, lengths))
        source, record = made[key]
        shutil.copytree(source, path, dirs_exist_ok=True)
        return record

    return write


def make_shard(path: Path, spec: CaptureSpec, lengths: tuple[int, ...]) -> ShardRecord:
    samples = [make_sample(spec, make_states(spec, n, seed=i)) for i, n in enumerate(lengths)]
    return add_shard(path, spec, SHARD, samples, calibration=create_cache(path, spec))


@pytest.fixture
def shard(tmp_path: Path, spec: CaptureSpec, write_shard: WriteShard) -> Shard:
    """A shard of samples of 1, 63, 64, 65 and 200 tokens."""
    return tmp_path, spec, write_shard(tmp_path, spec)


def read_all(path: Path, spec: CaptureSpec, record: ShardRecord) -> None:
    """Open the shard and read every sample."""
    reader = open_shard(path, spec, record)
    for row in range(len(reader)):
        reader.read(row)


def refuses(path: Path, spec: CaptureSpec, record: ShardRecord) -> None:
    with pytest.raises(ShardCorruptError, match=record.shard_id):
        read_all(path, spec, record)


@pytest.mark.parametrize("row", range(len(LENGTHS)), ids=[f"{n}-tokens" for n in LENGTHS])
def test_a_sample_comes_back_as_it_was_written(shard: Shard, row: int) -> None:
    path, spec, record = shard
    hidden = make_states(spec, LENGTHS[row], seed=row)
    written = make_sample(spec, hidden)
    sample = open_shard(path, spec, record).read(row)
    assert sample.sample_id == written.sample_id
    assert np.array_equal(sample.token_ids, written.token_ids)
    assert np.array_equal(sample.loss_mask, written.loss_mask)
    for name in ("planes_PTW", "outlier_position", "outlier_bits"):
        assert torch.equal(getattr(sample.packed, name), getattr(written.packed, name))
    found = unpack(spec, sample)
    if spec.codec["name"] == "lossless":
        assert np.array_equal(bits(found), bits(hidden))
    else:
        assert (found[0, :, 0] == 29_056.0).all()  # bfloat16 of 29,000: an exact outlier
        assert (found.float() - hidden.float()).abs().max() < spec.codec["step"] / 2 + 4 * 2**-8


@pytest.mark.parametrize("codec", CODECS, ids=list(PRESETS))
def test_a_shard_keeps_every_bit_pattern_in_two_bytes_a_value(codec: Any, tmp_path: Path) -> None:
    spec = make_spec(codec, hidden_size=128) if codec.name == "lossless" else make_spec(codec)
    patterns = np.arange(2**16, dtype=np.uint16).view(np.int16)
    hidden = torch.from_numpy(patterns).view(torch.bfloat16)
    hidden = hidden.reshape(-1, spec.num_captured, spec.target.hidden_size)
    name = create_cache(tmp_path, spec)
    record = add_shard(tmp_path, spec, SHARD, [make_sample(spec, hidden)], calibration=name)
    found = unpack(spec, open_shard(tmp_path, spec, record).read(0))
    if codec.name == "lossless":
        assert np.array_equal(bits(found), bits(hidden))
        assert record.files[STATES_OBJECT].size < 1.05 * 2 * 2**16
    else:
        last = 127 if codec.bits == 8 else 7
        outside = ~((hidden.float() / codec.step).round().abs() <= last).numpy()
        assert np.array_equal(bits(found)[outside], bits(hidden)[outside])
        assert record.num_outliers == outside.sum()


def test_the_record_counts_what_was_written(shard: Shard) -> None:
    path, spec, record = shard
    masks = [make_sample(spec, make_states(spec, n)).loss_mask for n in LENGTHS]
    assert record.num_samples == 5
    assert record.num_tokens == sum(LENGTHS)
    assert record.num_supervised == sum(int(mask.sum()) for mask in masks)
    assert record.fingerprint == spec.fingerprint
    group = path / GROUP / SHARD
    on_disk = {p.relative_to(group).as_posix(): p for p in group.rglob("*") if p.is_file()}
    assert {
        name: (file.size, file.sha256) for name, file in record.files.items()
    } == {name: (p.stat().st_size, sha256_file(p)) for name, p in on_disk.items()}  # fmt: skip


def test_plain_zarr_reads_the_same_arrays(shard: Shard) -> None:
    path, spec, record = shard
    group = zarr.open_group(str(path / GROUP / SHARD), mode="r")
    reader = open_shard(path, spec, record)
    for name, values in reader.arrays.items():
        found = group[name][...]
        assert found.dtype == values.dtype == SMALL_ARRAYS[name]
        assert np.array_equal(found, values)
    states, starts = group[STATES], group["sample_starts"][...]
    assert states.dtype == np.uint8
    for row, length in enumerate(LENGTHS):
        planes = reader.read(row).packed.planes_PTW.numpy()
        assert planes.shape == (states.shape[0], length, states.shape[2])
        assert starts[row] % 64 == 0
        assert np.array_equal(states[:, starts[row] : starts[row] + length], planes)
        padding = states[:, starts[row] + length : starts[row] + -(-length // 64) * 64]
        assert not padding.any()


def test_the_group_says_what_its_states_are(shard: Shard) -> None:
    path, spec, _ = shard
    assert dict(zarr.open_group(str(path / GROUP / SHARD), mode="r").attrs) == {
        "format": "draftcache",
        "format_version": 2,
        "shard_id": SHARD,
        "fingerprint": spec.fingerprint,
        "logical_dtype": "bfloat16",
        "codec": spec.codec,
        "target_layer_ids": [0, 2],
    }


def codec_names(node: Any) -> set[str]:
    """Names in every list of codecs, however deep."""
    names: set[str] = set()
    if isinstance(node, dict):
        for key, value in node.items():
            if key in ("codecs", "index_codecs"):
                names |= {codec["name"] for codec in value}
            names |= codec_names(value)
    elif isinstance(node, list):
        for value in node:
            names |= codec_names(value)
    return names


def test_every_array_needs_core_codecs_only(shard: Shard) -> None:
    path, _, _ = shard
    documents = sorted((path / GROUP).rglob("zarr.json"))
    assert len(documents) == 2 + len(SMALL_ARRAYS) + 1
    found = set()
    for document in documents:
        assert "numcodecs" not in document.read_text()
        found |= codec_names(json.loads(document.read_text()))
    assert found == CORE_CODECS


class CountingStorage(LocalStorage):
    """Notes what is read."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.ranges: list[tuple[str, int, int]] = []
        self.whole: list[str] = []
        self.opened: list[str] = []

    def read(self, key: str) -> bytes:
        self.whole.append(key)
        return super().read(key)

    def open(self, key: str) -> StoredObject:
        self.opened.append(key)
        return CountingObject(self, key)


class CountingObject(StoredObject):
    def __init__(self, storage: CountingStorage, key: str) -> None:
        super().__init__(storage.path(key), key)
        self._ranges, self._key = storage.ranges, key

    def read_into(self, buffer: memoryview, start: int) -> None:
        self._ranges.append((self._key, start, len(buffer)))
        super().read_into(buffer, start)


def test_reading_a_sample_touches_its_own_bytes_only(shard: Shard) -> None:
    path, spec, record = shard
    storage = CountingStorage(path)
    reader = ShardReader(storage, record, spec)
    states = f"{GROUP}/{SHARD}/{STATES_OBJECT}"
    total = record.files[STATES_OBJECT].size
    num_planes, _ = spec.build_codec().plane_shape(2, 8)
    index_bytes = 16 * num_planes * sum(-(-n // 64) for n in LENGTHS) + 4
    assert storage.ranges == [(states, total - index_bytes, index_bytes)]
    assert not any(key == states for key in storage.whole)
    storage.ranges.clear()
    storage.whole.clear()
    storage.opened.clear()
    for row in (3, 0, 4, 2, 1, 3):
        reader.read(row)
    assert storage.whole == []
    assert storage.opened == [states]  # once for all samples
    assert [key for key, _, _ in storage.ranges] == [states] * 6
    spans = {start: size for _, start, size in storage.ranges}
    assert len(spans) == 5  # one range a sample, and the sample read twice has one place
    ends = sorted((start, start + size) for start, size in spans.items())
    assert ends[0][0] == 0
    assert ends[-1][1] == total - index_bytes
    assert all(end == begin for (_, end), (begin, _) in pairwise(ends))


def test_the_states_are_open_while_a_reader_needs_them_and_no_longer(shard: Shard) -> None:
    path, spec, record = shard
    place = str(path / GROUP / SHARD / STATES_OBJECT)

    def num_open() -> int:
        return sum(os.path.realpath(link) == place for link in Path("/proc/self/fd").iterdir())

    if not Path("/proc/self/fd").is_dir():
        pytest.skip("needs /proc")
    readers = [open_shard(path, spec, record) for _ in range(3)]
    assert num_open() == 0  # planning reads the small arrays of thousands of shards
    for reader in readers:
        reader.read(0)
        reader.read(1)
    assert num_open() == 3
    del reader
    readers.pop()
    assert num_open() == 2
    readers.clear()
    assert num_open() == 0


def test_threads_that_share_a_reader_get_their_own_samples(
    tmp_path: Path, spec: CaptureSpec, write_shard: WriteShard
) -> None:
    """Each has its own buffers; what one has read stays as it is when it reads the next."""
    record = write_shard(tmp_path, spec)
    reader = open_shard(tmp_path, spec, record)
    expected = [reader.read(row).packed.planes_PTW.clone() for row in range(len(LENGTHS))]
    rows = np.random.default_rng(0).permutation(np.repeat(np.arange(len(LENGTHS)), 40)).tolist()
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda row: reader.read(row).packed.planes_PTW, rows))
    for row, levels in zip(rows, found, strict=True):
        assert torch.equal(levels, expected[row])


def _digest_of_a_sample(reader: ShardReader, row: int, sender: Any) -> None:
    sender.send(reader.read(row).packed.planes_PTW.numpy().tobytes())


def test_a_forked_process_may_go_on_with_an_open_reader(shard: Shard) -> None:
    reader = open_shard(*shard)
    expected = [reader.read(row).packed.planes_PTW.numpy().tobytes() for row in range(5)]
    context = multiprocessing.get_context("fork")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads
        pipes = [context.Pipe(duplex=False) for _ in range(2)]
        processes = [
            context.Process(target=_digest_of_a_sample, args=(reader, 3 + i, pipes[i][1]))
            for i in range(2)
        ]
        for process in processes:
            process.start()
    assert reader.read(1).packed.planes_PTW.numpy().tobytes() == expected[1]
    found = [receiver.recv() for receiver, _ in pipes]
    for process in processes:
        process.join()
    assert found == expected[3:]


def test_reading_takes_the_memory_of_one_sample(
    tmp_path: Path, spec: CaptureSpec, write_shard: WriteShard
) -> None:
    spec = replace(spec, target=replace(spec.target, hidden_size=64))
    record = write_shard(tmp_path, spec, (128,) * 40)
    reader = open_shard(tmp_path, spec, record)
    reader.read(0)
    raw = 128 * math.prod(spec.build_codec().plane_shape(spec.num_captured, 64))
    tracemalloc.start()
    for row in range(40):
        reader.read(row)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * raw < record.files[STATES_OBJECT].size / 2


def test_writing_takes_the_memory_of_one_sample(tmp_path: Path, spec: CaptureSpec) -> None:
    spec = replace(spec, target=replace(spec.target, hidden_size=256))
    writer = ShardWriter(tmp_path / SHARD, spec, SHARD)
    raw = 128 * spec.raw_bytes_per_token
    tracemalloc.start()
    for seed in range(40):
        writer.add(make_sample(spec, make_states(spec, 128, seed=seed)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    writer.close()
    assert peak < 4 * raw


def test_an_all_zero_mask_is_stored_and_not_left_to_the_fill_value(
    tmp_path: Path, spec: CaptureSpec
) -> None:
    name = create_cache(tmp_path, spec)
    hidden = make_states(spec, 5)
    sample = make_sample(spec, hidden, token_ids=[0] * 5, loss_mask=[0] * 5)
    record = add_shard(tmp_path, spec, SHARD, [sample], calibration=name)
    assert {"token_ids/c/0", "loss_mask/c/0", "sample_starts/c/0"} <= set(record.files)
    (tmp_path / GROUP / SHARD / "loss_mask/c/0").unlink()
    refuses(tmp_path, spec, record)


def test_a_shard_whose_samples_were_all_quarantined_is_empty_and_opens(
    tmp_path: Path, spec: CaptureSpec
) -> None:
    name = create_cache(tmp_path, spec)
    reasons = {"ab" * 16: "states of block 2 are not finite"}
    record = add_shard(tmp_path, spec, SHARD, [], calibration=name, quarantined=reasons)
    assert record.quarantined == reasons
    assert len(open_shard(tmp_path, spec, record)) == 0
    num_planes, width = spec.build_codec().plane_shape(2, 8)
    states = zarr.open_group(str(tmp_path / GROUP / SHARD), mode="r")[STATES]
    assert states.shape == (num_planes, 0, width)


def test_a_row_that_is_not_there_is_an_error(shard: Shard) -> None:
    reader = open_shard(*shard)
    with pytest.raises((ValueError, IndexError)):
        reader.read(len(LENGTHS))


def test_samples_that_do_not_fit_together_are_refused(tmp_path: Path, spec: CaptureSpec) -> None:
    writer = ShardWriter(tmp_path / SHARD, spec, SHARD)
    sample = make_sample(spec, make_states(spec, 5))
    with pytest.raises(ValueError, match="5 rows of states, 4 tokens, 5 mask entries"):
        writer.add(replace(sample, token_ids=sample.token_ids[:4]))
    with pytest.raises(ValueError, match="5 rows of states, 5 tokens, 6 mask entries"):
        writer.add(replace(sample, loss_mask=np.ones(6, np.uint8)))
    with pytest.raises(ValueError, match="must be equal and positive"):
        writer.add(make_sample(spec, make_states(spec, 5)[:0]))
    wider = make_spec(spec.build_codec(), hidden_size=16)
    (planes, found), (_, expected) = (spec.build_codec().plane_shape(2, n) for n in (16, 8))
    message = f"{planes} planes of {found} bytes a token, expected {planes} of {expected}$"
    with pytest.raises(ValueError, match=message):
        writer.add(make_sample(wider, make_states(wider, 5)))
    writer.close()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("num_samples", [1, 400], ids=["at-the-end", "on-the-way"])
def test_a_full_disk_ends_a_shard_with_an_error_of_ours(
    tmp_path: Path, spec: CaptureSpec, monkeypatch: pytest.MonkeyPatch, num_samples: int
) -> None:
    opened = Path.open

    def open_full(path: Path, *arguments: Any, **options: Any) -> Any:
        place = Path("/dev/full") if path.as_posix().endswith(STATES_OBJECT) else path
        return opened(place, *arguments, **options)

    monkeypatch.setattr(Path, "open", open_full)
    writer = ShardWriter(tmp_path / SHARD, spec, SHARD)
    sample = make_sample(spec, make_states(spec, 64))

    def write() -> None:
        try:
            for _ in range(num_samples):
                writer.add(sample)
            writer.finish(layers=(), sources=(), calibration=None, quarantined={})
        finally:
            writer.close()  # what a builder does, and what must not hide the first error

    with pytest.raises(OutOfSpaceError, match=r"no space left on the disk"):
        write()


FILES = [f"{name}/c/0{'/0' if name == 'sample_ids' else ''}" for name in SMALL_ARRAYS]


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def extend(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def empty(path: Path) -> None:
    path.write_bytes(b"")


def remove(path: Path) -> None:
    path.unlink()


def as_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGE = [
    pytest.param(lambda path: flip(path, 0), id="first-byte"),
    pytest.param(lambda path: flip(path, path.stat().st_size // 2, 0x80), id="middle-byte"),
    pytest.param(lambda path: flip(path, -1), id="last-byte"),
    pytest.param(truncate, id="truncated"),
    pytest.param(empty, id="empty"),
    pytest.param(remove, id="missing"),
    pytest.param(as_directory, id="a-directory"),
]


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", [STATES_OBJECT, *FILES])
def test_damage_to_any_array_is_found_by_reading(
    tmp_path: Path, name: str, damage: Callable[[Path], None], write_shard: WriteShard
) -> None:
    spec = make_spec(LevelCodec(step=1 / 16))
    record = write_shard(tmp_path, spec, (70, 3))
    read_all(tmp_path, spec, record)
    damage(tmp_path / GROUP / SHARD / name)
    refuses(tmp_path, spec, record)


@pytest.mark.parametrize("name", FILES)
def test_bytes_after_the_end_of_a_small_array_are_found(
    tmp_path: Path, name: str, write_shard: WriteShard
) -> None:
    spec = make_spec(LevelCodec(step=1 / 16))
    record = write_shard(tmp_path, spec, (70, 3))
    extend(tmp_path / GROUP / SHARD / name)
    refuses(tmp_path, spec, record)


def test_a_flipped_bit_anywhere_in_the_states_is_found(
    tmp_path: Path, spec: CaptureSpec, write_shard: WriteShard
) -> None:
    """Chunks, their checksums, and the index with its checksum: every byte of a small object."""
    record = write_shard(tmp_path, spec, (70, 3))
    path = tmp_path / GROUP / SHARD / STATES_OBJECT
    intact = path.read_bytes()
    num_planes, _ = spec.build_codec().plane_shape(2, 8)
    index_bytes = 16 * 3 * num_planes + 4
    places = [
        *range(0, len(intact) - index_bytes, 11),
        *range(len(intact) - index_bytes, len(intact)),
    ]
    for place in places:
        flip(path, place, 1 << place % 8)
        refuses(tmp_path, spec, record)
        path.write_bytes(intact)
    read_all(tmp_path, spec, record)


def test_a_damaged_chunk_spoils_its_own_sample_only(
    tmp_path: Path, spec: CaptureSpec, write_shard: WriteShard
) -> None:
    record = write_shard(tmp_path, spec, (70, 3, 64))
    flip(tmp_path / GROUP / SHARD / STATES_OBJECT, 10)
    reader = open_shard(tmp_path, spec, record)
    with pytest.raises(ShardCorruptError, match=rf"shard {SHARD}, sample 0, chunk 0: checksum"):
        reader.read(0)
    reader.read(1)
    reader.read(2)


def test_an_index_that_leaves_chunks_out_is_found(
    tmp_path: Path, spec: CaptureSpec, write_shard: WriteShard
) -> None:
    """Zarr would read fill values there, although every checksum is right."""
    record = write_shard(tmp_path, spec, (70, 3))
    path = tmp_path / GROUP / SHARD / STATES_OBJECT
    states = zarr.open_array(str(path.parents[3]), mode="r+")
    states[:, 64:128] = 0  # zarr drops a chunk of fill values from the index
    assert path.stat().st_size < record.files[STATES_OBJECT].size
    refuses(tmp_path, spec, record)
    grown = replace(record.files[STATES_OBJECT], size=path.stat().st_size)
    forged = replace(record, files={**record.files, STATES_OBJECT: grown})
    with pytest.raises(ShardCorruptError, match="chunks are missing from the index"):
        read_all(tmp_path, spec, forged)


def noise(spec: CaptureSpec, num_tokens: int, seed: int) -> torch.Tensor:
    """States that no compressor makes smaller, so that equal shapes have equal sizes."""
    rng = np.random.default_rng(seed)
    shape = (num_tokens, spec.num_captured, spec.target.hidden_size)
    if spec.codec["name"] == "levels":
        last = 7 if spec.codec.get("bits") == 4 else 127
        return torch.from_numpy(
            rng.integers(-last, last + 1, shape) * spec.codec["step"]
        ).bfloat16()
    return torch.from_numpy(rng.integers(0, 2**16, shape, np.uint16).view(np.int16)).view(
        torch.bfloat16
    )


def test_files_swapped_between_two_shards_of_equal_shapes_are_found(
    tmp_path: Path, spec: CaptureSpec
) -> None:
    calibration = create_cache(tmp_path, spec)
    records = []
    for number, shard_id in enumerate((SHARD, OTHER)):
        rng = np.random.default_rng(number)
        samples = [
            make_sample(
                spec,
                noise(spec, length, seed=length + number),
                token_ids=rng.integers(0, 32, length),
            )
            for length in (70, 64)
        ]
        records.append(add_shard(tmp_path, spec, shard_id, samples, calibration=calibration))
    assert len({record.files[STATES_OBJECT].size for record in records}) == 1
    one, two = tmp_path / GROUP / SHARD, tmp_path / GROUP / OTHER
    for name in (STATES_OBJECT, "token_ids/c/0", "chunk_crc32c/c/0", "."):
        swap(one / name, two / name)
        for record in records:
            refuses(tmp_path, spec, record)
        swap(one / name, two / name)
    for record in records:
        read_all(tmp_path, spec, record)


def swap(one: Path, two: Path) -> None:
    aside = one.with_name("aside")
    one.rename(aside)
    two.rename(one)
    aside.rename(two)


def test_samples_swapped_inside_a_shard_are_found(tmp_path: Path, spec: CaptureSpec) -> None:
    calibration = create_cache(tmp_path, spec)
    samples = [make_sample(spec, noise(spec, 64, seed)) for seed in (1, 2)]
    record = add_shard(tmp_path, spec, SHARD, samples, calibration=calibration)
    path = tmp_path / GROUP / SHARD / STATES_OBJECT
    data = path.read_bytes()
    num_planes, _ = spec.build_codec().plane_shape(2, 8)
    half = (len(data) - 32 * num_planes - 4) // 2
    path.write_bytes(data[half : 2 * half] + data[:half] + data[2 * half :])
    refuses(tmp_path, spec, record)


def test_a_shard_of_another_cache_is_found(
    tmp_path: Path, spec: CaptureSpec, write_shard: WriteShard
) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    record = write_shard(ours, spec)
    write_shard(theirs, make_spec(spec.build_codec(), hidden_size=16))
    shutil.rmtree(ours / GROUP / SHARD)
    shutil.copytree(theirs / GROUP / SHARD, ours / GROUP / SHARD)
    refuses(ours, spec, record)


def test_a_shard_that_is_gone_is_found(shard: Shard) -> None:
    path = shard[0]
    shutil.rmtree(path / GROUP / SHARD)
    with pytest.raises(ShardCorruptError, match=rf"{SHARD}.* missing\. Run `cache-builder repair`"):
        read_all(*shard)


@pytest.mark.parametrize("name", [STATES_OBJECT, *FILES])
def test_a_record_that_leaves_a_file_out_is_refused(
    tmp_path: Path, name: str, write_shard: WriteShard
) -> None:
    spec = make_spec(LevelCodec(step=1 / 16))
    record = write_shard(tmp_path, spec)
    files = {key: file for key, file in record.files.items() if key != name}
    refuses(tmp_path, spec, replace(record, files=files))


@pytest.mark.parametrize("name", ["num_samples", "num_tokens", "num_outliers"])
def test_a_record_with_other_counts_is_refused(shard: Shard, name: str) -> None:
    path, spec, record = shard
    changed = replace(record, **{name: getattr(record, name) + 1})
    with pytest.raises(ShardCorruptError, match=f"shard {SHARD}: its arrays disagree"):
        read_all(path, spec, changed)


def test_the_metadata_of_zarr_are_in_the_record_and_not_needed_to_read(shard: Shard) -> None:
    """Damage to them is for a comparison of all digests to find; reading does not touch them."""
    path, spec, record = shard
    documents = [name for name in record.files if name.endswith("zarr.json")]
    assert len(documents) == 1 + 1 + len(SMALL_ARRAYS)
    for name in documents:
        document = path / GROUP / SHARD / name
        flip(document, 5)
        assert sha256_file(document) != record.files[name].sha256
    read_all(path, spec, record)


def test_storage_names_a_file_that_ends_too_early_or_is_not_there(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    (tmp_path / "directory" / "inside").mkdir(parents=True)
    (tmp_path / "file").write_bytes(bytes(10))
    assert storage.read_range("file", 4, 6) == bytes(6)
    with pytest.raises(ShardCorruptError, match=r"file: expected 7 bytes at 4, found 6\. The file"):
        storage.read_range("file", 4, 7)
    with pytest.raises(ShardCorruptError, match=r"absent: missing\. Run `cache-builder repair`"):
        storage.read_range("absent", 0, 1)
    with pytest.raises(ShardCorruptError, match=r"cannot be read \(Is a directory\)"):
        storage.read("directory")
    assert storage.names("directory") == ["inside"]
    assert storage.names("absent") == []


def test_the_same_samples_give_the_same_record(
    tmp_path: Path, spec: CaptureSpec, write_shard: WriteShard
) -> None:
    again = make_shard(tmp_path / "again", spec, LENGTHS)
    assert again == write_shard(tmp_path, spec)


def test_the_stored_states_are_smaller_than_raw_ones(
    tmp_path: Path, write_shard: WriteShard
) -> None:
    for name, share in (("lossless", 0.75), ("balanced", 0.42), ("small", 0.21)):
        spec = make_spec(PRESETS[name], hidden_size=2048)
        record = write_shard(tmp_path / name, spec, (128,))
        raw = 128 * spec.raw_bytes_per_token
        assert record.files[STATES_OBJECT].size < share * raw
        if name == "balanced":
            assert record.num_outliers == 2
