"""The comparison with published runs: factors, ratios and the quick rows."""

import importlib
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("published_runs")


def test_factor_is_geometric_mean_per_stack(benchmark) -> None:
    speeds = {"8b": 2.0, "8b compile": 0.5, "a100 8b": 4.0}
    results = {
        name: benchmark.Result(benchmark.RUNS[name].tokens_per_s * speed, 0.0)
        for name, speed in speeds.items()
    }
    actual = benchmark.factors(results)
    assert actual == pytest.approx({"torchtitan, H100": 1.0, "torchtitan, A100": 0.25})
    [factor, *_] = benchmark.speed_rows(results)
    assert factor.case == "torchtitan, H100"
    [ratio] = benchmark.ratio_rows(results)
    assert ratio.ours / ratio.paper == pytest.approx(0.25)  # independent of the factor


def test_quick_rows_reach_goals(benchmark) -> None:
    results = {name: benchmark.simulate(benchmark.RUNS[name]) for name in benchmark.QUICK}
    speeds = [row for row in benchmark.speed_rows(results) if row.paper is not None]
    assert len(speeds) == len(benchmark.QUICK)
    assert all(abs(benchmark.error(row)) < 0.1 for row in speeds)
    assert all(abs(benchmark.error(row)) < 0.04 for row in benchmark.ratio_rows(results))


def test_slow_network_fails_published_scaling(benchmark, monkeypatch) -> None:
    support = importlib.import_module("support.papers.training_runs")
    profile = support.load_profile("h100_grand_teton")
    # One network card per group instead of per rank, as in a model without groups.
    slow = replace(profile, device=replace(profile.device, network_bytes_per_s=50e9 / 8))
    monkeypatch.setattr(support, "load_profile", lambda _: slow)
    results = {name: benchmark.simulate(benchmark.RUNS[name]) for name in ("8b", "8b 128")}
    [ratio] = benchmark.ratio_rows(results)
    assert benchmark.error(ratio) < -0.03
