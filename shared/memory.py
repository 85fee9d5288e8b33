"""Memory of the process: keep what is freed instead of handing it back and asking again."""

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
_KEEP_BYTES = 2**31 - 1


def keep_freed_memory() -> bool:
    """Tell glibc to reuse large blocks; False where the C library has no such switch.

    By default each tensor over 32 MiB is mapped anew and its pages are faulted in one by one,
    which on a CPU costs more than what is computed in them: the loss over a vocabulary of 49,152
    takes 1.2 s without and 0.7 s with this. Up to 2 GiB of free memory stay with the process.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return False
    return bool(mallopt(_M_MMAP_MAX, 0)) and bool(mallopt(_M_TRIM_THRESHOLD, _KEEP_BYTES))
