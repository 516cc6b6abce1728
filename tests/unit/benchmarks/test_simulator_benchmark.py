"""The simulator benchmark: steps of the stated size."""

import importlib
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("simulator")


def test_simulated_steps_have_stated_size(benchmark):
    for size in benchmark.SIZES:
        graph = benchmark.step_graph(size)
        costs = benchmark.step_costs(graph, 0.0)
        assert abs(len(costs.compute_ms) - size.tasks) <= benchmark.RANKS
        assert 0 in graph.sub_microbatches["vision"]


def test_small_step_writes_all_rows(benchmark):
    size = benchmark.Size("small", 1_200, 1, 1.0)
    rows = benchmark.dispatcher_rows(size, 1) + benchmark.plan_rows(size, 1)
    assert [row.metric.split(" of ")[0] for row in rows] == [
        "dispatcher",
        "dispatcher with transfers",
        "plan",
    ]
    assert all(row.case == "small: 1200 tasks" and row.ours > 0 for row in rows)
