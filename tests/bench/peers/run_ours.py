"""Our training loop for some steps, timed. Without evaluation, and saved after the last step."""

from pathlib import Path
from typing import Any

from shared.memory import keep_freed_memory
from tests.bench.peers.stamps import Stamps, arguments, start_from


def main() -> None:
    settings = arguments()
    keep_freed_memory()  # as the command line does

    import torch

    from trainer import train as training
    from trainer.config import CacheConfig, RunConfig, SamplerConfig, StepConfig, TrainConfig
    from trainer.learner import Learner
    from trainer.recipe import AnchorConfig, DrafterConfig, LossConfig, OptimizerConfig

    torch.set_num_threads(settings["threads"])
    stamps = Stamps()

    class TimedLearner(Learner):
        def train_step(self, *given: Any) -> dict[str, Any]:
            metrics = super().train_step(*given)
            stamps.add(metrics["train/loss"])
            return metrics

    training.Learner = TimedLearner  # type: ignore[misc]
    run = training.Training(
        TrainConfig(
            run=RunConfig(path=Path(settings["work"]) / "run"),
            cache=CacheConfig(path=Path(settings["data"]), heldout_fraction=0.0),
            sampler=SamplerConfig(tokens_per_batch=settings["tokens"]),
            drafter=DrafterConfig(**settings["drafter"]),
            train=StepConfig(steps=settings["steps"], device="cpu", compute_dtype="bfloat16"),
            anchors=AnchorConfig(per_sample=settings["anchors"]),
            loss=LossConfig(kind="decay", gamma=settings["gamma"]),
            optimizer=OptimizerConfig(lr=settings["lr"]),
        )
    )
    num_parameters = start_from(run.session.drafter, settings["weights"])
    run.train()
    stamps.write(
        settings["result"],
        num_parameters=num_parameters,
        loss_scale=1.0,
    )


if __name__ == "__main__":
    main()
