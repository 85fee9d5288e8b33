"""Every architecture that is tested: a tiny random model of each, and where its parts are.

Paths are written down here and not found, so that a tap on a wrong module shows.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

_COMMON: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.2,  # at the usual 0.02 blocks hardly change what they are given
}

_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LOCAL_MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}
_DELTA_NET = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1}
_SLIDING = {
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}


@dataclass(frozen=True, slots=True)
class Architecture:
    """One row of the table."""

    model_type: str
    extra: dict[str, Any] = field(default_factory=dict)
    decoder: str = "model"
    layers: str = "layers"
    norm: str = "norm"
    attention: str = "sdpa"
    vision: dict[str, Any] | None = None
    """Of the multimodal wrapper, whose text part has `extra`."""

    wrapper: dict[str, Any] = field(default_factory=dict)
    """Other keys of the wrapper's configuration."""

    whole: str = ""
    """Path of what makes logits of ids alone, where the wrapper itself does not."""

    name: str = ""

    @property
    def id(self) -> str:
        return self.name or self.model_type


def _text(model_type: str, **extra: Any) -> Architecture:
    return Architecture(model_type, extra)


_SIGLIP = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
_QWEN_VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": 8,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}
_QWEN_TOKENS = {"image_token_id": 500, "video_token_id": 501, "vision_start_token_id": 502}


def _wrapped(
    model_type: str, vision: dict[str, Any], wrapper: dict[str, Any], **extra: Any
) -> Architecture:
    return Architecture(
        model_type, extra, decoder="model.language_model", vision=vision, wrapper=wrapper
    )


ARCHITECTURES = [
    _text("llama"),
    _text("qwen2"),
    _text("qwen3"),
    _text("mistral", sliding_window=16),
    _text("ministral3"),
    _text("phi3"),
    _text("olmo2"),
    _text("olmo3", **_SLIDING),
    _text("glm4"),
    _text("seed_oss"),
    _text("ernie4_5"),
    _text("smollm3"),
    _text("granite"),
    Architecture(
        "granite",
        {
            "logits_scaling": 8.0,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.2,
        },
        name="granite, multipliers",
    ),
    _text("qwen2_moe", **_MOE, shared_expert_intermediate_size=32),
    _text("qwen3_moe", **_MOE),
    _text("mixtral", **_LOCAL_MOE),
    _text("olmoe", **_MOE),
    _text("glm4_moe", **_MOE, n_routed_experts=4, n_group=1, topk_group=1, first_k_dense_replace=1),
    _text("minimax_m2", **_LOCAL_MOE),
    _text(
        "deepseek_v3",
        head_dim=None,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=16,
        num_key_value_heads=4,
    ),
    Architecture("gpt_oss", {**_LOCAL_MOE, **_SLIDING}, attention="eager"),
    _text("qwen3_next", **_MOE, **_DELTA_NET, shared_expert_intermediate_size=32),
    _text("qwen3_5_text", **_DELTA_NET),
    _text("qwen3_5_moe_text", **_MOE, **_DELTA_NET, shared_expert_intermediate_size=32),
    _text("olmo_hybrid", **_DELTA_NET, layer_types=["linear_attention", "full_attention"] * 2),
    _text(
        "granitemoehybrid",
        **_LOCAL_MOE,
        **_MAMBA,
        layer_types=["mamba", "attention"] * 2,
        shared_intermediate_size=32,
        logits_scaling=4.0,
        embedding_multiplier=3.0,
        residual_multiplier=0.5,
    ),
    Architecture("gemma2", {**_SLIDING, "final_logit_softcapping": 20.0}, attention="eager"),
    _text("gemma3_text", **_SLIDING),
    _text(
        "gemma4_text",
        **_SLIDING,
        hidden_size_per_layer_input=0,
        num_kv_shared_layers=0,
        global_head_dim=16,
        final_logit_softcapping=20.0,
    ),
    _text("nanochat", final_logit_softcapping=5.0),
    Architecture(
        "jamba",
        {
            "num_experts": 2,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "mamba_d_state": 16,
            "mamba_dt_rank": 8,
            "use_mamba_kernels": False,
        },
        norm="final_layernorm",
    ),
    Architecture(
        "zamba2",
        {
            "layers_block_type": ["mamba", "hybrid"] * 2,
            "hybrid_layer_ids": [1, 3],
            "n_mamba_heads": 8,
            "mamba_headdim": 16,
            "mamba_d_state": 16,
            "attention_hidden_size": 128,
            "attention_head_dim": 32,
            "kv_channels": 32,
            "adapter_rank": 8,
            "num_key_value_heads": 4,
            "num_query_groups": 4,
        },
        norm="final_layernorm",
    ),
    Architecture("falcon_h1", {**_MAMBA, "mamba_d_ssm": 128}, norm="final_layernorm"),
    Architecture(
        "falcon_h1",
        {
            **_MAMBA,
            "mamba_d_ssm": 128,
            "lm_head_multiplier": 0.25,
            "embedding_multiplier": 3.0,
            "key_multiplier": 0.5,
            "mlp_multipliers": [0.5, 2.0],
            "ssm_in_multiplier": 0.5,
        },
        norm="final_layernorm",
        name="falcon_h1, multipliers",
    ),
    Architecture("bamba", {**_MAMBA, "attn_layer_indices": [1, 3]}, norm="final_layernorm"),
    Architecture(
        "lfm2",
        {"layer_types": ["conv", "full_attention"] * 2, "block_ff_dim": 128},
        norm="embedding_norm",
    ),
    Architecture(
        "nemotron_h",
        {
            "layers_block_type": ["mamba", "attention", "mamba", "moe"],
            "num_hidden_layers": None,
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "ssm_state_size": 16,
            "n_groups": 1,
            "n_routed_experts": 4,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 32,
        },
        norm="norm_f",
    ),
    Architecture(
        "mamba",
        {"state_size": 16, "time_step_rank": 8, "intermediate_size": None, "expand": 2},
        decoder="backbone",
        norm="norm_f",
        attention="eager",
    ),
    Architecture(
        "mamba2",
        {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1, "expand": 2},
        decoder="backbone",
        norm="norm_f",
        attention="eager",
    ),
    Architecture(
        "gpt2",
        {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 512},
        decoder="transformer",
        layers="h",
        norm="ln_f",
    ),
    Architecture("gpt_neox", decoder="gpt_neox", norm="final_layer_norm"),
    Architecture("falcon", {"head_dim": None}, decoder="transformer", layers="h", norm="ln_f"),
    Architecture(
        "opt",
        {"ffn_dim": 128, "word_embed_proj_dim": 64},
        decoder="model.decoder",
        norm="final_layer_norm",
    ),
    # Not of the families above: other norms, multipliers, and ways to the decoder.
    _text("llama4_text", **_LOCAL_MOE, intermediate_size_mlp=128, attention_chunk_size=16),
    _text("cohere", logit_scale=0.25),
    _text("olmo"),
    _text("hyperclovax", logits_scaling=0.25),
    _text(
        "kimi_linear",
        **_LOCAL_MOE,
        moe_intermediate_size=32,
        head_dim=None,
        num_key_value_heads=4,
        kv_lora_rank=32,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=16,
        linear_head_dim=16,
        linear_num_heads=4,
    ),
    _wrapped("qwen3_5", _QWEN_VISION, _QWEN_TOKENS, **_DELTA_NET),
    _wrapped(
        "qwen3_5_moe",
        _QWEN_VISION,
        _QWEN_TOKENS,
        **_MOE,
        **_DELTA_NET,
        shared_expert_intermediate_size=32,
    ),
    _wrapped("qwen3_vl", _QWEN_VISION, _QWEN_TOKENS, rope_parameters=_MROPE),
    _wrapped("qwen2_5_vl", _QWEN_VISION, _QWEN_TOKENS, rope_parameters=_MROPE),
    _wrapped("gemma3", _SIGLIP, {"image_token_index": 500, "mm_tokens_per_image": 4}, **_SLIDING),
    _wrapped(
        "gemma4",
        _SIGLIP,
        {"image_token_id": 500, "video_token_id": 501, "audio_token_id": 503},
        **_SLIDING,
        hidden_size_per_layer_input=0,
        num_kv_shared_layers=0,
        global_head_dim=16,
        final_logit_softcapping=20.0,
    ),
    _wrapped("mistral3", {**_SIGLIP, "head_dim": 16}, {"image_token_index": 500}),
    _wrapped("llava", _SIGLIP, {"image_token_index": 500}),
    replace(
        _wrapped(
            "llama4",
            {
                **_SIGLIP,
                "vision_output_dim": 32,
                "projector_input_dim": 32,
                "projector_output_dim": 32,
            },
            {"image_token_index": 500},
            **_LOCAL_MOE,
            intermediate_size_mlp=128,
            attention_chunk_size=16,
        ),
        decoder="language_model.model",
        whole="language_model",
    ),
]

REFUSED = [
    (
        Architecture("opt", {"ffn_dim": 128, "word_embed_proj_dim": 32}, name="opt, projection"),
        r"OPTForCausalLM: its token embedding is \[512, 32\], expected \[512, 64\]",
    ),
    (
        Architecture(
            "opt",
            {"ffn_dim": 128, "word_embed_proj_dim": 64, "do_layer_norm_before": False},
            name="opt, post-norm",
        ),
        r"OPTForCausalLM: no final norm in OPTDecoder",
    ),
    (_text("phi"), r"PhiForCausalLM: its LM head has a bias"),
    (
        Architecture(
            "qwen4_exp_text",
            {
                **_MOE,
                **{key: value for key, value in _DELTA_NET.items() if "interval" not in key},
                "shared_expert_intermediate_size": 32,
                "indexer_n_heads": 2,
                "indexer_kv_heads": 1,
                "indexer_head_dim": 16,
                "indexer_budget": 16,
                "indexer_compress_ratio": 4,
                "hc_lowrank": 8,
                "ngram_vocab_size_base": 100,
                "split_ngram_parts": 1,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 10000.0,
                    "partial_rotary_factor": 0.5,
                    "mrope_section": [1, 1, 0],
                },
            },
            attention="eager",
        ),
        r"Qwen4ExpForCausalLM: no final norm",
    ),
]
"""What no drafter could be trained for, or whose parts are unknown, and how that is said."""


def build(architecture: Architecture) -> Any:
    """The model in float32, its weights random and exact in bfloat16, no norm at its default."""
    torch.manual_seed(0)
    text = {**_COMMON, **architecture.extra}
    text = {key: value for key, value in text.items() if value is not None}
    if architecture.vision is None:
        config = AutoConfig.for_model(architecture.model_type, **text)
        auto = AutoModelForCausalLM
    else:
        config = AutoConfig.for_model(
            architecture.model_type,
            text_config=text,
            vision_config=architecture.vision,
            **architecture.wrapper,
        )
        auto = AutoModelForImageTextToText
    model = auto.from_config(config, attn_implementation=architecture.attention)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1 and "norm" in name:
            parameter.data += 0.5 * torch.rand(parameter.shape)
        parameter.data = parameter.data.bfloat16().float()
    return model.eval().requires_grad_(False)
