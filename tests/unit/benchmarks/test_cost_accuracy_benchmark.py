"""The benchmark of predicted step times: cases, rows, and one run."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def modules(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("support.cases.cost_cases"), importlib.import_module(
        "cost_accuracy"
    )


def test_cost_cases_are_different_and_match_models(modules):
    cases, _ = modules
    all_cases = [*cases.ONE_RANK, *cases.TWO_RANKS]
    assert len({case.name for case in all_cases}) == len(all_cases) >= 12
    assert all(case.ranks == 1 for case in cases.ONE_RANK)
    assert all(case.ranks == 2 for case in cases.TWO_RANKS)
    for case in all_cases:
        names = {module.name for module in case.build().modality_modules()}
        step = case.step(0)
        assert len(step) == case.microbatches
        assert any(m.target_count for m in step)
        encoders = {name for m in step for name in m.encoders}
        assert encoders == names - {"llm"}, case.name
        for microbatch in step:
            for inputs in microbatch.encoders.values():
                patches = sum(i.patches for s in microbatch.meta.samples for i in s.images)
                tokens = sum(i.tokens for s in microbatch.meta.samples for i in s.images)
                assert len(inputs.positions_K) == tokens < case.tokens
                assert sum(rows * columns for _, rows, columns in inputs.grids_thw) == patches


def test_accuracy_is_symmetric_and_reports_worst_case(modules):
    _, benchmark = modules
    low = benchmark.CaseResult("low", 90.0, [100.0, 100.0, 120.0, 100.0], [100.0, 80.0, 90.0])
    high = benchmark.CaseResult("high", 104.0, [100.0, 100.0], [])
    rows = benchmark.rows({1: [low], 2: [high]})
    by_metric = {(row.case, row.metric): row for row in rows}
    assert by_metric["low; 1 rank", "accuracy"].ours == pytest.approx(0.9)
    # First half 100, second half 110.
    assert by_metric["low; 1 rank", "accuracy"].baseline == pytest.approx(1 - 10 / 110)
    assert by_metric["high; 2 ranks", "accuracy"].ours == pytest.approx(0.96)
    assert by_metric["high; 2 ranks", "predicted step"].baseline == 100.0
    assert by_metric["low; 1 rank", "accuracy, CPU time"].ours == pytest.approx(1.0)
    assert ("high; 2 ranks", "accuracy, CPU time") not in by_metric
    assert by_metric["all 2 cases", "mean accuracy, CPU time, 1 rank"].ours == pytest.approx(1.0)
    mean, worst = (by_metric["all 2 cases", f"{name} accuracy"] for name in ("mean", "worst"))
    assert mean.ours == pytest.approx(0.93)
    assert mean.met is False and mean.goal == mean.paper == 0.976
    assert worst.ours == pytest.approx(0.9)


def test_one_run_has_no_noise_floor(modules):
    _, benchmark = modules
    rows = benchmark.rows({1: [benchmark.CaseResult("once", 90.0, [100.0], [100.0])]})
    assert [row.baseline for row in rows if row.metric == "accuracy"] == [None]
    assert [row.baseline for row in rows if row.metric == "mean accuracy"] == [None]


@pytest.mark.slow
def test_cost_benchmark_writes_rows_of_both_rank_counts(tmp_path):
    file = tmp_path / "rows.json"
    result = subprocess.run(
        [sys.executable, BENCHMARKS / "cost_accuracy.py", "--tiny", "--json", file],
        check=False, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    rows = json.loads(file.read_text())
    assert [row["metric"] for row in rows] == [
        "predicted step", "accuracy", "accuracy, CPU time", "predicted step", "accuracy",
        "mean accuracy", "worst accuracy", "mean accuracy, CPU time, 1 rank",
        "worst accuracy, CPU time, 1 rank",
    ]  # fmt: skip
    assert all(row["baseline"] > 0 for row in rows if row["metric"] == "predicted step")
