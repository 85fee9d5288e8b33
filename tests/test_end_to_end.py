"""What is trained from a cache is what the published client serves, token for token.

The real target answers held-out prompts greedily; its answers become a cache; a drafter is
trained from it, exported, and run by the `dflash` package with the real target. If layers,
positions, mask, anchor, labels or export were off by one anywhere, the accepted lengths that the
trainer computes from the cache would not be those of the served model.
"""

import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from cache_builder.build import build
from cache_builder.config import (
    BuildConfig,
    CacheConfig,
    CaptureConfig,
    CodecConfig,
    DataConfig,
    PlanConfig,
    TargetConfig,
)
from shared.cache import Cache
from tests.conftest import DEMO_DATA, write_jsonl
from trainer import config as training
from trainer.acceptance import chain_accepted, rank_of_gold, tree_accepted, walk
from trainer.anchors import legal_anchors
from trainer.batch import collate
from trainer.decoding.decode import Decoded, decode_speculatively
from trainer.decoding.drafting import Drafting
from trainer.decoding.source import DrafterSource
from trainer.decoding.strategy import GreedyChain, GreedyTree, Strategy
from trainer.decoding.target import Target
from trainer.export import export_dflash
from trainer.ranking import best_tokens
from trainer.run import Run
from trainer.session import Session
from trainer.step import forward_blocks
from trainer.train import train

pytestmark = pytest.mark.slow

NUM_PROMPTS = 4
NEW_TOKENS = 48
BLOCK = 8
MASK_TOKEN = 16
BUDGETS = (8, 32)
NUM_DECODED = 2
"""Prompts that are decoded by us too: the more of them, the longer it takes."""

TIE = 2e-2
"""Logits closer than this count as tied: the cache rounds states to bfloat16, serving does not."""


@dataclass
class Served:
    prompt_ids: list[int]
    greedy_ids: list[int]
    served_ids: list[int]
    produced: list[int]


@pytest.fixture(scope="module")
def target(target_dir: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(target_dir, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def answers(target: Any, target_dir: Path) -> list[tuple[list[int], list[int]]]:
    """Prompt and greedy answer of the target itself, as ids."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target_dir)
    rows = [json.loads(line) for line in DEMO_DATA.read_text().splitlines()]
    prompts = sorted(
        (row["messages"][:-1] for row in rows if row["source"] == "truthfulqa"),
        key=lambda messages: len(messages[0]["content"]),
    )
    pairs = []
    for messages in prompts[15 : 15 + NUM_PROMPTS]:
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        with torch.inference_mode():
            out = target.generate(torch.tensor([ids]), max_new_tokens=NEW_TOKENS, do_sample=False)
        pairs.append((list(ids), out[0, len(ids) :].tolist()))
    return pairs


@pytest.fixture(scope="module")
def cache(
    answers: list[tuple[list[int], list[int]]],
    target_dir: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    directory = tmp_path_factory.mktemp("end-to-end")
    rows = [
        {"source": "x", "input_ids": p + a, "loss_mask": [0] * len(p) + [1] * len(a)}
        for p, a in answers
    ]
    build(
        BuildConfig(
            cache=CacheConfig(path=directory / "cache", min_free_gb=0),
            target=TargetConfig(path=str(target_dir), dtype="float32"),
            data=DataConfig(
                sources=(str(write_jsonl(directory / "answers.jsonl", rows)),), max_length=512
            ),
            codec=CodecConfig(preset="lossless"),
            capture=CaptureConfig(batch_tokens=1024),
            plan=PlanConfig(shard_mib=16),
        )
    )
    return directory / "cache"


@pytest.fixture(scope="module")
def run(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A drafter that has learned most answers by heart, and those of a held-out prompt not."""
    path = tmp_path_factory.mktemp("run") / "run"
    train(
        training.TrainConfig(
            run=training.RunConfig(path=path),
            cache=training.CacheConfig(path=cache, heldout_fraction=0.35),
            sampler=training.SamplerConfig(tokens_per_batch=1024, num_buckets=1),
            drafter=training.DrafterConfig(
                mask_token_id=MASK_TOKEN,
                num_layers=2,
                block_size=BLOCK,
                intermediate_size=512,
                num_heads=9,
                num_kv_heads=3,
                head_dim=64,
                rope_theta=100000.0,
            ),
            anchors=training.AnchorConfig(per_sample=16),
            optimizer=training.OptimizerConfig(lr=2e-3),
            train=training.StepConfig(steps=80, device="cpu", compute_dtype="float32"),
            evaluate=training.EvaluateConfig(every_steps=0, tree_budgets=(8,)),
            checkpoint=training.CheckpointConfig(every_steps=1000),
        )
    )
    return Run(path)


@pytest.fixture(scope="module")
def exported(run: Run) -> Path:
    return export_dflash(run, run.path / "export" / "dflash")


@pytest.fixture(scope="module")
def served(exported: Path, target: Any, answers: list[tuple[list[int], list[int]]]) -> list[Served]:
    """Speculative decoding by the published package, in float32."""
    from dflash.model import DFlashDraftModel, dflash_generate

    model = DFlashDraftModel.from_pretrained(exported, dtype=torch.float32).eval()
    results = []
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        # The package passes an argument that transformers 5.24 still takes but has renamed.
        warnings.filterwarnings("ignore", "`past_key_values` is deprecated", FutureWarning)
        patch.setattr(torch.cuda, "synchronize", lambda: None)  # the package times CUDA only
        for prompt, greedy in answers:
            out = dflash_generate(
                model,
                target,
                torch.tensor([prompt]),
                # Room beyond the answer: the last blocks would be cut short at the limit.
                max_new_tokens=NEW_TOKENS + BLOCK,
                stop_token_ids=[2],
                return_stats=True,
            )
            ids = out.output_ids[0, len(prompt) :].tolist()
            results.append(Served(prompt, greedy, ids, out.acceptance_lengths))
    return results


def test_served_text_is_the_targets_own_greedy_text(served: list[Served]) -> None:
    for result in served:
        assert result.served_ids[: len(result.greedy_ids)] == result.greedy_ids


def test_accepted_lengths_from_the_cache_are_those_of_serving(
    served: list[Served], run: Run, exported: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    session = Session.open(run.config())
    head = session.cache.head().to("cpu", torch.float32)
    session.drafter.load_state_dict(
        {name: t.float() for name, t in load_file(exported / "model.safetensors").items()}
    )
    session.drafter.eval()
    index = session.cache.index
    positions = {index.sample_id(i): i for i in range(len(index))}
    offline: list[int] = []
    online: list[int] = []
    num_ties = 0
    for sample in (session.cache.read(i) for i in positions.values()):
        result = next(r for r in served if r.prompt_ids + r.greedy_ids == sample.token_ids.tolist())
        begin, last = len(result.prompt_ids), len(sample.token_ids) - 1
        anchors = legal_anchors(sample.loss_mask.astype(bool))
        assert anchors.tolist() == list(range(begin, last))
        batch = collate([sample], [anchors], epoch=0, bucket=0)
        with torch.no_grad():
            forward = forward_blocks(
                session.drafter, head, batch, session.features.unpack(batch), MASK_TOKEN
            )
            logits_AKV = forward.hidden_AKD @ head.lm_head_VD.T
        accepted, is_close = _accept(logits_AKV, sample.token_ids, anchors)
        # Walk with serving, round by round; where the two part, it must be over a tie.
        at, rounds = begin, []
        for produced in result.produced:
            if at >= last:
                break
            ours = min(accepted[at - begin] + 1, last - at)
            theirs = min(produced, last - at)
            if ours != theirs:
                assert is_close[at - begin, min(ours, theirs) - 1], (at, ours, theirs)
                num_ties += 1
            rounds.append(int(ours))
            online.append(theirs)
            at += theirs
        offline += rounds
        if rounds == online[-len(rounds) :]:
            assert walk(np.append(accepted, 0)).tolist() == rounds
    tau_offline, tau_online = np.mean(offline), np.mean(online)
    with capsys.disabled():
        print(  # noqa: T201  # the issue asks for both figures
            f"\nacceptance length over {len(online)} rounds: {tau_online:.4f} served, "
            f"{tau_offline:.4f} from the cache, {num_ties} rounds decided by a tie"
        )
    assert tau_online > 1.3, "too few accepted drafts for this test to mean anything"
    assert num_ties <= len(online) // 50
    assert abs(tau_offline - tau_online) <= 8 * num_ties / len(online)


@pytest.fixture(scope="module")
def tapped(run: Run, target: Any) -> tuple[DrafterSource, Target]:
    """Drafter and target as `trainer evaluate --target` puts them together."""
    source = DrafterSource.read(run.path)
    tapped = Target(target, source.target_layer_ids, "the demo target")
    source.require_target(tapped)
    return source, tapped


def _decode(
    tapped: tuple[DrafterSource, Target], prompt: list[int], strategy: Strategy, num_new: int
) -> Decoded:
    source, target = tapped
    drafting = Drafting(source.drafter, target.decoder)
    return decode_speculatively(target, drafting, prompt, strategy, num_new)


def test_our_rounds_are_those_of_the_published_client(
    served: list[Served], tapped: tuple[DrafterSource, Target]
) -> None:
    for result in served[:NUM_DECODED]:
        decoded = _decode(tapped, result.prompt_ids, GreedyChain(), NEW_TOKENS + BLOCK)
        assert decoded.token_ids == result.served_ids
        assert decoded.produced == result.produced


def test_what_is_reckoned_is_what_is_decoded_by_chains_and_trees(
    answers: list[tuple[list[int], list[int]]],
    run: Run,
    tapped: tuple[DrafterSource, Target],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """From the same states in float32, round by round; from the cache's bfloat16, nearly."""
    source, target = tapped
    session = Session.open(run.config())
    head = session.cache.head().to("cpu", torch.float32)
    read = [session.cache.read(i) for i in range(len(session.cache.index))]
    samples = {tuple(sample.token_ids.tolist()): sample for sample in read}
    strategies = {0: GreedyChain(), **{budget: GreedyTree(budget) for budget in BUDGETS}}
    from_cache, decoded_all = ({name: [] for name in strategies} for _ in range(2))
    for prompt, answer in answers[:NUM_DECODED]:
        sample = samples[tuple(prompt + answer)]
        anchors = legal_anchors(sample.loss_mask.astype(bool))
        batch = collate([sample], [anchors], epoch=0, bucket=0)
        live_NF = target.forward(prompt + answer, target.new_cache()).features_NF.clone()
        live_SLD = live_NF.unflatten(1, (len(target.layer_ids), -1))
        for features_SLD, is_live in ((live_SLD, True), (session.features.unpack(batch), False)):
            with torch.no_grad():
                forward = forward_blocks(source.drafter, head, batch, features_SLD, MASK_TOKEN)
                logits_AKV = forward.hidden_AKD @ head.lm_head_VD.T
            log_p_MT, token_MT = best_tokens(logits_AKV[:, 1:].flatten(0, 1), 64)
            shape = (len(anchors), BLOCK - 1, -1)
            gold_AP = forward.blocks.label_AK[:, 1:].numpy()
            rank_AP = rank_of_gold(token_MT.reshape(shape).numpy(), gold_AP)
            num_gold_A = forward.blocks.supervised_AK[:, 1:].long().cumprod(1).sum(1).numpy()
            log_p_APT = log_p_MT.reshape(shape).numpy()
            tree_AU = tree_accepted(log_p_APT, rank_AP, num_gold_A, BUDGETS)
            accepted = dict(zip(BUDGETS, tree_AU.T, strict=True))
            accepted[0] = chain_accepted(rank_AP, num_gold_A)
            for name, strategy in strategies.items():
                rounds = walk(np.append(accepted[name], 0)).tolist()
                if not is_live:
                    from_cache[name] += rounds
                    continue
                decoded = _decode(tapped, prompt, strategy, len(answer))
                assert decoded.token_ids == answer
                assert decoded.produced == rounds, name
                decoded_all[name] += decoded.produced
    taus = {name: (np.mean(decoded_all[name]), np.mean(from_cache[name])) for name in strategies}
    with capsys.disabled():
        for name, (tau, cached) in taus.items():
            print(f"\nbudget {name}: tau {tau:.4f} decoded, {cached:.4f} from the cache", end="")  # noqa: T201
        print()  # noqa: T201
    assert 1.3 < taus[0][0] < taus[BUDGETS[1]][0]
    for tau, cached in taus.values():
        assert abs(cached - tau) < 0.03 * tau


def _accept(
    logits_AKV: Tensor, token_ids: np.ndarray, anchors: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Accepted drafts of each anchor, and whether slot k's choice was close to a tie."""
    top_AK2 = logits_AKV[:, 1:].topk(2, dim=-1)
    drafts = top_AK2.indices[..., 0].numpy()
    is_close = (top_AK2.values[..., 0] - top_AK2.values[..., 1] < TIE).numpy()
    accepted = np.zeros(len(anchors), np.int64)
    for row, anchor in enumerate(anchors.tolist()):
        for slot, draft in enumerate(drafts[row], 1):
            if anchor + slot >= len(token_ids) or draft != token_ids[anchor + slot]:
                break
            accepted[row] += 1
    return accepted, is_close


def test_every_stored_state_belongs_to_its_token(cache: Path, target: Any) -> None:
    """States of the cache against a plain run of transformers, all layers and tokens."""
    opened = Cache(cache)
    for position in range(2):
        sample = opened.read(position)
        with torch.inference_mode():
            hidden = target(
                torch.from_numpy(sample.token_ids).long()[None], output_hidden_states=True
            ).hidden_states
        # hidden_states[k + 1] is the output of block k, for every block but the last.
        expected = torch.stack([hidden[k + 1][0] for k in opened.spec.target_layer_ids], 1)
        torch.testing.assert_close(opened.unpack(sample).float(), expected, rtol=2**-7, atol=2**-6)
