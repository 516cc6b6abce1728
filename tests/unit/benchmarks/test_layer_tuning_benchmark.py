"""The benchmark of per-layer recomputation: plans that fit, within the limit, at stated sizes."""

import importlib
from pathlib import Path

import pytest


@pytest.fixture
def benchmark(monkeypatch):
    """Import the module from benchmarks/, which is not a package."""
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "benchmarks")
    return importlib.import_module("layer_tuning")


def test_rows_compare_steps_that_fit(benchmark):
    step = benchmark.Step("vlm_s", 6)
    solving = benchmark.solving_rows(step, "vlm_s", repetitions=1)
    assert len(solving) == 3 * len(benchmark.SHARES)
    assert all(row.ours > 0 for row in solving if row.unit == "ms")
    assert all(row.ours <= 0.3 for row in solving if row.metric == "proven gap")
    highs = {row.metric: row for row in benchmark.highs_rows(step, "vlm_s", limit_s=10)}
    assert highs["time added"].ours <= 1.2 * highs["time added"].baseline
    rows = benchmark.gain_rows(step, "vlm_s", (0.01, 0.5, 0.95))
    cases = {row.case for row in rows}
    assert len(cases) == 2, "an impossible limit is skipped"
    for row in rows:
        if row.metric.startswith("speedup"):
            assert row.ours >= 1
        elif row.metric == "memory / limit":
            assert row.ours <= 1
    assert any(row.paper for row in rows)
    rows = {row.metric: row for row in benchmark.offload_rows(step, "vlm_s")}
    copying = [row for metric, row in rows.items() if metric.endswith("recomputation, offloading")]
    assert len(copying) == 2 and all(0 < row.ours < row.baseline for row in copying)
    minimum = rows["minimum memory, without offloading"]
    assert minimum.ours < minimum.baseline
