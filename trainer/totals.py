"""What one optimizer step adds up over its micro-batches."""

import math
from typing import Any

import torch

from trainer.batch import Batch
from trainer.loss import BlockLoss
from trainer.ranks import Ranks
from trainer.step import Forward


class StepTotals:
    """Sums over the micro-batches of one optimizer step.

    Attributes:
        loss_sum: weighted cross-entropy or divergence, nats (total variation: a probability). NaN
            before `sum_`, as below.
        weight_sum: the loss weights; what the gradients are divided by.
    """

    def __init__(self, block_size: int, device: torch.device) -> None:
        self.loss_sum = self.weight_sum = math.nan
        self._sums = torch.zeros(2, dtype=torch.float64, device=device)
        self._samples: list[tuple[str, ...]] = []
        self._num_tokens = 0
        self._num_anchors = 0
        self._buckets: list[int] = []
        self._epoch = 0
        self._correct_K = torch.zeros(block_size, device=device)
        self._counted_K = torch.zeros_like(self._correct_K)

    def add_loss(self, forward: Forward, loss: BlockLoss) -> None:
        """Count one forward. Does not wait for the device."""
        self._sums += torch.stack([loss.loss_sum.detach(), loss.weight_sum])
        self._correct_K += loss.correct_AK.sum(0)
        self._counted_K += forward.blocks.supervised_AK.sum(0)

    def add_batch(self, batch: Batch) -> None:
        """Count one micro-batch, apart from its loss."""
        self._samples.append(batch.sample_ids)
        self._num_tokens += batch.num_tokens
        self._num_anchors += len(batch.anchor_A)
        self._buckets.append(batch.bucket)
        self._epoch = batch.epoch

    def sum_(self, ranks: Ranks) -> None:
        """Make these the sums over all ranks; samples and buckets in the order of the stream.

        Waits for the device.
        """
        counts = torch.tensor([self._num_tokens, self._num_anchors], dtype=torch.float64)
        sums = torch.cat([self._sums, counts.to(self._sums.device)])
        ranks.sum_([sums, self._correct_K, self._counted_K])
        self.loss_sum, self.weight_sum, num_tokens, num_anchors = sums.tolist()
        self._num_tokens, self._num_anchors = int(num_tokens), int(num_anchors)
        parts = ranks.gather((self._samples, self._buckets, self._epoch))
        self._samples = [
            own for turn in zip(*(part[0] for part in parts), strict=True) for own in turn
        ]
        self._buckets = [
            own for turn in zip(*(part[1] for part in parts), strict=True) for own in turn
        ]
        self._epoch = max(part[2] for part in parts)

    @property
    def sample_ids(self) -> list[str]:
        """Of all micro-batches, in their order."""
        return [sample_id for own in self._samples for sample_id in own]

    def metrics(self) -> dict[str, Any]:
        """The step's metrics so far; NaN, and so null, for a slot that was not counted."""
        per_slot = (self._correct_K / self._counted_K).tolist()
        return {
            "train/loss": self.loss_sum / self.weight_sum if self.weight_sum else float("nan"),
            "train/accuracy": float(self._correct_K.sum() / self._counted_K.sum().clamp_min(1)),
            "train/accuracy_per_slot": per_slot[1:],
            "train/weight_sum": self.weight_sum,
            "train/tokens": self._num_tokens,
            "train/anchors": self._num_anchors,
            "train/epoch": self._epoch,
            "train/buckets": self._buckets,
            "train/samples": self.sample_ids,
        }
