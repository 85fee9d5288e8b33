"""A checkpoint as a drafter directory that others load.

z-lab's layout is read by the published `dflash` package, SGLang and vLLM: `config.json` and
`model.safetensors` with the drafter's own tensors; embedding and LM head stay the target's.
"""

import logging
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from shared.errors import RunError
from shared.files import read_json, replace_directory, staging_directory, write_json, writing
from trainer.caches import Caches, generations_of
from trainer.recipe import DrafterConfig
from trainer.run import Run
from trainer.session import Session, read_target_config

logger = logging.getLogger(__name__)

MODEL = "model.safetensors"
EXPORTED = frozenset({"config.json", MODEL, "README.md"})


def dflash_config(drafter: DrafterConfig, cache: Caches, target: dict[str, Any]) -> dict[str, Any]:
    """`config.json` of z-lab's layout.

    Both spellings of the rotary base are written: z-lab's MLX loader and older transformers read
    `rope_theta`, transformers 5 reads `rope_parameters`, and each falls back to 10,000 without a
    word when its own is missing.

    Source: the published Qwen3-8B-DFlash-b16 drafter; z-lab/dflash 44947fb.
    """
    spec = cache.spec
    eos = spec.tokens.eos_token_ids
    return {
        "architectures": ["DFlashDraftModel"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "block_size": drafter.block_size,
        "bos_token_id": target.get("bos_token_id"),
        "dflash_config": {
            "mask_token_id": drafter.mask_token_id,
            "target_layer_ids": list(spec.target_layer_ids),
        },
        "dtype": "bfloat16",
        "eos_token_id": eos[0] if eos else None,
        "head_dim": drafter.head_dim,
        "hidden_act": "silu",
        "hidden_size": spec.target.hidden_size,
        "initializer_range": drafter.initializer_range,
        "intermediate_size": drafter.intermediate_size,
        "layer_types": ["full_attention"] * drafter.num_layers,
        "max_position_embeddings": target.get("max_position_embeddings", spec.tokens.max_length),
        "max_window_layers": drafter.num_layers,
        "model_type": "qwen3",
        "num_attention_heads": drafter.num_heads,
        "num_hidden_layers": drafter.num_layers,
        "num_key_value_heads": drafter.num_kv_heads,
        "num_target_layers": spec.target.num_layers,
        "pad_token_id": spec.tokens.pad_token_id,
        "rms_norm_eps": drafter.rms_norm_eps,
        "rope_parameters": {"rope_theta": drafter.rope_theta, "rope_type": "default"},
        "rope_scaling": None,
        "rope_theta": drafter.rope_theta,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": spec.target.vocab_size,
    }


def dflash_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a drafter of `config` has: 3 + 11 per layer."""
    hidden, inner, head_dim = (
        config[key] for key in ("hidden_size", "intermediate_size", "head_dim")
    )
    queries = config["num_attention_heads"] * head_dim
    keys = config["num_key_value_heads"] * head_dim
    num_taps = len(config["dflash_config"]["target_layer_ids"])
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, num_taps * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for i in range(config["num_hidden_layers"]):
        layer = {
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
            "self_attn.q_proj": (queries, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, queries),
            "self_attn.q_norm": (head_dim,),
            "self_attn.k_norm": (head_dim,),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        shapes |= {f"layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    return shapes


def export_dflash(run: Run, out: Path) -> Path:
    """Write the newest checkpoint of `run` to `out` in z-lab's layout, whole or not at all.

    Raises:
        RunError: there is no checkpoint, or what was written is not what was trained.
    """
    snapshot = run.require_checkpoint()
    session = Session.open(run.config(), generations=generations_of(snapshot.cache))
    session.require_same_cache(snapshot.cache, str(run.path))
    tensors = {name: value.to(torch.bfloat16) for name, value in snapshot.drafter.items()}
    config = dflash_config(session.config.drafter, session.cache, read_target_config(session.cache))
    _require_replaceable(out)
    with staging_directory(out) as staging, writing(out):
        partial = staging / "new"
        partial.mkdir()
        save_file(tensors, partial / MODEL, {"format": "pt"})
        write_json(partial / "config.json", config)
        (partial / "README.md").write_text(
            _card(session, snapshot.step, run.evaluations(snapshot.step))
        )
        check_dflash(partial, tensors)
        replace_directory(partial, out)
    logger.info("exported step %d to %s", snapshot.step, out)
    return out


def _require_replaceable(out: Path) -> None:
    """Refuse to replace anything but an earlier export.

    Raises:
        RunError: `out` holds something else.
    """
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise RunError(f"{out}: not a directory. Choose another place for the export.")
    if out.is_dir() and (foreign := {path.name for path in out.iterdir()} - EXPORTED):
        raise RunError(
            f"{out}: holds other files ({', '.join(sorted(foreign)[:8])}). "
            "Choose an empty or a new directory for the export."
        )


def check_dflash(directory: Path, trained: dict[str, Tensor]) -> None:
    """Read back what was written: exact keys, shapes and bits. No loader would notice a hole.

    Raises:
        RunError: naming the tensor.
    """
    shapes = dflash_shapes(read_json(directory / "config.json"))
    tensors = load_file(directory / MODEL)
    for name in sorted(shapes.keys() | tensors.keys() | trained.keys()):
        if name not in shapes or name not in tensors or name not in trained:
            raise RunError(f"{directory}: tensor {name!r} is missing or not of the layout.")
        if tuple(tensors[name].shape) != shapes[name] or tensors[name].dtype != torch.bfloat16:
            raise RunError(
                f"{directory}: tensor {name!r} is {tensors[name].dtype} "
                f"{list(tensors[name].shape)}, expected bfloat16 {list(shapes[name])}."
            )
        if not torch.equal(tensors[name].view(torch.int16), trained[name].view(torch.int16)):
            raise RunError(f"{directory}: tensor {name!r} differs from the trained one.")
        if not bool(tensors[name].isfinite().all()):
            raise RunError(f"{directory}: tensor {name!r} has values that are not finite.")


def _card(session: Session, step: int, evaluations: list[dict[str, Any]]) -> str:
    spec, drafter = session.cache.spec, session.config.drafter
    last = evaluations[-1] if evaluations else {}
    acceptance = "not measured"
    if last.get("tau_walk") is not None:
        acceptance = (
            f"chain {last['tau_chain']:.3f}, walk {last['tau_walk']:.3f} "
            f"({last['num_samples']} held-out samples, step {last['step']})"
        )
    return f"""# DFlash drafter

A block-diffusion drafter for speculative decoding, in z-lab's layout.

| | |
|---|---|
| target | {spec.target.model_type}, weights sha256 {spec.target.weights_sha256[:16]} |
| target blocks tapped | {list(spec.target_layer_ids)} (0-based, output of the block) |
| draft layers | {drafter.num_layers} |
| block size | {drafter.block_size}, {drafter.block_size - 1} drafted tokens |
| mask token id | {drafter.mask_token_id} |
| trained | {step} steps, seed {session.config.train.seed}, {session.config.loss.kind} loss |
| cache fingerprint | {spec.fingerprint[:16]} |
| acceptance length, held out | {acceptance} |
"""
