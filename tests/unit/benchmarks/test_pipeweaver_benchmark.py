"""The PipeWeaver benchmark in simulation: every technique shortens the step."""

import importlib
from pathlib import Path

import pytest


@pytest.fixture
def benchmark(monkeypatch):
    """Import the module from benchmarks/, which is not a package."""
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "benchmarks")
    return importlib.import_module("pipeweaver_figures")


def test_each_technique_shortens_step(benchmark):
    setting = benchmark.Setting(8)
    graph, chain = setting.separated(), setting.megatron()
    assert max(graph.sub_microbatches["vision"]) > max(chain.sub_microbatches["vision"]) == 1
    rows = benchmark.ablation_rows(setting, evaluations=40, fixed=False)
    steps = [row.ours for row in rows if row.metric == "step"]
    assert len(steps) == 5 and steps[2] >= steps[3] > steps[4]
    assert steps[0] > steps[2], "interleaved segments are faster than a single pipeline"
    used = [row.ours for row in rows if row.metric == "memory / limit"]
    assert max(used[:4]) < used[4] <= 1


def test_sizes_compare_best_with_worst_order(benchmark):
    rows = benchmark.size_rows(6, (4, 12), evaluations=20)
    by_metric = {}
    for row in rows:
        by_metric.setdefault(row.metric, []).append(row.ours)
    assert by_metric["step / step with 12 images"][1] == 1
    assert all(share >= 0 for share in by_metric["worst schedule longer by"])
    assert len(rows) == 6


def test_dynamic_iterations_are_fastest_with_torchmm(benchmark):
    bounds = benchmark.bounds_by_iteration()
    assert len(bounds) == 40 and bounds[:20] == bounds[20:]
    assert bounds[0] == (0, 32) and bounds[4] == (16, 32) and bounds[19] == (0, 0)
    assert all(0 <= min_images <= max_images <= 48 for min_images, max_images in bounds)
    rows = benchmark.dynamic_rows(benchmark.Setting(6), every=20, evaluations=20)
    assert {row.case.split(":")[0].split(", ")[1] for row in rows} == {
        "iterations 1-10", "iteration 6"
    }  # fmt: skip
    assert len(rows) == 10 and all(row.ours > 0.99 for row in rows)
    assert any(row.paper for row in rows)


def test_large_models_have_published_mfu_once(benchmark):
    assert {model.devices for model in benchmark.LARGE.values()} == {3072, 6144, 8192, 16384}
    rows = benchmark.large_rows(["T2V-XL-3k"], microbatches=6, evaluations=10)
    mfu_rows = [row for row in rows if row.metric == "MFU"]
    assert len(mfu_rows) == 6 and all(0 < row.ours < 1 for row in mfu_rows)
    assert [row.paper for row in mfu_rows if row.case.endswith(": tuned")] == [0.39]
    assert sum(row.paper is not None for row in mfu_rows) == 1
    gains = {row.case.split(": ")[-1]: row.ours for row in rows if row.metric == "torchmm faster"}
    best = rows[-1]
    assert best.paper == pytest.approx(1.828)
    assert best.ours == max(gains[n] for n in benchmark.BASELINES)


def test_figure_9a_has_published_range_of_gains(benchmark):
    rows = benchmark.average_rows(["VLM-S"], microbatches=6, evaluations=20)
    gains = [row.ours for row in rows if row.metric == "torchmm faster by"]
    minimum, maximum = rows[-2:]
    assert len(gains) == 3 and min(gains) > 0
    assert (minimum.ours, maximum.ours) == (min(gains), max(gains))
    assert (minimum.paper, maximum.paper) == (0.156, 0.762)


def test_figure_11_compares_memory_of_first_rank(benchmark):
    rows = {(row.case, row.metric): row.ours for row in benchmark.memory_rows(8, 20)}
    assert rows["figure 11, Megatron-LM", "peak above Megatron-LM"] == 0
    assert rows["figure 11, Megatron-LM", "fewer fluctuations than Megatron-LM"] == 0
    # Running modules sequentially saves the outputs of all images, but each rank stores a slice.
    coarse = rows[f"figure 11, {benchmark.COARSE}", "peak above Megatron-LM"]
    assert coarse < 0 < rows["figure 11, tuned", "peak above Megatron-LM"]


def test_mixed_stages_are_searched(benchmark):
    (row,) = benchmark.partition_rows(benchmark.Setting(8), evaluations=20)
    assert row.paper == 0.131 and -0.3 < row.ours < 0.5


def test_grid_has_published_sizes_once(benchmark):
    grid = benchmark.grid(64, benchmark.LONGEST)
    sizes = [(m.data, m.pipeline, m.tensor) for m in grid]
    assert sizes.count(benchmark.PIPEWEAVER_GRID_BEST) == 1 == sizes.count((4, 16, 1))
    assert len(set(sizes)) == len(sizes) == 15 and all(m.devices == 64 for m in grid)


def test_grid_rows_are_mfu_fractions(benchmark):
    rows = benchmark.grid_rows(benchmark.grid(64, benchmark.LONGEST)[-1:], 4, evaluations=5)
    assert rows and all(row.paper is None and 0 < row.ours < 1 for row in rows)


def test_replicas_of_large_models_have_equal_work(benchmark):
    name = next(iter(benchmark.LARGE))
    balanced = benchmark.Setting(4, model=benchmark.LARGE[name])
    natural = benchmark.Setting(4, model=benchmark.LARGE[name], dealt=False)
    assert natural.mean_flops_fraction < 0.9 < balanced.mean_flops_fraction <= 1
