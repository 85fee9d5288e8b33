"""One trial as a process of its own: `python -m trainer train` in its own run directory."""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shared.errors import RunError

_PR_SET_PDEATHSIG = 1
_LOG_TAIL_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that a process has moved, as Linux counts them."""

    read: int = 0
    """By read calls, from the disk or from memory; the start of Python included."""

    from_disk: int = 0
    """What was not in memory yet, mapped files included."""

    written: int = 0

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(
            self.read + other.read, self.from_disk + other.from_disk, self.written + other.written
        )


class TrialProcess:
    """A started trial.

    It has a session of its own, so that Ctrl-C reaches the sweep alone; where the sweep is
    killed, Linux sends it SIGTERM, so that it saves and ends too.
    """

    def __init__(self, arguments: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        """Run `trainer train` with `arguments`; what it says is appended to `log`.

        Raises:
            RunError: the system gives no process.
        """
        self._log = log
        self.traffic = Traffic()
        with log.open("ab") as file:
            self._begin = file.tell()
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "trainer", "train", *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=_dies_with_parent(),
                    env=environment,
                )
            except OSError as error:
                raise RunError(f"{log}: a trial cannot be started ({error.strerror}).") from error

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        return self._look(os.WNOHANG)

    def stop(self) -> None:
        """Have it finish its step, save and exit. To be called once: a second time it quits."""
        self._process.send_signal(signal.SIGTERM)

    def wait(self) -> None:
        """Wait for its end."""
        self._look(0)

    def _look(self, option: int) -> int | None:
        if self._process.returncode is None:
            # Not waited for at once, because then its counts would be gone.
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | option)
            self.traffic = _traffic(self.pid) or self.traffic
        return self._process.poll()

    def last_error(self) -> str:
        """The last line that it said: its error, if it failed."""
        with self._log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(self._begin, size - _LOG_TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
        said = [line.strip() for line in lines if line.strip()]
        errors = [line.removeprefix("Error: ") for line in said if line.startswith("Error: ")]
        return (errors or said or ["it said nothing"])[-1]


def _dies_with_parent() -> Callable[[], None] | None:
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None).prctl  # looked up here: little may be done between fork and exec

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)

    return ask


def _traffic(pid: int) -> Traffic | None:
    try:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    except OSError:
        return None  # no Linux, or it has ended
    counts = {name: int(count) for name, _, count in (line.partition(": ") for line in lines)}
    return Traffic(counts["rchar"], counts["read_bytes"], counts["wchar"])
