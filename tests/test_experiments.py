"""The experiments compare what they say, on tiny models and made-up results."""

import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import trainer.loader
import trainer.sampler
from cache_builder.build import build
from cache_builder.config import BuildConfig
from cache_builder.target import Target
from shared.cache import Cache as ReadCache
from shared.files import write_json
from tests.experiments import page
from tests.experiments.__main__ import PUBLISHED
from tests.experiments.changes import CHANGES, Places, live
from tests.experiments.derive import captured
from tests.experiments.figures import Difference, difference, largest_gap
from tests.experiments.one import ask_on, train_one
from tests.experiments.projections import PILOT
from tests.experiments.runner import Job, Results, Runner, jobs_of
from tests.experiments.variant import Cache, Variant
from tests.experiments.variants import CACHES, GROUPS, VARIANTS
from trainer.anchors import draw_anchors
from trainer.config import TrainConfig
from trainer.recipe import NoiseConfig
from trainer.run import Run


def record(*chains: float, loss: float = 4.0, asked: str = "ab") -> dict[str, Any]:
    """A run whose held-out samples have ten anchors each, and `chains` accepted on average."""
    pairs = [[10 * chain, 10] for chain in chains]
    mean = sum(chains) / len(chains)
    trees = dict.fromkeys(("16", "64", "256"), mean + 0.2)
    heldout = {"loss": loss, "tau_chain": mean, "tau_walk": mean, "tau_tree": trees}
    metrics = ("loss", "chain", "walk", "tree 16", "tree 64", "tree 256")
    return {
        "heldout": {**heldout, "heldout_sha256": asked},
        "samples": dict.fromkeys(metrics, pairs),
        "train": {"wobble": 0.1},
        "losses": [loss, loss / 2],
        "grad_norms": [1.0, 0.5],
    }


def test_differences_are_taken_by_seed_and_by_sample() -> None:
    baseline = {0: record(1.0, 1.2, 1.4), 1: record(2.0, 2.2, 2.4)}
    ours = {0: record(1.1, 1.5, 1.6), 1: record(2.2, 2.4, 2.8), 2: record(9.0, 9.0, 9.0)}
    found = difference(ours, baseline, "chain")
    assert found is not None
    by_seed = np.array([0.6 / 3, 0.8 / 3])
    by_sample = np.array([0.15, 0.25, 0.3])
    assert found.mean == pytest.approx(by_seed.mean())
    assert found.over_seeds == pytest.approx(by_seed.std(ddof=1) / 2**0.5)
    assert found.over_samples == pytest.approx(by_sample.std(ddof=1) / 3**0.5)
    assert found.error == pytest.approx((found.over_seeds**2 + found.over_samples**2) ** 0.5)
    assert found.num_seeds == 2
    assert difference({2: ours[2]}, baseline, "chain") is None
    with pytest.raises(ValueError, match="held-out samples differ"):
        difference({0: record(1.0, 1.0, 1.0, asked="cd")}, baseline, "chain")


def test_a_difference_is_sure_only_far_beyond_its_error_and_with_several_seeds() -> None:
    assert Difference(0.31, 0.06, 0.08, 3).is_sure
    assert not Difference(0.29, 0.06, 0.08, 3).is_sure
    assert not Difference(0.31, 0.0, 0.01, 1).is_sure


def test_largest_gap() -> None:
    ours, baseline = record(1.5, 1.5, loss=4.5), record(1.5, 1.5, loss=4.0)
    assert largest_gap(ours, baseline) == {
        "training loss": 0.5,
        "gradient norm": 0.0,
        "held-out metrics": 0.5,
    }


@pytest.fixture
def alone(tiny_build: Callable[..., BuildConfig]) -> Callable[..., Path]:
    """Makes a cache that was captured a sample a forward."""

    def make(path: Path, preset: str) -> Path:
        config = tiny_build(path, preset=preset, dtype="bfloat16")
        build(replace(config, capture=replace(config.capture, batch_tokens=1)))
        return path

    return make


def test_a_live_forward_trains_the_same_and_reads_no_stored_state(
    alone: Callable[..., Path],
    tiny_train: Callable[..., TrainConfig],
    tiny_target: Path,
    tmp_path: Path,
) -> None:
    exact, coarse = alone(tmp_path / "exact", "lossless"), alone(tmp_path / "coarse", "small")
    noise = NoiseConfig(scale=0.3)
    stored = train_one(tiny_train(tmp_path / "stored", exact, steps=3, noise=noise))
    config = tiny_train(tmp_path / "rounded", coarse, steps=3, noise=noise)
    rounded = train_one(config)
    with live(Places(tiny_target, tiny_target)):
        alive = train_one(tiny_train(tmp_path / "alive", coarse, steps=3, noise=noise))
    assert stored is not None
    assert rounded is not None
    assert alive is not None
    assert len(stored["losses"]) == 3
    for name in ("losses", "grad_norms", "heldout", "samples"):
        assert alive[name] == stored[name], name
        assert rounded[name] != stored[name], name
    for cache, is_same in ((coarse, True), (exact, False)):
        assert (ask_on(config, cache)["samples"] == rounded["samples"]) is is_same


def test_samples_add_up_to_the_evaluation(
    tiny_cache: Path, tiny_train: Callable[..., TrainConfig], tmp_path: Path
) -> None:
    config = tiny_train(tmp_path / "run", tiny_cache, steps=2)
    facts = train_one(config)
    assert facts is not None
    heldout, samples = facts["heldout"], facts["samples"]
    wanted = {
        "loss": heldout["loss"],
        "chain": heldout["tau_chain"],
        "walk": heldout["tau_walk"],
        **{f"tree {budget}": tau for budget, tau in heldout["tau_tree"].items()},
    }
    assert samples.keys() == wanted.keys()
    for name, pairs in samples.items():
        assert len(pairs) == heldout["num_samples"] == 4
        total = np.sum(pairs, axis=0)
        assert total[0] / total[1] == pytest.approx(wanted[name], rel=1e-5)
    assert sorted(path.name for path in (tmp_path / "run/evaluations").iterdir()) == [
        "step-00000002.json"
    ]
    again = train_one(config)  # killed before its result was written
    assert again is not None
    assert again["samples"] == samples


def test_orders_hold_every_batch_and_differ_in_their_runs(tmp_path: Path) -> None:
    count = np.array([40, 50, 60])

    def longest_run(label: np.ndarray) -> int:
        assert np.bincount(label).tolist() == count.tolist()
        return int(np.diff(np.flatnonzero(np.diff(label, prepend=-1, append=-1))).max())

    found = {"ours": longest_run(trainer.sampler.interleave(count, np.random.default_rng(0)))}
    for name in ("iid-order", "runs-order"):
        with CHANGES[name](Places(tmp_path, tmp_path)):
            found[name] = longest_run(trainer.sampler.interleave(count, np.random.default_rng(0)))
    assert found["ours"] <= 3 < found["iid-order"] < 16 <= found["runs-order"]


def test_fixed_anchors_are_those_of_the_first_epoch(tmp_path: Path) -> None:
    mask = np.ones(100, bool)
    named: dict[str, Any] = {"seed": 1, "sample_id": "ab", "limit": 8}
    first = draw_anchors(mask, epoch=0, **named)
    assert draw_anchors(mask, epoch=5, **named).tolist() != first.tolist()
    with CHANGES["fixed-anchors"](Places(tmp_path, tmp_path)):
        assert trainer.loader.draw_anchors(mask, epoch=5, **named).tolist() == first.tolist()


def test_a_cache_of_states_captured_before_is_the_one_that_a_forward_gives(
    tiny_build: Callable[..., BuildConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(tiny_build(tmp_path / "states", preset="lossless"))
    build(tiny_build(tmp_path / "forward", preset="balanced"))
    ran: list[int] = []
    monkeypatch.setattr(Target, "capture", lambda *given: ran.append(1))
    with captured(tmp_path / "states"):
        build(tiny_build(tmp_path / "derived", preset="balanced"))
    assert not ran
    ours, theirs = ReadCache(tmp_path / "derived"), ReadCache(tmp_path / "forward")
    assert ours.shard_ids == theirs.shard_ids
    for shard_id in ours.shard_ids:  # the digests of all bytes
        assert ours.record(shard_id).files == theirs.record(shard_id).files
    with pytest.raises(ValueError, match="not hold the states"), captured(tmp_path / "forward"):
        pass


def test_a_raw_drafter_may_start_with_the_fc_of_a_pilot(
    tiny_cache: Path, tiny_train: Callable[..., TrainConfig], tmp_path: Path
) -> None:
    train_one(tiny_train(tmp_path / PILOT, tiny_cache, steps=2))
    wanted = Run(tmp_path / PILOT).require_checkpoint().drafter["fc.weight"]
    config = tiny_train(tmp_path / "run", tiny_cache, steps=1)
    config = replace(config, optimizer=replace(config.optimizer, lr=1e-9))
    with CHANGES["pilot-fc"](Places(tmp_path, tmp_path)):
        train_one(config)
    found = Run(tmp_path / "run").require_checkpoint().drafter["fc.weight"]
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)


def test_runs_that_are_done_are_not_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = Results.read(tmp_path / "results.jsonl")
    jobs = jobs_of(["codec", "floor"])
    assert [str(job) for job in jobs[:4]] == [
        *("lossless, seed 0", "balanced, seed 0", "small, seed 0", "lossless, seed 1")
    ]
    assert len(jobs) == len({job.key for job in jobs}) == 12  # the baseline once
    write_json(tmp_path / "made.json", record(1.0, 1.0))

    def command(self: Runner, job: Job) -> list[str]:
        source = tmp_path / ("nothing" if job.variant.name == "small" else "made.json")
        self._result(job).parent.mkdir(parents=True, exist_ok=True)
        return ["json.tool", str(source), str(self._result(job))]

    monkeypatch.setattr(Runner, "_command", command)
    said: list[str] = []
    runner = Runner(tmp_path, results, at_once=2, nice=0, say=said.append)
    failed = runner.run(jobs[:4])
    assert [str(job) for job in failed] == ["small, seed 0"]
    assert "losses" not in results.of("balanced")[0]
    again = Results.read(tmp_path / "results.jsonl")
    assert again.by_key == results.by_key
    assert again.of("lossless").keys() == {0, 1}
    said.clear()
    assert not Runner(tmp_path, again, at_once=2, nice=0, say=said.append).run(jobs[:2])
    assert said == ["2 of 2 runs are done"]


def test_caches_are_made_in_the_order_in_which_they_need_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_json(tmp_path / "data.json", 1)
    copy = ("json.tool", "{caches}/pilot.json", "{caches}/made {n = 1}.json")
    made = Cache("made", (copy, copy), needs=("pilot",))
    pilot = Cache("pilot", (("json.tool", str(tmp_path / "data.json"), "{caches}/pilot.json"),))
    for cache in (made, pilot):
        monkeypatch.setitem(CACHES, cache.name, cache)
    said: list[str] = []
    runner = Runner(tmp_path, Results(tmp_path), at_once=1, nice=0, say=said.append)
    runner.build([Job(Variant("x", "x", cache="made"), 0)])
    assert [line.partition(":")[0] for line in said] == ["cache pilot", "cache made", "cache made"]
    assert (tmp_path / "caches" / "made {n = 1}.json").read_text() == "1\n"
    monkeypatch.setitem(CACHES, "pilot", Cache("pilot", (("json.tool", "nothing"),)))
    with pytest.raises(RuntimeError, match=r"cache pilot: exit code .*cache-pilot\.log"):
        runner.build([Job(Variant("x", "x", cache="made"), 0)])


def test_the_page_is_written_between_its_markers(tmp_path: Path) -> None:
    results = Results(tmp_path / "results.jsonl")
    for name in ("lossless", "balanced", "stored", "live"):
        for seed in VARIANTS[name].seeds:
            better = 0.4 if name == "balanced" else 0.0
            facts = record(1.0 + better, 1.1 + better)
            facts["also"] = record(1.0 + better, 1.3 + better)
            results.add(Job(VARIANTS[name], seed), facts)
    parts = [f"About {g}.\n<!-- {g}: written -->\nold\n<!-- end of {g} -->\n" for g in GROUPS]
    path = tmp_path / "PAGE.md"
    path.write_text("".join(parts))
    page.publish(results, tmp_path / "copy.jsonl", path)
    text = path.read_text()
    assert "old" not in text
    assert all(f"About {g}." in text for g in GROUPS)
    assert "| balanced | 3 | 4.0000 | 1.4500 | 1.4500 | 1.6500 |" in text
    assert "| balanced, asked on lossless | 3 | 4.0000 | 1.5500 |" in text
    assert "**+0.4000 ± 0.0000**" in text
    assert "| from a live forward | 2 | 0 | 0 | 0 |" in text
    root = ElementTree.parse(tmp_path / "proof" / "codec.svg").getroot()
    assert len(root.findall("{*}circle")) == 3 * 3 * 3
    assert Results.read(tmp_path / "copy.jsonl").by_key == results.by_key
    path.write_text("nowhere")
    with pytest.raises(ValueError, match="0 places for 'codec'"):
        page.publish(results, tmp_path / "copy.jsonl", path)


def test_the_published_page_is_what_the_published_results_give(tmp_path: Path) -> None:
    copy = tmp_path / "PROOF.md"
    copy.write_text(page.PAGE.read_text())
    page.publish(Results.read(PUBLISHED), tmp_path / "results.jsonl", copy)
    assert copy.read_text() == page.PAGE.read_text()
    assert (tmp_path / "results.jsonl").read_text() == PUBLISHED.read_text()
    for plot in (tmp_path / "proof").iterdir():
        assert plot.read_text() == (page.PAGE.parent / "proof" / plot.name).read_text()
