"""Tokens per second of stage one: the forward alone, with the store on, and done otherwise.

One thread a worker, the real demo target, the same samples and padded tokens a batch throughout.
"""

import multiprocessing
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from safetensors.torch import save_file

from cache_builder.config import BuildConfig
from cache_builder.description import create_directories, describe_capture
from cache_builder.plan import PlannedSample
from cache_builder.planning import make_plan
from cache_builder.target_files import resolve_target, stamp_files
from cache_builder.tokens import load_template
from cache_builder.worker import Job, Prepared, Task, Worker
from shared.config import load
from shared.files import remove_tree
from shared.layout import RECORDS
from shared.memory import keep_freed_memory
from shared.shard import GROUP
from tests.bench.states import DEMO_CONFIG
from tests.conftest import REPOSITORY

BARE = "forward alone, sorted"
STORED = "with the store on"
RANDOM = "forward alone, random order"
PEERS = "all states and logits, arrival order, a file per sample"


@dataclass(frozen=True, slots=True)
class CaptureRow:
    way: str
    num_workers: int
    tokens_per_second: float
    """Of all workers, padding not counted: median over the rounds."""

    fill: float
    """Tokens over tokens with padding."""


def measure_capture(
    directory: Path, *, num_rows: int, rounds: int, workers: Sequence[int] = (1, 2)
) -> list[CaptureRow]:
    """Every worker captures all samples in every way, the workers at the same time."""
    job, task = _make_job(directory, num_rows)
    prepared = Worker(job, ("cpu",)).prepare()
    context = multiprocessing.get_context("spawn")
    rows = []
    for count in workers:
        barrier, results = context.Barrier(count), context.Queue()
        processes = [
            context.Process(target=_run, args=(job, task, prepared, rounds, i, barrier, results))
            for i in range(count)
        ]
        for process in processes:
            process.start()
        found = [results.get() for _ in processes]
        for process in processes:
            process.join()
        for way in found[0]:
            fill = found[0][way][0]
            rates = zip(*(own[way][1] for own in found), strict=True)
            rows.append(CaptureRow(way, count, statistics.median(map(sum, rates)), fill))
    return rows


def _make_job(directory: Path, num_rows: int) -> tuple[Job, Task]:
    """A cache with one planned shard of `num_rows` conversations of the demo, chosen at random."""
    demo = load(BuildConfig, DEMO_CONFIG)
    lines = (REPOSITORY / demo.data.tagged_sources[0].path).read_text().splitlines(keepends=True)
    chosen = np.random.default_rng(0).permutation(len(lines))[:num_rows]
    data = directory / "capture.jsonl"
    data.write_text("".join(lines[i] for i in chosen))
    cache = directory / "capture"
    overrides = (
        f'data.sources=["{data}"]',
        f'cache.path="{cache}"',
        "cache.min_free_gb=0",
        "plan.shard_mib=4096",
        f'target.path="{REPOSITORY / demo.target.path}"',
    )
    config = load(BuildConfig, DEMO_CONFIG, overrides)
    target_path = resolve_target(config.target)
    stamps = stamp_files(target_path)
    template = load_template(target_path, config.data)
    spec = describe_capture(config, target_path, template)
    cache.mkdir()
    create_directories(cache)
    plan = make_plan(config, spec, template, key="bench", known=set())
    (shard_id,) = plan.shard_ids
    job = Job(cache, plan.directory, spec, target_path, config.target, stamps, 0)
    return job, Task(shard_id, plan.forward)


def _run(
    job: Job,
    task: Task,
    prepared: Prepared,
    rounds: int,
    number: int,
    barrier: Any,
    results: Any,
) -> None:
    """One worker: all ways in turns, each begun by all workers together."""
    keep_freed_memory()
    torch.set_num_threads(1)
    scratch = job.cache.parent / f"worker-{number}"  # type: ignore[union-attr]
    if number:  # of its own: two workers would commit one shard
        shutil.copytree(job.cache, scratch / "cache")  # type: ignore[arg-type]
        job = Job(scratch / "cache", *_after_cache(job))
    worker = Worker(job, ("cpu",))
    positions = worker._plan.shard_positions(task.shard_id)
    samples = [worker._plan.sample(int(position)) for position in positions]
    arrival = [samples[i] for i in np.random.default_rng(1).permutation(len(samples))]
    peers = _Peers(job, worker, scratch / "files")
    ways: dict[str, tuple[float, Callable[[], None]]] = {
        BARE: (_fill(samples, task), lambda: _forward(worker, samples, task)),
        STORED: (
            _fill(samples, task),
            lambda: _store(worker, job.cache, task, prepared),
        ),
        RANDOM: (_fill(arrival, task), lambda: _forward(worker, arrival, task)),
        PEERS: (_fill(arrival, task), lambda: peers.capture(_batches(arrival, task))),
    }
    num_tokens = sum(len(sample.token_ids) for sample in samples)
    rates: dict[str, tuple[float, list[float]]] = {
        way: (fill, []) for way, (fill, _) in ways.items()
    }
    _forward(worker, samples[-8:], task)  # what is done once, is done
    for turn in range(rounds):
        for way, (_, run) in ways.items():
            barrier.wait()
            began = time.perf_counter()
            run()
            rates[way][1].append(num_tokens / (time.perf_counter() - began))
            if not number:
                where = f"{barrier.parties} at a time, round {turn + 1} of {rounds}, {way}"
                click.echo(f"capture, {where}: {rates[way][1][-1]:,.0f} tokens/s each", err=True)
    results.put(rates)


def _after_cache(job: Job) -> tuple[Any, ...]:
    return (
        job.plan,
        job.spec,
        job.target_path,
        job.target,
        job.target_stamps,
        job.min_free_bytes,
    )


def _store(worker: Worker, cache: Any, task: Task, prepared: Prepared) -> None:
    worker.capture(task, prepared.calibration, lambda tokens: None)
    (cache / RECORDS / f"{task.shard_id}.json").unlink()  # or it could not be captured again
    remove_tree(cache / GROUP / task.shard_id)


def _batches(samples: Sequence[PlannedSample], task: Task) -> Iterator[list[PlannedSample]]:
    """Runs of `samples` as they come, whose padded size is at most that of a planned batch."""
    batch: list[PlannedSample] = []
    for sample in samples:
        longest = max(len(own.token_ids) for own in [*batch, sample])
        if batch and longest * (len(batch) + 1) > task.forward.batch_tokens:
            yield batch
            batch = []
        batch.append(sample)
    yield batch


def _fill(samples: Sequence[PlannedSample], task: Task) -> float:
    batches = list(_batches(samples, task))
    padded = sum(len(b) * max(len(own.token_ids) for own in b) for b in batches)
    return sum(len(sample.token_ids) for sample in samples) / padded


def _forward(worker: Worker, samples: Sequence[PlannedSample], task: Task) -> None:
    """The truncated forward of the product, and nothing else."""
    for batch in _batches(samples, task):
        worker._target.capture([sample.token_ids for sample in batch])


class _Peers:
    """The whole model with its head, all hidden states, and one raw file per sample."""

    def __init__(self, job: Job, worker: Worker, directory: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(job.target_path, dtype=torch.bfloat16)
        self._layer_ids = job.spec.target_layer_ids
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)

    @torch.inference_mode()
    def capture(self, batches: Iterator[list[PlannedSample]]) -> None:
        for batch in batches:
            lengths = [len(sample.token_ids) for sample in batch]
            ids = torch.zeros((len(batch), max(lengths)), dtype=torch.int64)
            mask = torch.zeros_like(ids)
            for row, sample in enumerate(batch):
                ids[row, : lengths[row]] = torch.from_numpy(sample.token_ids)
                mask[row, : lengths[row]] = 1
            output = self._model(
                input_ids=ids, attention_mask=mask, output_hidden_states=True, use_cache=False
            )
            taps = torch.stack([output.hidden_states[i + 1] for i in self._layer_ids], 2)
            for row, sample in enumerate(batch):
                tensors = {
                    "token_ids": ids[row, : lengths[row]].clone(),
                    "hidden_states": taps[row, : lengths[row]].clone(),
                }
                save_file(tensors, self._directory / f"{sample.sample_id}.safetensors")
