"""Where the time of a run goes between its steps."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Pauses:
    """Seconds of evaluating and saving since the step before, and the time, for a step's line.

    What lies between two lines beyond these and the step's own seconds is time that nothing
    accounts for.
    """

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._seconds = {"evaluate": 0.0, "checkpoint": 0.0}

    @contextmanager
    def measure(self, kind: str) -> Iterator[None]:
        """Count what happens inside as `kind`, `evaluate` or `checkpoint`."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[kind] += time.perf_counter() - began

    def take(self) -> dict[str, float]:
        """Metrics of the step that has just ended; starts again from 0."""
        taken = {f"time/{kind}_seconds": seconds for kind, seconds in self._seconds.items()}
        self._seconds = dict.fromkeys(self._seconds, 0.0)
        return taken | {
            "time/unix_seconds": time.time(),
            "time/uptime_seconds": time.monotonic() - self._began,
        }
