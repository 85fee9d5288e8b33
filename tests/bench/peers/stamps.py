"""What a timed training writes down after each of its steps. Nothing but the standard library:
it runs in the virtual environments of the peers as well."""

import json
import os
import sys
import time
from itertools import pairwise
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
        self._peak_bytes = _peak_bytes()

    def write(self, path: str, **facts: Any) -> None:
        """The differences between neighbours, so one step fewer than were counted."""

        def differences(times: list[float]) -> list[float]:
            return [after - before for before, after in pairwise(times)]

        fields = {
            "wall_seconds": differences(self._wall),
            "cpu_seconds": differences(self._cpu),
            "losses": self._losses,
            "peak_bytes": self._peak_bytes,
            **facts,
        }
        Path(path).write_text(json.dumps(fields) + "\n")


def start_from(model: Any, path: str) -> int:
    """Give `model` the first weights that all trainers share; returns how many they are.

    Raises:
        ValueError: what it trains has not just the names and shapes of those weights.
    """
    import torch
    from safetensors.torch import load_file

    weights = load_file(path)
    trained = {name: item for name, item in model.named_parameters() if item.requires_grad}
    shapes = [{name: item.shape for name, item in own.items()} for own in (trained, weights)]
    if shapes[0] != shapes[1]:
        different = sorted(set(shapes[0].items()) ^ set(shapes[1].items()))
        raise ValueError(f"not the same drafter: {different[:4]}")
    with torch.no_grad():
        for name, item in trained.items():
            item.copy_(weights[name])
    return sum(item.numel() for item in trained.values())


def arguments() -> dict[str, Any]:
    """The one argument of each script: a JSON object."""
    settings: dict[str, Any] = json.loads(sys.argv[1])
    os.environ["WANDB_MODE"] = "disabled"
    os.environ["HF_HUB_OFFLINE"] = "1"
    return settings


def _peak_bytes() -> int:
    """Of this program's own resident memory: `getrusage` remembers that of who started it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
