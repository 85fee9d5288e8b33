"""What an epoch's order looks like: measured before training, and printed."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from shared.errors import RunError
from shared.files import sha256_bytes
from trainer.sampler import EpochPlan

REPORT_WINDOW_BATCHES = 32


@dataclass(frozen=True, slots=True)
class OrderReport:
    """What an epoch's order looks like, to be printed before training."""

    num_samples: int
    num_tokens: int
    num_batches: int
    longest_run: int
    """Most micro-batches of one bucket in a row."""

    window_kl: float
    """Mean divergence (nats) of the buckets of a sliding window from those of the epoch."""

    fill: float
    """Tokens over the tokens that all micro-batches could hold; the rest is padding."""

    share: tuple[float, ...]
    """Share of each bucket in the micro-batches."""

    sha256: str
    """Digest of the samples of every micro-batch."""

    def __str__(self) -> str:
        return (
            f"{self.num_samples} samples, {self.num_tokens} tokens in {self.num_batches} "
            f"micro-batches, {self.fill:.1%} full; longest run of a bucket {self.longest_run}, "
            f"window divergence {self.window_kl:.4f} nats"
        )

    def describe(self) -> dict[str, str]:
        """What a checkpoint remembers. numpy promises no stream of random numbers for good."""
        return {"sha256": self.sha256, "numpy": np.__version__}

    def require_same(self, there: dict[str, Any] | None, where: str) -> None:
        """Refuse to go on in another order.

        Args:
            there: what `describe` gave when a checkpoint was written; None if it was not told.
            where: names the checkpoint.

        Raises:
            RunError: the order is another one.
        """
        if there is not None and there["sha256"] != self.sha256:
            raise RunError(
                f"{where}: these settings put the samples in another order than it has, so that "
                "some would be trained twice and others never. It was written with numpy "
                f"{there['numpy']}, this is {np.__version__}: go on with that one, and with the "
                "release that wrote it; or begin anew with --fresh."
            )


def window_kl(label: np.ndarray, window: int) -> float:
    """Mean over all windows of KL(labels of the window || labels of the whole), in nats.

    An independent shuffle of k labels measures about (k - 1) / (2 * window).
    """
    window = min(window, len(label))
    divergence = np.zeros(len(label) - window + 1)
    for value in np.unique(label):
        seen = np.concatenate([[0], np.cumsum(label == value)])
        share = (seen[window:] - seen[:-window]) / window
        ratio = share * len(label) / seen[-1]
        divergence += share * np.log(ratio, where=share > 0, out=np.zeros_like(share))
    return float(divergence.mean())


def order_report(plan: EpochPlan, length: np.ndarray) -> OrderReport:
    """Measure `plan`; `length` is what it was made from."""
    run = np.diff(np.flatnonzero(np.diff(plan.bucket, prepend=-1, append=-1)))
    num_tokens = int(length[plan.sample].sum())
    share = np.bincount(plan.bucket, minlength=len(plan.edge) - 1) / len(plan)
    return OrderReport(
        num_samples=len(plan.sample),
        num_tokens=num_tokens,
        num_batches=len(plan),
        longest_run=int(run.max()),
        window_kl=window_kl(plan.bucket, REPORT_WINDOW_BATCHES),
        fill=num_tokens / (len(plan) * plan.tokens_per_batch),
        share=tuple(share.tolist()),
        sha256=sha256_bytes(np.concatenate([plan.offset, plan.sample]).astype("<i8").tobytes()),
    )
