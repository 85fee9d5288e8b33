"""Telling that memory ran out from everything else that torch raises."""

import torch

_SIGNS = (
    "not enough memory",
    "DefaultCPUAllocator",
    "out of memory",
    "can't allocate memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a smaller batch may help against `error`."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)
