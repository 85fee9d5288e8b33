"""The offline DFlash trainer of SpecForge for some steps, timed, by its own command line.

On a CPU it wants `fsdp_sharding` NO_SHARD and `attention_backend` sdpa; nothing in it is replaced
but the logger of metrics, which gets the figures of every step, and the first weights.
"""

import importlib.metadata
import json
from pathlib import Path
from typing import Any

from stamps import Stamps, arguments, start_from


def main() -> None:
    settings = arguments()
    work = Path(settings["work"])
    target = json.loads((Path(settings["target"]) / "config.json").read_text())
    drafter = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "hidden_size": target["hidden_size"],
        "intermediate_size": settings["drafter"]["intermediate_size"],
        "num_attention_heads": settings["drafter"]["num_heads"],
        "num_key_value_heads": settings["drafter"]["num_kv_heads"],
        "head_dim": settings["drafter"]["head_dim"],
        "num_hidden_layers": settings["layers"],
        "num_target_layers": target["num_hidden_layers"],
        "vocab_size": target["vocab_size"],
        "max_position_embeddings": target["max_position_embeddings"],
        "rms_norm_eps": settings["drafter"]["rms_norm_eps"],
        "rope_theta": settings["drafter"]["rope_theta"],
        "rope_scaling": None,
        "initializer_range": 0.02,
        "layer_types": ["full_attention"] * settings["layers"],
        "sliding_window": None,
        "use_sliding_window": False,
        "max_window_layers": settings["layers"],
        "tie_word_embeddings": False,
        "use_cache": True,
        "dtype": "bfloat16",
        "block_size": settings["block_size"],
        "dflash_config": {
            "mask_token_id": settings["drafter"]["mask_token_id"],
            "target_layer_ids": settings["layer_ids"],
        },
    }
    (work / "drafter.json").write_text(json.dumps(drafter))
    embedding = "model.embed_tokens.weight"
    run = {
        "model": {
            "target_model_path": settings["target"],
            "draft_model_config": str(work / "drafter.json"),
            "embedding_key": embedding,
            "torch_dtype": "bfloat16",
            **({"lm_head_key": embedding} if target.get("tie_word_embeddings") else {}),
        },
        "data": {
            "hidden_states_path": settings["data"],
            "max_length": settings["tokens"],
            "cache_dir": str(work / "cache"),
            "dataloader_num_workers": 0,
        },
        "training": {
            "strategy": "dflash",
            "num_epochs": 1000,
            "max_steps": settings["steps"],
            "batch_size": 1,
            "learning_rate": settings["lr"],
            "warmup_ratio": 0.01,
            "max_grad_norm": 1.0,
            "attention_backend": "sdpa",
            "num_anchors": settings["anchors"],
            "loss_decay_gamma": settings["gamma"],
            "log_interval": 1,
            "seed": 0,
            "save_interval": 0,
            "fsdp_sharding": "NO_SHARD",
        },
        "run_id": "bench",
        "output_dir": str(work / "out"),
    }
    (work / "run.json").write_text(json.dumps(run))

    import torch
    from specforge import cli, optimizer
    from specforge.training import assembly

    stamps = Stamps()
    num_parameters = 0

    def log(metrics: dict[str, Any], step: int) -> None:
        stamps.add(float(metrics.get("train/loss", metrics.get("loss"))))

    assembly._logger = log
    make = optimizer.BF16Optimizer.__init__

    def make_optimizer(self: Any, model: Any, *given: Any, **named: Any) -> None:
        nonlocal num_parameters
        num_parameters = start_from(model, settings["weights"])
        make(self, model, *given, **named)

    optimizer.BF16Optimizer.__init__ = make_optimizer
    torch.set_num_threads(settings["threads"])
    cli.main(["train", "-c", str(work / "run.json")])
    stamps.write(
        settings["result"],
        version=importlib.metadata.version("specforge"),
        num_parameters=num_parameters,
        loss_scale=1.0,
    )


if __name__ == "__main__":
    main()
