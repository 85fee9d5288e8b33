"""Answers from a server, many conversations at once.

Threads only wait for the server. Templates and files stay with the caller's thread, which hands
turns out by one queue and takes answers in by another.
"""

import logging
import random
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from cache_builder.endpoint import Endpoint, PassingError
from cache_builder.exchange import Exchange, Turn
from cache_builder.generation import Answer, Sampling
from cache_builder.protocol import RefusedError
from shared.errors import EndpointError

logger = logging.getLogger(__name__)

_MAX_BACKOFF_SECONDS = 60.0
_HOPELESS = 16
"""Conversations that fail one after the other, at least, before the run is given up."""


@dataclass(frozen=True, eq=False, slots=True)
class _Task:
    exchange: Exchange
    turn: Turn
    sampling: Sampling


@dataclass(frozen=True, eq=False, slots=True)
class _Outcome:
    exchange: Exchange
    answer: Answer | None
    failure: str | Exception
    """Where there is no answer: why this conversation failed, or what ends the whole run."""

    retries: Counter[str]


class Dispatcher:
    """Conversations through a server. A context manager, for the sake of the connections."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._stopped = threading.Event()

    def __enter__(self) -> "Dispatcher":
        return self

    def __exit__(self, *error: object) -> None:
        self._stopped.set()
        self._endpoint.close()

    @property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""
        return self._endpoint.eos_ids

    def describe(self) -> str:
        """The model and what serves it, for the rows. A server that is starting is waited for.

        Raises:
            EndpointError: it cannot be reached, or does not serve the model.
        """
        retries: Counter[str] = Counter()
        while True:
            try:
                return self._endpoint.describe()
            except PassingError as error:
                place = f"{self._endpoint.config.url}: {error.kind} ({error})"
                if not self._wait(error, retries):
                    raise EndpointError(
                        f"{place}, asked {1 + retries.total()} times. Start the server, or check "
                        "--endpoint."
                    ) from None
                logger.warning("%s; asked again", place)

    def answer(self, exchanges: Iterator[Exchange], sampling: Sampling) -> Iterator[list[Exchange]]:
        """The conversations as they end, answered or failed. Twice as many are taken of
        `exchanges` as the server works on, so that it never waits.

        Raises:
            EndpointError: the server answers none any more.
        """
        config = self._endpoint.config
        tasks: SimpleQueue[_Task | None] = SimpleQueue()
        outcomes: SimpleQueue[_Outcome] = SimpleQueue()
        threads = [
            # Daemons: after Ctrl-C nobody waits for answers that are under way.
            threading.Thread(target=self._work, args=(tasks, outcomes), daemon=True)
            for _ in range(config.concurrency)
        ]
        for thread in threads:
            thread.start()
        num_open = num_failed_in_succession = 0
        try:
            while True:
                while num_open < 2 * config.concurrency:
                    if (exchange := next(exchanges, None)) is None:
                        break
                    tasks.put(_task(exchange, sampling))
                    num_open += 1
                if not num_open:
                    return
                ended: list[Exchange] = []
                fatal: Exception | None = None
                for outcome in _take(outcomes):
                    exchange = outcome.exchange
                    exchange.retries += outcome.retries
                    if outcome.answer is not None:
                        num_failed_in_succession = 0
                        exchange.add(outcome.answer)
                    elif isinstance(outcome.failure, str):
                        num_failed_in_succession += 1
                        exchange.fail(outcome.failure)
                    else:
                        fatal = outcome.failure
                        exchange.fail(str(fatal))
                    if exchange.is_open:
                        tasks.put(_task(exchange, sampling))
                    else:
                        ended.append(exchange)
                num_open -= len(ended)
                yield ended
                if fatal is not None:
                    raise fatal
                if num_failed_in_succession >= max(_HOPELESS, 2 * config.concurrency):
                    raise EndpointError(
                        f"{config.url}: {num_failed_in_succession} requests failed in succession, "
                        f"the last one with {ended[-1].failure}. What was answered is kept: run "
                        "the same command again when the server answers."
                    )
        finally:
            self._stopped.set()
            for _ in threads:
                tasks.put(None)

    def _work(self, tasks: "SimpleQueue[_Task | None]", outcomes: "SimpleQueue[_Outcome]") -> None:
        while (task := tasks.get()) is not None and not self._stopped.is_set():
            outcomes.put(self._ask(task))

    def _ask(self, task: _Task) -> _Outcome:
        retries: Counter[str] = Counter()
        while True:
            try:
                answer = self._endpoint.ask(task.turn, task.sampling)
                return _Outcome(task.exchange, answer, "", retries)
            except PassingError as error:
                if not self._wait(error, retries):
                    failure = f"{error.kind} ({error}), asked {1 + retries.total()} times"
                    return _Outcome(task.exchange, None, failure, retries)
            except RefusedError as error:
                return _Outcome(task.exchange, None, str(error), retries)
            except Exception as error:  # the caller's thread raises it
                return _Outcome(task.exchange, None, error, retries)

    def _wait(self, error: PassingError, retries: Counter[str]) -> bool:
        """Sleep before the next try, and count it. False: there is none."""
        config = self._endpoint.config
        if retries.total() >= config.num_retries:
            return False
        delay = min(_MAX_BACKOFF_SECONDS, config.backoff_seconds * 2 ** retries.total())
        delay = max(delay * random.uniform(0.5, 1.0), min(error.retry_after, _MAX_BACKOFF_SECONDS))
        retries[error.kind] += 1
        return not self._stopped.wait(delay)


def _task(exchange: Exchange, sampling: Sampling) -> _Task:
    return _Task(exchange, exchange.turn, sampling)


def _take(outcomes: "SimpleQueue[_Outcome]") -> Iterator[_Outcome]:
    """At least one outcome, and all that are there."""
    yield outcomes.get()
    while True:
        try:
            yield outcomes.get_nowait()
        except Empty:
            return
