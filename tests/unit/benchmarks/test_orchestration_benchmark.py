"""The benchmark of parallelism search: brute force agrees, and sizes are those of the paper."""

import importlib
from pathlib import Path

import pytest


@pytest.fixture
def benchmark(monkeypatch):
    """Import the module from benchmarks/, which is not a package."""
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "benchmarks")
    return importlib.import_module("orchestration")


def test_brute_force_confirms_search_on_small_cluster(benchmark):
    row = benchmark.brute_force_row([4])
    assert row.met and row.ours < 1e-9


def test_search_is_timed_at_published_sizes(benchmark):
    rows = [row for row in benchmark.time_rows(repetitions=1) if row.metric == "search"]
    assert [row.paper for row in rows] == [922, 641, 441, 133]
    assert all(row.ours > 0 and row.goal == 5 for row in rows)
    assert rows[0].case == "MLLM-72B, 1296 devices, batch 1920"
