"""Workers as the pool sees them, whatever they are: processes of this machine, actors of Ray.

Requests: `("prepare",)`, `("capture", Task, calibration)`, `("stop",)`.
Messages: `("started", place)` once and before the target is loaded, `("ready",)` after it,
`("prepared", Prepared)`, `("progress", tokens)`, `("committed", ShardRecord, Timing)`,
`("log", level, text)`, and `("failed", error)`, with which a worker refuses to go on.
"""

from collections.abc import Sequence
from typing import Any, Protocol

Request = tuple[Any, ...]
Message = tuple[Any, ...]


class WorkerDiedError(Exception):
    """A worker is gone; says how, to follow its name: `died with exit code -9`."""


class Member(Protocol):
    """One worker."""

    @property
    def number(self) -> int: ...

    def send(self, request: Request) -> None:
        """Raises WorkerDiedError."""

    def receive(self) -> Message:
        """The next message of a member that `Crew.wait` returned. Raises WorkerDiedError."""


class Crew(Protocol):
    """The workers of one capture, started. A context manager, which ends those that are left."""

    @property
    def members(self) -> Sequence[Member]: ...

    def wait(self, members: Sequence[Any], timeout: float) -> Sequence[Member]:
        """Those of `members` that have something to say, after `timeout` seconds at most."""

    def bury(self, member: Any) -> None:
        """Make sure that a member that was called dead is."""

    def stop(self, members: Sequence[Any]) -> list[Any]:
        """Let `members`, all of them idle, end in peace; returns those that had died."""


def worker_name(number: int, place: str) -> str:
    """What a worker is called: `worker 0 (cuda:0)`."""
    return f"worker {number} ({place})"
