"""A cache as a whole: opening, moving, refusing; its golden copies; and FORMAT.md, executed."""

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore
import torch
import zarr
from safetensors.numpy import load, save

import shared
from cache_builder.publication import publish
from shared.cache import Cache
from shared.codec import Calibration, LevelCodec, LosslessCodec
from shared.errors import (
    CacheError,
    CacheIncompatibleError,
    CacheNotFoundError,
    DraftCacheError,
    ShardCorruptError,
)
from shared.files import canonical_json, sha256_bytes, write_bytes, write_json
from shared.head import Readout
from shared.layout import CALIBRATIONS, DESCRIPTION, HEAD, MANIFEST, RECORDS, generation_key
from shared.metadata import calibration_to_bytes, read_calibration
from shared.shard import GROUP
from tests.test_shared.made import (
    CODECS,
    add_shard,
    bits,
    create_cache,
    flip,
    make_cache,
    make_sample,
    make_spec,
    make_states,
)
from tests.test_shared.make_golden import (
    GOLDEN,
    OUTLIERS,
    SHARDS,
    golden_calibration,
    golden_levels,
    golden_projection,
    golden_spec,
    golden_states,
    golden_tokens,
)

SPEC = make_spec(LevelCodec(step=1 / 16))
LENGTHS = ((70, 3, 64), (2, 130))
FORMAT_MD = Path(shared.__file__).with_name("FORMAT.md")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of two shards. Read it only."""
    path = tmp_path_factory.mktemp("made") / "cache"
    make_cache(path, SPEC, LENGTHS)
    return path


@pytest.fixture
def cache(made: Path, tmp_path: Path) -> Path:
    """A copy that may be damaged."""
    return shutil.copytree(made, tmp_path / "cache")


def read_all(path: Path) -> list[bytes]:
    """Everything a trainer reads, as bytes."""
    opened = Cache(path)
    opened.head()
    return [read_one(opened, position) for position in range(len(opened.index))]


def read_one(cache: Cache, position: int) -> bytes:
    sample = cache.read(position)
    states = bits(cache.unpack(sample)).tobytes()
    return states + sample.token_ids.tobytes() + sample.loss_mask.tobytes()


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    fields = json.loads(path.read_text())
    change(fields)
    write_json(path, fields)


def test_a_cache_gives_back_every_sample_under_its_identity(made: Path) -> None:
    cache = Cache(made)
    assert cache.shard_ids == ["0001-00000", "0001-00001"]
    positions = iter(range(5))
    for number, lengths in enumerate(LENGTHS):
        for i, length in enumerate(lengths):
            hidden = make_states(SPEC, length, seed=1000 * number + i)
            sample = cache.read(position := next(positions))
            assert sample.sample_id == make_sample(SPEC, hidden).sample_id
            assert cache.index.num_tokens[position] == length
            assert (cache.unpack(sample).float() - hidden.float()).abs().max() < 0.05


def test_a_cache_built_from_a_target_is_whole(tiny_cache: Path) -> None:
    cache = Cache(tiny_cache)
    head = cache.head()
    assert head.embedding_VD.shape == (272, 64)
    assert not head.is_tied
    assert len(read_all(tiny_cache)) == cache.manifest.totals.num_samples == 48


def test_a_moved_cache_opens_unchanged(cache: Path, tmp_path: Path) -> None:
    before = read_all(cache)
    moved = tmp_path / "elsewhere" / "other name"
    moved.parent.mkdir()
    cache.rename(moved)
    assert read_all(moved) == before


def test_what_readers_must_ignore_is_ignored(cache: Path) -> None:
    before = read_all(cache)
    (cache / "wip" / "0002-00000").mkdir(parents=True)
    (cache / GROUP / "0002-00000").mkdir()  # renamed, and killed before its record
    shutil.copyfile(cache / RECORDS / "0001-00000.json", cache / RECORDS / "0002-00000.json")
    (cache / "manifest.json.77.partial").write_bytes(b"{")
    assert read_all(cache) == before


def test_an_older_generation_opens_as_it_was(cache: Path) -> None:
    before = read_all(cache)
    name = Cache(cache).description["calibration"]
    sample = make_sample(SPEC, make_states(SPEC, 40, seed=7), source=0)
    add_shard(cache, SPEC, "0002-00000", [sample], calibration=name, sources=("new",))
    assert publish(cache, SPEC).generation == 2
    newest, first = Cache(cache), Cache(cache, generation=1)
    assert len(newest.index) == 6
    assert newest.manifest.sources == ("made", "new")
    assert newest.index.source.tolist() == [0] * 5 + [1]
    assert (first.manifest.generation, len(first.index)) == (1, 5)
    assert [read_one(first, i) for i in range(5)] == before
    assert [read_one(newest, i) for i in range(5)] == before
    assert newest.read(5).sample_id == sample.sample_id


def test_publishing_again_adds_no_generation(cache: Path) -> None:
    assert publish(cache, SPEC).generation == 1
    assert not (cache / generation_key(2, "json")).exists()


def test_a_generation_that_is_not_there_is_named(cache: Path) -> None:
    with pytest.raises(CacheNotFoundError, match=r"generations/0009\.json is missing: no such"):
        Cache(cache, generation=9)


def test_a_generation_in_the_place_of_another_is_refused(cache: Path) -> None:
    shutil.copyfile(cache / generation_key(1, "json"), cache / generation_key(2, "json"))
    with pytest.raises(CacheError, match=r"generations/0002\.json: it holds generation 1"):
        Cache(cache, generation=2)


def test_where_no_cache_is_the_message_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(CacheNotFoundError) as caught:
        Cache(tmp_path / "absent")
    assert str(caught.value) == (
        f"{tmp_path / 'absent'}: no cache here (cache.json is missing). Build one with "
        "`make cache` or `cache-builder build`."
    )
    assert isinstance(caught.value, FileNotFoundError)


def test_a_cache_that_was_never_published_says_how_to_go_on(cache: Path) -> None:
    (cache / MANIFEST).unlink()
    with pytest.raises(CacheNotFoundError, match=r"nothing is published yet\. Run `make cache`"):
        Cache(cache)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"format_version": 1}, "format version 1, this version reads 2", id="version"),
        pytest.param({"format_version": None}, "format version None, this", id="no-version"),
        pytest.param({"format": "other"}, "not a draftcache cache", id="format"),
    ],
)
def test_a_cache_of_another_format_is_refused(
    cache: Path, change: dict[str, Any], message: str
) -> None:
    edit(cache / DESCRIPTION, lambda fields: fields.update(change))
    with pytest.raises(CacheIncompatibleError, match=rf"cache\.json: {message}"):
        Cache(cache)


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"\xff\xfe", b"[" * 100_000, b'{"a": NaN}', b"null"],
    ids=["empty", "cut", "not-utf8", "deep", "nan", "null"],
)
@pytest.mark.parametrize("name", [DESCRIPTION, MANIFEST])
def test_metadata_that_is_no_json_object_is_refused_with_its_name(
    cache: Path, name: str, data: bytes
) -> None:
    (cache / name).write_bytes(data)
    with pytest.raises(CacheError, match=re.escape(f"{cache}/{name}: ")):
        Cache(cache)


EDITS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "description-spec": (
        DESCRIPTION,
        lambda c: edit(c / DESCRIPTION, lambda f: f["spec"]["target"].update(vocab_size=33)),
    ),
    "description-fingerprint": (
        DESCRIPTION,
        lambda c: edit(c / DESCRIPTION, lambda f: f.update(fingerprint="0" * 64)),
    ),
    "description-head": (
        HEAD,
        lambda c: edit(c / DESCRIPTION, lambda f: f.update(head_sha256="0" * 64)),
    ),
    "description-part": (DESCRIPTION, lambda c: edit(c / DESCRIPTION, lambda f: f.pop("spec"))),
    "manifest-totals": (
        MANIFEST,
        lambda c: edit(c / MANIFEST, lambda f: f["totals"].update(num_tokens=1)),
    ),
    "manifest-sources": (
        MANIFEST,
        lambda c: edit(c / MANIFEST, lambda f: f.update(sources=["renamed"])),
    ),
    "manifest-records": (
        MANIFEST,
        lambda c: edit(c / MANIFEST, lambda f: f["records"].popitem()),
    ),
    "index": (generation_key(1, "index.safetensors"), lambda c: flip(c / INDEX, -1)),
    "index-gone": (generation_key(1, "index.safetensors"), lambda c: (c / INDEX).unlink()),
    "record": (
        f"{RECORDS}/0001-00001.json",
        lambda c: edit(c / RECORDS / "0001-00001.json", lambda f: f.update(num_supervised=1)),
    ),
    "record-gone": (
        f"{RECORDS}/0001-00001.json",
        lambda c: (c / RECORDS / "0001-00001.json").unlink(),
    ),
    "record-swapped": (
        f"{RECORDS}/0001-00000.json",
        lambda c: shutil.copyfile(c / RECORDS / "0001-00001.json", c / RECORDS / "0001-00000.json"),
    ),
    "head": (HEAD, lambda c: flip(c / HEAD, -1)),
    "head-gone": (HEAD, lambda c: (c / HEAD).unlink()),
    "calibration": (CALIBRATIONS, lambda c: flip(next((c / CALIBRATIONS).iterdir()), -1)),
    "calibration-gone": (CALIBRATIONS, lambda c: next((c / CALIBRATIONS).iterdir()).unlink()),
    "shard": (f"{GROUP}/0001-00000", lambda c: flip(c / GROUP / "0001-00000/token_ids/c/0", 3)),
}
INDEX = generation_key(1, "index.safetensors")


@pytest.mark.parametrize("name", EDITS)
def test_whatever_was_edited_is_refused_by_its_name(cache: Path, name: str) -> None:
    place, damage = EDITS[name]
    damage(cache)
    with pytest.raises(CacheError) as caught:
        read_all(cache)
    message = str(caught.value)
    assert Path(place).name in message
    assert message.startswith(str(cache))


def test_a_flipped_bit_in_any_file_that_reading_covers_is_found(cache: Path) -> None:
    """FORMAT.md: what is not covered is named there, and nothing else."""
    not_covered = re.compile(r"shards\.zarr/(.*/)?zarr\.json|generations/0001\.json")
    not_covered_fields = re.compile(rb'"(calibration|target_name|target_revision)"')
    rng = np.random.default_rng(0)
    for path in sorted(p for p in cache.rglob("*") if p.is_file()):
        if not_covered.fullmatch(path.relative_to(cache).as_posix()):
            continue
        intact = path.read_bytes()
        for place in rng.integers(0, len(intact), 4):
            line = intact[intact.rfind(b"\n", 0, place) + 1 :].split(b"\n")[0]
            if path.name == DESCRIPTION and not_covered_fields.search(line):
                continue
            if path.suffix == ".json" and intact[place : place + 1].isspace():
                continue  # white space of JSON may change into other white space
            flip(path, int(place), 1 << int(rng.integers(8)))
            with pytest.raises(DraftCacheError):
                read_all(cache)
            path.write_bytes(intact)
    assert read_all(cache)


def test_metadata_of_two_caches_do_not_mix(cache: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    make_cache(other, make_spec(LevelCodec(step=1 / 8)), LENGTHS)
    shutil.copyfile(other / MANIFEST, cache / MANIFEST)
    with pytest.raises(
        CacheIncompatibleError, match=r"manifest\.json has fingerprint .* two caches"
    ):
        Cache(cache)


def forge(cache: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a manifest and make its digest right again."""

    def redo(fields: dict[str, Any]) -> None:
        del fields["sha256"]
        change(fields)
        fields["sha256"] = sha256_bytes(canonical_json(fields))

    edit(cache / MANIFEST, redo)


def test_a_record_of_another_cache_is_refused_even_with_the_right_digest(
    cache: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    make_cache(other, make_spec(LevelCodec(step=1 / 8)), LENGTHS)
    key = f"{RECORDS}/0001-00000.json"
    data = (other / key).read_bytes()
    (cache / key).write_bytes(data)
    forge(cache, lambda f: f["records"].update({"0001-00000": sha256_bytes(data)}))
    with pytest.raises(CacheIncompatibleError, match=r"0001-00000\.json: .* another cache"):
        Cache(cache).read(0)


def test_an_index_that_points_to_another_sample_is_refused(cache: Path) -> None:
    arrays = load((cache / INDEX).read_bytes())
    arrays["row"] = arrays["row"][::-1].copy()
    arrays["shard"] = arrays["shard"][::-1].copy()
    data = save(arrays)
    write_bytes(cache / INDEX, data)
    forge(cache, lambda f: f.update(index={"size": len(data), "sha256": sha256_bytes(data)}))
    with pytest.raises(CacheError, match=r"the index expects sample .* found"):
        Cache(cache).read(0)


def test_an_index_with_fewer_rows_than_the_manifest_counts_is_refused(cache: Path) -> None:
    arrays = {name: values[:-2] for name, values in load((cache / INDEX).read_bytes()).items()}
    data = save(arrays)
    write_bytes(cache / INDEX, data)
    forge(cache, lambda f: f.update(index={"size": len(data), "sha256": sha256_bytes(data)}))
    with pytest.raises(CacheError, match=r"3 samples, the manifest counts 5"):
        Cache(cache)


@pytest.mark.parametrize(
    ("mean", "step"),
    [
        pytest.param(torch.zeros(2, 9), torch.ones(2, 9), id="shape"),
        pytest.param(torch.zeros(2, 8), torch.ones(8), id="step-shape"),
        pytest.param(torch.zeros(2, 8).double(), torch.ones(2, 8), id="type"),
        pytest.param(torch.full((2, 8), torch.nan), torch.ones(2, 8), id="nan"),
        pytest.param(torch.zeros(2, 8), torch.full((2, 8), torch.inf), id="infinite-step"),
        pytest.param(torch.zeros(2, 8), torch.zeros(2, 8), id="step-of-zero"),
    ],
)
def test_a_calibration_that_cannot_be_is_refused(
    cache: Path, mean: torch.Tensor, step: torch.Tensor
) -> None:
    data = calibration_to_bytes(Calibration(mean, step))
    name = sha256_bytes(data)
    write_bytes(cache / CALIBRATIONS / f"{name}.safetensors", data)
    with pytest.raises(CacheError, match=rf"{name}\.safetensors: "):
        read_calibration(Cache(cache).storage, name, SPEC)


def test_a_damaged_file_is_found_by_a_reader_that_is_open_already(cache: Path) -> None:
    opened = Cache(cache)
    opened.read(0)
    flip(cache / GROUP / "0001-00000" / "hidden_states/c/0/0/0", 20)
    with pytest.raises(ShardCorruptError, match="shard 0001-00000, sample 0"):
        opened.read(0)


def test_only_so_many_shards_stay_open(tmp_path: Path) -> None:
    make_cache(tmp_path / "cache", SPEC, [[2]] * 5)
    cache = Cache(tmp_path / "cache", open_shards=2)
    first = cache.shard(cache.shard_ids[0])
    assert cache.shard(cache.shard_ids[0]) is first
    for shard_id in cache.shard_ids:
        cache.shard(shard_id)
        assert len(cache._readers) <= 2
    assert list(cache._readers) == cache.shard_ids[-2:]
    cache.shard(cache.shard_ids[-2])  # used last, so the other one goes
    cache.shard(cache.shard_ids[0])
    assert list(cache._readers) == [cache.shard_ids[-2], cache.shard_ids[0]]
    assert cache.shard(cache.shard_ids[0]) is not first


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_eight_threads_read_the_same_bytes(codec: Any, tmp_path: Path) -> None:
    """With fewer readers than shards, so that they are opened and closed meanwhile."""
    make_cache(tmp_path / "cache", make_spec(codec, hidden_size=64), [[70, 3, 64], [2, 130], [65]])
    expected = read_all(tmp_path / "cache")
    cache = Cache(tmp_path / "cache", open_shards=1)
    positions = np.random.default_rng(0).permutation(np.repeat(np.arange(6), 16)).tolist()
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda position: read_one(cache, position), positions))
    assert found == [expected[position] for position in positions]


def test_an_empty_shard_is_no_obstacle(tmp_path: Path) -> None:
    name = create_cache(tmp_path, SPEC)
    add_shard(tmp_path, SPEC, "0001-00000", [], calibration=name)
    sample = make_sample(SPEC, make_states(SPEC, 3))
    add_shard(tmp_path, SPEC, "0001-00001", [sample], calibration=name)
    publish(tmp_path, SPEC)
    cache = Cache(tmp_path)
    assert len(cache.index) == 1
    assert cache.read(0).sample_id == sample.sample_id


# Golden caches


@pytest.fixture(params=SHARDS)
def golden(request: pytest.FixtureRequest) -> Cache:
    return Cache(GOLDEN / request.param)


LENGTHS_OF_GOLDEN = {
    "lossless-2": [65, 3],
    "levels-2": [65, 3, 2],
    "small-2": [65, 3],
    "post-norm-2": [65, 3],
    "projected-2": [65, 3],
}


def test_a_golden_cache_holds_exactly_what_was_put_in(golden: Cache) -> None:
    lengths = LENGTHS_OF_GOLDEN[golden.path.name]
    assert golden.index.num_tokens.tolist() == lengths
    for position, length in enumerate(lengths):
        sample = golden.read(position)
        token_ids, loss_mask = golden_tokens(length)
        assert sample.token_ids.tolist() == token_ids
        assert sample.loss_mask.tolist() == loss_mask
        assert np.array_equal(bits(golden.unpack(sample)), bits(golden_states(length)))


def test_the_values_of_the_golden_caches_are_these(golden: Cache) -> None:
    """Written out, so that a change of the code that makes them cannot move the goal."""
    sample = golden.read(0)
    hidden = golden.unpack(sample)
    assert bits(hidden)[0, 0, 0] == 0x46E3
    assert hidden[0, 0, 1:].tolist() == [-3.25, -2.6875, -2.125, -1.5625, -1.0, -0.4375, 0.125]
    assert hidden[64, 1, :3].tolist() == [-1.375, -0.5, 0.375]
    assert bits(hidden)[2, 1, 7] == 0x7FC1
    assert hidden[2, 0, 3] == -torch.inf
    assert sample.sample_id == "905c70128beb6bb8bf07d23c5e5ce120"
    digest = hashlib.sha256(bits(hidden).tobytes()).hexdigest()
    assert digest == "3be1ecd3e78397058965ad289cdaebbc597af94b291ab7e2bdeb9a7de7062121"


def test_the_levels_and_outliers_of_the_golden_cache_are_apart() -> None:
    packed = Cache(GOLDEN / "levels-2").read(0).packed
    levels = golden_levels(65)
    for place in OUTLIERS:
        levels[place] = 0
    first, second = (levels % 256).chunk(2, -1)
    upper, lower = first // 16 + 16 * (second // 16), first % 16 + 16 * (second % 16)
    assert packed.planes_PTW.tolist() == torch.stack([upper, lower]).flatten(2).tolist()
    positions = [(t * 2 + layer) * 8 + channel for t, layer, channel in OUTLIERS]
    assert packed.outlier_position.tolist() == sorted(positions)


def test_the_golden_cache_of_small_has_two_levels_in_a_byte_and_the_rest_beside_them() -> None:
    packed = Cache(GOLDEN / "small-2").read(0).packed
    levels = golden_levels(65)
    for place in OUTLIERS:
        levels[place] = 0
    held = levels.abs() <= 7
    lower, upper = levels.where(held, torch.tensor(0)).chunk(2, -1)
    (plane,) = packed.planes_PTW
    assert plane.tolist() == (lower % 16 + 16 * (upper % 16)).flatten(1).tolist()
    for place in OUTLIERS:
        held[place] = False
    assert packed.outlier_position.tolist() == (~held).flatten().nonzero().squeeze(1).tolist()


def test_the_metadata_of_the_golden_caches_are_these() -> None:
    levels, lossless = (Cache(GOLDEN / name) for name in ("levels-2", "lossless-2"))
    assert levels.spec == make_spec(LevelCodec(step=1 / 16))
    assert lossless.spec == make_spec(LosslessCodec())
    small = Cache(GOLDEN / "small-2")
    assert small.spec == make_spec(LevelCodec(step=1 / 2, bits=4))
    post_norm = Cache(GOLDEN / "post-norm-2")
    assert post_norm.spec == make_spec(
        LosslessCodec(), target_layer_ids=(2,), last_hidden="post_norm"
    )
    assert post_norm.head().readout == Readout(
        scale=0.5, soft_cap=30.0, norm_eps=None, norm_offset=0.0
    )
    assert lossless.head().readout is None
    projected = Cache(GOLDEN / "projected-2")
    assert projected.spec == golden_spec("projected-2")
    projection = projected.projection()
    assert projection is not None
    assert projection.provenance == golden_projection().provenance
    assert torch.equal(projection.matrix_RF, golden_projection().matrix_RF)
    assert projected.projection_provenance() == projection.provenance
    assert (projected.spec.num_captured, projected.spec.num_features) == (2, 8)
    assert post_norm.projection() is None
    assert (levels.manifest.generation, lossless.manifest.generation) == (2, 1)
    assert len(Cache(GOLDEN / "levels-2", generation=1).index) == 2
    assert levels.manifest.sources == ("alpha", "beta")
    assert levels.index.source.tolist() == [0, 1, 0]
    assert levels.index.num_supervised.tolist() == [32, 1, 0]
    assert levels.index.num_anchors.tolist() == [16, 0, 0]
    assert levels.manifest.totals.quarantined == 1
    calibration = levels.calibration(levels.record("0001-00000").calibration)
    assert calibration is not None
    assert torch.equal(calibration.mean_LD, golden_calibration().mean_LD)
    assert torch.equal(calibration.step_LD, golden_calibration().step_LD)
    assert levels.head().embedding_VD.shape == (32, 8)


FINGERPRINTS = {
    "lossless-2": "83ad36511ee08d8c203ac67773594a099009742733fd3abad7417b27f505405b",
    "levels-2": "02ed1db522af97c6e774b0523b5b50ac431cb4dc4d2af9c53214ae520208e62b",
    "small-2": "750e7953f7d51db0690d570d104ad9a50033c244f059e49f42c29c43dd27ab0e",
    "post-norm-2": "2f62462dc020dc3e2bbe1e0c4135d8d9a4c636bbd183554c67b0cd9e249af643",
    "projected-2": "ecbeb2a36e18843fedb01952f6d95914a3860bef5cf24722b3a857778fda9eb1",
}


def test_the_fingerprints_of_the_golden_caches_are_these(golden: Cache) -> None:
    """Another fingerprint of the same spec would make every cache there is foreign."""
    assert golden.spec.fingerprint == FINGERPRINTS[golden.path.name]
    assert golden.manifest.fingerprint == FINGERPRINTS[golden.path.name]


# FORMAT.md


class TensorStore:
    """Stands in for the module zarr: groups and arrays of the local disk, by TensorStore."""

    @staticmethod
    def open_group(path: str, mode: str) -> "TensorStoreGroup":
        assert mode == "r"
        return TensorStoreGroup(path)


class TensorStoreGroup:
    def __init__(self, path: str) -> None:
        self.path = path

    def __getitem__(self, name: str) -> "TensorStoreArray":
        store = {"driver": "file", "path": f"{self.path}/{name}/"}
        return TensorStoreArray({"driver": "zarr3", "kvstore": store})


class TensorStoreArray:
    def __init__(self, spec: dict[str, Any]) -> None:
        self.store = tensorstore.open(spec, open=True, read=True).result()

    def __getitem__(self, place: Any) -> Any:
        return np.asarray(self.store[place].read().result())[()]  # a scalar, not an array


@pytest.fixture(scope="module", params=[zarr, TensorStore], ids=["zarr", "tensorstore"])
def decode(request: pytest.FixtureRequest) -> Callable[[Path, str, int], np.ndarray]:
    """The function that FORMAT.md gives to whoever has nothing but Zarr, with two readers of it."""
    (code,) = re.findall(r"```python\n(.*?)```", FORMAT_MD.read_text(), re.DOTALL)
    namespace: dict[str, Any] = {}
    exec(compile(code, str(FORMAT_MD), "exec"), namespace)
    namespace["zarr"] = request.param
    return namespace["decode"]


def test_tensorstore_reads_every_array_as_zarr_does(golden: Cache) -> None:
    for shard_id in golden.shard_ids:
        path = str(golden.path / GROUP / shard_id)
        group = zarr.open_group(path, mode="r")
        names = sorted(name for name, _ in group.arrays())
        assert "hidden_states" in names
        for name in names:
            expected = group[name][...]
            found = TensorStore.open_group(path, "r")[name][...]
            assert found.dtype == expected.dtype
            assert np.array_equal(found, expected)


def assert_decodes(cache: Cache, decode: Callable[[Path, str, int], np.ndarray]) -> None:
    for position in range(len(cache.index)):
        shard_id = cache.shard_ids[cache.index.shard[position]]
        found = decode(cache.path, shard_id, int(cache.index.row[position]))
        expected = bits(cache.unpack(cache.read(position)))
        assert found.dtype == np.float32
        assert np.array_equal(found.view(np.uint32) >> 16, expected.view(np.uint16))
        assert not (found.view(np.uint32) & 0xFFFF).any()


def test_format_md_decodes_a_cache_of_a_target(tiny_cache: Path, decode: Any) -> None:
    assert_decodes(Cache(tiny_cache), decode)


def test_format_md_decodes_the_golden_caches(golden: Cache, decode: Any) -> None:
    assert_decodes(golden, decode)


def test_format_md_decodes_outliers_and_every_bit_pattern(decode: Any, tmp_path: Path) -> None:
    patterns = np.arange(2**16, dtype=np.uint16).view(np.int16)
    for codec in CODECS:
        spec = make_spec(codec, hidden_size=128)
        path = tmp_path / spec.fingerprint
        name = create_cache(path, spec)
        hidden = torch.from_numpy(patterns).view(torch.bfloat16).reshape(-1, 2, 128)
        add_shard(path, spec, "0001-00000", [make_sample(spec, hidden)], calibration=name)
        publish(path, spec)
        assert_decodes(Cache(path), decode)


def test_samples_are_identified_as_format_md_says(tiny_cache: Path, golden: Cache) -> None:
    for cache in (Cache(tiny_cache), golden):
        for position in range(len(cache.index)):
            sample = cache.read(position)
            ids, mask = sample.token_ids, sample.loss_mask
            digest = hashlib.sha256(b"draftcache.sample.1\0" + ids.tobytes() + mask.tobytes())
            assert cache.index.sample_id(position) == digest.hexdigest()[:32]
            first = int(mask.argmax()) if mask.any() else len(ids)
            prompt = ids[:first] if first >= 2 else ids
            split = hashlib.sha256(b"draftcache.split.1\0" + prompt.tobytes()).digest()[:8]
            assert int(cache.index.split_keys[position]) == int.from_bytes(split, "little")


def test_format_md_names_every_file_field_and_array(tiny_cache: Path) -> None:
    text = FORMAT_MD.read_text()
    names = {path.name for path in tiny_cache.iterdir() if not path.name.endswith(".lock")}
    description = json.loads((tiny_cache / DESCRIPTION).read_text())
    names |= set(description) | set(description["spec"])
    names |= set(description["spec"]["target"]) | set(description["spec"]["tokens"])
    manifest = json.loads((tiny_cache / MANIFEST).read_text())
    names |= set(manifest) | set(manifest["totals"]) | set(manifest["index"])
    record = json.loads(next((tiny_cache / RECORDS).iterdir()).read_text())
    names |= set(record) | set(record["layers"][0])
    names |= {path.name for path in (tiny_cache / GROUP / record["shard_id"]).iterdir()}
    names |= set(load((tiny_cache / INDEX).read_bytes()))
    missing = {name for name in names if not re.search(rf"`{re.escape(name)}[/`]", text)}
    assert missing == set()


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("lossless-2", '| `{"name": "lossless"}` |'),
        ("levels-2", '| `{"name": "levels", "step": s}` |'),
        ("small-2", '| `{"name": "levels", "step": s, "bits": 4}` |'),
    ],
)
def test_the_codec_chains_are_those_of_format_md(name: str, fields: str) -> None:
    """Names and settings as in zarr.json, in their order."""
    rows = [line for line in FORMAT_MD.read_text().splitlines() if line.startswith(fields)]
    (row,) = rows
    stated = re.findall(r"`(\w+)`([^;|]*)", row.rsplit("|", 2)[1])
    document = GOLDEN / name / GROUP / "0001-00000/hidden_states/zarr.json"
    (sharding,) = json.loads(document.read_text())["codecs"]
    chain = sharding["configuration"]["codecs"]
    assert [name for name, _ in stated] == [entry["name"] for entry in chain]
    for (_, settings), entry in zip(stated, chain, strict=True):
        for value in entry.get("configuration", {}).values():
            assert json.dumps(value).strip('"') in settings
    index_codecs = sharding["configuration"]["index_codecs"]
    assert [entry["name"] for entry in index_codecs] == ["bytes", "crc32c"]
    assert sharding["configuration"]["index_location"] == "end"
