"""The benchmark of bubble filling: its fit, its rows, its optimum."""

import importlib
from pathlib import Path

import pytest


@pytest.fixture
def benchmark(monkeypatch):
    """benchmarks/ is no package."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    return importlib.import_module("bubble_filling")


def test_the_fitted_efficiency_gives_the_baseline_its_published_time(benchmark):
    speed = benchmark.fitted(2)
    assert benchmark.Llm(32).balanced_s(speed) == pytest.approx(10.43, abs=0.005)
    assert 0.2 < speed.efficiency < 0.6


def test_fine_hides_more_than_coarse_and_both_beat_the_baseline(benchmark):
    rows = {row.metric: row for row in benchmark.efficiency_rows(benchmark.Speed(0.36, 2), 3072)}
    assert len(rows) in (5, 7, 9)
    steps = {name: row.ours for name, row in rows.items() if name.startswith("step")}
    fine = min(s for name, s in steps.items() if "fine" in name)
    coarse = min(s for name, s in steps.items() if "coarse" in name)
    assert fine < coarse < steps["step, balanced"]
    shares = [row for name, row in rows.items() if name.startswith("Eff")]
    assert all(-1 < row.ours <= 1 and row.paper is not None for row in shares)


def test_the_optimum_is_a_bound(benchmark):
    for seed in range(3):
        for alike in (True, False):
            assert 1 - 1e-9 <= benchmark.optimum_ratio(seed, alike, "fine") <= 1.01
