"""Logging to stderr: one format for both stages, a prefix for workers."""

import logging
import sys

from tqdm import tqdm


class _Handler(logging.StreamHandler):  # type: ignore[type-arg]  # generic only in the stubs
    """Write above a progress bar instead of through it."""

    def emit(self, record: logging.LogRecord) -> None:
        with tqdm.external_write_mode(file=sys.stderr):
            super().emit(record)


def configure(level: int = logging.INFO, *, prefix: str = "") -> None:
    """Send this project's log lines to stderr. Called by the command line only."""
    handler = _Handler(sys.stderr)
    handler.setFormatter(
        logging.Formatter(f"%(asctime)s %(levelname).1s {prefix}%(message)s", "%H:%M:%S")
    )
    for name in ("cache_builder", "shared", "trainer"):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.setLevel(level)
        logger.propagate = False
