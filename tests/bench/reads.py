"""How fast the layouts read, warm and cold, at random and in order."""

import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from shared.files import sync_file
from tests.bench.layouts import Layout, Ours, all_layouts
from tests.bench.states import States


@dataclass(frozen=True, slots=True)
class ReadRow:
    """GB/s of bfloat16 bytes: warm in CPU time of one core, cold in time of one thread."""

    layout: str
    ratio: float
    """Files over bfloat16 bytes; 0 where there are none."""

    warm_random: float
    warm_sequential: float
    cold_random: float
    cold_sequential: float
    touched: float | None
    """Bytes that reading a quarter of the samples fetched from the disk, over what is stored of
    them; the system reads ahead on its own account. Unknown where the system does not count."""

    asked: float | None
    """Bytes that the reader asked for over bytes of the files. Known for ours only."""


def measure_reads(
    states: States, directory: Path, *, rounds: int, cold_rounds: int
) -> list[ReadRow]:
    """Write all layouts under `directory`, then read them in turns, so that drift hits all."""
    layouts = all_layouts(directory)
    for layout in tqdm(layouts, desc="write layouts", disable=None):
        layout.write(states)
        for file in layout.files:
            sync_file(file)
    num = len(states.samples)
    order = np.random.default_rng(3).permutation(num).tolist()
    passes = {"random": order, "sequential": list(range(num))}
    taken: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    sizes = [hidden_TLD.nbytes for _, hidden_TLD in states.samples]
    fetched: dict[str, float | None] = {}
    asked: dict[str, int] = {}
    for layout in layouts:
        layout.open()
    for number in tqdm(range(rounds + 1), desc="warm reads", disable=None):
        for layout in layouts[number % len(layouts) :] + layouts[: number % len(layouts)]:
            _pass(layout, order[: num // 4 + 1], time.thread_time)  # its files and code are warm
            if number:
                for kind, numbers in passes.items():
                    seconds = _pass(layout, numbers[:: layout.stride], time.thread_time)
                    taken[layout.name, f"warm_{kind}"].append(seconds)
    for layout in layouts:
        if isinstance(layout, Ours):
            asked[layout.name] = layout.bytes_asked(range(num))
        layout.close()
    for _ in tqdm(range(cold_rounds), desc="cold reads", disable=None):
        for layout in layouts:
            for kind, numbers in passes.items():
                _drop(layout.files)
                began = _running_time()
                layout.open()
                with closing(layout):
                    _pass(layout, numbers[:: layout.stride], _running_time)
                    taken[layout.name, f"cold_{kind}"].append(_running_time() - began)
    for layout in layouts:
        fetched[layout.name] = _fetched(layout, order[: max(1, num // 4)], sizes)

    def row(layout: Layout) -> ReadRow:
        size = layout.stored_bytes
        rates = {}
        for kind in ("warm_random", "warm_sequential", "cold_random", "cold_sequential"):
            numbers = passes[kind.partition("_")[2]][:: layout.stride]
            seconds = max(statistics.median(taken[layout.name, kind]), 1e-9)
            rates[kind] = sum(sizes[i] for i in numbers) / 1e9 / seconds
        return ReadRow(
            layout.name,
            size / states.raw_bytes,
            **rates,
            touched=fetched[layout.name],
            asked=asked[layout.name] / size if layout.name in asked else None,
        )

    return [row(layout) for layout in layouts]


def breakeven(ours: ReadRow, raw: ReadRow) -> tuple[float, float]:
    """GB/s of disk below which fewer bytes win against `raw`: one after the other, overlapped.

    One thread that reads and then decodes takes `ratio / disk + 1 / decode` for a byte of
    states, and raw takes `1 / disk + 1 / copy`. Where reading goes on while others decode, the
    slower of the two counts, and a disk slower than the decoding decides.
    """
    decode = 1 / ours.warm_random - 1 / raw.warm_random
    serial = (1 - ours.ratio) / decode if decode > 0 else float("inf")
    return serial, ours.warm_random


def _pass(layout: Layout, numbers: Sequence[int], clock: Callable[[], float]) -> float:
    began = clock()
    for number in numbers:
        layout.read(number)
    return clock() - began


def _fetched(layout: Layout, numbers: Sequence[int], sizes: Sequence[int]) -> float | None:
    share = sum(sizes[i] for i in numbers) / sum(sizes)
    _drop(layout.files)
    before = _bytes_fetched()
    layout.open()
    with closing(layout):
        _pass(layout, numbers, time.perf_counter)
        after = _bytes_fetched()
    if before is None or after is None or not layout.stored_bytes:
        return None
    return (after - before) / (share * layout.stored_bytes)


def _running_time() -> float:
    """Seconds of wall time less those in which this thread waited for a core."""
    try:
        waited = int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):
        waited = 0.0
    return time.perf_counter() - waited


def _drop(files: Sequence[Path]) -> None:
    """Ask the system to forget the contents of `files`."""
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _bytes_fetched() -> int | None:
    """Bytes that this process made the system fetch from a disk; None where it does not count."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return None
    return int(next(line.split()[1] for line in lines if line.startswith("read_bytes")))
