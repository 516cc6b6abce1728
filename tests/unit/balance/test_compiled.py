"""Compiled loops run where nothing can be cached, and count bits."""

import numpy as np
import pytest

from torchmm.balance.compiled import compiled, inner, loop, trailing_zeros
from torchmm.balance.simulation.graph_kernels import time_nodes

SOURCE = """
def total(values):
    result = 0
    for value in values:
        result += value
    return result
"""


@pytest.mark.parametrize("decorator", [compiled, loop])
def test_a_function_of_no_file_is_compiled_without_a_cache(decorator):
    names: dict = {}
    exec(SOURCE, names)
    total = decorator(names["total"])
    assert total(np.arange(5)) == 10
    assert not total.stats.cache_path


def test_functions_of_files_are_cached():
    assert time_nodes.stats.cache_path


def test_the_lowest_bit_is_found():
    @inner
    def count(word):
        return trailing_zeros(word)

    @compiled
    def lowest(words):
        return [count(word) for word in words]

    for bit in range(64):
        words = np.array([1 << bit, (1 << 63) | (1 << bit)], np.uint64)
        assert list(lowest(words)) == [bit, bit]
