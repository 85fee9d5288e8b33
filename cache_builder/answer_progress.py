"""How the answers are getting on."""

import time
from collections.abc import Sequence
from typing import Protocol

from cache_builder.prompts import PromptCounts
from cache_builder.rows import count_rows
from cache_builder.sources import DataFile
from shared.bar import Bar


class _Done(Protocol):
    num_answered: int
    num_failed: int
    num_new_tokens: int


class AnswerProgress:
    """Conversations done of those that are to be done. A context manager, for the sake of the bar.

    The rows are counted beforehand, by their lines. What is passed over while they are read
    (answered before, twice the same, dropped) leaves the total again.
    """

    def __init__(self, files: Sequence[DataFile], limit: int | None) -> None:
        self._num_rows = sum(map(count_rows, files))
        self._limit = limit
        self._started = time.monotonic()
        self._bar = Bar("answer", "row", self._total(PromptCounts()))

    def __enter__(self) -> "AnswerProgress":
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.__exit__(*error)

    def show(self, prompts: PromptCounts, done: _Done) -> None:
        num_done = done.num_answered + done.num_failed
        num_open = prompts.num_rows - prompts.num_passed_over - num_done
        rate = done.num_new_tokens / max(time.monotonic() - self._started, 1e-9)
        note = f"{rate:,.0f} tokens/s, {num_open:,} open, {done.num_failed:,} failed"
        self._bar.reach(num_done, self._total(prompts), note)

    def _total(self, prompts: PromptCounts) -> int:
        total = self._num_rows - prompts.num_passed_over
        return total if self._limit is None else min(total, self._limit - prompts.num_present)
