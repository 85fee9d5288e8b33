"""A pilot's projection, a drafter trained behind it, and its export for those who know none."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from torch import Tensor

from cache_builder.build import build
from cache_builder.config import BuildConfig
from shared.errors import CacheIncompatibleError, ConfigError, NonFiniteError, RunError
from shared.projection import Projection
from tests.conftest import Projected, projecting
from trainer.batch import collate
from trainer.caches import Caches
from trainer.checkpoint import save
from trainer.cli import main
from trainer.compare import compare
from trainer.config import StepConfig, TrainConfig
from trainer.decoding.source import DrafterSource
from trainer.doctor.diagnosis import diagnose
from trainer.doctor.view import RunView
from trainer.drafter import Drafter
from trainer.evaluate import evaluate_run
from trainer.export import export_dflash, export_speculators
from trainer.exporting.checks import check_product
from trainer.inspect import inspect_checkpoint
from trainer.inspect import rows as inspect_rows
from trainer.loader import Loader
from trainer.projection import ProjectionSettings, fit_factor, make_projection, unprojected
from trainer.recipe import LossConfig, NoiseConfig
from trainer.run import Run
from trainer.session import Session
from trainer.snapshot import restore
from trainer.step import forward_blocks
from trainer.summary import summarize
from trainer.train import Training, train

MakeTrain = Callable[..., TrainConfig]
MakeBuild = Callable[..., BuildConfig]


@pytest.fixture(scope="module")
def run(
    tiny_projected: Projected, tiny_train: MakeTrain, tmp_path_factory: pytest.TempPathFactory
) -> Run:
    """Of a drafter trained from projected states."""
    path = tmp_path_factory.mktemp("runs") / "projected"
    train(tiny_train(path, tiny_projected.cache, steps=4))
    return Run(path)


@pytest.fixture(scope="module")
def exported(run: Run) -> Path:
    return export_dflash(run, run.path / "export" / "dflash")


@pytest.fixture(scope="module")
def features(tiny_projected: Projected) -> Tensor:
    """Float64, as the pilot's statistics have them: without the first token of each sample."""
    session = Session.open(Run(tiny_projected.pilot).config())
    samples = [session.cache.read(int(position)) for position in session.split.train]
    return torch.cat([session.cache.unpack(s)[1:].flatten(1).double() for s in samples])


def fc_of(run: Path) -> Tensor:
    return Run(run).require_checkpoint().drafter["fc.weight"].double()


@pytest.mark.parametrize(
    "settings",
    [
        ProjectionSettings(),
        ProjectionSettings(is_orthonormal=False),
        ProjectionSettings(rank=96),
        ProjectionSettings(rank_factor=1.5, is_orthonormal=False),
    ],
)
def test_the_pilots_fc_lies_in_it(
    tiny_projected: Projected, features: Tensor, settings: ProjectionSettings
) -> None:
    made = make_projection(Run(tiny_projected.pilot), settings)
    fc_DF = fc_of(tiny_projected.pilot)
    product_DF = made.start_DR.double() @ made.matrix_RF.double()
    torch.testing.assert_close(product_DF, fc_DF, rtol=0, atol=1e-5 * float(fc_DF.abs().max()))
    assert fit_factor(fc_DF, made.matrix_RF, made.channel_rms_F)[1] < 1e-6
    rms_F = features.square().mean(0).sqrt()
    torch.testing.assert_close(made.channel_rms_F.double(), rms_F, rtol=1e-6, atol=0)
    provenance = made.provenance
    assert (provenance.kind, provenance.step, provenance.num_tokens) == ("pilot", 4, len(features))
    if not settings.is_orthonormal:
        assert torch.equal(made.matrix_RF[:64], fc_DF.float())
        torch.testing.assert_close(made.start_DR[:, :64], torch.eye(64), rtol=0, atol=1e-5)
    else:
        rows_RF = made.matrix_RF.double() * rms_F
        gram_RR = rows_RF @ rows_RF.T / length_of(rms_F, provenance.rank) ** 2
        unit_RR = torch.eye(provenance.rank, dtype=torch.float64)
        torch.testing.assert_close(gram_RR, unit_RR, rtol=0, atol=1e-5)


def length_of(rms_F: Tensor, rank: int) -> float:
    """Of orthogonal rows, so that what Adam moves by a step is what it is on the states: F
    channels of these RMS, or R features that share the variance, F, of all of them."""
    moved_on_states = float(rms_F.sum())
    moved_behind_rows_of_1 = rank * (len(rms_F) / rank) ** 0.5
    return moved_on_states / moved_behind_rows_of_1


def test_a_wider_one_adds_what_varies_most_outside(
    tiny_projected: Projected, features: Tensor
) -> None:
    made = make_projection(Run(tiny_projected.pilot), ProjectionSettings(rank=96))
    rms_F = features.square().mean(0).sqrt()
    rows_RF = made.matrix_RF.double() * rms_F / length_of(rms_F, 96)
    pilot_DF, added_EF = rows_RF[:64], rows_RF[64:]
    covariance_FF = torch.cov((features / rms_F).T, correction=0)
    outside_FF = torch.eye(128, dtype=torch.float64) - pilot_DF.T @ pilot_DF
    expected_E = torch.linalg.eigvalsh(outside_FF @ covariance_FF @ outside_FF).flip(0)[:32]
    found_E = torch.linalg.vecdot(added_EF @ covariance_FF, added_EF)
    torch.testing.assert_close(found_E, expected_E, rtol=1e-3, atol=1e-6)
    assert not made.start_DR[:, 64:].abs().max() > 1e-5


def test_principal_directions_need_nothing_of_the_pilot(
    tiny_projected: Projected, features: Tensor
) -> None:
    made = make_projection(Run(tiny_projected.pilot), ProjectionSettings(is_principal=True))
    assert (made.provenance.kind, made.provenance.step) == ("principal", None)
    rms_F = features.square().mean(0).sqrt()
    rows_RF = made.matrix_RF.double() * rms_F
    covariance_FF = torch.cov((features / rms_F).T, correction=0)
    expected_R = torch.linalg.eigvalsh(covariance_FF).flip(0)[:64]
    found_R = torch.linalg.vecdot(rows_RF @ covariance_FF, rows_RF) / length_of(rms_F, 64) ** 2
    torch.testing.assert_close(found_R, expected_R, rtol=1e-3, atol=1e-6)
    # It starts from what of the last block is left: at least as near to it as any other start.
    last_DF = torch.zeros(64, 128, dtype=torch.float64)
    last_DF[:, 64:] = torch.eye(64)
    left = (last_DF - made.start_DR.double() @ rows_RF).norm() / last_DF.norm()
    assert left == pytest.approx(fit_factor(last_DF / rms_F, made.matrix_RF, rms_F)[1], abs=1e-5)
    assert 0.1 < left < 0.9


@pytest.mark.parametrize("share", [0.2, 0.4, 0.6, 0.9])
def test_its_statistics_are_of_the_whole_cache_however_few_tokens_they_take(
    tiny_projected: Projected, features: Tensor, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its order is by length: the first samples of it are all long."""
    session = Session.open(Run(tiny_projected.pilot).config())
    lengths = session.cache.index.num_tokens[session.split.train]
    read: list[int] = []
    of_cache = Caches.read
    monkeypatch.setattr(
        Caches, "read", lambda cache, position: read.append(position) or of_cache(cache, position)
    )
    asked = int(share * len(features))
    made = make_projection(Run(tiny_projected.pilot), ProjectionSettings(num_tokens=asked))
    assert made.provenance.num_tokens == pytest.approx(asked, rel=0.15)
    taken = session.cache.index.num_tokens[read]
    assert float(taken.mean()) == pytest.approx(float(lengths.mean()), rel=0.1)
    rms_F = features.square().mean(0).sqrt()
    assert float((made.channel_rms_F / rms_F - 1).abs().max()) < 0.2


def test_the_same_pilot_gives_the_same_bytes(tiny_projected: Projected) -> None:
    again = make_projection(Run(tiny_projected.pilot), ProjectionSettings())
    assert again.to_bytes() == tiny_projected.file.read_bytes()


@pytest.mark.parametrize("rank", [1, 63, 128, 1000])
def test_a_rank_that_saves_nothing_or_too_much_is_refused(
    tiny_projected: Projected, rank: int
) -> None:
    with pytest.raises(ConfigError, match=rf"rank {rank}: must be at least the hidden size, 64"):
        make_projection(Run(tiny_projected.pilot), ProjectionSettings(rank=rank))


def test_a_pilot_that_cannot_be_one_is_refused(
    tiny_projected: Projected, run: Run, tiny_train: MakeTrain, tmp_path: Path
) -> None:
    with pytest.raises(RunError, match="trained from projected states"):
        make_projection(run, ProjectionSettings())
    step = StepConfig(steps=1, device="cpu", compute_dtype="float32", zero_features=True)
    blind = tiny_train(tmp_path / "blind", tiny_projected.raw, train=step)
    train(blind)
    with pytest.raises(RunError, match=r"train\.zero_features"):
        make_projection(Run(blind.run.path), ProjectionSettings())
    with pytest.raises(RunError, match="no checkpoint yet"):
        make_projection(Run(tmp_path / "nothing"), ProjectionSettings())
    training = Training(tiny_train(tmp_path / "flat", tiny_projected.raw))
    with torch.no_grad():
        training.session.drafter.fc.weight[5] = training.session.drafter.fc.weight[6]
    save(tmp_path / "flat", training.learner.snapshot(None, {"unlogged": None}), keep=1)
    with pytest.raises(RunError, match="rows of its fc depend on each other"):
        make_projection(Run(tmp_path / "flat"), ProjectionSettings())
    with torch.no_grad():
        training.session.drafter.fc.weight[5, 7] = torch.nan
    training.learner.step = 1
    save(tmp_path / "flat", training.learner.snapshot(None, {"unlogged": None}), keep=1)
    with pytest.raises(NonFiniteError, match="the fc of step 1 is not finite"):
        make_projection(Run(tmp_path / "flat"), ProjectionSettings())


def test_the_command_writes_the_file(tiny_projected: Projected, tmp_path: Path) -> None:
    out = tmp_path / "new" / "p.safetensors"
    result = CliRunner().invoke(main, ["projection", str(tiny_projected.pilot), "-o", str(out)])
    assert result.exit_code == 0
    assert out.read_bytes() == tiny_projected.file.read_bytes()
    assert "64 of 128 (0.500)" in result.stdout
    arguments = ["projection", str(tiny_projected.pilot), "-o", str(out), "--rank-factor", "1.5"]
    result = CliRunner().invoke(main, [*arguments, "--no-orthonormal", "--tokens", "200"])
    made = Projection.from_bytes(out.read_bytes(), "here").provenance
    assert (made.rank, made.is_orthonormal, made.num_tokens < 300) == (96, False, True)
    result = CliRunner().invoke(main, [*arguments, "--rank", "96"])
    assert result.exit_code == 2
    assert "give one of them" in result.output


def blocks_of(session: Session, position: int) -> Tensor:
    """Hidden states of two blocks in the sample at `position`, float32."""
    sample = session.cache.read(position)
    batch = collate([sample], [torch.tensor([5, 9]).numpy()], epoch=0, bucket=0)
    features_SLD = session.features.unpack(batch)
    head, mask_token = session.head, session.config.drafter.mask_token_id
    with torch.no_grad():
        forward = forward_blocks(session.drafter, head, batch, features_SLD, mask_token)
    return forward.hidden_AKD


@torch.no_grad()
def fused(session: Session, position: int) -> Tensor:
    """What the layers read of the sample at `position`, float32 [T, D]."""
    states_TLD = session.cache.unpack(session.cache.read(position))
    fused_TD: Tensor = session.drafter.hidden_norm(
        session.drafter.fc(states_TLD.flatten(1).float())
    )
    return fused_TD


def raw_session(config: TrainConfig, raw: Path, weights: dict[str, Tensor]) -> Session:
    """The drafter with `weights` on a cache of the states themselves."""
    session = Session.open(replace(config, cache=replace(config.cache, path=raw)))
    session.drafter.load_state_dict({name: tensor.float() for name, tensor in weights.items()})
    return session


def difference(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def test_it_starts_where_the_pilot_ended(tiny_projected: Projected, tiny_train: MakeTrain) -> None:
    config = tiny_train(tiny_projected.pilot.parent / "unused", tiny_projected.cache)
    training = Training(config)
    started = training.session.drafter
    assert started.fc.weight.shape == (64, 64)
    whole = unprojected(training.session.cache, started.state_dict())
    torch.testing.assert_close(
        whole["fc.weight"].double(), fc_of(tiny_projected.pilot), rtol=0, atol=1e-4
    )
    plain = Training(replace(config, cache=replace(config.cache, path=tiny_projected.raw)))
    assert torch.equal(plain.session.drafter.norm.weight, started.norm.weight)


@pytest.mark.parametrize("form", ["dflash", "speculators"])
def test_an_export_computes_of_the_states_what_was_trained_of_their_projection(
    run: Run, exported: Path, tiny_projected: Projected, tmp_path: Path, form: str
) -> None:
    out = exported if form == "dflash" else export_speculators(run, tmp_path / "out")
    tensors = load_file(out / "model.safetensors")
    assert tensors["fc.weight"].shape == (64, 128)
    session = Session.open(run.config())
    restore(run.require_checkpoint(), session.drafter)
    exact = unprojected(session.cache, run.require_checkpoint().drafter)
    whole = raw_session(run.config(), tiny_projected.raw, exact)
    rounded = raw_session(run.config(), tiny_projected.raw, tensors)
    by_id = {whole.cache.index.sample_id(i): i for i in range(len(whole.cache.index))}
    for position in range(0, 40, 8):
        trained = blocks_of(session, position)
        same = by_id[session.cache.index.sample_id(position)]
        # Stored states are rounded to bfloat16 behind the projection; exported weights, too.
        assert difference(blocks_of(whole, same), trained) < 0.01
        assert difference(blocks_of(rounded, same), trained) < 0.02
        context_SD = fused(session, position)
        assert difference(fused(whole, same), context_SD) < 0.01
        assert difference(fused(rounded, same), context_SD) < 0.02


def test_the_published_client_loads_the_export(run: Run, exported: Path) -> None:
    from dflash.model import DFlashDraftModel

    model, info = DFlashDraftModel.from_pretrained(
        exported, dtype=torch.float32, output_loading_info=True
    )
    assert not any(info.values()), info
    assert model.fc.weight.shape == (64, 128)
    config = json.loads((exported / "config.json").read_text())
    assert config["dflash_config"] == {"mask_token_id": 3, "target_layer_ids": [0, 2]}
    card = (exported / "README.md").read_text()
    assert "| features | from states projected to 64 values by " in card


def test_real_decoding_multiplies_the_projection_in(run: Run, exported: Path) -> None:
    found = DrafterSource.read(run.path).drafter.state_dict()
    for name, weight in DrafterSource.read(exported).drafter.state_dict().items():
        assert torch.equal(found[name], weight)


def test_real_decoding_takes_no_projection_but_the_runs_own(
    run: Run,
    tiny_projected: Projected,
    tiny_build: MakeBuild,
    tmp_path: Path,
) -> None:
    """Another one of the same rank in the cache's place would give another drafter in silence."""
    file, cache, path = tmp_path / "p.safetensors", tmp_path / "cache", tmp_path / "run"
    settings = ProjectionSettings(is_principal=True)
    file.write_bytes(make_projection(Run(tiny_projected.pilot), settings).to_bytes())
    build(projecting(tiny_build(cache, preset="lossless"), file))
    shutil.copytree(run.path, path)
    fields = json.loads((path / "config.json").read_text())
    fields["cache"]["path"] = str(cache)
    (path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(CacheIncompatibleError, match="trained from a cache with fingerprint"):
        DrafterSource.read(path)


def test_a_wrong_product_is_not_exported(run: Run, exported: Path) -> None:
    session = Session.open(run.config())
    restore(run.require_checkpoint(), session.drafter)
    projection = session.cache.projection()
    assert projection is not None
    check_product(exported, session.drafter, projection)
    with pytest.raises(RunError, match="something else than the trained drafter of their"):
        check_product(
            exported, session.drafter, replace(projection, matrix_RF=projection.matrix_RF.flip(1))
        )


def test_a_resumed_run_learns_the_same_to_the_bit(
    run: Run, tiny_projected: Projected, tiny_train: MakeTrain, tmp_path: Path
) -> None:
    config = tiny_train(tmp_path / "run", tiny_projected.cache, steps=4)
    training = Training(config)
    with Loader.open(training.session, training.ranks, training.step) as loader:
        batches = iter(loader)
        for _ in range(2):
            training.learner.train_step(batches)
    save(tmp_path / "run", training.learner.snapshot(None, {"unlogged": None}), keep=1)
    train(config)
    found, expected = Run(tmp_path / "run").require_checkpoint(), run.require_checkpoint()
    assert found.step == expected.step == 4
    assert found.cache["projection"]["rank"] == 64
    for name, weight in expected.drafter.items():
        assert torch.equal(found.drafter[name], weight)
    for name, moment in expected.optimizer.items():
        assert torch.equal(found.optimizer[name], moment)


@pytest.mark.parametrize(
    ("sections", "learns"),
    [
        ({"noise": NoiseConfig(scale=0.3)}, True),
        (
            {
                "train": StepConfig(
                    steps=2, device="cpu", compute_dtype="float32", zero_features=True
                )
            },
            False,
        ),
    ],
)
def test_noise_and_zeros_apply_to_projected_features(
    tiny_projected: Projected,
    tiny_train: MakeTrain,
    tmp_path: Path,
    sections: dict[str, Any],
    learns: bool,
) -> None:
    config = tiny_train(tmp_path / "run", tiny_projected.cache, **{"steps": 2, **sections})
    before = Training(config).session.drafter.fc.weight.detach().clone()
    train(config)
    after = Run(tmp_path / "run").require_checkpoint().drafter["fc.weight"]
    assert bool(after.isfinite().all())
    assert torch.equal(before, after) is not learns


@pytest.mark.parametrize("kind", ["pilot", "principal"])
def test_a_wider_cache_with_the_last_hidden_state_teaches(
    tiny_projected: Projected,
    tiny_build: MakeBuild,
    tiny_train: MakeTrain,
    tmp_path: Path,
    kind: str,
) -> None:
    settings = ProjectionSettings(rank=96, is_principal=kind == "principal")
    file = tmp_path / "p.safetensors"
    file.write_bytes(make_projection(Run(tiny_projected.pilot), settings).to_bytes())
    build(projecting(tiny_build(tmp_path / "cache"), file, last_hidden="post_norm"))
    config = tiny_train(tmp_path / "run", tmp_path / "cache", steps=2, loss=LossConfig(kind="kl"))
    session = Session.open(config)
    sample = session.cache.read(0)
    batch = collate([sample], [torch.tensor([5]).numpy()], epoch=0, bucket=0)
    features_SLD, last_hidden_SD = session.features.split(batch)
    assert features_SLD.shape[1:] == (1, 96)
    assert last_hidden_SD is not None
    assert last_hidden_SD.shape[1:] == (64,)
    train(config)
    weights = load_file(export_dflash(Run(config.run.path), tmp_path / "out") / "model.safetensors")
    assert weights["fc.weight"].shape == (64, 128)


def warm(config: TrainConfig, start: Path) -> TrainConfig:
    return replace(config, train=replace(config.train, init_from=start, seed=7))


def test_an_export_starts_a_drafter_behind_its_own_projection(
    exported: Path, tiny_projected: Projected, tiny_train: MakeTrain, tmp_path: Path, caplog: Any
) -> None:
    caplog.set_level("INFO")
    training = Training(warm(tiny_train(tmp_path / "run", tiny_projected.cache), exported))
    tensors = load_file(exported / "model.safetensors")
    whole = unprojected(training.session.cache, training.session.drafter.state_dict())
    torch.testing.assert_close(
        whole["fc.weight"], tensors["fc.weight"].float(), rtol=0.01, atol=1e-3
    )
    for name, weight in training.session.drafter.state_dict().items():
        if name != "fc.weight":
            assert torch.equal(weight, tensors[name].float())
    assert training.learner.init_from is not None
    assert 0 < training.learner.init_from["fc_left_out"] < 0.01
    assert "taken as far as the projection of the cache holds it: 0." in caplog.text
    assert not [
        record
        for record in caplog.records
        if "as far as" in record.message and record.levelname == "WARNING"
    ]


def test_an_export_starts_a_drafter_on_the_states_themselves(
    exported: Path, tiny_projected: Projected, tiny_train: MakeTrain, tmp_path: Path
) -> None:
    training = Training(warm(tiny_train(tmp_path / "run", tiny_projected.raw), exported))
    tensors = load_file(exported / "model.safetensors")
    for name, weight in training.session.drafter.state_dict().items():
        assert torch.equal(weight, tensors[name].float())


def test_a_start_that_the_projection_does_not_hold_is_warned_of_or_refused(
    exported: Path, tiny_projected: Projected, tiny_train: MakeTrain, tmp_path: Path, caplog: Any
) -> None:
    start = tmp_path / "start"
    shutil.copytree(exported, start)
    tensors = load_file(start / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    strange_DF = torch.randn(64, 128, generator=generator) * tensors["fc.weight"].float().std()
    tensors["fc.weight"] = (tensors["fc.weight"].float() + 0.1 * strange_DF).bfloat16()
    save_file(tensors, start / "model.safetensors")
    Training(warm(tiny_train(tmp_path / "near", tiny_projected.cache), start))
    (line,) = [record for record in caplog.records if "as far as" in record.message]
    assert line.levelname == "WARNING"
    tensors["fc.weight"][:, 64:] = 0  # the pilot's rows are nearly those of the last block
    save_file(tensors, start / "model.safetensors")
    with pytest.raises(RunError, match=r"does not hold its fc: \d\d\.\d % of it .* lie outside"):
        Training(warm(tiny_train(tmp_path / "run", tiny_projected.cache), start))


def test_everything_else_reads_such_a_run(
    run: Run, exported: Path, tiny_projected: Projected, tmp_path: Path
) -> None:
    again = evaluate_run(run, cache=None, max_samples=None)
    assert again["tau_chain"] >= 1
    result = compare([run, Run(tiny_projected.pilot)])
    assert result["comparable"]
    assert any("different fingerprints" in remark for remark in result["remarks"])
    diagnosis = diagnose(RunView.read(run))
    (note,) = [f for f in diagnosis.findings if f.name == "projected-features"]
    assert note.severity == "note"
    assert "blocks [0, 2] projected to 64 values a token" in note.evidence
    assert "frozen" in note.advice
    assert not [
        f for f in diagnose(RunView.read(Run(tiny_projected.pilot))).findings if f.name == note.name
    ]
    assert dict(inspect_rows(inspect_checkpoint(run.path)))["  projection"].startswith("to 64 ")
    facts = summarize(run, exported)
    assert facts["raw_bytes_per_token"] == 2 * 64 * 2
    assert facts["stored_over_raw"] < 0.5


def test_projected_and_plain_caches_are_not_read_as_one(tiny_projected: Projected) -> None:
    with pytest.raises(
        CacheIncompatibleError, match=r"projection\.rank: 64 in .*, '\(absent\)' in"
    ):
        Caches([tiny_projected.cache, tiny_projected.raw])


def test_memory_is_foreseen_for_the_smaller_fusion(
    tiny_projected: Projected, tiny_train: MakeTrain, tmp_path: Path
) -> None:
    projected = Training(tiny_train(tmp_path / "a", tiny_projected.cache))
    whole = Training(tiny_train(tmp_path / "b", tiny_projected.raw))
    assert whole.footprint.moments - projected.footprint.moments == 64 * 64 * 8
    count = sum(p.numel() for p in projected.session.drafter.parameters())
    assert projected.footprint.moments == 8 * count
    assert isinstance(projected.session.drafter, Drafter)
