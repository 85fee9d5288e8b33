"""z-lab's layout: `config.json` and the drafter's own tensors; the target's stay with the target.

Read by the published `dflash` package, SGLang, and vLLM with method `dflash`.

Source: the published Qwen3-8B-DFlash-b16 drafter; z-lab/dflash 44947fb and 0.1.0.
"""

from typing import Any

from shared import config as configs
from shared.errors import ConfigError, RunError
from trainer.caches import Caches
from trainer.recipe import DrafterConfig, RopeScaling

_SIZES = {
    "intermediate_size": "intermediate_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "num_layers": "num_hidden_layers",
    "rms_norm_eps": "rms_norm_eps",
}
"""Settings of a drafter by their names in `config.json`."""

_DRAFT_KEYS = {"mask_token_id", "target_layer_ids", "block_size"}
_ONLY = {
    "attention_bias": False,
    "hidden_act": "silu",
    "input_embedding_scale": 1,
    "output_multiplier": 1,
    "final_logit_softcapping": 0,
    "is_neox_style": True,
    "rope_is_neox_style": True,
}
"""Settings that the published client or a server heeds, and the one value that is trained here."""


def dflash_config(drafter: DrafterConfig, cache: Caches, target: dict[str, Any]) -> dict[str, Any]:
    """`config.json` of a drafter for the target that `cache` holds states of.

    Args:
        target: the target's own `config.json`.
    """
    spec = cache.spec
    return {
        "architectures": ["DFlashDraftModel"],
        **layer_config(drafter, cache, target),
        "block_size": drafter.block_size,
        "dflash_config": {
            "mask_token_id": drafter.mask_token_id,
            "target_layer_ids": list(spec.target_layer_ids),
        },
        "dtype": "bfloat16",
        "num_target_layers": spec.target.num_layers,
        "torch_dtype": "bfloat16",
    }


def layer_config(drafter: DrafterConfig, cache: Caches, target: dict[str, Any]) -> dict[str, Any]:
    """The draft layers as a Qwen3 configuration.

    Both spellings of the rotary base are written: z-lab's MLX loader and older transformers read
    `rope_theta` and `rope_scaling`, transformers 5 reads `rope_parameters`, and each falls back to
    10,000 without a word when its own is missing.
    """
    spec = cache.spec
    eos = spec.tokens.eos_token_ids
    scaling = None if drafter.rope_scaling is None else _scaling(drafter.rope_scaling)
    return {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": target.get("bos_token_id"),
        "eos_token_id": eos[0] if eos else None,
        "head_dim": drafter.head_dim,
        "hidden_act": "silu",
        "hidden_size": spec.target.hidden_size,
        "initializer_range": drafter.initializer_range,
        "intermediate_size": drafter.intermediate_size,
        "layer_types": [
            "sliding_attention" if slides else "full_attention" for slides in drafter.slides
        ],
        "max_position_embeddings": target.get("max_position_embeddings", spec.tokens.max_length),
        "max_window_layers": drafter.num_layers,
        "model_type": "qwen3",
        "num_attention_heads": drafter.num_heads,
        "num_hidden_layers": drafter.num_layers,
        "num_key_value_heads": drafter.num_kv_heads,
        "pad_token_id": spec.tokens.pad_token_id,
        "rms_norm_eps": drafter.rms_norm_eps,
        "rope_parameters": {
            "rope_theta": drafter.rope_theta,
            **(scaling or {"rope_type": "default"}),
        },
        "rope_scaling": None if scaling is None else {**scaling, "type": scaling["rope_type"]},
        "rope_theta": drafter.rope_theta,
        "sliding_window": drafter.sliding_window,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": any(drafter.slides),
        "vocab_size": spec.target.vocab_size,
    }


def _scaling(rope: RopeScaling) -> dict[str, Any]:
    """The parameters by the names of transformers, and of a factor by that of the servers, too:
    vLLM and SGLang read no `attention_factor`, and multiply what it is by default instead."""
    told = rope.parameters()
    if rope.attention_factor is not None:
        told["attn_factor"] = rope.attention_factor / rope.default_gain
    return told


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


def drafter_of(config: dict[str, Any], where: str) -> DrafterConfig:
    """The settings of the drafter that `config` describes; what else it holds is of the target.

    Raises:
        RunError: it describes a drafter that cannot be trained here, or none.
    """
    draft = config.get("dflash_config") or {}
    other = [
        f"{key} {config[key]!r}"
        for key, only in _ONLY.items()
        if config.get(key) not in (None, only)
    ]
    other += [f"dflash_config.{key}" for key in sorted(draft.keys() - _DRAFT_KEYS)]
    other += [f"{key} {config[key]!r}" for key in ("is_causal",) if config.get(key) is not None]
    if other:
        raise RunError(f"{where}: not a drafter that can be trained here: {', '.join(other)}.")
    kinds = config.get("layer_types") or []
    tree: dict[str, Any] = {ours: config.get(name) for ours, name in _SIZES.items()}
    tree |= {
        "mask_token_id": draft.get("mask_token_id", config.get("mask_token_id")),
        "block_size": draft.get("block_size", config.get("block_size")),
        **_rope_settings(config),
    }
    if "sliding_attention" in kinds:
        tree |= {"layer_types": kinds, "sliding_window": config.get("sliding_window")}
    try:
        return configs.build(DrafterConfig, tree)
    except ConfigError as error:
        raise RunError(f"{where}: not a drafter that can be trained here: {error}") from None


def _rope_settings(config: dict[str, Any]) -> dict[str, Any]:
    """`rope_theta`, `rope_scaling` and `partial_rotary_factor` of either spelling."""
    given = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    kind = given.pop("type", "default")
    kind = given.setdefault("rope_type", kind)
    theta = given.pop("rope_theta", config.get("rope_theta"))
    partial = given.pop("partial_rotary_factor", config.get("partial_rotary_factor"))
    if "attention_factor" in given:
        given.pop("attn_factor", None)  # the same for servers
    return {
        "rope_theta": theta,
        "rope_scaling": None if kind == "default" else given,
        "partial_rotary_factor": partial,
    }
