"""`trainer evaluate --target`: figures, their page, and a verdict that the exit code repeats."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file

from shared.errors import ConfigError, DraftCacheError, RunError, TargetError
from shared.weights import weights_sha256
from trainer.caches import Caches
from trainer.cli import main
from trainer.config import TrainConfig
from trainer.decoding.decode import Decoded
from trainer.decoding.evaluation import DecodingConfig, Evaluation
from trainer.decoding.lossless import find_difference
from trainer.decoding.prompts import Prompt
from trainer.decoding.source import DrafterSource
from trainer.decoding.strategy import GreedyChain
from trainer.decoding.target import Target
from trainer.decoding.totals import MethodTotals
from trainer.export import export_dflash, export_speculators
from trainer.run import Run
from trainer.train import train


@pytest.fixture(scope="module")
def run(
    tiny_train: Callable[..., TrainConfig],
    tiny_cache: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Run:
    path = tmp_path_factory.mktemp("runs") / "decoded"
    train(tiny_train(path, tiny_cache, steps=3))
    return Run(path)


@pytest.fixture
def evaluate(tiny_target: Path, tiny_data: Path) -> Callable[..., Result]:
    def invoke(drafter: Path, *arguments: str) -> Result:
        given = ["--target", str(tiny_target), "--prompts", str(tiny_data), "--limit", "3"]
        given += ["--max-new-tokens", "12", "--dtype", "float32", "--device", "cpu"]
        return CliRunner().invoke(main, ["evaluate", str(drafter), *given, *arguments])

    return invoke


def figures(result: Result) -> dict[str, Any]:
    """Without what takes time."""
    found: dict[str, Any] = json.loads(result.stdout)
    for method in found["methods"]:
        for name in ("seconds", "prefill_seconds", "tokens_per_second", "speedup"):
            assert method.pop(name) > 0
    return found


def test_a_run_and_its_export_give_the_same_figures_and_a_page(
    run: Run, evaluate: Callable[..., Result], tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    arguments = ["--tree-budget", "4,16", "--tree-budget", "2", "--json"]
    result = evaluate(run.path, *arguments, "--plot", str(page))
    assert result.exit_code == 0, result.output
    found = figures(result)
    assert [method["method"] for method in found["methods"]] == [
        "plain",
        "chain",
        "tree 2",
        "tree 4",
        "tree 16",
    ]
    assert found["lossless"] is True
    assert (found["num_compared"], found["num_different"]) == (12, 0)
    assert found["prompts"] == {"num_prompts": 3, "num_too_long": 0}
    assert found["step"] == 3
    plain = found["methods"][0]
    assert plain["tau"] == plain["tokens_per_forward"] == 1.0
    for method in found["methods"][1:]:
        assert method["num_texts"] == 3
        assert method["num_tokens"] == plain["num_tokens"]
        assert len(method["accepted_by_slot"]) == 7
    text = page.read_text()
    assert not re.findall(r"""<(?:script|link|img)[^>]*\s(?:src|href)=["']""", text)
    assert "lossless: 12 of 12 texts" in text
    export = export_dflash(run, run.path / "export" / "dflash")
    of_export = figures(evaluate(export, *arguments))
    assert of_export.pop("step") is None
    assert of_export.pop("drafter") == str(export)
    assert of_export == {k: v for k, v in found.items() if k not in ("step", "drafter")}


def test_the_table_says_what_it_is_of(run: Run, evaluate: Callable[..., Result]) -> None:
    result = evaluate(run.path)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0].split() == [
        *("method", "tau", "tokens/forward", "tokens/s", "speed-up", "accepted", "by", "slot")
    ]
    assert lines[1].split()[:3] == ["plain", "1.000", "1.000"]
    assert lines[2].split()[0] == "chain"
    assert "3 prompts, at most 12 new tokens each, float32 on cpu; drafter" in lines[4]
    assert lines[5].startswith("lossless: 3 of 3 texts equal plain greedy decoding")


def test_another_text_is_a_failure(
    run: Run, evaluate: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    def credulous(self: GreedyChain, draft: Any, logits_NV: Any) -> tuple[list[int], int]:
        return list(range(len(logits_NV))), int(logits_NV[-1].argmax())

    monkeypatch.setattr(GreedyChain, "accept", credulous)
    result = evaluate(run.path)
    assert result.exit_code == 1
    assert "NOT LOSSLESS: 0 of 3 texts" in result.stdout
    assert re.search(
        r"chain, .*:1: new token 1 is \d+, plain decoding gives \d+ \(margin", result.stdout
    )


def test_drawn_texts_are_not_compared(run: Run, evaluate: Callable[..., Result]) -> None:
    result = evaluate(run.path, "--temperature", "0.9", "--seed", "4")
    assert result.exit_code == 0
    assert "temperature 0.9: texts are drawn" in result.stdout
    again = evaluate(run.path, "--temperature", "0.9", "--seed", "4", "--json")
    same = evaluate(run.path, "--temperature", "0.9", "--seed", "4", "--json")
    assert figures(again) == figures(same)
    assert figures(again)["lossless"] is None
    trees = evaluate(run.path, "--temperature", "0.9", "--tree-budget", "4")
    assert isinstance(trees.exception, ConfigError)
    assert "trees are decoded greedily" in str(trees.exception)


def test_a_drawn_text_does_not_depend_on_the_prompts_before_it(
    run: Run,
    evaluate: Callable[..., Result],
    tiny_data: Path,
    tiny_target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    texts: list[list[int]] = []
    add = MethodTotals.add

    def remember(totals: MethodTotals, decoded: Decoded) -> None:
        texts.append(decoded.token_ids)
        add(totals, decoded)

    monkeypatch.setattr(MethodTotals, "add", remember)
    drawn = ("--temperature", "0.9", "--seed", "4")
    assert evaluate(run.path, *drawn).exit_code == 0
    together, texts[:] = texts[:], []
    assert len({tuple(text) for text in together}) == 6
    alone = tmp_path / "third.jsonl"
    alone.write_text(tiny_data.read_text().splitlines()[2] + "\n")
    given = ["--target", str(tiny_target), "--prompts", str(alone), "--max-new-tokens", "12"]
    given += ["--dtype", "float32", "--device", "cpu", *drawn]
    assert CliRunner().invoke(main, ["evaluate", str(run.path), *given]).exit_code == 0
    assert texts == together[4:]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--limit", "3"], "--limit goes with --target"),
        (["--target", "x", "--samples", "3"], "--samples is of the evaluation from a cache"),
        (["--target", "x"], "--target needs prompts"),
        (["--target", "x", "--prompts", "y", "--tree-budget", "8,none"], "--tree-budget 'none'"),
        (["--target", "x", "--prompts", "y", "--tree-budget", "0"], "--tree-budget '0'"),
        (["--target", "x", "--prompts", "y", "--template-arg", "think"], "expected NAME=VALUE"),
    ],
)
def test_wrong_usage(run: Run, arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(main, ["evaluate", str(run.path), *arguments])
    assert result.exit_code == 2
    assert message in result.stderr


def test_what_is_no_drafter_or_no_target_is_refused(
    run: Run, evaluate: Callable[..., Result], tmp_path: Path
) -> None:
    def error(result: Result) -> DraftCacheError:
        assert isinstance(result.exception, DraftCacheError), result.output
        return result.exception

    assert "no run here" in str(error(evaluate(tmp_path)))
    result = evaluate(run.path, "--target", str(tmp_path))
    assert isinstance(result.exception, TargetError)
    assert "no target here" in str(result.exception)
    assert str(error(evaluate(run.path, "--device", "nope"))).startswith("--device 'nope': ")
    speculators = export_speculators(run, tmp_path / "speculators")
    assert "a drafter in the format of speculators" in str(error(evaluate(speculators)))


@pytest.mark.parametrize(
    "change", [{"hidden_size": "x"}, {"num_hidden_layers": [4]}, {"rope_parameters": 3}]
)
def test_a_target_whose_config_cannot_be_is_refused(
    tiny_target: Path, tmp_path: Path, change: dict[str, Any]
) -> None:
    import torch

    target = tmp_path / "target"
    shutil.copytree(tiny_target, target)
    fields = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(fields | change))
    with pytest.raises(TargetError, match="transformers cannot load it"):
        Target.load(target, (0, 2), dtype="float32", device=torch.device("cpu"))


def test_a_target_of_other_sizes_is_refused(run: Run, tiny_target: Path) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    layers = {"num_hidden_layers": 5, "layer_types": ["full_attention"] * 5}
    config = Qwen3Config.from_pretrained(tiny_target, hidden_size=32, **layers)
    target = Target(Qwen3ForCausalLM(config), (0, 2), "other")
    with pytest.raises(RunError, match=r"hidden_size 32, expected 64"):
        DrafterSource.read(run.path).require_target(target)
    export = export_dflash(run, run.path / "export" / "dflash")
    with pytest.raises(RunError, match=r"num_hidden_layers 5, expected 4"):
        DrafterSource.read(export).require_target(target)


def test_a_target_of_other_sizes_than_the_runs_cache_is_refused(
    run: Run, tiny_target: Path
) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    layers = {"num_hidden_layers": 5, "layer_types": ["full_attention"] * 5}
    config = Qwen3Config.from_pretrained(tiny_target, vocab_size=280, **layers)
    target = Target(Qwen3ForCausalLM(config), (0, 2), "other")
    message = r"num_hidden_layers 5, expected 4; vocab_size 280, expected 272"
    with pytest.raises(RunError, match=message):
        DrafterSource.read(run.path).require_target(target)


def test_a_target_of_other_weights_is_warned_of(
    run: Run,
    evaluate: Callable[..., Result],
    tiny_target: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert evaluate(run.path).exit_code == 0
    assert "its weights" not in caplog.text
    other = tmp_path / "other"
    shutil.copytree(tiny_target, other)
    tensors = load_file(other / "model.safetensors")
    tensors["model.norm.weight"] *= 1.01
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    assert evaluate(run.path, "--target", str(other)).exit_code == 0
    expected = Caches(run.config().cache.paths).spec.target.weights_sha256
    (line,) = [r.message for r in caplog.records if "its weights" in r.message]
    assert line.startswith(f"{other}: its weights (sha256 {weights_sha256(other)[:16]}) are not")
    assert f"({expected[:16]})" in line


def test_the_template_arguments_are_those_of_the_cache(
    run: Run,
    evaluate: Callable[..., Result],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    source = DrafterSource.read(run.path)
    assert source.spec is not None
    tokens = replace(source.spec.tokens, template_arguments={"thinks": False, "tone": "dry"})
    told = replace(source, spec=replace(source.spec, tokens=tokens))
    monkeypatch.setattr(DrafterSource, "read", lambda path, checkpoint: told)
    found = figures(evaluate(run.path, "--json"))
    assert found["template_arguments"] == {"thinks": False, "tone": "dry"}
    assert "--template-arg" not in caplog.text
    found = figures(evaluate(run.path, "--json", "--template-arg", "thinks=true"))
    assert found["template_arguments"] == {"thinks": True, "tone": "dry"}
    assert "--template-arg thinks=true: the drafter was trained with false" in caplog.text


def test_a_run_whose_cache_is_gone_is_warned_of(
    run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "run"
    shutil.copytree(run.path, path)
    fields = json.loads((path / "config.json").read_text())
    fields["cache"]["path"] = str(tmp_path / "nowhere")
    (path / "config.json").write_text(json.dumps(fields))
    source = DrafterSource.read(path)
    assert (source.spec, source.sizes) == (None, {"hidden_size": 64})
    assert "compared with the drafter's by its hidden size alone" in caplog.text
    assert "nowhere" in caplog.text


def test_a_difference_is_judged_by_the_targets_own_logits(tiny_target: Path) -> None:
    import torch

    target = Target.load(tiny_target, (0, 2), dtype="float32", device=torch.device("cpu"))
    prompt = Prompt("here", [5, 6, 7, 8])
    logits = target.forward([5, 6, 7, 8, 9], target.new_cache()).logits_NV[-1]
    second, first = logits.topk(2).indices.flip(0).tolist()
    margin = float(logits[first] - logits[second])
    plain, other = [9, first, 3], [9, second, 4]
    assert find_difference(target, prompt, plain, plain, "chain", 1e-3) is None
    for tie, is_tie in ((1.01 * margin, True), (0.99 * margin, False)):
        difference = find_difference(target, prompt, plain, other, "chain", tie)
        assert difference is not None
        assert (difference.position, difference.expected, difference.found) == (1, first, second)
        assert difference.margin == pytest.approx(margin, rel=1e-4)
        assert difference.is_tie is is_tie
    ended = find_difference(target, prompt, plain, plain[:2], "chain", 1e9)
    assert ended is not None
    assert (ended.position, ended.found, ended.margin, ended.is_tie) == (2, None, None, False)


def test_a_tree_is_refused_before_anything_is_decoded(run: Run) -> None:
    import torch
    from transformers import MistralConfig, MistralForCausalLM

    from tests.test_trainer.test_decoding.targets import sizes

    torch.manual_seed(0)
    target = Target(
        MistralForCausalLM(MistralConfig(**sizes(sliding_window=9))), (0, 1), "windowed"
    )
    config = DecodingConfig(max_new_tokens=4, tree_budgets=(4,), temperature=0.0, seed=0)
    with pytest.raises(TargetError, match="Leave out --tree-budget"):
        Evaluation(target, DrafterSource.read(run.path).drafter, config)
