"""Workers as processes of this machine, each at the other end of a pipe."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from cache_builder.crew import Message, Request, WorkerDiedError, worker_name
from cache_builder.devices import Devices, describe_devices
from cache_builder.lock import worker_lock
from cache_builder.pool import Events, Outcome, run_crew
from cache_builder.worker import Job, Prepared, Task, Worker
from shared import log
from shared.errors import DraftCacheError
from shared.memory import keep_freed_memory

_PARENT_POLL_SECONDS = 0.5
_GONE = (EOFError, BrokenPipeError, ConnectionResetError)


def run_processes(
    job: Job,
    devices: Sequence[Devices],
    tasks: Sequence[Task],
    prepared: Prepared | None,
    events: Events,
) -> Outcome:
    """Capture all shards with one process per entry of `devices`.

    Raises:
        DraftCacheError: what the first worker that refused to go on raised.
    """
    with ProcessCrew() as crew:
        for own in devices:
            crew.start(job, own)
        return run_crew(crew, tasks, prepared, events)


@dataclass(frozen=True, eq=False, slots=True)
class ProcessMember:
    number: int
    process: BaseProcess
    connection: Connection

    def send(self, request: Request) -> None:
        try:
            self.connection.send(request)
        except _GONE:
            raise self._died() from None

    def receive(self) -> Message:
        try:
            message: Message = self.connection.recv()
        except (EOFError, OSError):  # also what it is called in the middle of a long message
            raise self._died() from None
        return message

    def _died(self) -> WorkerDiedError:
        self.process.join()
        code = self.process.exitcode
        hint = " (which usually means out of memory)" if code == -signal.SIGKILL else ""
        return WorkerDiedError(f"died with exit code {code}{hint}")


class ProcessCrew:
    """Processes started so far."""

    def __init__(self) -> None:
        self.members: list[ProcessMember] = []

    def __enter__(self) -> "ProcessCrew":
        return self

    def __exit__(self, *error: object) -> None:
        for member in self.members:
            member.connection.close()
        for member in self.members:
            if member.process.is_alive():
                member.process.terminate()
            member.process.join()

    def start(self, job: Job, devices: Devices) -> None:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        number = len(self.members)
        process = context.Process(
            target=_serve,
            args=(theirs, job, devices, number, log.is_json()),
            name=worker_name(number, describe_devices(devices)),
            daemon=True,
        )
        process.start()
        theirs.close()
        self.members.append(ProcessMember(number, process, ours))

    def wait(self, members: Sequence[ProcessMember], timeout: float) -> list[ProcessMember]:
        waiting: dict[Any, ProcessMember] = {member.connection: member for member in members}
        return [waiting[connection] for connection in wait(list(waiting), timeout)]

    def bury(self, member: ProcessMember) -> None:
        member.process.join()  # its pipe is closed: it ends, if it has not

    def stop(self, members: Sequence[ProcessMember]) -> list[ProcessMember]:
        dead = []
        for member in members:
            try:
                member.send(("stop",))
            except WorkerDiedError:
                dead.append(member)
            member.process.join()
        return dead


def _serve(
    connection: Connection, job: Job, devices: Devices, number: int, is_json_log: bool
) -> None:
    """Main function of a worker process: answer requests until told to stop."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what an interrupt means
    threading.Thread(target=_exit_with_parent, args=(os.getppid(),), daemon=True).start()
    place = describe_devices(devices)
    log.configure(worker=worker_name(number, place), as_json=is_json_log)
    keep_freed_memory()
    with worker_lock(job.cache):
        try:
            connection.send(("started", place))
            worker = Worker(job, devices)
            connection.send(("ready",))
            while (request := connection.recv())[0] != "stop":
                connection.send(
                    worker.answer(request, lambda tokens: connection.send(("progress", tokens)))
                )
        except DraftCacheError as error:
            connection.send(("failed", error))
        except _GONE:
            return  # the parent is gone


def _exit_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_PARENT_POLL_SECONDS)
    os._exit(1)
