"""Workers pull shards from one queue: whoever is free takes the next, a dead one costs one."""

import logging
import multiprocessing
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from cache_builder.capture import Timing
from cache_builder.worker import Job, Prepared, Task, Worker, serve
from shared.errors import CaptureError, DraftCacheError
from shared.manifest import ShardRecord

logger = logging.getLogger(__name__)

_MAX_ATTEMPTS = 2
"""A shard that took down this many workers is given up."""

_TICK_SECONDS = 1.0


def _ignore(*arguments: object) -> None:
    pass


@dataclass(slots=True)
class Events:
    """What the caller wants to hear."""

    on_prepared: Callable[[Prepared], None]
    """Called once, before the first shard; writes what readers need of the target."""

    on_started: Callable[[str, str], None] = _ignore
    """Worker name and the shard it begins."""

    on_progress: Callable[[str, int], None] = _ignore
    """Worker name and tokens; negative where a shard begins anew."""

    on_committed: Callable[[str, ShardRecord, Timing], None] = _ignore

    on_died: Callable[[str], None] = _ignore
    """Worker name. What it told of its shard does not count."""

    on_tick: Callable[[], None] = _ignore
    """About once a second, whatever the workers do."""


@dataclass(slots=True)
class _Member:
    name: str
    process: BaseProcess
    connection: Connection
    task: Task | None = None
    is_ready: bool = False
    is_preparing: bool = False


@dataclass(slots=True)
class Outcome:
    """What a run of the workers left undone."""

    missing: dict[str, str] = field(default_factory=dict)
    """Shard ids that were not captured, with the reason."""


def worker_names(devices: Sequence[str]) -> list[str]:
    """What the workers on `devices` are called."""
    return [f"worker {number} ({device})" for number, device in enumerate(devices)]


def run_inline(
    job: Job, device: str, tasks: Sequence[Task], prepared: Prepared | None, events: Events
) -> Outcome:
    """Capture all shards in this process: no spawn, breakpoints work."""
    (name,) = worker_names([device])
    worker = Worker(job, device)
    if prepared is None:
        prepared = worker.prepare()
        events.on_prepared(prepared)

    def progress(tokens: int) -> None:
        events.on_progress(name, tokens)
        events.on_tick()

    for task in tasks:
        events.on_started(name, task.shard_id)
        record, timing = worker.capture(task, prepared.calibration, progress)
        events.on_committed(name, record, timing)
    return Outcome()


def run_processes(
    job: Job,
    devices: Sequence[str],
    tasks: Sequence[Task],
    prepared: Prepared | None,
    events: Events,
) -> Outcome:
    """Capture all shards with one process per entry of `devices`.

    Raises:
        DraftCacheError: what the first worker that refused to go on raised.
    """
    context = multiprocessing.get_context("spawn")
    members: list[_Member] = []
    try:
        for name, device in zip(worker_names(devices), devices, strict=True):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=serve, args=(theirs, job, device, name), name=name, daemon=True
            )
            process.start()
            theirs.close()
            members.append(_Member(name, process, ours))
        return _Dispatcher(list(members), tasks, prepared, events).run()
    finally:
        for member in members:
            member.connection.close()
        for member in members:
            if member.process.is_alive():
                member.process.terminate()
            member.process.join()


class _Dispatcher:
    def __init__(
        self,
        members: list[_Member],
        tasks: Sequence[Task],
        prepared: Prepared | None,
        events: Events,
    ) -> None:
        self._members = members
        self._todo = deque(tasks)
        self._attempts = {task.shard_id: 0 for task in tasks}
        self._prepared = prepared
        self._events = events
        self._missing: dict[str, str] = {}
        self._last_words = "no worker was started"

    def run(self) -> Outcome:
        ticked = time.monotonic()
        while self._members and (self._todo or any(m.task for m in self._members)):
            waiting: dict[Any, _Member] = {m.connection: m for m in self._members}
            for connection in wait(list(waiting), timeout=_TICK_SECONDS):
                member = waiting[connection]
                try:
                    message = member.connection.recv()
                except (EOFError, ConnectionResetError):
                    self._bury(member)
                    continue
                self._hear(member, message)
            self._hand_out()
            if time.monotonic() - ticked > _TICK_SECONDS:
                self._events.on_tick()
                ticked = time.monotonic()
        for task in self._todo:
            reason = f"no worker was left to capture it: {self._last_words}"
            self._missing.setdefault(task.shard_id, reason)
        for member in self._members:
            try:
                member.connection.send(("stop",))
            except (BrokenPipeError, ConnectionResetError):
                logger.warning("%s died after its last shard", member.name)
            member.process.join()
        return Outcome(self._missing)

    def _hear(self, member: _Member, message: tuple[Any, ...]) -> None:
        match message:
            case ("ready",):
                member.is_ready = True
            case ("prepared", prepared):
                self._prepared = prepared
                self._events.on_prepared(prepared)
                member.is_ready, member.is_preparing = True, False
            case ("progress", tokens):
                self._events.on_progress(member.name, tokens)
            case ("committed", record, timing):
                member.task, member.is_ready = None, True
                self._events.on_committed(member.name, record, timing)
            case ("failed", error):
                raise error if isinstance(error, DraftCacheError) else CaptureError(str(error))

    def _hand_out(self) -> None:
        for member in list(self._members):  # a dead one leaves the list
            if not member.is_ready or not self._todo:
                continue
            if self._prepared is None:
                if not any(m.is_preparing for m in self._members):
                    member.is_ready, member.is_preparing = False, True
                    self._send(member, ("prepare",))
                continue
            task = member.task = self._todo.popleft()
            member.is_ready = False
            self._attempts[task.shard_id] += 1
            if self._send(member, ("capture", task, self._prepared.calibration)):
                self._events.on_started(member.name, task.shard_id)

    def _send(self, member: _Member, request: tuple[Any, ...]) -> bool:
        """Whether `member` was there to take it; where not, it is buried."""
        try:
            member.connection.send(request)
        except (BrokenPipeError, ConnectionResetError):
            self._bury(member)
            return False
        return True

    def _bury(self, member: _Member) -> None:
        """A worker died: its shard goes to the front of the queue, or is given up."""
        self._members.remove(member)
        member.process.join()
        self._last_words = reason = f"{member.name} died with exit code {member.process.exitcode}"
        logger.error(
            "%s; %d workers go on. Exit code -9 usually means out of memory.",
            reason,
            len(self._members),
        )
        self._events.on_died(member.name)
        if (task := member.task) is None:
            return
        if self._attempts[task.shard_id] < _MAX_ATTEMPTS:
            self._todo.appendleft(task)
        else:
            self._missing[task.shard_id] = f"{reason}, as did {_MAX_ATTEMPTS - 1} before it"
