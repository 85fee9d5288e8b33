"""What each consumer makes of a drafter's `config.json`, replayed without the consumer.

None of them says so when it reads another drafter than was trained: a layer id off by one, a
causal block or a rotary base of 10,000 only cost acceptance. The rules are those of their loaders.

Sources: z-lab's dflash 0.1.0, `DFlashDraftModel.__init__`; SGLang, `speculative/dflash_utils.py`
and `models/dflash.py` (00731f0); vLLM, `models/qwen3_dflash.py` (036a00d) and
`transformers_utils/configs/speculators/algos.py` (002e77c), and the `rotary_embedding` of both;
speculators 0.9.0, `models/dflash`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Rope = dict[str, Any]

_DEFAULT_THETA = 10_000.0
GAIN_DIGITS = 6
"""Decimals of a gain that is multiplied out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """A drafter as one consumer understands it."""

    target_layer_ids: tuple[int, ...]
    """Tapped blocks of the target, 0-based, by their output."""

    mask_token_id: int | None
    block_size: int
    layers: tuple[tuple[int | None, bool], ...]
    """Of each draft layer its window, and whether its blocks are causal."""

    rope: Rope
    """`rope_theta`, `rope_type` and the parameters of that type, the gain of `yarn` resolved."""


def read_dflash(config: dict[str, Any]) -> Reading:
    """z-lab's package, on transformers 5."""
    given = config.get("is_causal")
    return Reading(
        target_layer_ids=tuple(_draft(config, "target_layer_ids")),
        mask_token_id=_draft(config, "mask_token_id"),
        block_size=int(_draft(config, "block_size", 16)),
        layers=tuple(
            (window, window is not None if given is None else bool(given))
            for window in _windows(config)
        ),
        rope=_rope(config),
    )


def read_dflash_older(config: dict[str, Any]) -> Reading:
    """The same on transformers 4, and z-lab's MLX loader: no `rope_parameters`.

    MLX gives `yarn` its default gain, whatever is set; that is not replayed.
    """
    return read_dflash({key: config[key] for key in config if key != "rope_parameters"})


def read_sglang(config: dict[str, Any]) -> Reading:
    """SGLang: sliding layers are causal, whatever else is said."""
    return Reading(
        target_layer_ids=tuple(_draft(config, "target_layer_ids")),
        mask_token_id=_draft(config, "mask_token_id"),
        block_size=int(_draft(config, "block_size", 16)),
        layers=tuple((window, window is not None) for window in _windows(config)),
        rope=_server_rope(config),
    )


def read_vllm(config: dict[str, Any]) -> Reading:
    """vLLM with method `dflash`; one causality for all layers wins over that of each."""
    draft = config.get("dflash_config") or {}
    taps = config.get("eagle_aux_hidden_state_layer_ids")
    taps = [i + 1 for i in draft["target_layer_ids"]] if taps is None else taps
    given = config.get("is_causal", draft.get("causal"))
    windows = _windows(config)
    if (window := draft.get("swa_window_size")) is not None:
        windows = [None if each is None else int(window) for each in windows]
    return Reading(
        target_layer_ids=tuple(i - 1 for i in taps),
        mask_token_id=draft.get("mask_token_id"),
        # Not read: `num_speculative_tokens` of the command line says it, one less.
        block_size=int(_draft(config, "block_size", 16)),
        layers=tuple(
            (window, window is not None if given is None else bool(given)) for window in windows
        ),
        rope=_server_rope(config),
    )


def read_vllm_speculators(config: dict[str, Any]) -> Reading:
    """vLLM by the path of a speculators directory: rewritten first, then read as its own."""
    [proposal] = config["speculators_config"]["proposal_methods"]
    taps = config["aux_hidden_state_layer_ids"]
    rewritten = {
        **config["transformer_layer_config"],
        "block_size": int(proposal["speculative_tokens"]) + 1,
        "eagle_aux_hidden_state_layer_ids": taps,
        "dflash_config": {
            "mask_token_id": config["mask_token_id"],
            "target_layer_ids": [i - 1 for i in taps],
            "causal": not config.get("sliding_window_non_causal", True),
        },
    }
    return read_vllm(rewritten)


def read_speculators(config: dict[str, Any]) -> Reading:
    """speculators: full layers look both ways, sliding ones as the flag says."""
    layers = config["transformer_layer_config"]
    is_causal = not config.get("sliding_window_non_causal", False)
    return Reading(
        target_layer_ids=tuple(i - 1 for i in config["aux_hidden_state_layer_ids"]),
        mask_token_id=config["mask_token_id"],
        block_size=int(config["block_size"]),
        layers=tuple((window, window is not None and is_causal) for window in _windows(layers)),
        rope=_rope(layers),
    )


CONSUMERS: dict[str, dict[str, Callable[[dict[str, Any]], Reading]]] = {
    "dflash": {
        "dflash": read_dflash,
        "dflash on transformers 4": read_dflash_older,
        "SGLang": read_sglang,
        "vLLM": read_vllm,
    },
    "speculators": {"speculators": read_speculators, "vLLM": read_vllm_speculators},
}
"""By format, who reads it and how."""


def _server_rope(config: dict[str, Any]) -> Rope:
    """vLLM, SGLang: the gain of `yarn` is their own, times `attn_factor`."""
    given = config.get("rope_scaling") or config.get("rope_parameters") or {}
    rope = _rope(config)
    if rope["rope_type"] == "yarn":
        gain = _yarn_gain(rope["factor"]) * given.get("attn_factor", 1.0)
        rope["attention_factor"] = round(gain, GAIN_DIGITS)
    return rope


def _yarn_gain(factor: float) -> float:
    return 0.1 * math.log(factor) + 1.0


def _draft(config: dict[str, Any], name: str, default: Any = None) -> Any:
    return (config.get("dflash_config") or {}).get(name, config.get(name, default))


def _windows(config: dict[str, Any]) -> list[int | None]:
    kinds = config.get("layer_types") or ["full_attention"] * config["num_hidden_layers"]
    return [config.get("sliding_window") if k == "sliding_attention" else None for k in kinds]


def _rope(config: dict[str, Any]) -> Rope:
    """As transformers standardises it: `rope_scaling` wins over `rope_parameters`."""
    given = config.get("rope_scaling") or config.get("rope_parameters") or {}
    rope = {key: value for key, value in given.items() if key != "type"}
    rope.setdefault("rope_type", given.get("type", "default"))
    rope.setdefault("rope_theta", config.get("rope_theta", _DEFAULT_THETA))
    rope.pop("attn_factor", None)
    if rope["rope_type"] == "yarn":
        gain = rope.get("attention_factor")
        gain = _yarn_gain(rope["factor"]) if gain is None else gain
        rope["attention_factor"] = round(gain, GAIN_DIGITS)
    return rope
