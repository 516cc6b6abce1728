"""PipeWeaver's figures in simulation: every technique adds to those before it."""

import importlib
from pathlib import Path

import pytest


@pytest.fixture
def benchmark(monkeypatch):
    """benchmarks/ is no package."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    return importlib.import_module("pipeweaver_figures")


def test_the_ladder_goes_down(benchmark):
    setting = benchmark.Setting(8)
    graph, chain = setting.separated(), setting.megatron()
    assert max(graph.sub_microbatches["vision"]) > max(chain.sub_microbatches["vision"]) == 1
    rows = benchmark.ablation_rows(setting, evaluations=40, fixed=False)
    steps = [row.ours for row in rows if row.metric == "step"]
    assert len(steps) == 5 and steps[2] >= steps[3] > steps[4]
    assert steps[0] > steps[2], "interleaved segments are faster than one chain"
    used = [row.ours for row in rows if row.metric == "memory of the limit"]
    assert max(used[:4]) < used[4] <= 1


def test_sizes_compare_the_best_with_the_worst_order(benchmark):
    rows = benchmark.size_rows(6, (4, 12), evaluations=20)
    by_metric = {}
    for row in rows:
        by_metric.setdefault(row.metric, []).append(row.ours)
    assert by_metric["against 12 images"][1] == 1
    assert all(share >= 0 for share in by_metric["worst order longer by"])
    assert len(rows) == 6
