"""Workers pull shards from one queue: whoever is free takes the next, a dead one costs one."""

import logging
import multiprocessing
import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from cache_builder.capture import Timing
from cache_builder.worker import Job, Prepared, Worker, serve
from shared.errors import CaptureError, DraftCacheError
from shared.manifest import ShardRecord

logger = logging.getLogger(__name__)

_MAX_ATTEMPTS = 2
"""A shard that took down this many workers is given up."""


@dataclass(slots=True)
class Events:
    """What the caller wants to hear."""

    on_prepared: Callable[[Prepared], None]
    """Called once, before the first shard; writes what readers need of the target."""

    on_progress: Callable[[str, int], None]
    """Worker name and tokens."""

    on_committed: Callable[[str, ShardRecord, Timing], None]


@dataclass(slots=True)
class _Member:
    name: str
    process: BaseProcess
    connection: Connection
    shard_id: str | None = None
    is_ready: bool = False


@dataclass(slots=True)
class Outcome:
    """What a run of the workers left undone."""

    missing: dict[str, str] = field(default_factory=dict)
    """Shard ids that were not captured, with the reason."""


def run_inline(
    job: Job, device: str, shard_ids: list[str], prepared: Prepared | None, events: Events
) -> Outcome:
    """Capture all shards in this process: no spawn, breakpoints work."""
    worker = Worker(job, device)
    if prepared is None:
        prepared = worker.prepare()
        events.on_prepared(prepared)
    for shard_id in shard_ids:
        record, timing = worker.capture(
            shard_id, prepared.calibration, lambda tokens: events.on_progress(device, tokens)
        )
        events.on_committed(device, record, timing)
    return Outcome()


def run_processes(
    job: Job, devices: list[str], shard_ids: list[str], prepared: Prepared | None, events: Events
) -> Outcome:
    """Capture all shards with one process per entry of `devices`.

    Raises:
        DraftCacheError: what the first worker that refused to go on raised.
    """
    context = multiprocessing.get_context("spawn")
    threads = max(1, (os.cpu_count() or 1) // len(devices))
    members: list[_Member] = []
    try:
        for number, device in enumerate(devices):
            ours, theirs = context.Pipe()
            name = f"worker {number} ({device})"
            process = context.Process(
                target=serve, args=(theirs, job, device, threads, name), name=name, daemon=True
            )
            process.start()
            theirs.close()
            members.append(_Member(name, process, ours))
        return _Dispatcher(members, shard_ids, prepared, events).run()
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
        shard_ids: list[str],
        prepared: Prepared | None,
        events: Events,
    ) -> None:
        self._members = members
        self._todo = deque(shard_ids)
        self._attempts = dict.fromkeys(shard_ids, 0)
        self._prepared = prepared
        self._is_preparing = False
        self._events = events
        self._missing: dict[str, str] = {}

    def run(self) -> Outcome:
        while self._members and (self._todo or any(m.shard_id for m in self._members)):
            waiting: dict[Any, _Member] = {m.connection: m for m in self._members}
            for connection in wait(list(waiting)):
                member = waiting[connection]
                try:
                    message = member.connection.recv()
                except (EOFError, ConnectionResetError):
                    self._bury(member)
                    continue
                self._hear(member, message)
            self._hand_out()
        for shard_id in self._todo:
            self._missing.setdefault(shard_id, "no worker was left to capture it")
        for member in self._members:
            member.connection.send(("stop",))
            member.process.join()
        return Outcome(self._missing)

    def _hear(self, member: _Member, message: tuple[Any, ...]) -> None:
        match message:
            case ("ready",):
                member.is_ready = True
            case ("prepared", prepared):
                self._prepared, self._is_preparing = prepared, False
                self._events.on_prepared(prepared)
                member.is_ready = True
            case ("progress", tokens):
                self._events.on_progress(member.name, tokens)
            case ("committed", record, timing):
                member.shard_id, member.is_ready = None, True
                self._events.on_committed(member.name, record, timing)
            case ("failed", error):
                raise error if isinstance(error, DraftCacheError) else CaptureError(str(error))

    def _hand_out(self) -> None:
        for member in self._members:
            if not member.is_ready or not self._todo:
                continue
            if self._prepared is None:
                if not self._is_preparing:
                    member.is_ready, self._is_preparing = False, True
                    member.connection.send(("prepare",))
                continue
            member.shard_id, member.is_ready = self._todo.popleft(), False
            self._attempts[member.shard_id] += 1
            member.connection.send(("capture", member.shard_id, self._prepared.calibration))

    def _bury(self, member: _Member) -> None:
        """A worker died: its shard goes to the front of the queue, or is given up."""
        self._members.remove(member)
        member.process.join()
        reason = f"{member.name} died with exit code {member.process.exitcode}"
        logger.error(
            "%s; %d workers go on. Exit code -9 usually means out of memory.",
            reason,
            len(self._members),
        )
        if self._prepared is None:
            self._is_preparing = False
        if (shard_id := member.shard_id) is None:
            return
        if self._attempts[shard_id] < _MAX_ATTEMPTS:
            self._todo.appendleft(shard_id)
        else:
            self._missing[shard_id] = f"{reason}, as did {_MAX_ATTEMPTS - 1} before it"
