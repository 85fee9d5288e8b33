"""Fixtures that several test modules share: targets, data, caches."""

import json
import logging
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: see the Makefile
os.environ["HF_HUB_OFFLINE"] = "1"
if "PYTEST_XDIST_WORKER" in os.environ:  # the other workers take the other cores
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from cache_builder.build import build
from cache_builder.config import (
    BuildConfig,
    CacheConfig,
    CaptureConfig,
    CodecConfig,
    DataConfig,
    PlanConfig,
    TargetConfig,
    WorkersConfig,
)
from shared import log
from trainer import config as training
from trainer.projection import ProjectionSettings, make_projection
from trainer.run import Run
from trainer.train import train

# A shell starts background jobs with SIGINT ignored, and what they start inherits it.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Every server of the tests is on loopback.
for _name in [name for name in os.environ if name.lower().endswith("_proxy")]:
    del os.environ[_name]

# How long an example takes says how busy the machine is. Every run has the same ones: others are
# drawn by `pytest --hypothesis-profile=explore`.
BUSY = [HealthCheck.too_slow]
settings.register_profile("explore", deadline=None, suppress_health_check=BUSY)
settings.register_profile("same", settings.get_profile("explore"), derandomize=True)
settings.load_profile("same")

REPOSITORY = Path(__file__).parent.parent
DEMO_DATA = REPOSITORY / "cache_builder" / "data" / "demo.jsonl"
TINY_MASK_TOKEN = 3
WORDS = [
    "the",
    "cache",
    "holds",
    "states",
    "of",
    "a",
    "small",
    "target",
    "and",
    "every",
    "drafter",
    "reads",
    "them",
    "back",
    "in",
    "blocks",
    "while",
    "nobody",
    "waits",
    "for",
    "anything",
    "at",
    "all",
    "because",
    "order",
    "is",
    "a",
    "pure",
    "function",
    "of",
    "the",
    "seed",
]

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests first: workers that take a file at a time then end together."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """What a test or its fixtures draw from torch's own generator is the same in any order."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """A command line that a test runs in this process sets up logging: take that back after it."""
    loggers = [logging.getLogger(name) for name in (None, *log.OURS, *log.LIBRARIES)]
    before = [(logger.handlers[:], logger.level, logger.propagate) for logger in loggers]
    hook = sys.excepthook
    yield
    logging.captureWarnings(False)
    sys.excepthook = hook
    for logger, (handlers, level, propagate) in zip(loggers, before, strict=True):
        logger.handlers[:], logger.level, logger.propagate = handlers, level, propagate


@pytest.fixture(scope="session")
def target_dir() -> Path:
    """The real target, SmolLM2-135M-Instruct. `make test` puts it there."""
    path = Path(os.environ.get("DRAFTCACHE_TEST_TARGET", REPOSITORY / ".demo" / "target"))
    if not (path / "config.json").is_file():
        pytest.fail(f"{path}: the demo target is missing. Run the tests by `make test`.")
    return path


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random four-block Qwen3 with a byte-level tokenizer and a ChatML template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    special = ["<|pad|>", "<|im_start|>", "<|im_end|>", "<|mask|>"]
    vocabulary = {token: i for i, token in enumerate(special)}
    for letter in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary[letter] = len(vocabulary)
    raw = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(special)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="<|im_end|>", pad_token="<|pad|>"
    )
    tokenizer.chat_template = CHATML
    path = tmp_path_factory.mktemp("targets") / "tiny"
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=272,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=512,
            eos_token_id=2,
            pad_token_id=0,
            bos_token_id=None,
            initializer_range=0.2,
            tie_word_embeddings=False,
        )
    )
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


S3_SERVER = """
from moto.server import ThreadedMotoServer

server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
input()
"""


@pytest.fixture(scope="module")
def s3_server() -> Iterator[str]:
    """The address of an S3 server of its own with the bucket `caches`."""
    with subprocess.Popen(
        [sys.executable, "-c", S3_SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        address = (
            f"http://127.0.0.1:{int(process.stdout.readline())}"  # the system chose a free one
        )
        urllib.request.urlopen(urllib.request.Request(f"{address}/caches", method="PUT")).close()
        yield address
        process.kill()


def conversations(numbers: Iterable[int], source: str = "made") -> list[dict[str, Any]]:
    """One conversation for each number, of varied length, the same ones at every call."""
    rows = []
    for n in numbers:
        question = " ".join(WORDS[(n * 7 + i * 3) % len(WORDS)] for i in range(3 + n % 5))
        answer = " ".join(WORDS[(n * 5 + i) % len(WORDS)] for i in range(4 + (n * 11) % 30))
        rows.append(
            {
                "source": source,
                "messages": [
                    {"role": "user", "content": f"{n} {question}"},
                    {"role": "assistant", "content": answer},
                ],
            }
        )
    return rows


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """48 conversations for the tiny target, from two sources."""
    rows = conversations(range(32), "even") + conversations(range(32, 48), "odd")
    return write_jsonl(tmp_path_factory.mktemp("data") / "tiny.jsonl", rows)


@pytest.fixture(scope="session")
def tiny_build(tiny_target: Path, tiny_data: Path) -> Callable[..., BuildConfig]:
    """Makes a BuildConfig for the tiny target: `tiny_build(cache, preset=..., data=[...])`."""

    def make(
        cache: Path,
        *,
        preset: Any = "balanced",
        data: Iterable[Path] = (tiny_data,),
        layer_ids: tuple[int, ...] = (0, 2),
        max_length: int = 256,
        dtype: Any = "float32",
    ) -> BuildConfig:
        return BuildConfig(
            cache=CacheConfig(path=cache, min_free_gb=0),
            target=TargetConfig(path=str(tiny_target), dtype=dtype),
            data=DataConfig(sources=tuple(str(path) for path in data), max_length=max_length),
            codec=CodecConfig(preset=preset),
            capture=CaptureConfig(target_layer_ids=layer_ids, batch_tokens=1024),
            plan=PlanConfig(shard_mib=0.25),
            workers=WorkersConfig(num_workers=1),  # in this process: fast, and open to patches
        )

    return make


@pytest.fixture(scope="session")
def tiny_cache(
    tiny_build: Callable[..., BuildConfig], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A published cache of the tiny target. Read it only; copy it to change it."""
    path = tmp_path_factory.mktemp("caches") / "tiny"
    build(tiny_build(path))
    return path


@pytest.fixture(scope="session")
def tiny_train() -> Callable[..., training.TrainConfig]:
    """Makes a TrainConfig for the tiny cache: `tiny_train(run, cache, steps=..., loss=...)`."""

    def make(
        run: Path, cache: Path, *, steps: int = 6, block_size: int = 8, **sections: Any
    ) -> training.TrainConfig:
        given = {
            "sampler": training.SamplerConfig(tokens_per_batch=512, num_buckets=3),
            "train": training.StepConfig(steps=steps, device="cpu", compute_dtype="float32"),
            "anchors": training.AnchorConfig(per_sample=8),
            "evaluate": training.EvaluateConfig(every_steps=0, max_samples=4, tree_budgets=(4, 8)),
            "checkpoint": training.CheckpointConfig(every_steps=2),
            "cache": training.CacheConfig(path=cache, heldout_fraction=0.2),
            **sections,
        }
        return training.TrainConfig(
            run=training.RunConfig(path=run),
            drafter=training.DrafterConfig(
                mask_token_id=TINY_MASK_TOKEN,
                num_layers=1,
                block_size=block_size,
                intermediate_size=128,
                num_heads=4,
                num_kv_heads=2,
                head_dim=16,
                rope_theta=10000.0,
            ),
            **given,
        )

    return make


@dataclass(frozen=True)
class Projected:
    """The flow of a projected cache, end to end, on the tiny target. Read only."""

    raw: Path
    """Lossless cache of the states themselves."""

    pilot: Path
    """Run on it."""

    file: Path
    """The projection, of the pilot's `fc`, with the rank of the hidden size."""

    cache: Path
    """Lossless cache of the same samples in the same batches, projected."""


@pytest.fixture(scope="session")
def tiny_projected(
    tiny_build: Callable[..., BuildConfig],
    tiny_train: Callable[..., training.TrainConfig],
    tmp_path_factory: pytest.TempPathFactory,
) -> Projected:
    place = tmp_path_factory.mktemp("projected")
    raw, pilot, file, cache = (place / name for name in ("raw", "pilot", "p.safetensors", "cache"))
    build(tiny_build(raw, preset="lossless"))
    train(tiny_train(pilot, raw, steps=4))
    file.write_bytes(make_projection(Run(pilot), ProjectionSettings()).to_bytes())
    build(projecting(tiny_build(cache, preset="lossless"), file))
    return Projected(raw, pilot, file, cache)


def projecting(config: BuildConfig, file: Path | None, **capture: Any) -> BuildConfig:
    """`config` with the projection in `file`, and shards of as many tokens as without it."""
    return replace(
        config,
        capture=replace(config.capture, projection=file, **capture),
        plan=replace(config.plan, shard_mib=config.plan.shard_mib / 2),
    )
