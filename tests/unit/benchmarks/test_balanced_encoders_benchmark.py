"""The benchmark of balanced encoders: its image counts and its planning rows."""

import importlib

import pytest


@pytest.fixture(scope="module")
def benchmark():
    return importlib.import_module("balanced_encoders")


def test_image_counts_vary_within_limits(benchmark):
    counts = benchmark.image_counts(2, 3, 4)
    assert counts.shape == (2, 3, 4)
    assert 0 <= counts.min() < counts.max() <= 48 // benchmark.SHORTEN


def test_planning_rows_show_even_work(benchmark):
    rows = {row.metric: row for row in benchmark.host_rows(1)}
    work = rows["work of the slowest rank / mean"]
    assert 1 <= work.ours < 1.34 < work.baseline
    assert rows["assignment of a microbatch"].ours > 0
    assert rows["assignment of a step, in the foreground"].ours < 5
