"""What a timed training writes down after each of its steps. Nothing but the standard library:
it runs in the virtual environments of the peers as well."""

import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any


class Stamps:
    """Wall time and time of all cores at the end of every step."""

    def __init__(self) -> None:
        self._wall: list[float] = []
        self._cpu: list[float] = []
        self._losses: list[float] = []
        self._peak_bytes = 0

    def add(self, loss: float) -> None:
        """A step has ended."""
        self._wall.append(time.perf_counter())
        self._cpu.append(time.process_time())
        self._losses.append(loss)
        self._peak_bytes = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def write(self, path: str, **facts: Any) -> None:
        """The differences between neighbours, so one step fewer than were counted."""

        def differences(times: list[float]) -> list[float]:
            return [after - before for before, after in zip(times, times[1:], strict=False)]

        fields = {
            "wall_seconds": differences(self._wall),
            "cpu_seconds": differences(self._cpu),
            "losses": self._losses,
            "peak_bytes": self._peak_bytes,
            **facts,
        }
        Path(path).write_text(json.dumps(fields) + "\n")


def arguments() -> dict[str, Any]:
    """The one argument of each script: a JSON object."""
    settings: dict[str, Any] = json.loads(sys.argv[1])
    os.environ["WANDB_MODE"] = "disabled"
    os.environ["HF_HUB_OFFLINE"] = "1"
    return settings
