"""Data parallelism: the processes that train one run together, as torchrun starts them.

Every rank holds the whole drafter and takes its share of the micro-batches of each optimizer
step; gradients and figures are summed before the step, so that all ranks apply the same one.
Alone, nothing here does anything.
"""

import importlib
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from shared.errors import ConfigError, RunError
from trainer.session import pick_device, require_gpu

T = TypeVar("T")

_TIMEOUT = timedelta(hours=12)
"""The other ranks wait while the first one evaluates. That one is gone, they learn at once."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among those that train together."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    """Number on this machine: its GPU."""

    @property
    def is_main(self) -> bool:
        """Whether this one writes: metrics, evaluations, checkpoints, lines."""
        return self.rank == 0

    def sum_(self, tensors: Iterable[Tensor]) -> None:
        """Replace each tensor, in place, by its sum over the ranks.

        Raises:
            RunError: another rank is gone.
        """
        if self.size == 1:
            return
        with self._together():
            pending = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
            for each in pending:
                each.wait()

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, by rank. Raises RunError, as `sum_`."""
        if self.size == 1:
            return [value]
        values: list[T | None] = [None] * self.size
        with self._together():
            dist.all_gather_object(values, value)
        return values  # type: ignore[return-value]

    def require_equal(self, what: str, value: object) -> None:
        """Refuse ranks that do not start from the same.

        Raises:
            RunError: naming what differs.
        """
        values = self.gather(value)
        if any(other != values[0] for other in values):
            raise RunError(
                f"the ranks do not agree on {what}: {values}. All need the same configuration, "
                "cache and run directory."
            )

    def require_shares(self, num_batches: int) -> None:
        """Refuse micro-batches of a step that the ranks cannot share equally.

        Raises:
            ConfigError: saying of how many they must be a multiple.
        """
        if num_batches % self.size:
            raise ConfigError(
                f"train.batches_per_step: {num_batches} micro-batches of a step, over all ranks, "
                f"do not make equal shares for {self.size}. Set it to a multiple of {self.size}."
            )

    @contextmanager
    def _together(self) -> Iterator[None]:
        try:
            yield
        except torch.OutOfMemoryError:
            raise  # this rank's own fault
        except RuntimeError as error:
            reason = str(error).splitlines()[0][:200]
            raise RunError(
                f"rank {self.rank} of {self.size}: another rank is gone ({reason}). Look at what "
                "it said; the same command goes on from the newest checkpoint."
            ) from error


ALONE = Ranks()


@contextmanager
def join(device: str) -> Iterator[Ranks]:
    """The ranks that torchrun started, or this process alone.

    Args:
        device: as `train.device` has it.

    Raises:
        ConfigError: it is not there; there are more ranks on this machine than GPUs, or it names
            one GPU for several of them.
    """
    picked = pick_device(device)
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1 or not dist.is_torchelastic_launched():
        yield ALONE
        return
    local_rank = int(os.environ["LOCAL_RANK"])
    if picked.type == "cuda":
        torch.cuda.set_device(_gpu_of(device, local_rank, size))
    # Default arguments in this module hold the group that there is when it is first imported, as
    # building an optimizer does. Held, the group is not destroyed below, and its threads may abort
    # the process at its end.
    importlib.import_module("torch.distributed.nn.functional")
    # What is gathered goes through the CPU: whoever waits there notices at once that one is gone.
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if picked.type == "cuda" else "gloo", timeout=_TIMEOUT
    )
    yield Ranks(dist.get_rank(), size, local_rank)
    dist.destroy_process_group()  # after an error the others may be gone: the process ends anyway


def _gpu_of(device: str, local_rank: int, size: int) -> int:
    """Number of the GPU of one rank: its own, or for the only rank of a machine the one named."""
    if device == "auto" or torch.device(device).index is None:
        require_gpu(local_rank, f"torchrun --nproc-per-node, rank {local_rank} of this machine")
        return local_rank
    if (local_size := int(os.environ.get("LOCAL_WORLD_SIZE", size))) > 1:
        raise ConfigError(
            f"train.device {device!r}: all {local_size} ranks of this machine would take that one "
            "GPU. Set it to cuda or auto: each rank then takes its own."
        )
    return torch.device(device).index
