"""What is exported loads in the real speculators 0.9.0, in its own environment.

Run by `make test-interop`, which makes that environment; the default suite leaves these out.
"""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from shared import config as configs
from tests.conftest import REPOSITORY
from trainer.batch import collate
from trainer.config import TrainConfig
from trainer.export import export_speculators
from trainer.run import Run
from trainer.session import Session
from trainer.snapshot import restore
from trainer.step import forward_blocks
from trainer.train import train

pytestmark = pytest.mark.interop

PYTHON = REPOSITORY / ".venv-speculators" / "bin" / "python"
SCRIPT = Path(__file__).with_name("load_speculators.py")
ANCHORS = np.array([30, 50, 70])
SLIDING = "sliding_attention"
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "deep": {"num_layers": 3, "block_size": 16},
    "block 7": {"block_size": 7},
    # Their window ends at the anchor for all slots, that of the servers at each slot: they agree
    # where it reaches over the whole context, and on the causal block.
    "sliding": {"num_layers": 2, "layer_types": [SLIDING, SLIDING], "sliding_window": 128},
    "yarn": {
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 128,
        }
    },
    "llama3": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "original_max_position_embeddings": 64,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        }
    },
}


REDUCED = "reduced vocabulary"
Reports = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def reports(
    tiny_train: Callable[..., TrainConfig],
    tiny_cache: Path,
    tiny_target: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Reports:
    """What the real package finds in every export, compared with the blocks of our own drafter."""
    directories = {}
    for name, drafter in {**VARIANTS, REDUCED: {}}.items():
        path = tmp_path_factory.mktemp("exports") / "drafter"
        tree = configs.to_dict(tiny_train(path / "run", tiny_cache, steps=2))
        tree["drafter"] |= {"initializer_range": 0.2, **drafter}  # attention far from uniform
        tree["loss"]["gamma"] = 4.0
        train(configs.build(TrainConfig, tree))
        run = Run(path / "run")
        size = 40 if name == REDUCED else None
        export_speculators(run, path / "out", target=str(tiny_target), draft_vocab_size=size)
        write_blocks(run, path / "blocks.safetensors")
        directories[name] = path
    process = subprocess.run(
        [PYTHON, SCRIPT, tiny_target, *directories.values()],
        capture_output=True,
        text=True,
        env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
        timeout=600,
    )
    assert process.returncode == 0, process.stderr[-4000:]
    return {
        name: json.loads((path / "report.json").read_text()) for name, path in directories.items()
    }


def write_blocks(run: Run, path: Path) -> None:
    """Our drafter's hidden states of some blocks of the longest sample, and their inputs."""
    session = Session.open(run.config())
    restore(run.require_checkpoint(), session.drafter)
    session.drafter.bfloat16().float()
    longest = session.cache.index.num_tokens[session.split.train].argmax()
    sample = session.cache.read(int(session.split.train[longest]))
    batch = collate([sample], [ANCHORS], epoch=0, bucket=0)
    states_SLD = session.features.unpack(batch)
    with torch.no_grad():
        forward = forward_blocks(session.drafter, session.head, batch, states_SLD, 3)
    length, hidden_size = len(sample.token_ids), session.cache.spec.target.hidden_size
    generator = torch.Generator().manual_seed(0)
    blocks = {
        "token_ids": torch.from_numpy(sample.token_ids.astype(np.int64)),
        "features": states_SLD[:length].flatten(1).float().contiguous(),
        "last_hidden": torch.randn(length, hidden_size, generator=generator),
        "anchors": torch.from_numpy(ANCHORS),
        "hidden": forward.hidden_AKD.contiguous(),
    }
    save_file(blocks, path)


@pytest.mark.parametrize("name", [*VARIANTS, REDUCED])
def test_the_real_package_loads_it_and_agrees(reports: Reports, name: str) -> None:
    found = reports[name]
    assert found["version"] == "0.9.0"
    assert found["class"] == "DFlashDraftModel"
    assert found["missing"] == found["unexpected"] == found["differing"] == []
    assert found["num_nan"] == 0
    assert found["target_layer_ids"] == [1, 3]
    assert found["block_size"] == VARIANTS.get(name, {}).get("block_size", 8)
    assert found["mask_token_id"] == 3
    assert found["hidden_error"] <= 1e-4
    assert np.isfinite(found["loss"])
    assert found["head_error"] <= 1e-5
    assert found["head_is_the_targets"]
