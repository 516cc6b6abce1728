"""The DistTrain benchmark: a small case has all rows, and the optimum is the fastest."""

import importlib
from pathlib import Path

import pytest


@pytest.fixture
def figures(monkeypatch):
    """Import the module from benchmarks/, which is not a package."""
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "benchmarks")
    results = importlib.import_module("disttrain_figures")
    monkeypatch.setattr(results, "SMALL", (24, {"9b": 16}))
    monkeypatch.setattr(results, "EFFORT", {24: 12_000})
    return results


def test_optimum_beats_baselines_on_small_cluster(figures):
    rows = figures.orchestration_rows(["9b"])
    assert [row.paper for row in rows if row.unit == "x"] == [1.3, 2.7, 1.4, 2.7]
    for row in rows:
        assert row.kind == "simulated" and row.ours >= 0
        if row.unit == "s":
            assert row.ours <= row.baseline
        elif row.unit == "GiB":
            assert "torchmm fits, baseline" in row.metric
    actual = figures.ours(figures.Case("9b", 24, 16))
    assert actual.fits and actual.mfu < 1


def test_reordering_and_frozen_modules_have_rows(figures):
    rows = figures.reordering_rows(["9b"])
    assert len(rows) == 3 + 2 and rows[2].metric == "throughput, both over random order"
    case = figures.Case("9b", 24, 16)
    assert figures.ours(case).seconds <= figures.ours(case, "none").seconds
    figures.FROZEN = {"LLM": ("vision", "generator")}
    steps = [row for row in figures.frozen_rows(["9b"]) if row.unit == "s"]
    assert len(steps) == 1
    assert steps[0].ours < steps[0].baseline
