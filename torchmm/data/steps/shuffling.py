"""Shuffling without a list: a permutation whose entries are computed one by one.

`permuted` is a Feistel network: the bits of a position are cut into two halves, and each in turn is
changed by a hash of the other one, which can be undone and therefore gives every number once. The
network permutes a power of two; a result that is not below `count` goes in again until one is
("cycle walking"), on average fewer than two times. So any place of a shuffled order is known
without the others: nothing is stored, and every process can begin anywhere.

Rejected: sorting by a hash, which takes 24 bytes and 0.2 us per sample and epoch on every rank;
numpy's generator, whose streams may change between releases. Kernels are compiled with numba and
cached on disk, like those of `torchmm.balance`, whose rules for cached kernels hold here too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

Int64s = NDArray[np.int64]
ROUNDS = 8
_MASK = (1 << 64) - 1
_njit: Any = njit  # takes options that its annotations do not have


def compiled(function: Callable[..., Any]) -> Any:
    """Decorator; where numba finds no directory to write to, every process compiles anew."""
    try:
        return _njit(cache=True, nogil=True)(function)
    except RuntimeError:
        return _njit(nogil=True)(function)


def mixed(*parts: int) -> int:
    """A hash of numbers: 64 bits (splitmix64, Steele et al. 2014, of one after the other)."""
    state = 0
    for part in parts:
        state = (state ^ (part & _MASK)) + 0x9E3779B97F4A7C15 & _MASK
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state


def permuted(positions_N: Int64s, count: int, key: int) -> Int64s:
    """Where a permutation of `count` things sends positions: int64.

    Args:
        positions_N: each below `count`.
        key: which permutation.
    """
    keys = [mixed(key, number) for number in range(ROUNDS)]
    return _feistel(np.ascontiguousarray(positions_N, np.int64), count, np.array(keys, np.uint64))


@compiled
def _feistel(positions_N: Int64s, count: int, keys_R: NDArray[np.uint64]) -> Int64s:
    bits = 2
    while (1 << bits) < count:
        bits += 1
    low = np.uint64(bits // 2)
    low_mask = (np.uint64(1) << low) - np.uint64(1)
    high_mask = (np.uint64(1) << np.uint64(bits - bits // 2)) - np.uint64(1)
    result_N = np.empty(len(positions_N), np.int64)
    limit = np.uint64(count)
    for i in range(len(positions_N)):
        place = np.uint64(positions_N[i])
        while True:
            left = place >> low
            right = place & low_mask
            for number in range(len(keys_R)):
                x = (right if number % 2 == 0 else left) + keys_R[number]
                x = (x ^ (x >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
                x = (x ^ (x >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
                x ^= x >> np.uint64(32)
                if number % 2 == 0:
                    left ^= x & high_mask
                else:
                    right ^= x & low_mask
            place = left << low | right
            if place < limit:
                break
        result_N[i] = np.int64(place)
    return result_N
