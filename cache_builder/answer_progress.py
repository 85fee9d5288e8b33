"""How the answers are getting on: a bar on a terminal, a line now and then elsewhere."""

import logging
import sys
import time
from collections.abc import Sequence
from typing import Protocol

from tqdm import tqdm

from cache_builder.prompts import PromptCounts
from cache_builder.rows import count_rows
from cache_builder.sources import DataFile

logger = logging.getLogger(__name__)

_LINE_SECONDS = 60.0
"""Between two lines where there is no terminal."""


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
        self._started = self._spoke = time.monotonic()
        self._bar: tqdm[None] | None = None

    def __enter__(self) -> "AnswerProgress":
        if sys.stderr.isatty():
            self._bar = tqdm(desc="answer", unit="row", total=self._total(PromptCounts()))
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def show(self, prompts: PromptCounts, done: _Done) -> None:
        num_done = done.num_answered + done.num_failed
        num_open = prompts.num_rows - prompts.num_passed_over - num_done
        now = time.monotonic()
        rate = done.num_new_tokens / max(now - self._started, 1e-9)
        total = self._total(prompts)
        if self._bar is not None:
            self._bar.total = total
            self._bar.set_postfix_str(f"{rate:,.0f} tokens/s, {num_open:,} open", refresh=False)
            self._bar.update(num_done - self._bar.n)
        elif now - self._spoke >= _LINE_SECONDS:
            self._spoke = now
            left = (total - num_done) * (now - self._started) / max(num_done, 1)
            logger.info(
                "%s of %s rows answered, %s failed, %s open; %s tokens/s, %.1f hours left",
                f"{done.num_answered:,}",
                f"{total:,}",
                f"{done.num_failed:,}",
                f"{num_open:,}",
                f"{rate:,.0f}",
                left / 3600,
            )

    def _total(self, prompts: PromptCounts) -> int:
        total = self._num_rows - prompts.num_passed_over
        return total if self._limit is None else min(total, self._limit - prompts.num_present)
