"""A cache of projected states: what is stored, what every command makes of it, what is refused."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from cache_builder.build import build
from cache_builder.config import BuildConfig
from cache_builder.estimate import estimate
from cache_builder.estimate import rows as estimate_rows
from cache_builder.inspect import inspect_cache
from cache_builder.inspect import rows as inspect_rows
from cache_builder.merge import merge
from cache_builder.prune import prune
from cache_builder.recapture import recapture
from cache_builder.repair import repair
from cache_builder.target import Target
from cache_builder.verify import verify_cache
from shared.cache import Cache
from shared.errors import CacheError, CacheIncompatibleError, DataError
from shared.layout import PROJECTION
from shared.location import parse_location
from shared.projection import Projection
from shared.shard import GROUP
from tests.conftest import Projected, conversations, projecting, write_jsonl
from tests.test_cache_builder.stored import assert_clean, contents, one_by_one, tree

MakeBuild = Callable[..., BuildConfig]


@pytest.fixture(scope="module")
def files(tiny_projected: Projected, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The projection of the pilot, another of the same size, and one of one and a half times it."""
    place = tmp_path_factory.mktemp("files")
    made = Projection.from_bytes(tiny_projected.file.read_bytes(), "here")
    other = replace(made, matrix_RF=made.matrix_RF.flip(0))
    generator = torch.Generator().manual_seed(5)
    wide = Projection(
        torch.cat([made.matrix_RF, torch.randn(32, 128, generator=generator)]),
        torch.cat([made.start_DR, torch.zeros(64, 32)], 1),
        made.channel_rms_F,
        replace(made.provenance, rank=96),
    )
    named = {"other": other, "wide": wide}
    for name, projection in named.items():
        (place / name).write_bytes(projection.to_bytes())
    return {"own": tiny_projected.file, **{name: place / name for name in named}}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    place = tmp_path_factory.mktemp("data")
    return [
        write_jsonl(place / "left.jsonl", conversations(range(8))),
        write_jsonl(place / "right.jsonl", conversations(range(5, 12))),
    ]


@pytest.fixture(scope="module")
def make(tiny_build: MakeBuild, data: list[Path], files: dict[str, Path]) -> MakeBuild:
    """A small build, one sample a forward: `make(path, data, file="own", last_hidden=...)`."""

    def make(
        path: Path, data: list[Path], file: str = "own", preset: str = "balanced", **capture: object
    ) -> BuildConfig:
        config = one_by_one(tiny_build(path, preset=preset, data=data))
        config = replace(config, plan=replace(config.plan, shard_mib=0.125))
        return projecting(config, files.get(file), **capture)

    return make


@pytest.fixture(scope="module")
def built(make: MakeBuild, data: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("built") / "cache"
    build(make(path, data))
    return path


@pytest.fixture
def copy(built: Path, tmp_path: Path) -> Path:
    shutil.copytree(built, tmp_path / "copy")
    return tmp_path / "copy"


def states(path: Path) -> dict[str, Tensor]:
    """By sample id."""
    cache = Cache(path)
    samples = [cache.read(position) for position in range(len(cache.index))]
    return {sample.sample_id: cache.unpack(sample) for sample in samples}


def projected(states_TLD: Tensor, file: Path) -> Tensor:
    """Exactly, float64 [T, R]."""
    return states_TLD[:, :2].flatten(1).double() @ load_file(file)["matrix"].double().T


def test_what_is_stored_is_the_projection_of_what_would_be_stored(
    tiny_projected: Projected,
) -> None:
    raw, found = states(tiny_projected.raw), states(tiny_projected.cache)
    assert raw.keys() == found.keys()
    for sample_id, states_TLD in raw.items():
        exact_TR = projected(states_TLD, tiny_projected.file)
        assert found[sample_id].shape == (len(states_TLD), 1, 64)
        # Half a unit in the last place of bfloat16, and what sums in float32 lose.
        allowed = exact_TR.abs() * 2**-8 + 1e-6 * exact_TR.abs().max()
        assert bool(((found[sample_id][:, 0].double() - exact_TR).abs() <= allowed).all())
    cache = Cache(tiny_projected.cache)
    assert (tiny_projected.cache / PROJECTION).read_bytes() == tiny_projected.file.read_bytes()
    assert cache.spec.projection is not None
    assert cache.spec.projection.rank == 64
    assert Cache(tiny_projected.raw).spec == cache.spec.unprojected()
    half = Cache(tiny_projected.raw).manifest.totals.stored_bytes / 2
    assert cache.manifest.totals.stored_bytes < 1.1 * half


@pytest.mark.parametrize(("preset", "largest"), [("balanced", 0.03), ("small", 0.2)])
def test_a_codec_goes_on_top(
    make: MakeBuild,
    data: list[Path],
    files: dict[str, Path],
    tmp_path: Path,
    preset: str,
    largest: float,
) -> None:
    build(make(tmp_path / "raw", data, "none", preset="lossless"))
    build(make(tmp_path / "cache", data, preset=preset))
    raw, found = states(tmp_path / "raw"), states(tmp_path / "cache")
    exact = torch.cat([projected(raw[key], files["own"]) for key in found])
    stored = torch.cat([found[key][:, 0].double() for key in found])
    error = float((stored - exact).norm() / exact.norm())
    assert 0.1 * largest < error < largest


@pytest.mark.parametrize("file", ["own", "wide"])
def test_the_last_hidden_state_lies_beside_it(
    make: MakeBuild, data: list[Path], files: dict[str, Path], tmp_path: Path, file: str
) -> None:
    build(make(tmp_path / "raw", data, "none", preset="lossless", last_hidden="post_norm"))
    for preset in ("lossless", "balanced"):
        build(make(tmp_path / preset, data, file, preset=preset, last_hidden="post_norm"))
    raw, found = states(tmp_path / "raw"), states(tmp_path / "lossless")
    width = load_file(files[file])["matrix"].shape[0]
    for key, states_TLD in raw.items():
        assert found[key].shape == (len(states_TLD), 2, width)
        exact_TR = projected(states_TLD, files[file])
        torch.testing.assert_close(found[key][:, 0].double(), exact_TR, rtol=2**-8, atol=1e-5)
        assert torch.equal(found[key][:, 1, :64], states_TLD[:, 2])
        assert not found[key][:, 1, 64:].any()
        lossy = states(tmp_path / "balanced")[key][:, 1]
        assert float((lossy[:, :64] - states_TLD[:, 2]).norm() / states_TLD[:, 2].norm()) < 0.03
        assert not lossy[:, 64:].any()
    layers = inspect_cache(tmp_path / "balanced")["layers"]
    names = ["projection of blocks 0, 2", "last hidden state"]
    assert [layer["name"] for layer in layers] == names
    expected = inspect_cache(tmp_path / "raw")["layers"][2]["rms"]
    assert layers[1]["rms"] == pytest.approx(expected, rel=1e-3)  # of its own values, no padding
    report = recapture(tmp_path / "balanced", Path(make(tmp_path, data).target.path), 4)
    assert report.problems == []
    assert len(report.to_dict()["layers"]) == 2


def test_other_workers_give_the_same_bytes(
    built: Path, make: MakeBuild, data: list[Path], tmp_path: Path
) -> None:
    config = make(tmp_path / "cache", data)
    build(replace(config, workers=replace(config.workers, num_workers=2)))
    assert contents(tmp_path / "cache") == contents(built)
    assert_clean(tmp_path / "cache")


def test_building_again_adds_what_is_new(make: MakeBuild, data: list[Path], tmp_path: Path) -> None:
    for part in (data[:1], data, data):
        build(make(tmp_path / "cache", part, preset="lossless"))
    build(make(tmp_path / "whole", data, preset="lossless"))
    assert contents(tmp_path / "cache") == contents(tmp_path / "whole")
    assert Cache(tmp_path / "cache").manifest.generation == 2


@pytest.mark.parametrize("preset", ["lossless", "balanced"])
def test_recapture_finds_it_right(
    make: MakeBuild, data: list[Path], tiny_target: Path, tmp_path: Path, preset: str
) -> None:
    build(make(tmp_path / "cache", data, preset=preset))
    report = recapture(tmp_path / "cache", tiny_target, 6)
    assert (report.num_samples, report.problems) == (6, [])
    if preset == "lossless":
        assert (report.num_equal, report.largest) == (6, [0.0])


@pytest.mark.parametrize(
    ("disturb", "message"),
    [
        pytest.param(
            lambda states: states * torch.tensor([1.0, 1.2])[:, None],
            "projection of blocks 0, 2 differs from the target's by",
            id="scaled",
        ),
        pytest.param(
            lambda states: states.flip(1), "projection of blocks 0, 2 differs", id="swapped"
        ),
    ],
)
def test_recapture_names_what_the_target_does_not_give(
    make: MakeBuild,
    data: list[Path],
    tiny_target: Path,
    tmp_path: Path,
    disturb: Callable[[Tensor], Tensor],
    message: str,
) -> None:
    original = Target.capture

    def disturbed(self: Target, token_ids: list[np.ndarray]) -> list[Tensor]:
        return [disturb(each.float()).bfloat16() for each in original(self, token_ids)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Target, "capture", disturbed)
        build(make(tmp_path / "cache", data))
    problems = recapture(tmp_path / "cache", tiny_target, 3).problems
    assert len(problems) == 3
    assert all(message in problem.message for problem in problems)


def test_recapture_finds_the_block_that_was_taken_for_another(
    make: MakeBuild, data: list[Path], tiny_target: Path, tmp_path: Path
) -> None:
    original = Target.__init__

    def off_by_one(self: Target, model: object, layer_ids: tuple[int, ...], *rest: object) -> None:
        original(self, model, (0, 1), *rest)  # type: ignore[arg-type]  # passed through

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Target, "__init__", off_by_one)
        build(make(tmp_path / "cache", data, preset="lossless"))
    problems = recapture(tmp_path / "cache", tiny_target, 3).problems
    assert len(problems) == 3
    for problem in problems:
        assert "those of the projection with block 1 in place of block 2" in problem.message


def test_a_lost_shard_is_captured_and_projected_again(
    copy: Path, make: MakeBuild, data: list[Path], built: Path
) -> None:
    victim = Cache(copy).shard_ids[0]
    shutil.rmtree(copy / GROUP / victim)
    assert repair(make(copy, data)) == [victim]
    assert contents(copy) == contents(built)


@pytest.mark.parametrize("damage", ["lost", "damaged", "another"])
def test_the_projection_is_restored_from_the_file(
    copy: Path,
    make: MakeBuild,
    data: list[Path],
    built: Path,
    files: dict[str, Path],
    damage: str,
) -> None:
    stored = copy / PROJECTION
    match damage:
        case "lost":
            stored.unlink()
        case "damaged":
            stored.write_bytes(stored.read_bytes()[:-1])
        case "another":
            shutil.copy(files["other"], stored)
    (problem,) = verify_cache(copy, deep=True)
    assert problem.piece == "projection"
    with pytest.raises(CacheError, match=r"projection\.safetensors: (missing|expected sha256)"):
        Cache(copy).projection()
    with pytest.raises(CacheError, match=r"Name the file .* in capture\.projection"):
        repair(make(copy, data, "none"))
    with pytest.raises(DataError, match="expected sha256"):
        repair(make(copy, data, "other"))
    repair(make(copy, data))
    assert tree(copy) == tree(built)


def test_prune_keeps_the_levels(copy: Path, make: MakeBuild, data: list[Path]) -> None:
    before = contents(copy)
    assert prune(make(copy, data[:1])).num_samples == 4
    after = contents(copy)
    assert len(after) == 8
    assert all(after[key] == before[key] for key in after)
    assert_clean(copy)


def test_merge_takes_caches_of_one_projection_only(
    built: Path, make: MakeBuild, data: list[Path], tmp_path: Path
) -> None:
    for name, part, file in (
        ("left", data[:1], "own"),
        ("right", data[1:], "own"),
        ("other", data[1:], "other"),
        ("raw", data[1:], "none"),
    ):
        build(make(tmp_path / name, part, file))
    before = tree(tmp_path / "left")
    for name, found in (("other", "'to 64 values by"), ("raw", "'none'")):
        with pytest.raises(
            CacheIncompatibleError, match=rf"capture\.projection: {found}.* there, 'to 64 .* here"
        ):
            merge(tmp_path / "left", [tmp_path / name])
    assert tree(tmp_path / "left") == before
    merge(tmp_path / "left", [tmp_path / "right"])
    assert contents(tmp_path / "left").keys() == contents(built).keys()
    assert_clean(tmp_path / "left")


@pytest.mark.parametrize(("file", "found"), [("other", "to 64 values by"), ("none", "none")])
def test_a_cache_holds_states_of_one_projection(
    copy: Path, make: MakeBuild, data: list[Path], file: str, found: str
) -> None:
    before = tree(copy)
    with pytest.raises(
        CacheIncompatibleError, match=rf"capture\.projection: '{found}.* asked for, 'to 64 values"
    ):
        build(make(copy, data, file))
    assert tree(copy) == before


def test_it_is_shown(built: Path, make: MakeBuild, data: list[Path], tmp_path: Path) -> None:
    facts = inspect_cache(built)
    assert facts["projection"]["rank"] == 64
    assert facts["projection"]["kind"] == "pilot"
    assert facts["raw_bytes"] == facts["num_tokens"] * 2 * 64 * 2
    table = dict(inspect_rows(facts))
    assert table["projection"].startswith("to 64 values by the fc of a pilot of 4 steps")
    assert "codec error" in table["  projection of blocks 0, 2"]
    costs = estimate(make(tmp_path / "cache", data))
    assert costs["projection"]["rank"] == 64
    assert costs["bytes_per_token"] < 0.5 * costs["raw_bytes_per_token"]
    stored = dict(estimate_rows(costs))["stored"]
    assert stored == "blocks [0, 2] projected to 64 values, last hidden state: none"
    assert not (tmp_path / "cache").exists()


def test_a_projection_of_something_else_is_refused(
    make: MakeBuild, data: list[Path], tiny_target: Path, files: dict[str, Path], tmp_path: Path
) -> None:
    path = tmp_path / "cache"
    with pytest.raises(
        CacheIncompatibleError,
        match=r"target_layer_ids: \[0, 3\] here, \[0, 2\] there.*\(capture\.target_layer_ids\)",
    ):
        build(make(path, data, target_layer_ids=(0, 3)))
    other = tmp_path / "target"
    shutil.copytree(tiny_target, other)
    weights = load_file(other / "model.safetensors")
    weights["model.norm.weight"] *= 2
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    config = make(path, data)
    with pytest.raises(CacheIncompatibleError, match=r"weights_sha256: .* here, .* there"):
        build(replace(config, target=replace(config.target, path=str(other))))
    for name, message in (("absent", "cannot be read"), ("text", "not a projection")):
        (tmp_path / "text").write_text("no")
        capture = replace(config.capture, projection=tmp_path / name)
        with pytest.raises((DataError, CacheError), match=rf"capture\.projection .*: {message}"):
            build(replace(config, capture=capture))
    made = Projection.from_bytes(files["own"].read_bytes(), "here")
    made.matrix_RF[3, 5] = torch.inf
    (tmp_path / "infinite").write_bytes(made.to_bytes())
    with pytest.raises(CacheError, match="'matrix' has values that are not finite"):
        build(replace(config, capture=replace(config.capture, projection=tmp_path / "infinite")))
    assert not path.exists()


def test_pairs_need_an_even_rank(make: MakeBuild, data: list[Path], tmp_path: Path) -> None:
    config = make(tmp_path / "cache", data)
    made = Projection.from_bytes(Path(str(config.capture.projection)).read_bytes(), "here")
    odd = Projection(
        torch.cat([made.matrix_RF, torch.ones(1, 128)]),
        torch.zeros(64, 65),
        made.channel_rms_F,
        replace(made.provenance, rank=65),
    )
    (tmp_path / "odd").write_bytes(odd.to_bytes())
    config = replace(config, capture=replace(config.capture, projection=tmp_path / "odd"))
    with pytest.raises(CacheIncompatibleError, match="channels in pairs, the states have 65"):
        build(config)
    build(replace(config, codec=replace(config.codec, preset="lossless")))
    assert Cache(tmp_path / "cache").spec.width == 65


def test_a_block_that_cannot_be_used_is_named_although_it_is_projected(
    make: MakeBuild, data: list[Path], tmp_path: Path
) -> None:
    original = Target.capture

    def silent(self: Target, token_ids: list[np.ndarray]) -> list[Tensor]:
        found = original(self, token_ids)
        return [each * torch.tensor([0, 1]).bfloat16()[:, None] for each in found]

    config = make(tmp_path / "cache", data, max_quarantined_fraction=1.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Target, "capture", silent)
        build(config)
    cache = Cache(tmp_path / "cache")
    reasons = {
        reason
        for shard_id in cache.shard_ids
        for reason in cache.record(shard_id).quarantined.values()
    }
    assert reasons == {"states of block 0 are all zero"}


def test_it_lies_in_a_bucket_as_in_a_directory(
    make: MakeBuild,
    data: list[Path],
    built: Path,
    tmp_path: Path,
    s3_server: str,
    tiny_target: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in (
        ("AWS_ENDPOINT_URL", s3_server),
        ("AWS_ACCESS_KEY_ID", "key"),
        ("AWS_SECRET_ACCESS_KEY", "secret"),
        ("AWS_REGION", "us-east-1"),
    ):
        monkeypatch.setenv(name, value)
    config = make(tmp_path, data)
    place = parse_location("s3://caches/projected")
    cache = replace(config.cache, path=place, scratch=tmp_path / "scratch")
    build(replace(config, cache=cache))
    assert contents(place) == contents(built)  # type: ignore[arg-type]  # any location will do
    assert verify_cache(place, deep=True) == []
    assert recapture(place, tiny_target, 2).problems == []
