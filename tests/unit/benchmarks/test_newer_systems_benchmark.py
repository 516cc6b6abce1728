"""Claims of newer systems: images distributed evenly, and valid bounds."""

import importlib
from pathlib import Path

import pytest


@pytest.fixture
def benchmark(monkeypatch):
    """Import the module from benchmarks/, which is not a package."""
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "benchmarks")
    return importlib.import_module("newer_systems")


def test_uniform_microbatches_have_all_images_and_tokens(benchmark):
    metas = benchmark.forecaster_of(benchmark.MODELS[0], 8, 10, 0).workload.microbatches
    even = benchmark.alike(metas)
    counts = [meta.image_count for meta in even]
    assert sum(counts) == sum(meta.image_count for meta in metas)
    assert max(counts) - min(counts) <= 1 < max(m.image_count for m in metas)
    assert [meta.tokens for meta in even] == [meta.tokens for meta in metas]


def test_static_pipeline_gains_from_uniform_microbatches(benchmark):
    rows = benchmark.deferral_rows(benchmark.MODELS[0], 8, evaluations=50, seeds=1)
    searched, uniform, bound, minimum = (row.ours for row in rows)
    assert searched == pytest.approx(uniform * bound) and bound == minimum
    assert uniform > 1


def test_bounded_encoders_save_fewer_activations(benchmark):
    rows = benchmark.nested_rows(benchmark.MODELS[0], (4, 24), evaluations=20)
    grown = {row.metric: row.ours for row in rows if row.case.endswith(" / 4")}
    assert grown["encoder activations, bounded"] < grown["encoder activations, encoders first"]
    steps = {r.metric: r.ours for r in rows if r.metric.startswith("step") and " 24 " in r.case}
    assert steps["step / step of unlimited search, searched, unlimited"] == 1
    bounded = steps["step / step of unlimited search, bounded"]
    assert steps["step / step of unlimited search, searched within this memory"] <= bounded
