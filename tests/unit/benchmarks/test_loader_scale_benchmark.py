"""The benchmark of planning at scale runs, on few samples, and its orders are the same."""

import importlib
from pathlib import Path

import pytest


@pytest.fixture
def benchmark(monkeypatch):
    """benchmarks/ is no package."""
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "benchmarks")
    return importlib.import_module("loader_scale")


@pytest.mark.parametrize("case", ["planning", "billion", "index"])
def test_each_case_gives_rows(benchmark, case):
    rows = {row.metric: row for table in getattr(benchmark, case)("tiny") for row in table}
    assert rows and all(row.ours > 0 for row in rows.values() if "memory" not in row.metric)
    if case == "planning":  # eight replicas of several packs, each of several samples
        assert rows["samples of a step"].ours > 8 * benchmark.PACKS
    if case == "billion":
        assert rows["same order on 1, 8 and 1,024 ranks"].met
