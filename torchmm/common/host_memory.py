"""Memory of processes that compute on a CPU.

glibc gives large freed blocks back to the system, and the next step's activations come as fresh
pages, which the kernel has to find and clear: a tenth of a step's time for a SigLIP tower with
256 patches per image. Devices have a caching allocator for that; here malloc is told to keep what
is freed. The price is that a process stays as large as it once was.

Rejected: MALLOC_ variables of the environment, which must be set before a process starts, by
whoever starts it.
"""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_NEVER, _LARGEST = -1, 1 << 30


def keep_freed_memory() -> bool:
    """Makes malloc keep freed blocks of up to 1 GiB for later ones; whether it does so.

    Only glibc can (Linux); elsewhere nothing happens.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGEST)) and bool(mallopt(_M_TRIM_THRESHOLD, _NEVER))
