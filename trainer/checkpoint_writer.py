"""Checkpoints in the background: a save never holds up a step."""

import errno
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Self

from shared.errors import DraftCacheError, RunError
from shared.files import listed, remove_tree
from trainer.checkpoint import CHECKPOINTS, save
from trainer.config import CheckpointConfig
from trainer.snapshot import Snapshot

logger = logging.getLogger(__name__)

_FIRST_PAUSE_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 30.0
"""Before the last save is tried again: doubled each time."""


class CheckpointWriter:
    """Writes snapshots from a thread of its own, one at a time.

    A save that the disk refuses costs a warning and its own checkpoint; the next one is the next
    try, and `max_failures` in a row end the run. The last save has none after it and is tried
    again, with growing pauses, as often as that allows. Use as a context manager, or call `close`.

    Attributes:
        wait_seconds: time that `submit` has spent waiting for the save before, so far.
        num_failures: saves that have failed in a row.
    """

    def __init__(
        self,
        run_dir: Path,
        config: CheckpointConfig,
        is_in_place: Callable[[], bool] = lambda: True,
    ) -> None:
        """Removes what a killed process left half written, so make one per run directory.

        Args:
            is_in_place: whether `run_dir` is still that of the run: asked by each save, which
                otherwise would make the directory anew, or write into another's.
        """
        for partial in listed(run_dir / CHECKPOINTS):
            if partial.suffix != ".partial":
                continue
            logger.info("removing %s, left by a save that was cut short", partial)
            remove_tree(partial)
        self.wait_seconds = 0.0
        self.num_failures = 0
        self._run_dir = run_dir
        self._config = config
        self._is_in_place = is_in_place
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._save: Future[None] | None = None
        self._unsaved: Snapshot | None = None
        """The last one submitted, unless it is on disk."""

        self._error: Exception | None = None

    def submit(self, snapshot: Snapshot) -> None:
        """Save `snapshot` in the background. Waits only while the save before is unfinished.

        Raises:
            RunError: `max_failures` saves in a row have failed.
        """
        self._wait()
        self.check()
        self._unsaved = snapshot
        self._save = self._executor.submit(self._write, snapshot)

    def check(self) -> None:
        """Raise what the saves finished so far call for. Costs nothing; ask it every step.

        Raises:
            RunError: `max_failures` saves in a row have failed.
        """
        if self._save is not None and self._save.done():
            self._save.result()
        if self.has_given_up:
            raise RunError(
                f"{self._run_dir / CHECKPOINTS}: {self.num_failures} checkpoints in a row could "
                f"not be written ({self._error}). The ones before them are kept: make room or "
                "repair the disk, then run the same command again."
            ) from self._error

    def close(self) -> None:
        """Wait for the last save, and try it again where the disk refuses it.

        Raises:
            RunError: `max_failures` saves in a row have failed, so the end of the run is not on
                disk.
        """
        self._wait()
        pause = _FIRST_PAUSE_SECONDS
        while self._unsaved is not None and self._is_worth_another():
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
            self._save = self._executor.submit(self._write, self._unsaved)
            self._wait()
        self._executor.shutdown()
        self.check()

    @property
    def has_given_up(self) -> bool:
        """Whether so many saves in a row have failed that no other is tried."""
        return self.num_failures >= self._config.max_failures

    def _is_worth_another(self) -> bool:
        """Whether the disk refused the last save, and may take it yet."""
        is_bug = self._save is not None and self._save.exception() is not None
        return self._error is not None and not is_bug and not self.has_given_up

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:  # the error on its way out matters more; a failed save has been logged
            self._executor.shutdown()

    def _wait(self) -> None:
        if self._save is not None and not self._save.done():
            started = time.perf_counter()
            wait([self._save])
            self.wait_seconds += time.perf_counter() - started

    def _write(self, snapshot: Snapshot) -> None:
        started = time.perf_counter()
        try:
            if not self._is_in_place():
                said = "the run's directory was moved, deleted or replaced"
                raise FileNotFoundError(errno.ENOENT, said, str(self._run_dir))
            path = save(self._run_dir, snapshot, keep=self._config.keep)
        except (OSError, DraftCacheError) as error:
            if not isinstance(error, OSError) and not isinstance(error.__cause__, OSError):
                raise  # not the disk's fault: another run's checkpoint, say
            self._error = error
            self.num_failures += 1
            logger.warning(
                "checkpoint of step %d was not written (%s): failure %d in a row, %d end the "
                "run. The checkpoints before it are kept.",
                snapshot.step,
                error,
                self.num_failures,
                self._config.max_failures,
            )
        else:
            self._error, self._unsaved = None, None
            self.num_failures = 0
            logger.info("wrote %s in %.1f s", path, time.perf_counter() - started)
