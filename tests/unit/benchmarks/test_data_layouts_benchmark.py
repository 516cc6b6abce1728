"""The benchmark of record formats: equal samples in each format, and rows of their speed."""

import importlib
from pathlib import Path

import pytest


@pytest.fixture
def benchmark_module(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "benchmarks")
    return importlib.import_module("data_layouts")


def test_every_record_format_is_compared_with_same_content(benchmark_module):
    reader = benchmark_module.make_reader()
    for name in benchmark_module.CASES:
        speed, ratio = benchmark_module.case_rows(name, reader, count=1, pairs=1)
        assert speed.ours > 0 and speed.baseline > 0 and ratio.goal == 0.9
        assert ratio.met == (ratio.ours >= ratio.goal)


def test_different_content_stops_format_benchmark(benchmark_module, monkeypatch):
    cases = {"moved": (benchmark_module.llava, benchmark_module.own_once)}
    monkeypatch.setattr(benchmark_module, "CASES", cases)
    with pytest.raises(AssertionError, match="moved: the sample differs"):
        benchmark_module.case_rows("moved", benchmark_module.make_reader(), count=1, pairs=1)
