"""Logging to stderr: one format for both stages, lines for people or JSON for programs."""

import json
import logging
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from tqdm import tqdm

OURS = ("cache_builder", "shared", "trainer")
LIBRARIES = ("transformers", "accelerate", "ray", "py.warnings")
"""Loggers that would write lines of their own between those of JSON."""

_logger = logging.getLogger(__name__)


class _Handler(logging.StreamHandler):  # type: ignore[type-arg]  # generic only in the stubs
    """Write above a progress bar instead of through it; events without words are for programs."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.msg or isinstance(self.formatter, _JsonFormatter):
            with tqdm.external_write_mode(file=sys.stderr):
                super().emit(record)


class _JsonFormatter(logging.Formatter):
    def __init__(self, worker: str) -> None:
        super().__init__()
        self._worker = worker

    def format(self, record: logging.LogRecord) -> str:
        when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{when}.{int(record.msecs):03}Z",
            "level": record.levelname,
            "logger": record.name,
            "event": "log",
        }
        if self._worker:
            line["worker"] = self._worker
        if message := record.getMessage():
            line["message"] = message
        line |= getattr(record, "event", {})
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def configure(level: int = logging.INFO, *, worker: str = "", as_json: bool = False) -> None:
    """Send this project's log lines to stderr. Called by the command line and by workers only.

    Args:
        worker: name of the worker that this process is, which its lines then carry.
        as_json: one JSON object a line, with `time` (UTC), `level`, `logger`, `event` and mostly
            `message`; lines of libraries, warnings and tracebacks too, and no progress bars.
    """
    # tqdm's own lock is shared with forks, and one that is killed never lets go of it.
    tqdm.set_lock(threading.RLock())
    handler = _Handler(sys.stderr)
    if as_json:
        handler.setFormatter(_JsonFormatter(worker))
        logging.captureWarnings(True)
        sys.excepthook = _log_bug
    else:
        prefix = f"{worker}: " if worker else ""
        handler.setFormatter(
            logging.Formatter(f"%(asctime)s %(levelname).1s {prefix}%(message)s", "%H:%M:%S")
        )
    for name in OURS:
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.setLevel(level)
        logger.propagate = False
    for name in LIBRARIES if as_json else ():
        adopt(name)


class _Forwarder(logging.Handler):
    def __init__(self, tell: Callable[[int, str], None]) -> None:
        super().__init__()
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        self._tell(record.levelno, self.format(record))


def forward(tell: Callable[[int, str], None], level: int = logging.INFO) -> None:
    """Send this project's log lines elsewhere than to stderr: `tell` gets their level and text."""
    for name in OURS:
        logger = logging.getLogger(name)
        logger.handlers[:] = [_Forwarder(tell)]
        logger.setLevel(level)
        logger.propagate = False


def adopt(name: str, level: int = logging.WARNING) -> None:
    """Have the lines of a library, from `level` on, written as ours are."""
    logger = logging.getLogger(name)
    logger.handlers[:] = logging.getLogger(__name__.partition(".")[0]).handlers
    logger.setLevel(level)
    logger.propagate = False


def is_json() -> bool:
    """Whether lines are JSON."""
    handlers = logging.getLogger(__name__.partition(".")[0]).handlers
    return any(isinstance(handler.formatter, _JsonFormatter) for handler in handlers)


def shows_bars() -> bool:
    """Whether a progress bar would be seen, and disturb nobody."""
    return sys.stderr.isatty() and not is_json()


def event(name: str, **fields: Any) -> dict[str, Any]:
    """What a log line says to programs: `logger.info("...", extra=event("committed", tokens=7))`.

    A line without words is for programs only.
    """
    return {"event": {"event": name, **fields}}


def _log_bug(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    _logger.critical(
        "%s: %s", kind.__name__, error, exc_info=(kind, error, traceback), extra=event("bug")
    )
