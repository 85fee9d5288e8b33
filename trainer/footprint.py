"""How much memory a run takes: estimated before its first step, measured while it goes.

What autograd keeps of the drafter was counted tensor by tensor. What the libraries and the heap
of a CPU hold besides are figures from experience.

P parameters   S context tokens   Q draft slots   T = S+Q   L tapped layers   D hidden size
F = L*D, or the rank of a projection   V vocabulary   c bytes of the compute type
"""

import math
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shared.cgroup import allowances
from shared.errors import ConfigError, RunError
from shared.quantity import size
from trainer.config import TrainConfig
from trainer.drafter import num_parameters
from trainer.evaluate import ANCHORS_PER_FORWARD, slots_per_chunk
from trainer.liger import is_used
from trainer.sampler import EpochPlan
from trainer.tiles import TILE_QUERIES

_FLOAT = 4
_MOMENTS = 2 * _FLOAT
_BYTES_PER_ROOT_TOKEN, _MEASURED_STEPS = 3.4e6, 1000
"""From runs on a CPU with bfloat16 units. A new shape (see `trainer.shapes`) leaves its kernels,
their buffers and code, and holes in the heap. New ones come ever more seldom, so what they take
grows with the logarithm of the steps; longer rows have more of them. Taken by rows of 1,024 tokens
after 20, 100 and 600 steps: 785, 878 and 1,088 MB, where 766, 937 and 1,131 are expected; of 512
tokens after 20 and 600: 497, and 741 to 873 (by the cache), where 579, and 837 to 887, are. Beyond
`_MEASURED_STEPS` nothing was measured."""
_FLOAT_BYTES_PER_ROOT_TOKEN = 7e6
"""The same of float32, whose products have no kernels for each shape: nothing grows after the first
steps. Taken by rows of 512, 1,024 and 2,048 tokens: 704, 833 and 1,120 MB, where 685, 840 and 1,129
are expected, and 865 of 1,024 after 600 steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSize:
    """The micro-batch of an order that takes most memory."""

    num_tokens: int
    num_anchors: int
    longest: int
    """Tokens of its longest sample."""

    mean_tokens: int
    """Of all micro-batches: what the queue holds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Footprint:
    """Bytes at the peak, by what they are for. On top of what Python and torch take themselves."""

    weights: int
    """The drafter's, float32, and their copy in the compute type."""

    moments: int
    head: int
    gradients_or_activations: int
    """What is larger: activations with the logits of a chunk, gradients, or an evaluation."""

    libraries: int
    """What they keep, in bfloat16 for each shape, and what of the heap lies idle: on a CPU."""

    queue: int
    """Micro-batches read ahead: host memory."""

    snapshot: int
    """The copy that a checkpoint is written from: host memory."""

    def on(self, device: torch.device) -> int:
        """Bytes in the memory of `device`."""
        total: int = sum(getattr(self, field.name) for field in fields(self))
        return total if device.type == "cpu" else total - self.queue - self.snapshot

    def __str__(self) -> str:
        return ", ".join(
            f"{field.name.replace('_', ' ')} {size(getattr(self, field.name))}"
            for field in fields(self)
        )


def largest_batch(
    plan: EpochPlan,
    length: npt.NDArray[np.int64],
    num_anchors: npt.NDArray[np.int64],
    block_size: int,
) -> BatchSize:
    """The micro-batch of `plan` with most context tokens and slots.

    Args:
        length, num_anchors: of the samples that the plan numbers, anchors as drawn.
    """
    starts = plan.offset[:-1]
    tokens = np.add.reduceat(length[plan.sample], starts)
    anchors = np.add.reduceat(num_anchors[plan.sample], starts)
    largest = int(np.argmax(tokens + anchors * block_size))
    return BatchSize(
        num_tokens=int(tokens[largest]),
        num_anchors=int(anchors[largest]),
        longest=int(length[plan.batch(largest)].max()),
        mean_tokens=int(tokens.mean()),
    )


def estimate(
    config: TrainConfig,
    batch: BatchSize,
    head: Iterable[Tensor],
    *,
    heldout_anchors: int,
    num_features: int,
    num_stored: int,
    bytes_per_token: int,
    num_batches: int,
    device: torch.device,
) -> Footprint:
    """The peak of a run whose largest micro-batch is `batch`.

    Args:
        head: the frozen tensors, on the device; the last one is the LM head.
        heldout_anchors: the most of any sample that is evaluated; all of them are used.
        num_features: values of one token that `fc` reads, F.
        num_stored: those and, where the cache has it, the last hidden state.
        bytes_per_token: of the stored states, unpacked from their compression.
        num_batches: micro-batches whose gradients are added up for a step.
    """
    held = {tensor.data_ptr(): tensor.nbytes for tensor in head}
    lm_head_VD = list(head)[-1]
    vocab_size, hidden_size = lm_head_VD.shape
    count = num_parameters(config.drafter, hidden_size, num_features)
    c = 2 if config.train.compute_dtype == "bfloat16" else _FLOAT
    copies = count * c if c < _FLOAT else 0
    together = min(config.anchors.per_forward or batch.num_anchors, batch.num_anchors)
    num_forwards = num_batches * -(-batch.num_anchors // together)
    batch = replace(batch, num_anchors=together)
    kept = _activations(config, batch, hidden_size, num_features, device)
    slots = together * config.drafter.block_size
    features = batch.num_tokens * num_stored * 2
    if c < _FLOAT and num_stored == num_features and device.type == "cpu":
        features = 0  # the very tensor that `fc` keeps
    blocks = min(config.loss.anchors_per_chunk, together)
    logits = (
        blocks * (config.drafter.block_size - 1) * vocab_size * _bytes_per_logit(config, device)
    )
    drafter = config.drafter
    queries, keys = drafter.num_heads * drafter.head_dim, drafter.num_kv_heads * drafter.head_dim
    # Weights that are multiplied as one matrix are laid side by side.
    copies += drafter.num_layers * hidden_size * (queries + 4 * keys) * c
    passing = slots * max(2 * c * drafter.intermediate_size, 3 * _FLOAT * queries)
    step = features + kept + max(logits, passing)
    if num_forwards > 1:  # the second one's activations are there beside the first one's gradients
        step += count * _FLOAT
    blocks = min(ANCHORS_PER_FORWARD, heldout_anchors)
    ranked = min(slots_per_chunk(vocab_size, device), blocks * (config.drafter.block_size - 1))
    forward = 3 * c * blocks * config.drafter.block_size * config.drafter.intermediate_size
    evaluation = max(ranked * vocab_size * 2 * _FLOAT, forward)
    return Footprint(
        weights=count * _FLOAT + copies,
        moments=count * _MOMENTS,
        head=sum(held.values()),
        gradients_or_activations=max(step, count * _FLOAT + features, evaluation),
        libraries=_libraries(config, batch.num_tokens, device),
        queue=config.loader.queue_batches * batch.mean_tokens * bytes_per_token,
        snapshot=count * (_FLOAT + _MOMENTS),
    )


def _bytes_per_logit(config: TrainConfig, device: torch.device) -> int:
    """What the loss holds for each logit of a chunk at its peak."""
    c = 2 if config.train.compute_dtype == "bfloat16" else _FLOAT
    kept = 2 * c if config.loss.needs_teacher else c
    if device.type == "cpu" or is_used(config.loss, device):  # a few rows at a time in float32
        return kept
    return kept + (4 * _FLOAT if config.loss.needs_teacher else _FLOAT)


def _libraries(config: TrainConfig, num_tokens: int, device: torch.device) -> int:
    if device.type != "cpu":
        return 0
    if config.train.compute_dtype == "float32":
        return int(_FLOAT_BYTES_PER_ROOT_TOKEN * math.sqrt(num_tokens))
    steps = min(config.train.steps, _MEASURED_STEPS)
    return int(_BYTES_PER_ROOT_TOKEN * math.sqrt(num_tokens) * math.log1p(steps))


def _activations(
    config: TrainConfig, batch: BatchSize, hidden_size: int, num_features: int, device: torch.device
) -> int:
    """Bytes that the forward keeps for the backward, besides the weights."""
    drafter = config.drafter
    c = 2 if config.train.compute_dtype == "bfloat16" else _FLOAT
    context, slots = batch.num_tokens, batch.num_anchors * drafter.block_size
    queries, keys = drafter.num_heads * drafter.head_dim, drafter.num_kv_heads * drafter.head_dim
    layer = (
        slots * hidden_size * 4  # two norms: what they read and what they give
        + slots * (queries + 2 * keys)  # projected
        + slots * queries * 2  # turned, and what attention gave
        + (context + slots) * keys * 3  # keys and values side by side, keys turned
        + slots * drafter.intermediate_size * 4  # gate, its silu, up, their product
    )
    fusion = context * (num_features + 2 * hidden_size)
    ends = slots * hidden_size * 3  # embeddings, last norm, gradient of the loss
    angles = (context + slots) * drafter.head_dim * 2
    mask = 0  # as blocks
    if device.type == "cpu":  # as bool tiles: each sees its documents, and itself
        tiles = -(-slots // TILE_QUERIES)
        seen = slots + min(tiles * context, context + tiles * batch.longest // 2)
        mask = seen * TILE_QUERIES
    kept = c * (drafter.num_layers * layer + fusion + ends + angles) + mask
    if device.type != "cpu":  # its norm keeps a copy in float32 of what it reads
        normed = slots * (2 * hidden_size + queries) + (context + slots) * keys
        kept += (_FLOAT - c) * (
            drafter.num_layers * normed + context * hidden_size + slots * hidden_size
        )
    return kept


def memory_of(device: torch.device) -> int:
    """Bytes that `device` has in all, or that a container or job may have of it."""
    if device.type == "cuda":
        total: int = torch.cuda.get_device_properties(device).total_memory
        return total
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *(group.limit for group in allowances())])


def require_memory(footprint: Footprint, device: torch.device) -> None:
    """Refuse a run that cannot be held, before its first step.

    Raises:
        ConfigError: the estimate exceeds the device's memory; says by what, and what lowers it.
    """
    needed, memory = footprint.on(device), memory_of(device)
    if needed > memory:
        raise ConfigError(
            f"training needs about {size(needed)} ({footprint}), {device} has "
            f"{size(memory)} in all. Lower anchors.per_forward or sampler.tokens_per_batch "
            "(activations), loss.anchors_per_chunk (logits), or the drafter's sizes (weights, "
            "moments, gradients)."
        )


@contextmanager
def memory_errors(where: str, advice: str) -> Iterator[None]:
    """Raise RunError, with the place and what to do, where a GPU's memory is full."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        reason = str(error).splitlines()[0][:200]
        raise RunError(f"{where}: the GPU's memory is full ({reason}). {advice}") from error


class Meter:
    """The peak of a run in the memory of its device, above what was in use when it began.

    Attributes:
        peak: bytes, as of the last `read`; None where the system does not tell.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.peak: int | None = None
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self._begin: int | None = 0
        else:
            self._begin = _resident("VmRSS")

    def read(self) -> int | None:
        """The peak so far."""
        if self._device.type == "cuda":
            self.peak = torch.cuda.max_memory_allocated(self._device)
        elif (highest := _resident("VmHWM")) is not None and self._begin is not None:
            # Linux sums what each core counts now and then (proc(5): "inaccurate"): the highest
            # can come out some pages below what was in use before.
            self.peak = max(self.peak or 0, highest - self._begin)
        return self.peak


def _resident(name: str) -> int | None:
    """A figure of /proc/self/status in bytes. Not `getrusage`, which remembers the parent's."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    found = [line.split() for line in lines if line.startswith(f"{name}:")]
    return int(found[0][1]) * 1024 if found else None
