"""Tests of numba functions: compilation without a cache, bit counts, random numbers."""

import numpy as np
import pytest

from torchmm.balance.numba_utils import (
    acceptance_threshold,
    cached_njit,
    cooling_factor,
    internal_njit,
    next_random,
    norefcount_njit,
    random_index,
    trailing_zeros,
)
from torchmm.balance.simulation.graph_kernels import time_nodes

SOURCE = """
def total(values):
    result = 0
    for value in values:
        result += value
    return result
"""


@pytest.mark.parametrize("decorator", [cached_njit, norefcount_njit])
def test_functions_without_file_are_not_cached(decorator):
    names: dict = {}
    exec(SOURCE, names)
    total = decorator(names["total"])
    assert total(np.arange(5)) == 10
    assert not total.stats.cache_path


def test_functions_of_files_are_cached():
    assert time_nodes.stats.cache_path


def test_trailing_zeros_finds_lowest_bit():
    @internal_njit
    def count(word):
        return trailing_zeros(word)

    @cached_njit
    def lowest(words):
        return [count(word) for word in words]

    for bit in range(64):
        words = np.array([1 << bit, (1 << 63) | (1 << bit)], np.uint64)
        assert list(lowest(words)) == [bit, bit]


def test_random_numbers_are_platform_independent():
    """Check the values, because cached kernels do not notice changes of these functions."""
    state, numbers = np.uint64(1), []
    for _ in range(3):
        state = np.uint64(next_random(state))
        numbers.append(int(state))
    assert numbers == [1082269761, 1152992998833853505, 11177516664432764457]
    assert [random_index(np.uint64(bits), 10) for bits in (0, 0x7FFF, 0xFFFF)] == [0, 4, 9]
    assert acceptance_threshold(np.uint64((1 << 64) - 1), 5.0) == 0
    assert acceptance_threshold(np.uint64(1 << 63), 2.0) == 23258158 / 2**24
    assert cooling_factor(100) == 16133559 / 2**24
