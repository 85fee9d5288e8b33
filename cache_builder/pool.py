"""Workers pull shards from one queue: whoever is free takes the next, a dead one costs one."""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cache_builder.capture import Timing
from cache_builder.crew import Crew, Member, Message, Request, WorkerDiedError, worker_name
from cache_builder.devices import Devices, describe_devices
from cache_builder.worker import Job, Prepared, Task, Worker
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

    on_joined: Callable[[str], None] = _ignore
    """Worker name, before anything else is said of it."""

    on_started: Callable[[str, str], None] = _ignore
    """Worker name and the shard it begins."""

    on_progress: Callable[[str, int], None] = _ignore
    """Worker name and tokens; negative where a shard begins anew."""

    on_committed: Callable[[str, ShardRecord, Timing], None] = _ignore

    on_died: Callable[[str, str], None] = _ignore
    """Worker name and how. What it told of its shard does not count."""

    on_tick: Callable[[], None] = _ignore
    """About once a second, whatever the workers do."""


@dataclass(slots=True)
class Outcome:
    """What a run of the workers left undone."""

    missing: dict[str, str] = field(default_factory=dict)
    """Shard ids that were not captured, with the reason."""


def run_inline(
    job: Job, devices: Devices, tasks: Sequence[Task], prepared: Prepared | None, events: Events
) -> Outcome:
    """Capture all shards in this process: no spawn, breakpoints work."""
    name = worker_name(0, describe_devices(devices))
    events.on_joined(name)
    worker = Worker(job, devices)
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


def run_crew(
    crew: Crew, tasks: Sequence[Task], prepared: Prepared | None, events: Events
) -> Outcome:
    """Capture all shards with the members of `crew`.

    Raises:
        DraftCacheError: what the first worker that refused to go on raised.
    """
    return _Dispatcher(crew, tasks, prepared, events).run()


@dataclass(eq=False, slots=True)
class _Seat:
    """A member, and what the dispatcher knows of it."""

    member: Member
    name: str
    has_joined: bool = False
    is_ready: bool = False
    is_preparing: bool = False
    task: Task | None = None


class _Dispatcher:
    def __init__(
        self, crew: Crew, tasks: Sequence[Task], prepared: Prepared | None, events: Events
    ) -> None:
        self._crew = crew
        self._seats = {member: _Seat(member, f"worker {member.number}") for member in crew.members}
        self._todo = deque(tasks)
        self._attempts = {task.shard_id: 0 for task in tasks}
        self._prepared = prepared
        self._events = events
        self._missing: dict[str, str] = {}
        self._last_words = "no worker was started"

    def run(self) -> Outcome:
        ticked = time.monotonic()
        while self._seats and (self._todo or any(seat.task for seat in self._seats.values())):
            for member in self._crew.wait(list(self._seats), _TICK_SECONDS):
                seat = self._seats[member]
                try:
                    message = member.receive()
                except WorkerDiedError as error:
                    self._bury(seat, str(error))
                    continue
                self._hear(seat, message)
            self._hand_out()
            if time.monotonic() - ticked > _TICK_SECONDS:
                self._events.on_tick()
                ticked = time.monotonic()
        for task in self._todo:
            reason = f"no worker was left to capture it: {self._last_words}"
            self._missing.setdefault(task.shard_id, reason)
        for member in self._crew.stop(list(self._seats)):
            logger.warning("%s died after its last shard", self._seats[member].name)
        return Outcome(self._missing)

    def _hear(self, seat: _Seat, message: Message) -> None:
        match message:
            case ("started", place):
                seat.name, seat.has_joined = worker_name(seat.member.number, place), True
                self._events.on_joined(seat.name)
            case ("ready",):
                seat.is_ready = True
            case ("prepared", prepared):
                self._prepared = prepared
                self._events.on_prepared(prepared)
                seat.is_ready, seat.is_preparing = True, False
            case ("progress", tokens):
                self._events.on_progress(seat.name, tokens)
            case ("committed", record, timing):
                seat.task, seat.is_ready = None, True
                self._events.on_committed(seat.name, record, timing)
            case ("log", level, text):
                logger.log(level, "%s: %s", seat.name, text)
            case ("failed", error):
                raise error if isinstance(error, DraftCacheError) else CaptureError(str(error))

    def _hand_out(self) -> None:
        for seat in list(self._seats.values()):  # a dead one leaves it
            if not seat.is_ready or not self._todo:
                continue
            if self._prepared is None:
                if not any(other.is_preparing for other in self._seats.values()):
                    seat.is_ready, seat.is_preparing = False, True
                    self._send(seat, ("prepare",))
                continue
            task = seat.task = self._todo.popleft()
            seat.is_ready = False
            self._attempts[task.shard_id] += 1
            if self._send(seat, ("capture", task, self._prepared.calibration)):
                self._events.on_started(seat.name, task.shard_id)

    def _send(self, seat: _Seat, request: Request) -> bool:
        """Whether the member was there to take it; where not, it is buried."""
        try:
            seat.member.send(request)
        except WorkerDiedError as error:
            self._bury(seat, str(error))
            return False
        return True

    def _bury(self, seat: _Seat, how: str) -> None:
        """A worker died: its shard goes to the front of the queue, or is given up."""
        del self._seats[seat.member]
        self._crew.bury(seat.member)
        self._last_words = reason = f"{seat.name} {how}"
        left = len(self._seats)
        logger.error("%s; %s on", reason, "1 worker goes" if left == 1 else f"{left} workers go")
        if seat.has_joined:
            self._events.on_died(seat.name, how)
        if (task := seat.task) is None:
            return
        if self._attempts[task.shard_id] < _MAX_ATTEMPTS:
            self._todo.appendleft(task)
        else:
            self._missing[task.shard_id] = f"{reason}, as did {_MAX_ATTEMPTS - 1} before it"
