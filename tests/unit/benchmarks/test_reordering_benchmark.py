"""The benchmark of reordering: equal counts, distance to bounds, and compared rows."""

import importlib
from pathlib import Path

import pytest


@pytest.fixture
def benchmark(monkeypatch):
    """Import the module from benchmarks/, which is not a package."""
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "benchmarks")
    return importlib.import_module("reordering")


def test_groups_are_balanced_in_all_cases(benchmark):
    rows = benchmark.groups_rows(repetitions=1)
    assert len(rows) == 3 * 3 * 3
    for row in rows:
        if row.metric == "largest load / bound":
            assert 1 - 1e-12 <= row.ours <= row.goal and row.ours <= row.baseline
        elif row.metric == "different group sizes":
            assert row.ours == 1
        else:
            assert row.metric == "time" and row.ours > 0 and row.paper


def test_orders_are_compared_with_best_known_order(benchmark, monkeypatch):
    monkeypatch.setattr(benchmark, "BATCH", 240)
    monkeypatch.setattr(benchmark, "RANKS", 4)
    rows = benchmark.orders_rows("images", 30, generator=True, per_rank=1, repetitions=1)
    by_metric = {row.metric: row for row in rows}
    assert 0 <= by_metric["above best known"].ours <= by_metric["above best known"].baseline
    assert by_metric["speedup of the slowest group"].ours >= 1
    assert by_metric["time"].ours > by_metric["Algorithm 3, time"].ours > 0
    assert "30 x 8" in rows[0].case


def test_brute_force_is_lower_bound(benchmark):
    rows = benchmark.brute_force_rows(cases=2)
    assert len(rows) == 4
    assert all(row.ours >= 0 for row in rows)
    assert all(row.met for row in rows if row.goal is not None)


def test_synchronized_ranks_gain_from_slices(benchmark):
    rows = benchmark.reorder_slices.step_rows(benchmark.reorder_slices.CASES[1], 1)
    assert [row.met for row in rows] == [True, True, True, None]
    assert 1 <= rows[-1].ours < rows[-1].baseline
