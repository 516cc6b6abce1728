"""Numba options, array types and shared kernels of compiled loops.

Kernels are cached on disk. Numba does not detect changes of functions in other files that a cached
kernel calls. Kernels therefore call only functions of their file, the functions at the end of this
file, and `simulation.graph_kernels.time_lanes`. These functions never change. A changed function
gets a new name, so that the files of its callers change too.

Argument types are cached by name and found by the name and line of a function. If a tuple type of
kernel arguments is renamed, move the functions that use it by a line.

`norefcount_njit` is for functions that take tuples of arrays and allocate no memory. Numba
atomically counts references to all arrays of a tuple at each use. In loops of a few nanoseconds,
this dominates the time. `_nrt` disables it. Passing arrays one by one is nearly as slow unless all
code is in one function.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core.caching import IndexDataCacheFile
from numba.extending import intrinsic
from numpy.typing import NDArray

Float64s = NDArray[np.float64]
Int64s = NDArray[np.int64]
Int32s = NDArray[np.int32]
Uint32s = NDArray[np.uint32]
Uint64s = NDArray[np.uint64]
Index = int | np.int64

_njit: Any = njit  # takes options that its annotations do not have


class KernelFiles(IndexDataCacheFile):
    """Cached machine code of a function, which several processes can write at the same time.

    Numba numbers the files of a function. Processes that compile different signatures choose the
    same number, and a process can read the file of an old source, because the index is written
    first. It then runs code of other argument types. Here, the number is a digest of source stamp
    and signature, and the index is written last.
    """

    def save(self, key: Any, data: Any) -> None:
        """Write the code of a signature, then its index entry."""
        digest = hashlib.sha256(repr((self._source_stamp, key)).encode()).digest()
        name = self._data_name(int.from_bytes(digest[:8]))
        self._save_data(name, data)
        self._save_index({**self._load_index(), key: name})


def _cached(**options: Any) -> Any:
    """Return a caching decorator. Without a writable directory, every process compiles again."""

    def decorate(function: Callable[..., Any]) -> Any:
        try:
            kernel = _njit(cache=True, **options)(function)
        except RuntimeError:
            return _njit(**options)(function)
        kernel._cache._cache_file.__class__ = KernelFiles  # numba has no option for it
        return kernel

    return decorate


cached_njit: Any = _cached()
nogil_njit: Any = _cached(nogil=True)
"""Decorator for kernels that run without the GIL, so that threads run them concurrently."""
norefcount_njit: Any = _cached(_nrt=False)
nonan_njit: Any = _cached(fastmath={"nnan", "nsz"})
"""Decorator for kernels on times. Without NaNs and signed zeros, a maximum is one vector
instruction."""
internal_njit: Any = _njit(_nrt=False, no_cpython_wrapper=True, no_cfunc_wrapper=True)
"""Decorator for functions that only compiled functions call. Halves the compilation time."""


def _count_trailing_zeros(typing_context: Any, word: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.uint64(types.uint64), generate


trailing_zeros: Any = intrinsic(_count_trailing_zeros)
"""Index of the lowest set bit of a uint64, which must not be 0."""

ROUNDING_STEPS = 16777216.0
"""Logarithms and powers are truncated to multiples of 1 / COARSE. Their last bits differ between
processors, and all ranks must compute equal results."""


@cached_njit
def next_random(state: np.uint64) -> np.uint64:
    """Return the next state of the xorshift generator of Marsaglia, equal on all machines."""
    state ^= state << np.uint64(13)
    state ^= state >> np.uint64(7)
    return state ^ (state << np.uint64(17))


@cached_njit
def random_index(bits: np.uint64, count: int) -> np.int64:
    """Return an index below `count` from the lowest 16 bits."""
    return np.int64((bits & np.uint64(0xFFFF)) * np.uint64(count) >> np.uint64(16))


@nonan_njit
def acceptance_threshold(bits: np.uint64, temperature: float) -> float:
    """Return the cost increase below which annealing accepts a change, from the highest 32 bits.

    An increase is accepted with probability exp(-rise / temperature).
    """
    chance = (float(bits >> np.uint64(32)) + 1.0) / 4294967296.0
    return temperature * np.floor(-np.log(chance) * ROUNDING_STEPS) / ROUNDING_STEPS


@nonan_njit
def cooling_factor(steps: int) -> float:
    """Return the temperature factor per step. The product over all steps is 1/50."""
    return np.floor(0.02 ** (1.0 / max(steps, 1)) * ROUNDING_STEPS) / ROUNDING_STEPS
