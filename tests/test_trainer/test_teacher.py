"""Divergence from the target: by hand, against autograd over all logits, and from a real cache."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cache_builder.build import build
from cache_builder.config import BuildConfig
from cache_builder.target import load_model
from shared.errors import ConfigError
from shared.head import Head, Readout
from trainer.batch import collate
from trainer.config import TrainConfig
from trainer.loss import BlockLoss, decay_weights, drafter_loss, slot_weights
from trainer.recipe import LossConfig
from trainer.session import Session
from trainer.step import forward_blocks
from trainer.teacher import Teacher, kl_divergence, teacher_of, total_variation
from trainer.train import Training, train

MakeBuild = Callable[..., BuildConfig]
MakeTrain = Callable[..., TrainConfig]

A, K, S, D, V = 7, 5, 12, 8, 23
DECAY = partial(decay_weights, slot_weight_K=slot_weights(K, 3.0))
READOUTS = {
    "post_norm": Readout(scale=1.0, soft_cap=None, norm_eps=None, norm_offset=0.0),
    "pre_norm": Readout(scale=0.5, soft_cap=3.0, norm_eps=1e-3, norm_offset=1.0),
}


def problem(readout: Readout) -> tuple[Tensor, Head, Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, head, states of the row, their indices, labels, and holes in supervision."""
    generator = torch.Generator().manual_seed(0)
    hidden_AKD = torch.randn(A, K, D, generator=generator).requires_grad_()
    lm_head_VD = torch.randn(V, D, generator=generator)
    head = Head(lm_head_VD, lm_head_VD, torch.rand(D, generator=generator), readout)
    last_hidden_SD = torch.randn(S, D, generator=generator).bfloat16()
    state_AK = torch.randint(S, (A, K), generator=generator)
    label_AK = torch.randint(V, (A, K), generator=generator)
    supervised_AK = torch.rand(A, K, generator=generator) < 0.7
    supervised_AK[:, 0] = supervised_AK[3] = False
    return hidden_AKD, head, last_hidden_SD, state_AK, label_AK, supervised_AK


def reference(kind: str, head: Head, state_ND: Tensor, hidden_ND: Tensor) -> Tensor:
    """The divergence of each row in float64, by its textbook formula."""
    readout = head.readout
    assert readout is not None
    state_ND, lm_head_VD = state_ND.double(), head.lm_head_VD.double()
    if readout.norm_eps is not None:
        state_ND = state_ND / (state_ND.square().mean(-1, keepdim=True) + readout.norm_eps).sqrt()
        state_ND = state_ND * (readout.norm_offset + head.final_norm_D.double())
    logits_NV = readout.scale * (state_ND @ lm_head_VD.T)
    if (cap := readout.soft_cap) is not None:
        logits_NV = cap * torch.tanh(logits_NV / cap)
    p_NV, q_NV = logits_NV.softmax(-1), (hidden_ND @ lm_head_VD.T).softmax(-1)
    if kind == "kl":
        return (p_NV * (p_NV / q_NV).log()).sum(-1)
    return (p_NV - q_NV).abs().sum(-1) / 2


@pytest.mark.parametrize("anchors_per_chunk", [1, 3, 100])
@pytest.mark.parametrize("side", READOUTS)
@pytest.mark.parametrize("kind", ["kl", "tv"])
def test_loss_and_gradient_equal_those_of_all_logits_in_float64(
    kind: str, side: str, anchors_per_chunk: int
) -> None:
    hidden_AKD, head, last_hidden_SD, state_AK, label_AK, supervised_AK = problem(READOUTS[side])
    loss = drafter_loss(
        hidden_AKD,
        head.lm_head_VD,
        label_AK,
        supervised_AK,
        DECAY,
        Teacher(kind, head, last_hidden_SD, state_AK),
        anchors_per_chunk=anchors_per_chunk,
    )
    exact_AKD = hidden_AKD.detach().double().requires_grad_()
    expected_AK = reference(kind, head, last_hidden_SD[state_AK], exact_AKD) * supervised_AK
    weight_AK = DECAY(expected_AK, supervised_AK).double()
    expected = (weight_AK * expected_AK).sum()
    (expected_grad_AKD,) = torch.autograd.grad(expected, exact_AKD)
    (grad_AKD,) = torch.autograd.grad(3 * loss.loss_sum, hidden_AKD)
    close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-6, check_dtype=False)
    close(loss.loss_sum, expected)
    close(loss.loss_AK, expected_AK)
    close(loss.weight_sum, weight_AK.sum())
    close(grad_AKD, 3 * expected_grad_AKD)
    plain = drafter_loss(
        hidden_AKD, head.lm_head_VD, label_AK, supervised_AK, DECAY, anchors_per_chunk=2
    )
    close(loss.ce_AK, plain.ce_AK)  # another chunk may round otherwise, as the CPU has it
    assert torch.equal(loss.correct_AK, plain.correct_AK)
    assert torch.equal(plain.loss_AK, plain.ce_AK)


def test_divergences_by_hand() -> None:
    p, q = torch.tensor([[0.5, 0.25, 0.25]]), torch.tensor([[0.25, 0.25, 0.5]])
    kl_M, gradient_MV = kl_divergence(p.log() + 7, q.log() - 3)
    assert kl_M.item() == pytest.approx(0.5 * math.log(2) - 0.25 * math.log(2))
    assert gradient_MV.tolist()[0] == pytest.approx([-0.25, 0, 0.25])
    tv_M, gradient_MV = total_variation((p + 1e-4).log(), q.log())
    assert tv_M.item() == pytest.approx(0.25, abs=1e-3)
    # Signs -, -, + with mean 0: q (s - 0) / 2. (The middle's p is a little above its q.)
    p = torch.tensor([[0.4, 0.35, 0.25]])
    tv_M, gradient_MV = total_variation(p.log(), q.log())
    assert tv_M.item() == pytest.approx((0.15 + 0.1 + 0.25) / 2)
    assert gradient_MV.tolist()[0] == pytest.approx([-0.125, -0.125, 0.25])


@pytest.mark.parametrize("divergence", [kl_divergence, total_variation])
def test_a_drafter_that_says_what_the_target_says_has_nothing_to_learn(divergence: Any) -> None:
    logits_MV = torch.randn(5, V, generator=torch.Generator().manual_seed(1))
    loss_M, gradient_MV = divergence(logits_MV, logits_MV.clone())
    assert loss_M.abs().max() < 1e-6
    assert gradient_MV.abs().max() < 1e-6


@pytest.mark.parametrize("kind", ["kl", "tv"])
def test_bfloat16_logits_are_reduced_in_float32(kind: str) -> None:
    hidden_AKD, head, last_hidden_SD, state_AK, label_AK, supervised_AK = problem(
        READOUTS["post_norm"]
    )

    def measure(head: Head, hidden_AKD: Tensor) -> BlockLoss:
        teacher = Teacher(kind, head, last_hidden_SD, state_AK)
        return drafter_loss(
            hidden_AKD,
            head.lm_head_VD,
            label_AK,
            supervised_AK,
            DECAY,
            teacher,
            anchors_per_chunk=3,
        )

    half = hidden_AKD.detach().bfloat16().requires_grad_()
    rough, exact = measure(head.to("cpu"), half), measure(head, hidden_AKD)
    assert rough.loss_sum.dtype == torch.float32
    torch.testing.assert_close(rough.loss_sum, exact.loss_sum, rtol=0.03, atol=0)
    (found,) = torch.autograd.grad(rough.loss_sum, half)
    (expected,) = torch.autograd.grad(exact.loss_sum, hidden_AKD)
    assert found.dtype == torch.bfloat16
    assert (found.float() - expected).norm() / expected.norm() < 0.05


@pytest.fixture(scope="module")
def taught(tiny_build: MakeBuild, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A lossless cache of one shard with the last hidden state."""
    return build_cache(tiny_build, tmp_path_factory.mktemp("taught") / "cache", "post_norm")


def build_cache(tiny_build: MakeBuild, path: Path, last_hidden: Any) -> Path:
    config = tiny_build(path, preset="lossless")
    build(
        replace(
            config,
            capture=replace(config.capture, last_hidden=last_hidden),
            plan=replace(config.plan, shard_mib=64),
        )
    )
    return path


@pytest.mark.parametrize("last_hidden", ["pre_norm", "post_norm"])
def test_the_teacher_at_a_slot_is_the_target_one_token_before_it(
    tiny_build: MakeBuild,
    tiny_train: MakeTrain,
    tmp_path: Path,
    last_hidden: str,
) -> None:
    config = tiny_build(tmp_path / "cache")
    cache = build_cache(tiny_build, tmp_path / "cache", last_hidden)
    session = Session.open(tiny_train(tmp_path / "run", cache, loss=LossConfig(kind="kl")))
    samples = [session.cache.read(position) for position in (0, 1)]
    first = [int(sample.loss_mask.argmax()) for sample in samples]
    anchors = [torch.tensor([place, place + 2]).numpy() for place in first]
    batch = collate(samples, anchors, epoch=0, bucket=0)
    features_SLD, last_hidden_SD = session.features.split(batch)
    assert features_SLD.shape[1] == session.cache.spec.num_taps == 2
    forward = forward_blocks(session.drafter, session.head, batch, features_SLD, 3)
    teacher = teacher_of(session.config.loss, session.head, last_hidden_SD, forward.blocks)
    assert teacher is not None
    model = load_model(Path(config.target.path), config.target)
    for number, anchor in enumerate(batch.anchor_A.tolist()):
        sample = samples[number // 2]
        ids = torch.from_numpy(sample.token_ids).long()[None]
        begin = len(samples[0].token_ids) * (number // 2)
        for slot in forward.blocks.supervised_AK[number].nonzero().flatten().tolist():
            expected_V = model(input_ids=ids).logits[0, anchor - begin + slot - 1]
            state_D = teacher.last_hidden_SD[teacher.state_AK[number, slot]]
            torch.testing.assert_close(
                session.head.logits(state_D[None])[0], expected_V, rtol=0.02, atol=0.1
            )
            assert forward.blocks.label_AK[number, slot] == ids[0, anchor - begin + slot]


def test_the_last_hidden_state_is_no_feature(
    taught: Path, tiny_build: MakeBuild, tiny_train: MakeTrain, tmp_path: Path
) -> None:
    """With it and without it in the cache, the same drafter is learned, to the bit."""
    plain = build_cache(tiny_build, tmp_path / "plain", "none")
    weights = []
    for name, cache in (("with", taught), ("without", plain)):
        config = tiny_train(tmp_path / name, cache, steps=2)
        assert train(config) is None
        weights.append(Training(config).session.drafter.state_dict())
    assert weights[0].keys() == weights[1].keys()
    for name, tensor in weights[0].items():
        assert torch.equal(tensor, weights[1][name]), name


@pytest.mark.parametrize("kind", ["kl", "tv"])
def test_a_run_learns_the_targets_distribution(
    taught: Path, tiny_train: MakeTrain, tmp_path: Path, kind: Any
) -> None:
    from trainer.config import StepConfig
    from trainer.recipe import OptimizerConfig

    training = Training(
        tiny_train(
            tmp_path / "run",
            taught,
            loss=LossConfig(kind=kind),
            train=StepConfig(steps=25, device="cpu", compute_dtype="float32"),
            optimizer=OptimizerConfig(lr=3e-3),
        )
    )
    from trainer.evaluate import evaluate

    before = evaluate(training.session)["loss"]
    assert training.train() is None
    after = evaluate(training.session)["loss"]
    assert 0 < after < (0.9 if kind == "kl" else 0.97) * before
    if kind == "tv":
        assert before <= 1


@pytest.mark.parametrize("kind", ["kl", "tv"])
def test_a_cache_without_last_hidden_state_is_refused(
    tiny_cache: Path, tiny_train: MakeTrain, tmp_path: Path, kind: Any
) -> None:
    config = tiny_train(tmp_path / "run", tiny_cache, loss=LossConfig(kind=kind))
    with pytest.raises(ConfigError, match=rf"loss\.kind '{kind}' needs .* capture\.last_hidden"):
        train(config)
    assert not list((tmp_path / "run").glob("*.jsonl"))
