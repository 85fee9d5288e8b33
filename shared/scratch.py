"""Memory that a thread uses again for each chunk, instead of having new pages faulted in."""

import threading
from typing import Any

import numpy as np
import numpy.typing as npt


class Scratch(threading.local):
    """One buffer per thread, as large as the largest array it was asked for."""

    def __init__(self) -> None:
        self._buffer = np.empty(0, np.uint8)

    def array(self, shape: tuple[int, ...], dtype: npt.DTypeLike = np.uint8) -> npt.NDArray[Any]:
        """An array of any content, the caller's until the same thread asks again."""
        kind = np.dtype(dtype)
        size = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
        if size > len(self._buffer):
            self._buffer = np.empty(size, np.uint8)
        return self._buffer[:size].view(kind).reshape(shape)
