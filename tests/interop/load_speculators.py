"""Runs in an environment with the real speculators: loads drafters, drafts, and reports.

    python load_speculators.py TARGET DIRECTORY...

Each DIRECTORY has a drafter in `out` and gets a `report.json`. Its `blocks.safetensors` holds
`token_ids` [S], `features` [S, F] and `last_hidden` [S, D] of one document, and our own `hidden`
[A, K, D] of the blocks at `anchors` [A]. Imports nothing of this project.
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from speculators.model import SpeculatorModel
from speculators.models.dflash import core
from transformers import AutoModelForCausalLM


def report(directory: Path, verifier: Any) -> dict[str, Any]:
    drafter = directory / "out"
    given = load_file(directory / "blocks.safetensors")
    kind = json.loads((drafter / "config.json").read_text())["speculators_model_type"]
    model_class = SpeculatorModel.registry[kind]
    config = model_class.config_class.from_pretrained(drafter)
    config.transformer_layer_config._attn_implementation = "sdpa"  # flex has no CPU backward
    model = model_class.from_pretrained(drafter, config=config).float().eval()
    stored = load_file(drafter / "model.safetensors")
    state = model.state_dict()
    of_target = ("embed_tokens.", "lm_head.", "verifier_")
    owned = {name for name in state if not name.startswith(of_target)}

    # Their anchors are drawn at random; ours are put in their place.
    anchors = given["anchors"]
    core.select_anchors = lambda *_: (anchors, torch.ones_like(anchors, dtype=torch.bool))
    call = {
        "hidden_states": given["features"][None],
        "input_ids": given["token_ids"][None],
        "loss_mask": torch.ones_like(given["token_ids"])[None],
        "verifier_last_hidden_states": given["last_hidden"][None],
        "document_ids": torch.zeros_like(given["token_ids"])[None],
    }
    settings, _ = model_class.get_trainer_kwargs(
        loss_fn="ce", loss_implementation="eager", max_anchors=len(anchors)
    )
    with torch.no_grad():
        hidden = model._backbone_forward(**call, max_anchors=len(anchors))[0]
        _, loss, _ = model(**call, **settings)
        theirs = model.verifier_lm_head(model.verifier_norm(given["last_hidden"]))
        logits = verifier.lm_head(verifier.model.norm(given["last_hidden"]))
    if model.t2d is not None:
        logits = logits[:, model.t2d]
    ours = given["hidden"]
    return {
        "version": version("speculators"),
        "class": type(model).__name__,
        "missing": sorted(owned - stored.keys()),
        "unexpected": sorted(stored.keys() - state.keys()),
        "differing": sorted(
            name
            for name, value in stored.items()
            if not torch.equal(state[name], value.to(state[name].dtype))
        ),
        "num_nan": sum(int(value.isnan().sum()) for value in state.values()),
        "target_layer_ids": list(model.target_layer_ids),
        "block_size": model.block_size,
        "mask_token_id": model.mask_token_id,
        "hidden_error": float((hidden.view_as(ours) - ours).abs().max()),
        "loss": float(loss),
        "head_error": float((theirs - logits).abs().max()),
        "head_is_the_targets": bool(
            torch.equal(model.embed_tokens.weight, verifier.get_input_embeddings().weight)
        ),
    }


def main(target: str, *directories: str) -> None:
    # They keep the target's head in the drafter's type.
    verifier = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16).float().eval()
    for directory in map(Path, directories):
        (directory / "report.json").write_text(json.dumps(report(directory, verifier)))


if __name__ == "__main__":
    main(*sys.argv[1:])
