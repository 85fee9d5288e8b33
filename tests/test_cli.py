"""Bad input is one line on stderr and exit code 1, and loses nothing that is there already."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cache_builder import cli as builder_cli
from cache_builder.commit import committed_shards
from cache_builder.config import BuildConfig
from cache_builder.progress import Progress
from shared import cli, config
from shared.layout import DESCRIPTION, MANIFEST, generation_key
from tests.conftest import REPOSITORY, conversations, write_jsonl
from tests.test_trainer.runs import evaluation, make_run
from tests.test_trainer.runs import make_config as made_config
from trainer import cli as trainer_cli
from trainer.config import LossConfig, TrainConfig

Invoke = Callable[..., tuple[int, str, str]]
INDEX = generation_key(1, "index.safetensors")

BUILD = """
[cache]
path = "{cache}"
min_free_gb = 0
[target]
path = "{target}"
dtype = "float32"
[data]
sources = ["{data}"]
max_length = 256
[capture]
target_layer_ids = [0, 2]
batch_tokens = 1024
"""
TRAIN = """
[run]
path = "{run}"
[cache]
path = "{cache}"
heldout_fraction = 0.2
[sampler]
tokens_per_batch = 512
[drafter]
mask_token_id = 3
num_layers = 1
block_size = 8
intermediate_size = 64
num_heads = 4
num_kv_heads = 2
head_dim = 16
rope_theta = 1e4
[train]
steps = 2
device = "cpu"
[evaluate]
max_samples = 2
"""


@pytest.fixture
def invoke(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Invoke:
    """Runs a command line as its process would: exit code, stdout, stderr."""

    def run(stage: str, *arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", [stage, *map(str, arguments)])
        group = builder_cli.main if stage == "cache-builder" else trainer_cli.main
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            cli.run(group)
        out, err = capsys.readouterr()
        code = stop.value.code
        assert isinstance(code, int)
        return code, out, err

    return run


def errors(stderr: str) -> list[str]:
    assert "Traceback" not in stderr
    return [line for line in stderr.splitlines() if line.startswith("Error: ")]


@pytest.fixture
def build_config(tmp_path: Path, tiny_target: Path, tiny_data: Path) -> Callable[..., Path]:
    def write(**changes: object) -> Path:
        fields = {"cache": tmp_path / "cache", "target": tiny_target, "data": tiny_data}
        path = tmp_path / "build.toml"
        path.write_text(BUILD.format(**{**fields, **changes}))
        return path

    return write


@pytest.fixture
def train_config(tmp_path: Path, tiny_cache: Path) -> Callable[..., Path]:
    def write(**changes: object) -> Path:
        path = tmp_path / "train.toml"
        path.write_text(TRAIN.format(**{"run": tmp_path / "run", "cache": tiny_cache, **changes}))
        return path

    return write


def _malformed(path: Path) -> Path:
    rows = [json.dumps(row) for row in conversations(range(3))]
    path.write_text("\n".join([*rows[:2], rows[2][:-9]]) + "\n")
    return path


NO_ASSISTANT = [{"messages": [{"role": "user", "content": "hello"}]}]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        pytest.param(lambda p: p / "absent.jsonl", "absent.jsonl: no such file", id="missing-file"),
        pytest.param(lambda p: _malformed(p / "bad.jsonl"), "bad.jsonl:3", id="malformed-line"),
        pytest.param(lambda p: write_jsonl(p / "e.jsonl", []), "no rows", id="empty-dataset"),
        pytest.param(
            lambda p: write_jsonl(p / "u.jsonl", NO_ASSISTANT),
            "no_assistant_turn",
            id="no-assistant-turn",
        ),
    ],
)
def test_data_that_cannot_be_used(
    invoke: Invoke,
    build_config: Callable[..., Path],
    tmp_path: Path,
    make: Callable[[Path], Path],
    message: str,
) -> None:
    code, out, err = invoke("cache-builder", "build", "--config", build_config(data=make(tmp_path)))
    assert code == 1
    (line,) = errors(err)
    assert message in line
    assert out == ""


@pytest.mark.parametrize(
    ("override", "message"),
    [
        pytest.param("capture.target_layer_ids=[0,4]", "0..3", id="tap-out-of-range"),
        pytest.param("capture.batch_token=5", "did you mean 'batch_tokens'", id="unknown-key"),
        pytest.param("data.max_length=true", "expected int", id="wrong-type"),
        pytest.param("codec.preset=tiny", "'lossless', 'balanced'", id="unknown-preset"),
        pytest.param("target.path=nowhere", "target.path", id="no-target"),
        pytest.param("nonsense", "section.key=value", id="not-an-override"),
        pytest.param("cache.path=/proc/cache", "/proc/cache", id="unwritable"),
    ],
)
def test_settings_that_cannot_be_right(
    invoke: Invoke, build_config: Callable[..., Path], override: str, message: str
) -> None:
    code, _, err = invoke("cache-builder", "build", "--config", build_config(), "--set", override)
    assert code == 1
    (line,) = errors(err)
    assert message in line


def test_preview_shows_what_is_supervised_and_what_is_dropped(
    invoke: Invoke, build_config: Callable[..., Path], tmp_path: Path
) -> None:
    rows = [
        {"prompt": "one\x1b[31m", "response": "two"},
        {"prompt": "one", "response": "t<|im_end|>wo"},
        {"prompt": "three", "response": "four"},
    ]
    config = build_config(data=write_jsonl(tmp_path / "chats.jsonl", rows))
    code, out, _ = invoke("cache-builder", "preview", "--config", config, "-n", "1")
    assert code == 0
    assert "assistant\n[[two]][[<|im_end|>]]" in out
    assert "one\\x1b[31m<|im_end|>" in out
    assert "\x1b" not in out
    assert "four" not in out
    assert "3 rows: 2 samples" in out
    assert "control_token" in out
    assert "chats.jsonl:2: message 1 (assistant) writes '<|im_end|>'" in out
    assert not (tmp_path / "cache").exists()


def test_preview_paints_supervised_tokens(tiny_build: Callable[..., BuildConfig]) -> None:
    from cache_builder.preview import preview

    shown = "\n".join(preview(tiny_build(Path("-")), 1, num_rows=1, is_colored=True))
    assert "\x1b[32m\x1b[1m" in shown
    assert "[[" not in shown


def test_a_build_that_is_refused_loses_nothing(
    invoke: Invoke, build_config: Callable[..., Path], tmp_path: Path
) -> None:
    config = build_config()
    assert invoke("cache-builder", "build", "--config", config)[0] == 0
    before = (tmp_path / "cache" / MANIFEST).read_bytes()
    changed = ("--set", "capture.target_layer_ids=[0,1]")
    code, _, err = invoke("cache-builder", "build", "--config", config, *changed)
    assert code == 1
    assert "capture.target_layer_ids: [0, 1] asked for, [0, 2] in the cache" in errors(err)[0]
    assert (tmp_path / "cache" / MANIFEST).read_bytes() == before
    code, out, _ = invoke("cache-builder", "inspect", tmp_path / "cache", "--json")
    assert code == 0
    facts = json.loads(out)
    assert facts["num_samples"] == 48
    assert {
        "fingerprint",
        "generation",
        "num_shards",
        "num_tokens",
        "codec",
        "stored_bytes",
        "raw_bytes",
        "stored_over_raw",
        "target_layer_ids",
        "hidden_size",
    } <= facts.keys()


@pytest.mark.parametrize(
    ("number", "expected", "word"),
    [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")],
    ids=["ctrl-c", "sigterm"],
)
def test_an_interrupted_build_says_what_is_committed_and_goes_on(
    invoke: Invoke,
    build_config: Callable[..., Path],
    tmp_path: Path,
    number: signal.Signals,
    expected: int,
    word: str,
) -> None:
    command = ("cache-builder", "build", "--config", build_config(), "--workers", "1")
    command += ("--set", "plan.shard_mib=0.125")
    original = Progress.committed

    def send(self: Progress, *arguments: Any) -> None:
        original(self, *arguments)
        if len(committed_shards(tmp_path / "cache")) == 2:
            os.kill(os.getpid(), number)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Progress, "committed", send)
        code, _, err = invoke(*command)
    assert code == expected
    (last,) = [line for line in err.splitlines() if word in line]
    assert re.search(r"2 of [0-9]+ shards of the newest plan are committed \([0-9,]+ of", last)
    assert "The same command goes on from there." in last
    assert "Traceback" not in err
    assert re.search(r"worker 0 \(cpu\) +2 +[0-9,]+ ", err)  # the report: how fast it was
    code, out, err = invoke(*command)
    assert code == 0
    assert len(committed_shards(tmp_path / "cache")) > 2
    assert "48 (0 quarantined)" in out


def test_a_json_log_is_one_object_a_line_whoever_writes_it(
    build_config: Callable[..., Path], tmp_path: Path
) -> None:
    """In a process of its own: workers, libraries, warnings and Python itself write there too."""

    def run(*arguments: str) -> tuple[int, str, list[dict[str, Any]]]:
        command = [sys.executable, "-m", "cache_builder", *arguments]
        ended = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY)
        return ended.returncode, ended.stdout, [json.loads(x) for x in ended.stderr.splitlines()]

    options = ["--config", str(build_config()), "--json-log", "--set", "plan.shard_mib=0.25"]
    code, out, lines = run("build", *options, "--workers", "2")
    assert code == 0
    assert "48 (0 quarantined)" in out
    assert all({"time", "level", "logger", "event"} <= line.keys() for line in lines)
    by_event: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        by_event.setdefault(line["event"], []).append(line)
    workers = {"worker 0 (cpu)", "worker 1 (cpu)"}
    assert {line["worker"] for line in by_event["joined"]} <= workers
    begun, committed = by_event["started"], by_event["committed"]
    assert {line["shard"] for line in begun} == {line["shard"] for line in committed}
    assert {line["worker"] for line in committed} <= workers
    assert all(line["tokens_per_second"] > 0 < line["seconds"]["total"] for line in committed)
    (report,) = by_event["report"]
    assert report["tokens"] == report["planned_tokens"] == sum(x["tokens"] for x in committed)
    assert report["planned_tokens"] == sum(x["planned_tokens"] for x in begun)
    assert report["eta_seconds"] == 0
    assert 0 < report["bytes_per_token"] < 256
    assert sum(totals["shards"] for totals in report["workers"].values()) == len(committed)

    code, out, lines = run("build", *options, "--set", "data.max_length=1000")
    assert (code, out) == (1, "")
    assert (lines[-1]["event"], lines[-1]["kind"]) == ("error", "ConfigError")
    assert "data.max_length" in lines[-1]["message"]


@pytest.mark.parametrize(
    ("name", "piece"),
    [(MANIFEST, "manifest"), (DESCRIPTION, "description"), (INDEX, "index")],
)
def test_verify_gives_json_whatever_is_damaged(
    invoke: Invoke, tiny_cache: Path, tmp_path: Path, name: str, piece: str
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(tiny_cache, copy)
    (copy / name).write_bytes(b"{")
    code, out, err = invoke("cache-builder", "verify", copy, "--json")
    assert code == 1
    facts = json.loads(out)
    assert facts["ok"] is False
    assert [problem["piece"] for problem in facts["problems"]] == [piece]
    assert name in facts["problems"][0]["message"]
    assert len(errors(err)) == 1
    code, out, _ = invoke("cache-builder", "verify", tmp_path / "nothing", "--json")
    assert (code, json.loads(out)["ok"]) == (1, False)


def test_repair_takes_workers_and_says_what_it_did(
    invoke: Invoke, build_config: Callable[..., Path], tmp_path: Path
) -> None:
    config = build_config()
    assert invoke("cache-builder", "build", "--config", config)[0] == 0
    (tmp_path / "cache" / INDEX).unlink()
    code, out, err = invoke("cache-builder", "repair", "--config", config, "--workers", "1")
    assert code == 0
    assert out == "0 shards captured anew\n"
    assert "made again from the shards" in err


def test_a_whole_run_by_its_commands(
    invoke: Invoke, train_config: Callable[..., Path], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    assert invoke("trainer", "train", "--config", train_config())[0] == 0
    assert invoke("trainer", "export", run)[0] == 0
    asked = ("--format", "speculators", "--target", "owner/name", "--draft-vocab", 30)
    code, out, _ = invoke("trainer", "export", run, *asked)
    assert (code, out.strip()) == (0, str(run / "export" / "speculators"))
    exported = json.loads((run / "export" / "speculators" / "config.json").read_text())
    assert exported["draft_vocab_size"] == 30
    assert exported["speculators_config"]["verifier"]["name_or_path"] == "owner/name"
    code, _, err = invoke("trainer", "export", run, "--draft-vocab", 30)
    assert (code, "only --format speculators" in err) == (2, True)
    code, out, _ = invoke("trainer", "summary", run)
    assert code == 0
    assert "acceptance length" in out
    assert f"export             {run / 'export' / 'dflash'}\n" in out
    shutil.rmtree(run / "export" / "dflash")
    _, out, _ = invoke("trainer", "summary", run)
    assert f"export             {run / 'export' / 'speculators'}\n" in out
    code, out, _ = invoke("trainer", "evaluate", run, "--json")
    assert code == 0
    facts = json.loads(out)
    assert {"tau_chain", "tau_walk", "tau_tree", "accuracy_per_slot", "loss"} <= facts.keys()
    assert len(facts["accuracy_per_slot"]) == 7


@pytest.mark.parametrize(
    ("override", "message"),
    [
        pytest.param("sampler.sed=4", "unknown key 'sed'", id="unknown-key"),
        pytest.param("cache.path=nowhere", "no cache here", id="no-cache"),
        pytest.param("optimizer.lr=fast", "expected float", id="wrong-type"),
        pytest.param("drafter.mask_token_id=999", "272 rows", id="mask-token"),
        pytest.param("drafter.block_size=7", "Set loss.gamma", id="no-published-gamma"),
        pytest.param("sampler.tokens_per_batch=100", "exceeds tokens_per_batch", id="long-sample"),
        pytest.param("cache.sources=['third']", "third", id="unknown-source"),
        pytest.param("run.path=/proc/run", "/proc/run", id="unwritable"),
    ],
)
def test_runs_that_cannot_start(
    invoke: Invoke, train_config: Callable[..., Path], override: str, message: str, tmp_path: Path
) -> None:
    code, _, err = invoke("trainer", "train", "--config", train_config(), "--set", override)
    assert code == 1
    (line,) = errors(err)
    assert message in line
    assert not (tmp_path / "run").exists()


def test_a_cache_of_another_format_version_is_refused(
    invoke: Invoke, train_config: Callable[..., Path], tiny_cache: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(tiny_cache, copy)
    fields = json.loads((copy / DESCRIPTION).read_text())
    (copy / DESCRIPTION).write_text(json.dumps({**fields, "format_version": 1}))
    for stage, arguments in [
        ("trainer", ("train", "--config", train_config(cache=copy))),
        ("cache-builder", ("inspect", copy)),
    ]:
        code, _, err = invoke(stage, *arguments)
        assert code == 1
        assert "format version 1, this version reads 2" in errors(err)[0]


def test_a_run_trained_from_another_kind_of_cache_is_refused(
    invoke: Invoke,
    train_config: Callable[..., Path],
    build_config: Callable[..., Path],
    tmp_path: Path,
) -> None:
    assert invoke("trainer", "train", "--config", train_config())[0] == 0
    other = ("--set", "capture.target_layer_ids=[1]")
    assert invoke("cache-builder", "build", "--config", build_config(), *other)[0] == 0
    code, _, err = invoke("trainer", "train", "--config", train_config(cache=tmp_path / "cache"))
    assert code == 1
    assert "trained from a cache with" in errors(err)[0]


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e999"])
@pytest.mark.parametrize(
    ("stage", "arguments"),
    [
        ("trainer", ["evaluate", "run", "--target", "t", "--prompts", "p", "--temperature"]),
        ("trainer", ["projection", "run", "-o", "p", "--rank-factor"]),
        ("cache-builder", ["import", "specforge", "from", "cache", "--tolerance"]),
        ("cache-builder", ["import", "specforge", "from", "cache", "--shard-mib"]),
        ("cache-builder", ["import", "specforge", "from", "cache", "--min-free-gb"]),
        ("cache-builder", ["import", "specforge", "from", "cache", "--max-quarantined-fraction"]),
        ("cache-builder", ["regenerate", "p", "--config", "c", "-o", "o", "--temperature"]),
        ("cache-builder", ["regenerate", "p", "--config", "c", "-o", "o", "--top-p"]),
        ("cache-builder", ["regenerate", "p", "--config", "c", "-o", "o", "--timeout"]),
    ],
)
def test_an_option_that_is_no_number_is_wrong_usage(
    invoke: Invoke, stage: str, arguments: list[str], value: str
) -> None:
    code, _, err = invoke(stage, *arguments, value)
    assert code == 2
    assert f"Invalid value for '{arguments[-1]}'" in err


@pytest.mark.parametrize(
    ("stage", "arguments"),
    [
        ("trainer", ["sweep", "--config", "c", "--space", "s", "-o", "o", "--jobs", "1025"]),
        ("trainer", ["sweep", "--config", "c", "--space", "s", "-o", "o", "--trials", 2**31]),
        ("trainer", ["evaluate", "run", "--samples", 2**31]),
        ("cache-builder", ["verify", "cache", "--recapture", 2, "--target", "t", "--seed", "-1"]),
        ("cache-builder", ["import", "specforge", "from", "cache", "--seed", "-1"]),
        ("cache-builder", ["preview", "--config", "c", "-n", 2**63]),
    ],
)
def test_an_option_out_of_range_is_wrong_usage(
    invoke: Invoke, stage: str, arguments: list[object]
) -> None:
    code, _, err = invoke(stage, *arguments)
    assert code == 2
    assert f"Invalid value for '{arguments[-2]}'" in err


@pytest.mark.parametrize(
    ("stage", "arguments", "message"),
    [
        ("cache-builder", ["verify", "cache", "--seed", 1], "--seed goes with --recapture"),
        (
            "trainer",
            ["evaluate", "r", "--target", "t", "--prompts", "p", "--seed", 1],
            "--seed goes with --temperature",
        ),
        (
            "cache-builder",
            ["regenerate", "p", "--config", "c", "-o", "o", "--seed", 1],
            "--seed goes with --temperature",
        ),
        (
            "cache-builder",
            ["regenerate", "p", "--config", "c", "-o", "o", "--top-p", 0.9],
            "--top-p goes with --temperature",
        ),
    ],
)
def test_an_option_that_would_be_ignored_is_wrong_usage(
    invoke: Invoke, stage: str, arguments: list[object], message: str
) -> None:
    code, _, err = invoke(stage, *arguments)
    assert code == 2
    assert message in err


def test_principal_directions_that_shall_not_be_orthogonal_are_wrong_usage(invoke: Invoke) -> None:
    options = ("--principal", "--no-orthonormal")
    code, _, err = invoke("trainer", "projection", "run", "-o", "p", *options)
    assert code == 2
    assert "--no-orthonormal: the rows of --principal are orthogonal" in err


@pytest.mark.parametrize("package", ["cache_builder", "trainer"])
def test_help_teaches_and_usage_errors_exit_with_two(package: str) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", package, *arguments]
        return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)

    done = run("--help")
    assert done.returncode == 0
    assert "--config" in done.stdout
    assert run("no-such-command").returncode == 2


@pytest.mark.parametrize("path", sorted((REPOSITORY / "cache_builder" / "configs").glob("*.toml")))
def test_shipped_cache_configurations_load(path: Path) -> None:
    settings = config.load(BuildConfig, path)
    assert settings.cache.path == Path("caches") / path.stem


@pytest.mark.parametrize("path", sorted((REPOSITORY / "trainer" / "configs").glob("*.toml")))
def test_shipped_training_configurations_load_and_name_their_cache(path: Path) -> None:
    settings = config.load(TrainConfig, path)
    assert settings.cache.path == Path("caches") / path.stem
    assert (REPOSITORY / "cache_builder" / "configs" / path.name).is_file()
    assert settings.optimizer.betas == (0.9, 0.95)
    if settings.drafter.block_size == 16:
        assert settings.loss.resolve_gamma(16) == 7.0


def test_doctor_exits_with_one_for_a_fault_only(invoke: Invoke, tmp_path: Path) -> None:
    make_run(tmp_path / "well")
    code, out, err = invoke("trainer", "doctor", tmp_path / "well")
    assert (code, errors(err)) == (0, [])
    assert out.count("\n") == 1
    assert "no fault found" in out

    gamma = made_config(tmp_path / "ill", loss=LossConfig(gamma=4.0))
    make_run(tmp_path / "ill", config=gamma)
    page = tmp_path / "page.html"
    code, out, err = invoke("trainer", "doctor", tmp_path / "ill", "--json", "--html", page)
    assert (code, errors(err)) == (1, [])
    found = json.loads(out)
    assert found["ok"] is False
    assert [finding["name"] for finding in found["findings"]] == ["gamma-of-another-block-size"]
    assert found["checkpoints"] == [100, 200]
    assert b"gamma-of-another-block-size" in page.read_bytes()

    code, out, err = invoke("trainer", "doctor", tmp_path / "absent")
    (line,) = errors(err)
    assert (code, out) == (1, "")
    assert "no run here" in line


def test_inspect_shows_a_checkpoint_and_refuses_a_damaged_one(
    invoke: Invoke, tmp_path: Path
) -> None:
    make_run(tmp_path)
    path = tmp_path / "checkpoints" / "step-00000200"
    code, out, _ = invoke("trainer", "inspect", path)
    assert code == 0
    assert "0.weight" in out
    code, out, _ = invoke("trainer", "inspect", path, "--json")
    assert code == 0
    assert json.loads(out)["step"] == 200
    tensors = path / "drafter.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-1])
    code, out, err = invoke("trainer", "inspect", path)
    (line,) = errors(err)
    assert (code, out) == (1, "")
    assert "drafter.safetensors: expected bytes" in line


def test_compare_exits_with_one_if_the_held_out_sets_differ(invoke: Invoke, tmp_path: Path) -> None:
    first, second = make_run(tmp_path / "a"), make_run(tmp_path / "b")
    code, out, _ = invoke("trainer", "compare", first.path, second.path)
    assert code == 0
    assert "tau walk" in out
    second.write_evaluation(200, evaluation(1.5, num_anchors=7))
    code, out, err = invoke("trainer", "compare", first.path, second.path, "--json")
    assert (code, errors(err)) == (1, [])
    assert json.loads(out)["comparable"] is False
