"""Workers as actors of Ray, which only carries requests and messages: what a worker does, its
locks and its commits are those of any other. An actor that died is not started again.
"""

import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Thread
from typing import Any

from cache_builder.crew import Message, Request, WorkerDiedError
from cache_builder.devices import Devices, describe_devices
from cache_builder.outpost import outpost
from cache_builder.worker import Job, Worker
from shared import log
from shared.errors import DraftCacheError
from shared.memory import keep_freed_memory
from shared.quantity import count

logger = logging.getLogger(__name__)

_ON_THE_WAY = ("started", "progress", "log")
"""Messages after which another one follows."""

_STOP_SECONDS = 30.0
"""For idle actors to put their workspace in order. Then they are killed."""

_PATIENCE_SECONDS = 60.0
"""Between two lines about workers that no node has room for."""

_MAX_REASON = 400


@dataclass(eq=False, slots=True)
class RayMember:
    number: int
    actor: Any
    stream: Any = field(default=None, init=False)
    """Messages to come; None while there is no request."""

    has_spoken: bool = field(default=False, init=False)

    def send(self, request: Request) -> None:
        self.stream = self.actor.answer.options(num_returns="streaming").remote(request)

    def receive(self) -> Message:
        import ray

        try:
            message: Message = ray.get(next(self.stream))
        except ray.exceptions.RayTaskError as error:
            raise WorkerDiedError(f"failed: {shorten(error.cause)}") from None
        except (ray.exceptions.RayError, StopIteration) as error:
            raise WorkerDiedError(f"died: {shorten(error)}") from None
        self.has_spoken = True
        if message[0] not in _ON_THE_WAY:
            self.stream = None
        return message


class RayCrew:
    """Actors that were asked for; they begin as nodes have room for them."""

    def __init__(self, job: Job, sign: str, need: Mapping[str, float], number: int) -> None:
        import ray

        actor = ray.remote(_Actor).options(
            num_gpus=need.get("GPU", 0),
            num_cpus=need.get("CPU", 0),
            memory=need.get("memory"),
            max_restarts=0,
            max_task_retries=0,
        )
        num_gpus = int(need.get("GPU", 0))
        devices: Devices = tuple(f"cuda:{i}" for i in range(num_gpus)) or ("cpu",)
        self.members = [RayMember(i, actor.remote(job, sign, devices)) for i in range(number)]
        self._spoke = time.monotonic()

    def __enter__(self) -> "RayCrew":
        for member in self.members:
            member.send(("start",))
        return self

    def __exit__(self, *error: object) -> None:
        for member in self.members:
            self.bury(member)

    def wait(self, members: Sequence[RayMember], timeout: float) -> list[RayMember]:
        import ray

        self._complain(members)
        streams = {member.stream: member for member in members if member.stream is not None}
        if not streams:
            time.sleep(timeout)
            return []
        ready, _ = ray.wait(list(streams), num_returns=1, timeout=timeout)
        return [streams[stream] for stream in ready]

    def bury(self, member: RayMember) -> None:
        """It may only have been cut off: it must not go on when the network is back."""
        import ray

        member.stream = None
        ray.kill(member.actor)

    def stop(self, members: Sequence[RayMember]) -> list[RayMember]:
        import ray

        asked = {m.actor.stop.remote(): m for m in members if m.has_spoken and m.stream is None}
        if not asked:
            return []
        ended, late = ray.wait(list(asked), num_returns=len(asked), timeout=_STOP_SECONDS)
        dead = [asked[one] for one in late]
        for one in ended:
            try:
                ray.get(one)
            except ray.exceptions.RayError:
                dead.append(asked[one])
        return dead

    def _complain(self, members: Sequence[RayMember]) -> None:
        waiting = [member for member in members if not member.has_spoken]
        if not waiting or time.monotonic() - self._spoke < _PATIENCE_SECONDS:
            return
        import ray

        self._spoke = time.monotonic()
        logger.warning(
            "%s still wait for room on a node, or for Python to start there; free are %s",
            count(len(waiting), "worker"),
            {name: ray.available_resources().get(name, 0) for name in ("CPU", "GPU", "memory")},
        )


class _Actor:
    """A worker in a process of Ray's, on whatever node has room for it."""

    def __init__(self, job: Job, sign: str, devices: Devices) -> None:
        self._job, self._sign, self._devices = job, sign, devices
        self._stack = ExitStack()
        self._worker: Worker | None = None
        self._messages: SimpleQueue[Message] = SimpleQueue()
        self._node = os.uname().nodename
        log.forward(lambda level, text: self._messages.put(("log", level, text)))
        keep_freed_memory()

    def answer(self, request: Request) -> Iterator[Message]:
        """The messages that a request leads to; `("start",)` comes before those of `crew`.

        Raises:
            BaseException: what is no error of ours, as it would end a process.
        """
        failures: list[BaseException] = []
        thread = Thread(target=self._work, args=(request, failures), daemon=True)
        thread.start()
        while (message := self._messages.get())[0] != "end":
            yield message
        thread.join()
        if failures:
            raise failures[0]

    def stop(self) -> None:
        self._stack.close()

    def _work(self, request: Request, failures: list[BaseException]) -> None:
        try:
            self._messages.put(self._do(request))
        except DraftCacheError as error:
            self._messages.put(("failed", type(error)(f"node {self._node}: {error}")))
        except BaseException as error:  # handed to Ray's thread, which raises it
            logger.exception("not an error of ours")
            failures.append(error)
        self._messages.put(("end",))

    def _do(self, request: Request) -> Message:
        if self._worker is not None:
            return self._worker.answer(
                request, lambda tokens: self._messages.put(("progress", tokens))
            )
        gpus = self._gpus()
        self._messages.put(("started", f"{self._node} {gpus or describe_devices(self._devices)}"))
        job = self._stack.enter_context(outpost(self._job, self._sign))
        self._worker = Worker(job, self._devices)
        return ("ready",)

    def _gpus(self) -> str:
        """The node's names of this worker's GPUs, which it sees as cuda:0 and so on."""
        import ray

        ids = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
        return describe_devices(tuple(f"cuda:{i}" for i in ids))


def shorten(error: BaseException) -> str:
    """One line of bounded length: Ray's messages have many."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= _MAX_REASON else f"{text[:_MAX_REASON]}..."
