"""Check of the order: runs of micro-batches of one length bucket."""

import math
from collections import Counter
from itertools import groupby

from trainer.doctor.finding import Finding, NotCheckedError
from trainer.doctor.jumps import filled
from trainer.doctor.view import RunView


def bucket_runs(view: RunView) -> list[Finding]:
    """More micro-batches of one length bucket in a row than an order in proportion has."""
    steps = view.steps
    shares = Counter(bucket for step in steps.buckets for bucket in step)
    if not shares:
        raise NotCheckedError("metrics.jsonl has no train/buckets")
    long = long_runs(view)
    if not long:
        return []
    count, bucket, first, last = max(long)
    share = shares[bucket] / shares.total()
    loss = filled(steps["train/loss"])
    during = loss[(steps.step >= first) & (steps.step <= last)]
    before = loss[steps.step < first][-64:]
    effect = f", loss {during.mean():.3g} against {before.mean():.3g} before" if len(before) else ""
    return [
        Finding(
            severity="warning",
            name="bucket-runs",
            metric="train/loss",
            steps=tuple((a, b) for _, _, a, b in long),
            evidence=f"{len(long)} runs; longest: {count} micro-batches of bucket {bucket} in a "
            f"row (share {share:.2f}: at most {_longest(share, len(shares))} in proportion), steps "
            f"{first}-{last}{effect}",
            advice="Steps of one length pull the weights one way and make the loss swing. Spread "
            "buckets in proportion, as trainer/interleave.py does, and raise "
            "train.batches_per_step so that a step mixes them.",
        )
    ]


def long_runs(view: RunView) -> list[tuple[int, int, int, int]]:
    """Runs of one bucket beyond what an order in proportion has: length, bucket, first and last
    step."""
    steps = view.steps
    flat = [(bucket, i) for i, step in enumerate(steps.buckets) for bucket in step]
    shares = Counter(bucket for bucket, _ in flat)
    found = []
    for bucket, group in groupby(flat, key=lambda entry: entry[0]):
        lines = [i for _, i in group]
        if len(lines) > 2 * _longest(shares[bucket] / len(flat), len(shares)):
            first, last = int(steps.step[lines[0]]), int(steps.step[lines[-1]])
            found.append((len(lines), bucket, first, last))
    return found


def _longest(share: float, num_buckets: int) -> int:
    """Longest run of a bucket of `share` where each prefix has its share within 1 - 1/(2k-2).

    A run may straddle two epochs, each of which keeps this; hence twice this is the limit.
    """
    if num_buckets < 2:
        return 2**31
    return max(1, math.floor((2 - 1 / (num_buckets - 1)) / (1 - share) + 1e-9))
