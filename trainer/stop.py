"""A stop asked for from outside: the step is finished and saved before the process goes."""

import os
import signal
import threading
from types import FrameType
from typing import Any, Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_STDERR = 2


class StopRequest:
    """While entered, a first SIGINT or SIGTERM is kept here, and a second quits at once.

    Python lets only the main thread handle signals: entered from another one, nothing changes.

    Attributes:
        signal: the first signal received, None before it.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._receive) for number in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, _: FrameType | None) -> None:
        self.signal = signal.Signals(number)
        for each in _SIGNALS:
            signal.signal(each, signal.SIG_DFL)
        # Not by logging: the signal may have come in the middle of a line of it.
        os.write(
            _STDERR,
            f"\n{self.signal.name}: finishing this step and saving it; "
            "once more quits at once\n".encode(),
        )
