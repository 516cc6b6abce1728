"""The wall-clock benchmark of bubble filling: valid plans, and simulated step times."""

import importlib
from pathlib import Path

import pytest

from torchmm.pipelining.checks.validate import validate_plan
from torchmm.pipelining.plan.lowering import lower_plan


@pytest.fixture
def benchmark(monkeypatch):
    """Import the module from benchmarks/, which is not a package."""
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "benchmarks")
    return importlib.import_module("bubble_runtime")


def test_filled_bubbles_shorten_simulated_step(benchmark):
    work = benchmark.load_nap(benchmark.NAPS[0], 2e-4)
    choices = {
        "chain": benchmark.Chain(2),
        "coarse": benchmark.Colocated("coarse", 1, 1, 2, 4),
        "fine": benchmark.Colocated("fine", 1, 3, 2, 4),
        "pipelines of two": benchmark.Colocated("fine", 2, 3, 2, 64),
        "front": benchmark.Front(1),
        "outside": benchmark.Outside(benchmark.Colocated("fine", 1, 3, 2, 4)),
    }
    for choice in choices.values():
        graph, order = choice.plan(work, 0)
        validate_plan(lower_plan(order, graph, {})).raise_for_problems()
    times_s = {name: benchmark.played_s(work, choice) for name, choice in choices.items()}
    assert times_s["fine"] < times_s["chain"] and times_s["coarse"] < times_s["chain"]
    assert max(times_s["fine"], times_s["chain"]) < times_s["front"]


def test_without_filling_encoders_run_outside_llm(benchmark):
    work = benchmark.load_nap(benchmark.NAPS[0], 2e-4)
    filled = benchmark.Colocated("fine", 1, 3, 2, 4)
    graph, order = benchmark.Outside(filled).plan(work, 0)
    assert [sorted(row, key=str) for row in order] == [
        sorted(row, key=str) for row in filled.plan(work, 0).order
    ]
    for row in order:
        llm = [i for i, a in enumerate(row) if graph.layout.stages[a.stage].module == "llm"]
        assert llm == list(range(llm[0], llm[-1] + 1))
        assert {a.type.value for a in row[: llm[0]]} <= {"F"}
        assert {a.type.value for a in row[llm[-1] + 1 :]} <= {"B"}


def test_filling_bubbles_of_1f1b_pays_off(benchmark):
    nap = benchmark.NAPS[-1]
    assert nap.frozen
    work = benchmark.load_nap(nap, 4e-3)
    plans = benchmark.best_plans(nap, work)
    assert not any(
        a.type.value == "B" and plans[name].steps[0].graph.layout.stages[a.stage].module == "vision"
        for name in plans
        for row in plans[name].steps[0].order
        for a in row
    )
    ratios = [row.ours for row in benchmark.played_rows("", work, plans)]
    assert len(ratios) == 4 and min(ratios) > 1.05
