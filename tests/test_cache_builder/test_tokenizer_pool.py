"""Rows tokenized by several processes are those that one gives; none of them outlives its use."""

import json
import multiprocessing
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cache_builder import tokenizer_pool
from cache_builder.config import BuildConfig, WorkersConfig
from cache_builder.corpus import CorpusReader
from cache_builder.planning import open_corpus
from cache_builder.tokens import load_template
from shared.errors import CaptureError, DataError
from tests.conftest import conversations, write_jsonl

MakeBuild = Callable[..., BuildConfig]


@pytest.fixture
def corpus(
    tiny_build: MakeBuild, tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., CorpusReader]:
    """Reads 300 rows, some of them bad, in chunks of seven: all but the first ten by processes."""
    monkeypatch.setattr(tokenizer_pool, "FEW_ROWS", 10)
    monkeypatch.setattr(tokenizer_pool, "_CHUNK_ROWS", 7)
    rows: list[dict[str, Any]] = conversations(range(280))
    rows[50:50] = [{"messages": []}, rows[3], {"text": "once"}, *rows[20:30]]
    rows[200:200] = [{**rows[100], "finish_reason": "length"}, {"prompt": "a", "response": ""}]
    data = write_jsonl(tmp_path / "data.jsonl", rows)

    def read(num_tokenizers: int, **options: Any) -> CorpusReader:
        config = tiny_build(tmp_path / "cache", data=[data])
        config = replace(
            config,
            workers=WorkersConfig(num_tokenizers=num_tokenizers),
            data=replace(config.data, max_length=80, **options),
        )
        return open_corpus(config, 272, load_template(tiny_target, config.data))

    return read


def test_any_number_of_processes_gives_the_same_samples_and_account(
    corpus: Callable[..., CorpusReader],
) -> None:
    alone, others = corpus(1), corpus(3)
    expected = [(s.sample_id, s.file, s.row, s.source) for s in alone]
    assert [(s.sample_id, s.file, s.row, s.source) for s in others] == expected
    assert others.report == alone.report
    assert len(alone.report.dropped) >= 4
    assert alone.report.num_cut_off == 1
    assert alone.report.num_truncated > 0
    assert not multiprocessing.active_children()


def test_processes_end_when_nobody_reads_on(corpus: Callable[..., CorpusReader]) -> None:
    reader = corpus(2)
    for _ in range(20):
        next(reader)
    assert len(multiprocessing.active_children()) == 2
    del reader
    assert not multiprocessing.active_children()


def test_a_process_that_is_killed_is_named_and_nothing_hangs(
    corpus: Callable[..., CorpusReader],
) -> None:
    reader = corpus(2)
    for _ in range(20):
        next(reader)
    victim = multiprocessing.active_children()[0]
    assert victim.pid is not None
    os.kill(victim.pid, signal.SIGKILL)
    with pytest.raises(CaptureError, match=r"tokenizer [01] died with exit code -9.*num_tokenizer"):
        list(reader)
    assert not multiprocessing.active_children()


def test_a_bad_row_stops_the_build_from_any_process(corpus: Callable[..., CorpusReader]) -> None:
    messages = []
    for num_processes in (1, 2):
        with pytest.raises(DataError, match=r"data\.jsonl:51: no_assistant_turn") as caught:
            list(corpus(num_processes, on_bad_row="stop"))
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


def test_a_line_that_is_no_json_is_named_also_behind_the_first_rows(
    corpus: Callable[..., CorpusReader], tmp_path: Path
) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text(file.read_text() + json.dumps({"a": 1})[:-1] + "\n")
    with pytest.raises(DataError, match=r"data\.jsonl:296: expected one JSON object per line"):
        list(corpus(2))
    assert not multiprocessing.active_children()
