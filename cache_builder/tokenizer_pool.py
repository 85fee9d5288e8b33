"""Rows tokenized by several processes, in the order in which they were read."""

import logging
import multiprocessing
import os
import queue
import signal
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import islice
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

from cache_builder.template import ChatTemplate
from cache_builder.tokenized_row import RowOutcome, RowRules, tokenize_row
from shared.cgroup import num_cores
from shared.errors import CaptureError

logger = logging.getLogger(__name__)

FEW_ROWS = 10_000
"""Tokenized by the calling process alone: others take seconds to start."""

MAX_PROCESSES = 8
"""By default. Reading, counting and writing stay with the caller, who keeps no more busy."""

_CHUNK_ROWS = 64
_CHUNKS_AHEAD = 2
"""Of each process: one in work, one waiting."""

_Place = TypeVar("_Place")


def tokenize_rows(
    rows: Iterator[tuple[_Place, Any]],
    template: ChatTemplate,
    rules: RowRules,
    *,
    num_processes: int = 0,
) -> Iterator[tuple[_Place, RowOutcome]]:
    """What becomes of each row, with its place, in order. The same for any number of processes.

    Args:
        num_processes: besides the calling one, once there are more than a few rows; 0 takes one
            per core, `MAX_PROCESSES` at most, 1 none.

    Raises:
        CaptureError: a process died.
    """
    num_processes = num_processes or min(num_cores(), MAX_PROCESSES)
    few = None if num_processes == 1 else FEW_ROWS
    for place, row in islice(rows, few):
        yield place, tokenize_row(row, template, rules)
    chunks = iter(lambda: list(islice(rows, _CHUNK_ROWS)), [])
    if (first := next(chunks, None)) is None:
        return
    logger.info("more than %s rows: %d processes tokenize", f"{FEW_ROWS:,}", num_processes)
    with ExitStack() as stack:
        members = deque(_Member(i, stack) for i in range(num_processes))
        for member in members:  # all of them are starting by now
            member.give((template, rules))
        waiting: deque[tuple[_Member, list[_Place]]] = deque()

        def give(chunk: list[tuple[_Place, Any]]) -> None:
            members[0].give([row for _, row in chunk])
            waiting.append((members[0], [place for place, _ in chunk]))
            members.rotate(-1)

        give(first)
        for chunk in islice(chunks, num_processes * _CHUNKS_AHEAD - 1):
            give(chunk)
        while waiting:
            member, places = waiting.popleft()
            outcomes = member.take()
            if (following := next(chunks, None)) is not None:
                give(following)
            yield from zip(places, outcomes, strict=True)


class _Member:
    """One process. It ends with the stack, and when the calling process is no more."""

    def __init__(self, number: int, stack: ExitStack) -> None:
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        self._process: BaseProcess = context.Process(
            target=_serve, args=(theirs,), name=f"tokenizer {number}", daemon=True
        )
        self._process.start()
        stack.callback(self._end)
        theirs.close()

    def give(self, work: Any) -> None:
        try:
            self._ours.send(work)
        except OSError as error:
            raise self._died() from error

    def take(self) -> list[RowOutcome]:
        try:
            outcomes: list[RowOutcome] = self._ours.recv()
        except (EOFError, OSError) as error:
            raise self._died() from error
        return outcomes

    def _died(self) -> CaptureError:
        self._process.join()
        return CaptureError(
            f"{self._process.name} died with exit code {self._process.exitcode}, mostly for lack "
            "of memory. Nothing is lost: run the same command again, with a lower "
            "workers.num_tokenizers."
        )

    def _end(self) -> None:
        self._process.terminate()
        self._process.join()
        self._ours.close()


def _serve(connection: Connection) -> None:
    """Tokenize chunks until the connection ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller decides
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    given: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def listen() -> None:
        # Always ready to take what is sent: two that both send and do not listen would wait for
        # ever.
        try:
            while True:
                given.put(connection.recv())
        except (EOFError, OSError):
            given.put(None)

    threading.Thread(target=listen, daemon=True).start()
    if (first := given.get()) is None:
        return
    template, rules = first
    while (chunk := given.get()) is not None:
        connection.send([tokenize_row(row, template, rules) for row in chunk])
