"""How far long work is: a bar on a terminal, a line now and then where there is none."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from tqdm import tqdm

from shared import log
from shared.quantity import duration

logger = logging.getLogger(__name__)

LINE_SECONDS = 30.0
"""Between two lines."""

T = TypeVar("T")


class Bar:
    """Counts what is done. A context manager: a bar is gone when the work is."""

    def __init__(
        self,
        what: str,
        unit: str,
        total: int | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin with nothing done.

        Args:
            what: name of the work, a verb.
            unit: what is counted, one of it.
            total: of what is counted, where it is known.
        """
        self._what, self._unit, self._total = what, unit, total
        self._clock = clock
        self._done = 0
        self._note = ""
        self._started = self._spoke = clock()
        self._bar: tqdm[None] | None = None
        if log.shows_bars():
            self._bar = tqdm(desc=what, unit=unit, total=total, unit_scale=True, leave=False)

    def __enter__(self) -> "Bar":
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def add(self, count: int = 1) -> None:
        """So many more are done."""
        self._done += count
        if self._bar is not None:
            self._bar.update(count)
        elif (now := self._clock()) - self._spoke >= LINE_SECONDS:
            self._spoke = now
            logger.info("%s", self._line(now - self._started))

    def reach(self, done: int, total: int | None = None, note: str = "") -> None:
        """So many are done in all.

        Args:
            total: of what is counted, where another is known now.
            note: what else there is to say.
        """
        if total is not None:
            self._total = total
        self._note = note
        if self._bar is not None:
            self._bar.total = self._total
            self._bar.set_postfix_str(note, refresh=False)
        self.add(done - self._done)

    def _line(self, seconds: float) -> str:
        rate = self._done / seconds
        text = f"{self._what}: {self._done:,}"
        if self._total is not None:
            text += f" of {self._total:,}"
        text += f" {self._unit}s, {_number(rate)}/s"
        if self._total is not None and self._done:
            text += f", about {duration((self._total - self._done) / rate)} left"
        return f"{text}; {self._note}" if self._note else text


def tracked(items: Iterable[T], what: str, unit: str, total: int | None = None) -> Iterator[T]:
    """`items`, counted under a `Bar` as they are asked for."""
    with Bar(what, unit, total) as bar:
        for item in items:
            yield item
            bar.add()


def _number(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.2g}"
