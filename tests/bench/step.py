"""The training step against the trainers of speculators and SpecForge, on one CPU.

The same states, samples, shape of drafter, anchors, block size, weights of the loss and AdamW;
products in bfloat16. Each round runs every trainer in a process of its own, one after the other.
"""

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tqdm import tqdm

from tests.bench.step_data import StepData, step_data
from tests.conftest import REPOSITORY
from trainer.drafter import Drafter
from trainer.recipe import DrafterConfig

OURS = "ours"
PEERS = {
    "speculators": REPOSITORY / ".venv-speculators",
    "specforge": REPOSITORY / ".venv-specforge",
}
"""Where `make bench-peers` installs each peer."""

_WARM_STEPS = 2
"""Steps at the start of a process that do not count."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """What is trained in each step: one sample of `tokens`, and blocks in it."""

    tokens: int = 1024
    layers: int = 5
    anchors: int = 64
    block_size: int = 16
    gamma: float = 7.0


@dataclass(frozen=True, slots=True)
class StepRow:
    """Medians over all counted steps of all rounds."""

    trainer: str
    version: str
    wall_seconds: float
    cpu_seconds: float
    """Of all cores: what counts where others use the machine too."""

    tokens_per_second: float
    """By wall time."""

    peak_bytes: int
    """Largest resident memory of the process up to the last step."""

    num_parameters: int
    first_loss: float
    """Of the weights that all start from, in nats: divided by the sum of the loss weights."""

    last_loss: float
    num_steps: int


def absent_peers() -> list[str]:
    return [name for name, venv in PEERS.items() if not (venv / "bin" / "python").exists()]


def measure_step(
    directory: Path, *, rounds: int, steps: int, shape: Shape, num_samples: int = 16
) -> list[StepRow]:
    """All trainers that are there, in turns. `directory` keeps the data for the next time."""
    data = step_data(directory, num_samples=num_samples, num_tokens=shape.tokens)
    trainers = [OURS, *(name for name in PEERS if name not in absent_peers())]
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in trainers}
    with tqdm(total=rounds * len(trainers), desc="train", disable=None) as bar:
        for number in range(rounds):
            for name in trainers[number % len(trainers) :] + trainers[: number % len(trainers)]:
                results[name].append(_run(name, data, shape, _WARM_STEPS + steps))
                bar.update()
    rows = [_row(name, own, shape) for name, own in results.items()]
    _require_same_work(rows)
    return rows


def _run(name: str, data: StepData, shape: Shape, steps: int) -> dict[str, Any]:
    """One process that trains `steps` steps; what it wrote of them."""
    paths = {OURS: data.cache, "speculators": data.speculators, "specforge": data.specforge}
    drafter = drafter_config(data.target, shape)
    with tempfile.TemporaryDirectory() as work:
        weights = Path(work) / "weights.safetensors"
        _write_first_weights(weights, drafter, data)
        settings = {
            **asdict(shape),
            "steps": steps,
            "threads": os.cpu_count(),
            "data": str(paths[name]),
            "target": str(data.target),
            "layer_ids": data.layer_ids,
            "lr": 6e-4,
            "drafter": asdict(drafter),
            "weights": str(weights),
            "work": work,
            "result": str(Path(work) / "result.json"),
        }
        if name == OURS:
            command = [sys.executable, "-m", "tests.bench.peers.run_ours"]
        else:
            script = REPOSITORY / "tests" / "bench" / "peers" / f"run_{name}.py"
            command = [str(PEERS[name] / "bin" / "python"), str(script)]
        done = subprocess.run(
            [*command, json.dumps(settings)],
            cwd=REPOSITORY if name == OURS else work,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{name} ended with {done.returncode}:\n{done.stderr[-3000:]}")
        result: dict[str, Any] = json.loads(Path(settings["result"]).read_text())
        return result


def drafter_config(target: Path, shape: Shape) -> DrafterConfig:
    """Layers like those of the target, which is what speculators makes them."""
    fields = json.loads((target / "config.json").read_text())
    heads = fields["num_attention_heads"]
    return DrafterConfig(
        mask_token_id=16,
        num_layers=shape.layers,
        block_size=shape.block_size,
        intermediate_size=fields["intermediate_size"],
        num_heads=heads,
        num_kv_heads=fields["num_key_value_heads"],
        head_dim=fields.get("head_dim") or fields["hidden_size"] // heads,
        rope_theta=fields.get("rope_theta") or fields["rope_parameters"]["rope_theta"],
        rms_norm_eps=fields["rms_norm_eps"],
        fitted_start=False,
    )


def _write_first_weights(path: Path, config: DrafterConfig, data: StepData) -> None:
    hidden_size = json.loads((data.target / "config.json").read_text())["hidden_size"]
    num_features = len(data.layer_ids) * hidden_size
    drafter = Drafter(config, hidden_size, num_features, torch.Generator().manual_seed(0))
    save_file(dict(drafter.state_dict()), path)


def _row(name: str, results: list[dict[str, Any]], shape: Shape) -> StepRow:
    def counted(key: str) -> list[float]:
        return [value for result in results for value in result[key][_WARM_STEPS - 1 :]]

    wall = statistics.median(counted("wall_seconds"))
    scale = results[0]["loss_scale"]
    losses = [result["losses"] for result in results]
    return StepRow(
        trainer=name,
        version=results[0].get("version", ""),
        wall_seconds=wall,
        cpu_seconds=statistics.median(counted("cpu_seconds")),
        tokens_per_second=shape.tokens / wall,
        peak_bytes=max(result["peak_bytes"] for result in results),
        num_parameters=results[0]["num_parameters"],
        first_loss=scale * statistics.mean(own[0] for own in losses),
        last_loss=scale * statistics.mean(own[-1] for own in losses),
        num_steps=len(counted("wall_seconds")),
    )


def _require_same_work(rows: list[StepRow]) -> None:
    """The same drafter everywhere, whose first loss is then the same but for anchors and labels.

    Each draws its own anchors, and speculators learns what the target predicts instead of the
    text: at random weights neither moves the loss far.
    """
    ours = rows[0]
    for row in rows[1:]:
        if row.num_parameters != ours.num_parameters:
            raise RuntimeError(
                f"{row.trainer} trains {row.num_parameters:,} parameters, ours "
                f"{ours.num_parameters:,}: not the same drafter."
            )
        if not math.isclose(row.first_loss, ours.first_loss, rel_tol=0.1):
            raise RuntimeError(
                f"{row.trainer} starts at a loss of {row.first_loss:.2f}, ours at "
                f"{ours.first_loss:.2f}: not the same loss."
            )
