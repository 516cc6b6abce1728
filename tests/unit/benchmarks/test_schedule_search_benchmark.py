"""The benchmark of schedule search: step sizes, rows and plot."""

import importlib
from math import isfinite
from pathlib import Path

import pytest
from support.strategies import STRATEGIES

from torchmm.balance.pipeweaver.schedule_search.bounds import lower_bound_ms
from torchmm.balance.pipeweaver.schedule_search.dispatcher import Dispatcher

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def modules(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return (
        importlib.import_module(n) for n in ("schedule_search", "support.cases.search_instances")
    )


def test_schedule_search_writes_rows_and_plot(modules, tmp_path):
    benchmark, instances = modules
    instance = instances.Instance(0, 1, 4, instances.TIGHT, microbatches=8)
    searched, rows = benchmark.run(instance, dict.fromkeys(STRATEGIES, 0.02))
    gaps = {row.metric: row for row in rows if row.metric.startswith("gap")}
    assert len(gaps) == 1 + len(STRATEGIES)
    natural = gaps["gap, default order"].ours
    for strategy, name in benchmark.NAMES.items():
        if strategy != "natural":
            row = gaps[f"gap, {name}, 0.02 s"]
            assert 0 <= row.ours <= natural == row.baseline
            assert row.goal == (1.0 if strategy == "annealing" else None)
    last = searched[-1]
    assert last.after(0.0) == natural
    assert last.after(1e9) == gaps["gap, annealing (torchmm), 0.02 s"].ours
    totals = benchmark.summary(searched, {instances.TIGHT: 0.02})
    assert [row.ours for row in totals] == [last.after(1e9)] * 2
    benchmark.draw(searched, tmp_path / "gap.svg")
    assert "<svg" in (tmp_path / "gap.svg").read_text()


def test_search_instances_have_stated_sizes(modules):
    _, instances = modules
    for seed, cap in ((0, instances.LOOSE), (1, instances.VERY_TIGHT)):
        graph, costs = instances.Instance(seed, 2, 6, cap).build()
        counts = graph.sub_microbatches["vision"]
        assert len(counts) == 64
        assert set(counts) == {0, 1, 2, 3, 4}
        ours = Dispatcher(graph, costs)
        assert 6000 < len(ours.actions) < 10_000
        longest = max(a.sub_microbatch for a in costs.compute_ms)
        assert longest == 3
        # The bound of equal ranks is valid: it is above the work of a rank.
        work_ms = sum(ms for a, ms in costs.compute_ms.items() if graph.layout.stages[
            a.stage].ranks == (0,))  # fmt: skip
        assert lower_bound_ms(ours) > work_ms
        assert isfinite(costs.memory_limit_bytes)
        assert costs.memory_limit_bytes == round(1000 * cap * 55)
