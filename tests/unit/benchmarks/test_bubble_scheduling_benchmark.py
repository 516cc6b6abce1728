"""The benchmark of bubble scheduling: fitted efficiency, rows, memory, optimum."""

import importlib
from pathlib import Path

import pytest


@pytest.fixture
def benchmark(monkeypatch):
    """Import the module from benchmarks/, which is not a package."""
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "benchmarks")
    return importlib.import_module("bubble_scheduling")


def test_fitted_efficiency_reproduces_published_baseline(benchmark):
    speed = benchmark.fitted(2)
    assert benchmark.balanced_s(benchmark.strong_scaling(1536), speed) == pytest.approx(
        10.43, abs=0.005
    )
    assert 0.2 < speed.efficiency < 0.6


def test_fine_granularity_beats_coarse_and_baselines(benchmark):
    rows = {row.metric: row for row in benchmark.strong_rows(benchmark.Speed(0.36, 2), 3072)}
    chosen = {name: row.ours for name, row in rows.items() if "(chosen)" in name}
    steps = {name.split(",")[1]: s for name, s in chosen.items() if name.startswith("step")}
    assert set(steps) == {" coarse", " fine"}
    assert steps[" fine"] < steps[" coarse"] < rows["step, balanced"].ours
    assert rows["step, balanced"].ours < rows["step, Megatron-LM"].ours
    assert rows["fine < coarse < balanced < Megatron-LM"].ours == 1
    efficiencies = [row for name, row in rows.items() if name.startswith("bubble efficiency")]
    assert len(efficiencies) == 8 and all(
        -1 < r.ours <= 1 and r.paper is not None for r in efficiencies
    )


def test_encoder_copies_use_memory_within_bound(benchmark):
    (chosen, *remaining) = benchmark.filled(benchmark.WEAK_SCALING[2], benchmark.Speed(0.36, 1))
    assert chosen.planned <= 0.12 and chosen.activations > 0
    plans = sorted([chosen, *remaining], key=lambda f: f.plan.encoders[0].sizes.pipeline)
    overheads = [f.planned for f in plans]
    assert overheads == sorted(overheads, reverse=True) and len(plans) == 4


def test_memory_includes_activations_and_marks_oversized_plans(benchmark):
    """Check encoders of 22B and 5B or 11B parameters, for which some plans exceed the memory."""
    speed = benchmark.fitted(benchmark.FITTED)
    large = {m.name: m for m in benchmark.TWO_ENCODERS if "22B" in m.name}
    assert len(large) == 2
    for model in large.values():
        plans = benchmark.filled(model, speed)
        for actual in plans:
            worst = actual.plan.worst_bytes
            assert max(worst, actual.activations) < actual.memory <= worst + actual.activations
            assert actual.fits == ("does not fit" not in actual.name) == (actual.memory <= 80e9)
        fits = [bool(actual.fits) for actual in plans]
        assert fits[0] and not fits[-1] and fits == sorted(fits, reverse=True)
    metrics = [row.metric for row in benchmark.two_encoder_rows(speed)]
    assert sum(m.startswith("memory with encoder activations") for m in metrics) == 3
    assert not any("does not fit" in metric for metric in metrics)
    rows = benchmark.weak_rows(speed)
    overheads = [row for row in rows if row.metric.startswith("memory overhead, ")]
    assert {row.met for row in overheads} == {True, False}, "some overheads must miss the goal"


def test_two_encoders_have_separate_plans(benchmark):
    rows = benchmark.two_encoder_rows(benchmark.Speed(0.36, 1))
    steps = [row for row in rows if row.metric.startswith("step")]
    assert len(steps) == 3 and all(" + " in row.metric for row in steps)
    assert all(row.ours > 1 for row in rows if row.metric.startswith("speedup"))


def test_bubble_optimum_is_lower_bound(benchmark):
    for seed in range(3):
        for is_uniform in (True, False):
            assert 1 - 1e-9 <= benchmark.optimum_ratio(seed, is_uniform, "fine") <= 1.01
