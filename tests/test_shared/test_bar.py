"""Long work says how far it is, with a terminal and without."""

import logging
import sys

import pytest

from shared import log
from shared.bar import LINE_SECONDS, Bar, tracked


def test_without_a_terminal_there_is_a_line_now_and_then(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "shows_bars", lambda: False)
    now = 100.0
    with caplog.at_level(logging.INFO, "shared.bar"):
        with Bar("decode", "text", 12, clock=lambda: now) as bar:
            bar.add()
            now += LINE_SECONDS - 1
            bar.add()
            assert not caplog.messages
            now += 1
            bar.add()
            now += 1
            bar.add()  # too soon
            now += LINE_SECONDS + 29
            bar.reach(9)
            now += LINE_SECONDS
            bar.reach(10, 11, "2 failed")
        with Bar("tokenize", "sample", clock=lambda: now) as bar:
            now += LINE_SECONDS
            bar.add(30_000)
    assert caplog.messages == [
        "decode: 3 of 12 texts, 0.1/s, about 90 s left",
        "decode: 9 of 12 texts, 0.1/s, about 30 s left",
        "decode: 10 of 11 texts, 0.083/s, about 12 s left; 2 failed",
        "tokenize: 30,000 samples, 1,000/s",
    ]


def test_on_a_terminal_there_is_a_bar(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert list(tracked(iter("abc"), "merge", "shard", 3)) == list("abc")
    assert "merge:   0%|" in capsys.readouterr().err
