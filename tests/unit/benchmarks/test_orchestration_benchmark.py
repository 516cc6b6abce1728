"""The benchmark of orchestration: brute force agrees, sizes are the paper's."""

import importlib
from pathlib import Path

import pytest


@pytest.fixture
def benchmark(monkeypatch):
    """benchmarks/ is no package."""
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "benchmarks")
    return importlib.import_module("orchestration")


def test_all_plans_of_a_small_cluster_are_tried(benchmark):
    row = benchmark.brute_force_row([4])
    assert row.met and row.ours < 1e-9


def test_the_search_is_timed_at_the_papers_sizes(benchmark):
    rows = [row for row in benchmark.time_rows(repetitions=1) if row.metric == "search"]
    assert [row.paper for row in rows] == [922, 641, 441, 133]
    assert all(row.ours > 0 and row.goal == 5 for row in rows)
    assert rows[0].case == "MLLM-72B, 1296 devices, batch 1920"
