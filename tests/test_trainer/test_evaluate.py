"""Held-out figures are repeatable and are what decoding block by block would give."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from shared.errors import RunError
from shared.shard import StoredSample
from trainer.anchors import legal_anchors
from trainer.batch import collate
from trainer.config import TrainConfig
from trainer.evaluate import evaluate, evaluate_run
from trainer.run import Run
from trainer.session import Session
from trainer.step import forward_blocks
from trainer.train import train

MakeTrain = Callable[..., TrainConfig]


@pytest.fixture(scope="module")
def trained(
    tiny_train: MakeTrain, tiny_cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A run that has learned enough to have some drafts accepted."""
    from trainer import config as training

    run = tmp_path_factory.mktemp("runs") / "trained"
    train(tiny_train(run, tiny_cache, steps=150, optimizer=training.OptimizerConfig(lr=3e-3)))
    return run


def open_trained(run: Path) -> Session:
    from trainer.snapshot import restore

    session = Session.open(Run(run).config())
    restore(Run(run).require_checkpoint(), session.drafter)
    return session


def test_evaluation_is_the_same_every_time(trained: Path) -> None:
    first = evaluate_run(Run(trained), cache=None, max_samples=None)
    second = evaluate_run(Run(trained), cache=None, max_samples=None)
    assert first == second
    assert first == {"step": 150, **Run(trained).evaluations(150)[-1]}


def test_training_raised_the_acceptance_length(trained: Path) -> None:
    before, after = Run(trained).evaluations(150)
    assert after["loss"] < before["loss"]
    assert after["tau_walk"] > before["tau_walk"] + 0.2
    assert after["tau_tree"]["8"] >= after["tau_tree"]["4"] >= 1.0


def test_walk_and_chain_equal_a_loop_over_single_blocks(trained: Path) -> None:
    """One block at a time, by hand: draft, compare with gold, move on by what was accepted."""
    session = open_trained(trained)
    block_size = session.config.drafter.block_size

    def accepted(position: int, anchor: int, end: int) -> int:
        sample = session.cache.read(position)
        batch = collate([sample], [np.array([anchor])], epoch=0, bucket=0)
        with torch.no_grad():
            forward = forward_blocks(
                session.drafter, session.head, batch, session.features.unpack(batch), 3
            )
        drafts = (forward.hidden_AKD[0] @ session.head.lm_head_VD.T).argmax(-1).tolist()
        count = 0
        for slot in range(1, block_size):
            if anchor + slot >= end or drafts[slot] != int(sample.token_ids[anchor + slot]):
                break
            count += 1
        return count

    rounds = tokens = anchors = total = 0
    for position in session.split.heldout[:4].tolist():
        mask = session.cache.read(position).loss_mask
        begin, end = int(np.flatnonzero(mask)[0]), int(np.flatnonzero(mask)[-1]) + 1
        assert mask[begin:end].all()
        at = begin
        while at < end - 1:
            step = min(accepted(position, at, end) + 1, end - 1 - at)
            at, tokens, rounds = at + step, tokens + step, rounds + 1
        for anchor in range(begin, end - 1):
            total += accepted(position, anchor, end) + 1
            anchors += 1
    result = evaluate(session)
    assert result["num_rounds"] == rounds
    assert result["tau_walk"] == pytest.approx(tokens / rounds)
    assert result["num_anchors"] == anchors
    assert result["tau_chain"] == pytest.approx(total / anchors)


def test_no_slot_counts_behind_a_gap_in_the_supervision(
    trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the target did not write, as between two answers, ends what can be accepted."""
    session = open_trained(trained)
    read, num_slots = session.cache.read, session.config.drafter.block_size - 1

    def gapped(position: int) -> StoredSample:
        sample = read(position)
        mask = sample.loss_mask.copy()
        mask[np.flatnonzero(mask)[4]] = 0
        return replace(sample, loss_mask=mask)

    monkeypatch.setattr(session.cache, "read", gapped)
    expected = np.zeros(num_slots, np.int64)
    for position in session.split.heldout[:4].tolist():
        mask = gapped(position).loss_mask
        for anchor in legal_anchors(mask.astype(bool)).tolist():
            follows = mask[anchor + 1 : anchor + 1 + num_slots]
            expected[: follows.size if follows.all() else follows.argmin()] += 1
    assert evaluate(session)["num_anchors_per_slot"] == expected.tolist()


def test_noise_does_not_touch_evaluation(
    tiny_train: MakeTrain, tiny_cache: Path, tmp_path: Path
) -> None:
    from trainer import config as training

    noise = training.NoiseConfig(scale=0.5)
    quiet = evaluate(Session.open(tiny_train(tmp_path / "a", tiny_cache)))
    noisy = evaluate(Session.open(tiny_train(tmp_path / "b", tiny_cache, noise=noise)))
    assert quiet == noisy


def test_another_kind_of_cache_is_refused(
    trained: Path, tiny_build: Callable[..., object], tmp_path: Path
) -> None:
    from cache_builder.build import build
    from shared.errors import CacheIncompatibleError

    build(tiny_build(tmp_path / "other", layer_ids=(1, 2)))
    with pytest.raises(CacheIncompatibleError, match="trained from a cache with fingerprint"):
        evaluate_run(Run(trained), cache=tmp_path / "other", max_samples=2)


def test_a_full_gpu_is_one_line(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import trainer.decoding.command
    import trainer.evaluate
    from trainer.commands.evaluate import evaluate as command

    def full(*given: Any, **named: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore.")

    monkeypatch.setattr(trainer.evaluate, "forward_blocks", full)
    monkeypatch.setattr(trainer.decoding.command, "enter_device", full)
    decode = ["--target", "there", "--prompts", str(trained / "config.toml")]
    for options, advice in (([], "CUDA_VISIBLE_DEVICES"), (decode, "Lower --max-new-tokens")):
        result = CliRunner().invoke(command, [str(trained), *options])
        assert isinstance(result.exception, RunError)
        assert str(result.exception).startswith(
            f"{trained}: the GPU's memory is full (CUDA out of memory. Tried to allocate 2.00 GiB.)"
        )
        assert advice in str(result.exception)
