"""What a cache holds, sample by sample, and how to kill a command at one of its writes."""

import itertools
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from cache_builder.commit import committed_shards
from cache_builder.config import BuildConfig
from cache_builder.plan import Plan
from cache_builder.retirement import RETIRED
from cache_builder.verify import verify_cache
from shared.cache import Cache
from shared.layout import PLANS, WIP
from shared.shard import GROUP
from tests.conftest import write_jsonl

Contents = dict[str, tuple[Any, ...]]

_WRITES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir")


def contents(path: Path) -> Contents:
    """By sample id: tokens, mask, levels, outliers, source, split key, calibration, states."""
    cache = Cache(path)
    stored: Contents = {}
    for position in range(len(cache.index)):
        sample = cache.read(position)
        assert sample.sample_id not in stored
        stored[sample.sample_id] = (
            sample.token_ids.tobytes(),
            sample.loss_mask.tobytes(),
            sample.packed.planes_PTW.numpy().tobytes(),
            sample.packed.outlier_position.numpy().tobytes(),
            sample.packed.outlier_bits.numpy().tobytes(),
            cache.manifest.sources[cache.index.source[position]],
            int(cache.index.split_keys[position]),
            sample.calibration,
            cache.unpack(sample).view(torch.int16).numpy().tobytes(),
        )
    return stored


def rows_by_id(path: Path) -> dict[str, int]:
    """Line of the data file, from 1, of every planned sample of a cache built from one file."""
    rows = {}
    for directory in sorted((path / PLANS).iterdir()):
        plan = Plan(directory)
        for position in range(len(plan)):
            rows[plan.sample(position).sample_id] = plan.provenance(position)[1]
    return rows


def without(data: Path, unwanted: Iterable[int], target: Path) -> Path:
    """`data` but for the lines `unwanted`, from 1, as the file `target`."""
    import json

    lines, gone = data.read_text().splitlines(), set(unwanted)
    return write_jsonl(
        target, [json.loads(line) for number, line in enumerate(lines, 1) if number not in gone]
    )


def tree(path: Path) -> dict[str, bytes]:
    """Every file below `path`, but for locks."""
    return {
        file.relative_to(path).as_posix(): file.read_bytes()
        for file in path.rglob("*")
        if file.is_file() and file.suffix != ".lock"
    }


def assert_clean(path: Path) -> None:
    """Nothing is wrong, and nothing is left over."""
    assert verify_cache(path, deep=True) == []
    assert not list((path / WIP).iterdir())
    assert not list(path.rglob("*.partial"))
    assert not list((path / PLANS).glob("*.wip"))
    assert not (path / RETIRED).exists()
    assert set(Cache(path).shard_ids) == committed_shards(path)
    assert {p.name for p in (path / GROUP).iterdir()} == {"zarr.json", *committed_shards(path)}


class Killer:
    """Runs a command in a process of its own that kills itself at its n-th write."""

    def __init__(self, command: Callable[..., object], scratch: Path) -> None:
        self._command = command
        self._writes = scratch / "writes"
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(
            ["cache_builder.importing.importer", "transformers.models.qwen3.modeling_qwen3"]
        )

    def run(self, *arguments: object, kill_at: int = -1) -> int:
        """Its exit code: -9 if it was killed."""
        process = self._context.Process(
            target=_counted, args=(self._command, arguments, kill_at, self._writes)
        )
        process.start()
        process.join()
        assert process.exitcode is not None
        return process.exitcode

    def count(self, *arguments: object) -> int:
        """Run it to its end; returns how many writes it made."""
        return len(self.writes(*arguments))

    def writes(self, *arguments: object) -> list[str]:
        """Run it to its end; returns its writes, each as what it does and to which path."""
        assert self.run(*arguments) == 0
        return self._writes.read_text().splitlines()


def _counted(
    command: Callable[..., object], arguments: tuple[object, ...], kill_at: int, log: Path
) -> None:
    writes: dict[int, str] = {}
    numbers = itertools.count(1)  # another thread may write between two lines of the hook

    def hook(event: str, values: tuple[Any, ...]) -> None:
        is_write = event in _WRITES or (
            event == "open" and isinstance(values[2], int) and bool(values[2] & os.O_ACCMODE)
        )
        if is_write:
            number = next(numbers)
            writes[number] = f"{event} {values[0]}"
            if number == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    command(*arguments)
    total = dict(writes)
    log.write_text("\n".join(total[number] for number in sorted(total)))


def one_by_one(config: BuildConfig) -> BuildConfig:
    """One sample a forward: its states are the same bits whatever else is captured."""
    return replace(config, capture=replace(config.capture, batch_tokens=1))
