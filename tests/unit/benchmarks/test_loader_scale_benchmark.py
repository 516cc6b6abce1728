"""The benchmark of planning at scale: small runs, and equal orders."""

import importlib
from pathlib import Path

import pytest


@pytest.fixture
def benchmark(monkeypatch):
    """Import the module from benchmarks/, which is not a package."""
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "benchmarks")
    return importlib.import_module("loader_scale")


@pytest.mark.parametrize("case", ["planning", "billion", "index"])
def test_each_scale_case_has_rows(benchmark, case):
    rows = {row.metric: row for table in getattr(benchmark, case)("tiny") for row in table}
    assert rows and all(row.ours > 0 for row in rows.values() if "memory" not in row.metric)
    if case == "planning":  # eight replicas of several packs with several samples
        assert rows["samples of a step"].ours > 8 * benchmark.PACKS
    if case == "billion":
        assert rows["same order on 1, 8 and 1,024 ranks"].met
