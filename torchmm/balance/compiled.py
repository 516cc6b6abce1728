"""How loops are compiled: numba's options, types of arrays, and what kernels of all files call.

Kernels are cached on disk. Numba does not notice when something changes in another file that a
cached kernel calls, so none calls functions of another file, except for those at the end of this
file and `simulation.graph_kernels.time_lanes`. These never change: a function that is to do
something else gets another name, and with it its callers' files change.

Types of arguments are cached by name, and found again by a function's name and line: where a tuple
that kernels take gets another name, move the functions that take it by a line.

`loop` is for functions that take tuples of arrays and allocate nothing. Numba counts references to
all arrays of a tuple wherever it is used, atomically; in loops of a few nanoseconds that takes
more time than all else. `_nrt` turns it off. Rejected: passing the arrays one by one, which is
nearly as slow unless all is written out in one function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic
from numpy.typing import NDArray

Float64s = NDArray[np.float64]
Int64s = NDArray[np.int64]
Int32s = NDArray[np.int32]
Uint32s = NDArray[np.uint32]
Words = NDArray[np.uint64]
Index = int | np.int64

_njit: Any = njit  # takes options that its annotations do not have


def _cached(**options: Any) -> Any:
    """Decorator; where numba finds no directory to write to, every process compiles anew."""

    def decorate(function: Callable[..., Any]) -> Any:
        try:
            return _njit(cache=True, **options)(function)
        except RuntimeError:
            return _njit(**options)(function)

    return decorate


compiled: Any = _cached()
unlocked: Any = _cached(nogil=True)
"""Threads that call it run at the same time."""
loop: Any = _cached(_nrt=False)
without_nans: Any = _cached(fastmath={"nnan", "nsz"})
"""For times: with no NaNs, and -0 the same as 0, a maximum is one vector instruction."""
inner: Any = _njit(_nrt=False, no_cpython_wrapper=True, no_cfunc_wrapper=True)
"""For functions that only compiled ones call: half the time to compile."""


def _count(typing_context: Any, word: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.uint64(types.uint64), generate


trailing_zeros: Any = intrinsic(_count)
"""Index of the lowest bit that is set in a uint64, which must not be 0."""

COARSE = 16777216.0
"""Logarithms and powers are cut to multiples of its inverse: their last bits differ by processor,
and all ranks have to anneal alike."""


@compiled
def next_random(state: np.uint64) -> np.uint64:
    """Marsaglia's xorshift: random bits that are the same on every machine."""
    state ^= state << np.uint64(13)
    state ^= state >> np.uint64(7)
    return state ^ (state << np.uint64(17))


@compiled
def random_index(bits: np.uint64, count: int) -> np.int64:
    """An index below `count`, from the lowest 16 bits."""
    return np.int64((bits & np.uint64(0xFFFF)) * np.uint64(count) >> np.uint64(16))


@without_nans
def acceptable_rise(bits: np.uint64, heat: float) -> float:
    """The rise in cost below which annealing accepts a change, from the highest 32 bits.

    A rise is accepted with a probability of exp(-rise / heat).
    """
    chance = (float(bits >> np.uint64(32)) + 1.0) / 4294967296.0
    return heat * np.floor(-np.log(chance) * COARSE) / COARSE


@without_nans
def cooling_factor(steps: int) -> float:
    """What the heat is multiplied by in every step, to fall to a fiftieth in all of them."""
    return np.floor(0.02 ** (1.0 / max(steps, 1)) * COARSE) / COARSE
