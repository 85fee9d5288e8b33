"""What a build says about its data."""

import gc
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from cache_builder.build import build
from cache_builder.config import (
    BuildConfig,
    CacheConfig,
    DataConfig,
    TargetConfig,
    WorkersConfig,
)
from cache_builder.plan_writer import PlanWriter
from cache_builder.planning import describe_writers, open_corpus
from cache_builder.report import Tally
from cache_builder.tokens import load_template
from tests.conftest import conversations, write_jsonl


@pytest.mark.parametrize(
    ("target", "writers", "expected"),
    [
        pytest.param({"path": "Qwen/Qwen3-8B"}, ["Qwen/Qwen3-8B"], "", id="own"),
        pytest.param({"path": "/models/qwen3-8b/"}, ["Qwen/Qwen3-8B"], "", id="own-by-directory"),
        pytest.param({"path": ".demo/target", "name": "a/b"}, ["a/b", "b"], "", id="own-by-name"),
        pytest.param(
            {"path": "a/b"},
            ["b (greedy, a/c)", "b@0123", "a/b@vllm/completions"],
            "",
            id="own-with-a-remark",
        ),
        pytest.param({"path": "a/b"}, [], "", id="nothing"),
        pytest.param(
            {"path": "a/b"},
            ["b", "c/d", None, "c/d"],
            "3 of 4 samples not answered by the target 'b', by their `generated_by`: 2 by c/d, "
            "1 do not say by which model. ",
            id="others",
        ),
    ],
)
def test_samples_that_the_target_did_not_answer_are_one_sentence(
    target: dict[str, str], writers: list[str | None], expected: str
) -> None:
    tally = Tally()
    for writer in writers:
        tally.keep(source="s", generated_by=writer, num_tokens=int(np.int64(3)))
    line = describe_writers(tally.report(), TargetConfig(**target))
    assert line.startswith(expected)
    assert bool(line) == bool(expected)


def test_answers_of_others_draw_one_warning_with_counts_and_are_recorded(
    tiny_build: Callable[..., BuildConfig], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writers = ["tiny", "tiny@0", "c/d", "c/d", None]
    rows = [
        {**row, **({"generated_by": writer} if writer else {})}
        for row, writer in zip(conversations(range(5)), writers, strict=True)
    ]
    data = write_jsonl(tmp_path / "data.jsonl", rows)
    report = build(tiny_build(tmp_path / "cache", data=[data]))
    (line,) = [r for r in caplog.records if "not answered by the target" in r.getMessage()]
    assert line.levelname == "WARNING"
    assert line.getMessage().startswith(
        "3 of 5 samples not answered by the target 'tiny', by their `generated_by`: 2 by c/d, 1 do"
    )
    recorded = json.loads((report.plan.directory / "plan.json").read_text())["report"]
    assert recorded["generated_by"] == {"c/d": 2, "tiny": 1, "tiny@0": 1, "unknown": 1}

    caplog.clear()
    own = write_jsonl(
        tmp_path / "own.jsonl", [{**row, "generated_by": "tiny"} for row in conversations(range(3))]
    )
    build(tiny_build(tmp_path / "own", data=[own]))
    assert "not answered by the target" not in caplog.text


def test_a_plan_keeps_few_bytes_of_a_row(tiny_target: Path, tmp_path: Path) -> None:
    """A million rows must not need more than their ids, lengths and places in memory."""
    num_rows = 20_000
    with (tmp_path / "x.jsonl").open("w") as file:
        for n in range(num_rows):
            file.write(
                f'{{"input_ids": [{n % 200}, {n // 200}, 5, 6], "loss_mask": [0, 0, 1, 1]}}\n'
            )
    data = DataConfig(sources=(str(tmp_path / "x.jsonl"),), max_length=16)
    config = BuildConfig(
        cache=CacheConfig(path=tmp_path),
        target=TargetConfig(path=str(tiny_target)),
        data=data,
        workers=WorkersConfig(num_tokenizers=1),
    )
    corpus = open_corpus(config, 272, load_template(tiny_target, data))
    writer = PlanWriter(tmp_path / "plans", "0001")
    gc.collect()
    tracemalloc.start()
    try:
        for sample in corpus:
            writer.add(sample)
            if len(writer) == num_rows:  # at the end of the loop, the corpus forgets its ids
                gc.collect()
                used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    writer.discard()
    assert len(writer) == num_rows
    # Of a row 46, as measured, and 116 of the set of ids, whose parts do not become more.
    assert used < 190 * num_rows
