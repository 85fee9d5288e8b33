"""`python -m tests.bench`: codecs, layouts, capture and the training step: tables, or JSON."""

import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: see the Makefile

import click
import torch

from shared.memory import keep_freed_memory
from tests.bench.capture import BARE, CaptureRow, measure_capture
from tests.bench.codecs import (
    Errors,
    SizeRow,
    SpeedRow,
    measure_sizes,
    measure_speed,
    noise,
    one_core,
)
from tests.bench.gpu import GpuRow, large_shapes, measure_gpu
from tests.bench.layouts import CODEC, OURS, OURS_BFLOAT16, RAW
from tests.bench.plan import measure_plan
from tests.bench.reads import ReadRow, breakeven, measure_reads
from tests.bench.states import States, demo_states, random_states, widened
from tests.bench.step import Shape, StepRow, absent_peers, measure_step
from tests.conftest import REPOSITORY

DIRECTORY = REPOSITORY / ".demo" / "bench"
PART_NAMES = ("store", "capture", "step", "gpu")


@click.command()
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--quick", is_flag=True, help="A quarter of the tokens, fewer rounds: a fifth of the time."
)
@click.option(
    "--only",
    type=click.Choice(PART_NAMES),
    help="Codecs and reads, stage one, the training step, or that of large drafters on a GPU.",
)
def main(json_path: Path | None, quick: bool, only: str | None) -> None:
    """Measure codecs, read speed, capture and the training step on the demo target.

    On two CPU cores codecs and reads take 3 minutes, capture 16, the step 7 beside its peers.
    """
    keep_freed_memory()
    began, loads = time.perf_counter(), [os.getloadavg()[0]]
    facts: dict[str, Any] = {}
    for name, part in zip(
        PART_NAMES,
        (measure_store, measure_stage_one, measure_stage_two, measure_on_gpu),
        strict=True,
    ):
        if only in (None, name):
            facts |= part(quick)
    loads.append(os.getloadavg()[0])
    click.echo(
        f"{time.perf_counter() - began:.0f} s. Load of the machine, {os.cpu_count()} cores: "
        f"{loads[0]:.1f} at the start, {loads[1]:.1f} at the end; above 1 at the start the rates "
        "are too low, and their ratios count"
    )
    if json_path is not None:
        json_path.write_text(json.dumps({"load": loads, **facts}, indent=1) + "\n")


def measure_store(quick: bool) -> dict[str, Any]:
    """Codecs and layouts; prints their tables."""
    real = demo_states(DIRECTORY, 5_000 if quick else 20_000)
    models = [real, *random_states()]
    wide = widened(real)
    with one_core():
        noises = [noise(states) for states in models]
        sizes = [measure_sizes(states) for states in models]
        speeds = [
            measure_speed(states, num_tokens=num, repeats=3 if quick else 7)
            for states, num in ((real, 4_000), (wide, 600))
        ]
        reads = [
            _read(states, rounds=2 if quick else 5, cold=1 if quick else 5)
            for states in (real, wide)
        ]
    for states, floor, rows in zip(models, noises, sizes, strict=True):
        click.echo(size_table(states, floor, rows))
    for states, rows in zip((real, wide), speeds, strict=True):
        click.echo(speed_table(states, rows))
    for states, rows in zip((real, wide), reads, strict=True):
        click.echo(read_table(states, rows))
    return {
        "noise": {states.name: asdict(own) for states, own in zip(models, noises, strict=True)},
        "sizes": [asdict(row) for rows in sizes for row in rows],
        "speeds": [asdict(row) for rows in speeds for row in rows],
        "reads": {
            states.name: [asdict(row) for row in rows]
            for states, rows in zip((real, wide), reads, strict=True)
        },
    }


def measure_stage_one(quick: bool) -> dict[str, Any]:
    """Ways to capture; prints their table."""
    with _scratch("capture") as directory:
        rows = measure_capture(directory, num_rows=40 if quick else 100, rounds=1 if quick else 3)
    click.echo(capture_table(rows))
    return {"capture": [asdict(row) for row in rows]}


def measure_stage_two(quick: bool) -> dict[str, Any]:
    """Plan of an epoch, and the step, ours and the peers'; prints a table for each shape."""
    facts: dict[str, Any] = {"plan": (plan := measure_plan())}
    click.echo(
        "\nPlan of an epoch of {num_samples:,} samples, in {num_batches:,} micro-batches: "
        "{cpu_seconds:.2f} s of CPU, {padding:.1%} of the budget unused".format(**plan)
    )
    for anchors in (64,) if quick else (64, 16):
        shape = Shape(anchors=anchors)
        rows = measure_step(
            DIRECTORY, rounds=1 if quick else 3, steps=4 if quick else 8, shape=shape
        )
        click.echo(step_table(rows, shape))
        facts[f"step, {anchors} anchors"] = [asdict(row) for row in rows]
    if absent := absent_peers():
        click.echo(f"Left out: {', '.join(absent)}. `make bench-peers` installs them.\n")
    return facts


def measure_on_gpu(quick: bool) -> dict[str, Any]:
    """The step of large drafters; prints a table where there is a GPU, a line where not."""
    if not torch.cuda.is_available():
        click.echo("Left out: the step of large drafters, which needs a CUDA device.\n")
        return {}
    rows = []
    for shape in large_shapes():
        rows += measure_gpu(shape, torch.device("cuda"), rounds=2 if quick else 5)
        torch.cuda.empty_cache()
    click.echo(gpu_table(rows, torch.cuda.get_device_name()))
    return {"gpu": [asdict(row) for row in rows]}


@contextmanager
def _scratch(name: str) -> Iterator[Path]:
    directory = DIRECTORY / name
    shutil.rmtree(directory, ignore_errors=True)  # of a run that was killed
    directory.mkdir(parents=True)
    try:
        yield directory
    finally:
        shutil.rmtree(directory)


def _read(states: States, *, rounds: int, cold: int) -> list[ReadRow]:
    with _scratch("layouts") as directory:
        return measure_reads(states, directory, rounds=rounds, cold_rounds=cold)


def gpu_table(rows: Sequence[GpuRow], device: str) -> str:
    return _table(
        f"Training step on {device}: random states in `balanced`, products in bfloat16, a full "
        "micro-batch with AdamW; model FLOPs without what is computed twice",
        [
            *("drafter of", "samples", "tokens", "anchors", "step s", "tokens/s", "TFLOP/s"),
            *("of peak", "peak GB", "expected"),
        ],
        [
            [
                row.shape + (", compiled" if row.is_compiled else ""),
                str(row.num_samples),
                f"{row.num_tokens:,}",
                f"{row.num_anchors:,}",
                f"{row.step_seconds:.3f}",
                f"{row.tokens_per_second:,.0f}",
                f"{row.tflops:.3g}",
                "" if row.utilisation is None else f"{row.utilisation:.0%}",
                f"{row.peak_bytes / 1e9:.1f}",
                f"{row.expected_bytes / 1e9:.1f}",
            ]
            for row in rows
        ],
    )


def size_table(states: States, floor: Errors, rows: Sequence[SizeRow]) -> str:
    lines = [
        [
            row.codec,
            f"{row.ratio:.3f}",
            f"{row.outliers_per_million:.0f}",
            _percents(row.errors.normalised),
            _percents(row.errors.relative),
        ]
        for row in rows
    ]
    lines.append(["bf16 noise", "", "", _percents(floor.normalised), _percents(floor.relative)])
    return _table(
        f"Size and error: {_described(states)}. Errors in % per layer, first to last. bf16 noise: "
        f"the target in bfloat16 against itself in float32, {len(states.exact_TLD):,} tokens",
        ["codec", "stored/raw", "outliers/1e6", "error in channel deviations", "relative L2"],
        lines,
    )


def speed_table(states: States, rows: Sequence[SpeedRow]) -> str:
    return _table(
        f"Codec speed: {_described(states)}. MB/s of bfloat16 on one core, checksums included",
        ["codec", "pack", "encode", "decode to levels", "decode to bf16"],
        [
            [
                row.codec,
                *(f"{x:,.0f}" for x in (row.pack, row.encode, row.decode, row.decode_bfloat16)),
            ]
            for row in rows
        ],
    )


def read_table(states: States, rows: Sequence[ReadRow]) -> str:
    by_name = {row.layout: row for row in rows}
    ours, raw, codec = by_name[OURS], by_name[RAW], by_name[CODEC]
    kinds = ("warm_random", "warm_sequential", "cold_random", "cold_sequential")
    lines = [
        [
            row.layout,
            f"{row.ratio:.3f}" if row.ratio else "",
            *(
                f"{getattr(row, kind):.2f} ({getattr(row, kind) / getattr(ours, kind):.2f})"
                for kind in kinds
            ),
            "" if row.touched is None else f"{row.touched:.2f}",
            "" if row.asked is None else f"{row.asked:.2f}",
        ]
        for row in rows
    ]
    text = _table(
        f"Reading whole samples: {_described(states)}, {len(states.samples)} samples. GB/s of "
        "bfloat16, in brackets over ours. Warm: time of one core. Cold: wall time of one thread "
        "less its waiting for a core, opening included; indicative, whatever lies below may have "
        "the bytes in memory",
        ["layout", "stored/raw", *(kind.replace("_", " ") for kind in kinds), "fetched", "asked"],
        lines,
    )
    text += (
        "fetched: bytes read from the disk for a quarter of the samples, at random and cold, over "
        "what is stored of them; asked: what the reader asks for over what is stored\n"
        f"ours to levels takes {codec.warm_random / ours.warm_random:.2f} times the time of the "
        "codec alone\n"
    )
    for row in (ours, by_name[OURS_BFLOAT16]):
        serial, overlapped = breakeven(row, raw)
        text += (
            f"{row.layout}: faster than raw mapped on a disk below {serial:.2f} GB/s in one "
            f"thread, {overlapped:.2f} GB/s per core where reading and decoding overlap\n"
        )
    return text


def capture_table(rows: Sequence[CaptureRow]) -> str:
    bare = {row.num_workers: row.tokens_per_second for row in rows if row.way == BARE}
    return _table(
        "Stage one: tokens/s of SmolLM2-135M in bfloat16, one thread a worker, the same samples "
        "and padded tokens a batch",
        ["way", "workers", "tokens/s", "over forward alone", "fill"],
        [
            [
                row.way,
                str(row.num_workers),
                f"{row.tokens_per_second:,.0f}",
                f"{row.tokens_per_second / bare[row.num_workers]:.3f}",
                f"{row.fill:.2f}",
            ]
            for row in rows
        ],
    )


def step_table(rows: Sequence[StepRow], shape: Shape) -> str:
    best = min(rows[1:], key=lambda row: row.cpu_seconds, default=None)
    text = _table(
        f"Training step: {shape.layers} layers, {shape.anchors} blocks of {shape.block_size} in "
        f"one sample of {shape.tokens:,} tokens, cross-entropy with decay, AdamW, products in "
        f"bfloat16, {os.cpu_count()} threads, medians of {rows[0].num_steps} steps. CPU: seconds "
        "of all cores",
        ["trainer", "CPU s", "over ours", "wall s", "tokens/s", "peak MB", "first loss", "last"],
        [
            [
                f"{row.trainer} {row.version}".strip(),
                f"{row.cpu_seconds:.2f}",
                f"{row.cpu_seconds / rows[0].cpu_seconds:.2f}",
                f"{row.wall_seconds:.2f}",
                f"{row.tokens_per_second:,.0f}",
                f"{row.peak_bytes / 1e6:,.0f}",
                f"{row.first_loss:.2f}",
                f"{row.last_loss:.2f}",
            ]
            for row in rows
        ],
    )
    if best is not None:
        text += (
            f"ours takes 1/{best.cpu_seconds / rows[0].cpu_seconds:.2f} of the CPU time of "
            f"{best.trainer}, the faster of the others, and "
            f"{rows[0].tokens_per_second / max(r.tokens_per_second for r in rows[1:]):.2f} times "
            "the tokens/s by wall time of the fastest\n"
        )
    return text


def _described(states: States) -> str:
    num, layers, width = states.hidden_TLD.shape
    return f"{states.name}, {num:,} tokens, {layers} x {width}"


def _percents(values: Iterable[float]) -> str:
    return " ".join(f"{100 * value:5.2f}" for value in values)


def _table(title: str, headers: list[str], rows: list[list[str]]) -> str:
    widths = [max(len(row[i]) for row in [headers, *rows]) for i in range(len(headers))]

    def line(cells: list[str]) -> str:
        first, *rest = zip(cells, widths, strict=True)
        parts = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in rest)]
        return "  ".join(parts).rstrip()

    return "\n".join(["", title, "", line(headers), *(line(row) for row in rows), ""])


if __name__ == "__main__":
    main()
