"""What the plan of an epoch costs, for as many samples as a large cache has."""

import time
from typing import Any

import numpy as np

from trainer.config import SamplerConfig
from trainer.sampler import epoch_batches

_NUM_SAMPLES = 1_000_000
_TOKENS_PER_BATCH = 16_384
_ROUNDS = 3


def measure_plan() -> dict[str, Any]:
    """CPU time of one plan, the least of some; lengths as conversations have them."""
    rng = np.random.default_rng(0)
    length = np.minimum(rng.lognormal(7.3, 0.7, _NUM_SAMPLES).astype(np.int64) + 1, 8192)
    config = SamplerConfig(tokens_per_batch=_TOKENS_PER_BATCH)
    seconds = []
    for epoch in range(_ROUNDS):
        began = time.process_time()
        plan = epoch_batches(length, config, seed=0, epoch=epoch)
        seconds.append(time.process_time() - began)
    filled = int(length.sum()) / (len(plan) * _TOKENS_PER_BATCH)
    return {
        "num_samples": _NUM_SAMPLES,
        "num_batches": len(plan),
        "cpu_seconds": min(seconds),
        "padding": 1 - filled,
    }
