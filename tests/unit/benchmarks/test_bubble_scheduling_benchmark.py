"""The benchmark of bubble scheduling: its fit, its rows, its memory, its optimum."""

import importlib
from pathlib import Path

import pytest


@pytest.fixture
def benchmark(monkeypatch):
    """benchmarks/ is no package."""
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "benchmarks")
    return importlib.import_module("bubble_scheduling")


def test_the_fitted_efficiency_gives_the_baseline_its_published_time(benchmark):
    speed = benchmark.fitted(2)
    assert benchmark.balanced_s(benchmark.strong_scaling(1536), speed) == pytest.approx(
        10.43, abs=0.005
    )
    assert 0.2 < speed.efficiency < 0.6


def test_fine_hides_more_than_coarse_and_both_beat_the_baselines(benchmark):
    rows = {row.metric: row for row in benchmark.strong_rows(benchmark.Speed(0.36, 2), 3072)}
    chosen = {name: row.ours for name, row in rows.items() if "(chosen)" in name}
    steps = {name.split(",")[1]: s for name, s in chosen.items() if name.startswith("step")}
    assert set(steps) == {" coarse", " fine"}
    assert steps[" fine"] < steps[" coarse"] < rows["step, balanced"].ours
    assert rows["step, balanced"].ours < rows["step, Megatron-LM"].ours
    assert rows["fine < coarse < balanced < Megatron-LM"].ours == 1
    shares = [row for name, row in rows.items() if name.startswith("bubble efficiency")]
    assert len(shares) == 8 and all(-1 < r.ours <= 1 and r.paper is not None for r in shares)


def test_copies_of_an_encoder_cost_memory_and_the_chosen_plan_keeps_the_bound(benchmark):
    (found, *others) = benchmark.filled(benchmark.WEAK_SCALING[2], benchmark.Speed(0.36, 1))
    assert found.planned <= 0.12 and found.activations > 0
    every = sorted([found, *others], key=lambda f: f.plan.encoders[0].sizes.pipeline)
    overheads = [f.planned for f in every]
    assert overheads == sorted(overheads, reverse=True) and len(every) == 4


def test_memory_has_all_activations_and_plans_that_do_not_fit_are_marked_and_come_last(benchmark):
    """Of two encoders of 22 billion and 5 or 11 billion parameters some keep more than there is."""
    speed = benchmark.fitted(benchmark.FITTED)
    large = {m.name: m for m in benchmark.TWO_ENCODERS if "22B" in m.name}
    assert len(large) == 2
    for model in large.values():
        every = benchmark.filled(model, speed)
        for found in every:
            worst = found.plan.worst_bytes
            assert max(worst, found.activations) < found.memory <= worst + found.activations
            assert found.fits == ("does not fit" not in found.name) == (found.memory <= 80e9)
        fits = [bool(found.fits) for found in every]
        assert fits[0] and not fits[-1] and fits == sorted(fits, reverse=True)
    metrics = [row.metric for row in benchmark.two_encoder_rows(speed)]
    assert sum(m.startswith("memory with encoder activations") for m in metrics) == 3
    assert not any("does not fit" in metric for metric in metrics)
    rows = benchmark.weak_rows(speed)
    overheads = [row for row in rows if row.metric.startswith("memory overhead, ")]
    assert {row.met for row in overheads} == {True, False}, "no identity"


def test_two_encoders_have_plans_of_their_own(benchmark):
    rows = benchmark.two_encoder_rows(benchmark.Speed(0.36, 1))
    steps = [row for row in rows if row.metric.startswith("step")]
    assert len(steps) == 3 and all(" + " in row.metric for row in steps)
    assert all(row.ours > 1 for row in rows if row.metric.startswith("speedup"))


def test_the_optimum_is_a_bound(benchmark):
    for seed in range(3):
        for alike in (True, False):
            assert 1 - 1e-9 <= benchmark.optimum_ratio(seed, alike, "fine") <= 1.01
