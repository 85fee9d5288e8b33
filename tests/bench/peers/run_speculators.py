"""The DFlash trainer of speculators for some steps, timed, by its own command line.

It insists on an accelerator in three places, which are told that the CPU is one; its fused
attention and loss are kernels for GPUs, and its own CPU paths are asked for instead.
"""

import importlib.metadata
import os
from typing import Any

from stamps import Stamps, arguments, start_from


def main() -> None:
    settings = arguments()

    import torch
    from speculators.train import cli
    from speculators.train import trainer as training
    from speculators.train.config import TrainConfig

    stamps = Stamps()
    num_parameters = 0

    class Logger:
        """In place of the logger of metrics, which gets the figures of every step."""

        @staticmethod
        def info(message: Any, extra: object = None) -> None:
            if "train" in message:
                stamps.add(float(message["train"]["loss"]))

    train_epoch = training.Trainer.train_epoch

    def timed_epoch(self: Any, *given: Any, **named: Any) -> Any:
        nonlocal num_parameters
        if not self.global_step:
            num_parameters = start_from(self.model, settings["weights"])
        if self.global_step < settings["steps"]:  # `--max-steps` ends an epoch, not the run
            return train_epoch(self, *given, **named)
        return None

    torch.accelerator.synchronize = lambda *given, **named: None  # type: ignore[assignment]
    training.get_local_rank = lambda: "cpu"
    training.metric_logger = Logger
    training.Trainer.device_type = property(lambda self: "cpu", lambda self, value: None)
    training.Trainer.val_epoch = lambda self, epoch: None
    training.Trainer.maybe_save_checkpoint = lambda self, *given, **named: None
    training.Trainer.train_epoch = timed_epoch
    options = {
        "--verifier-name-or-path": settings["target"],
        "--speculator-type": "dflash",
        "--data-path": settings["data"],
        "--save-path": os.path.join(settings["work"], "out"),  # noqa: PTH118
        "--total-seq-len": settings["tokens"],
        "--num-layers": settings["layers"],
        "--block-size": settings["block_size"],
        # A tap is numbered by the block that reads it there, by the one that writes it here.
        "--target-layer-ids": [layer + 1 for layer in settings["layer_ids"]],
        "--max-anchors": settings["anchors"],
        "--on-missing": "raise",
        "--num-workers": 0,
        "--mask-token-id": settings["drafter"]["mask_token_id"],
        "--max-steps": settings["steps"],
        "--epochs": 1000,
        "--full-attention-indices": list(range(settings["layers"])),
        "--lr": settings["lr"],
        "--log-freq": 1,
        "--dflash-decay-gamma": settings["gamma"],
        "--loss-fn": "ce",
        "--optimizer": "adamw",
        "--per-position-loss-weight": "fixed-exp-decay",
        "--checkpoint-freq": 1_000_000,
        "--draft-attn-impl": "sdpa",
        "--loss-implementation": "eager",
    }
    words: list[str] = []
    for name, value in options.items():
        words += [name, *map(str, value if isinstance(value, list) else [value])]
    config = TrainConfig.resolve(words)
    torch.set_num_threads(settings["threads"])
    cli.main(config)
    # Its loss is divided by the number of labels instead of by the sum of their weights.
    weights = [
        2.718281828459045 ** (-k / settings["gamma"]) for k in range(settings["block_size"] - 1)
    ]
    stamps.write(
        settings["result"],
        version=importlib.metadata.version("speculators"),
        num_parameters=num_parameters,
        loss_scale=len(weights) / sum(weights),
    )


if __name__ == "__main__":
    main()
