"""The benchmark of preprocessing: the same pixels from producers, and rows that say so."""

import importlib
from pathlib import Path


def test_waits_of_both_sides_are_told(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "benchmarks")
    benchmark = importlib.import_module("preprocessing")
    step_s = 0.01
    waits, asked, planned, left = benchmark.case_rows(images=1, side_px=64, step_s=step_s, steps=2)
    assert waits.ours > 0 and waits.baseline > 0 and waits.better == "lower"
    assert left.ours == waits.ours / waits.baseline
    assert asked.ours == waits.ours / 1e3 / step_s and planned.ours > 0
    assert asked.met == (asked.ours <= asked.goal)


def test_what_sending_costs_is_told_for_both_ways(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "benchmarks")
    benchmark = importlib.import_module("preprocessing")
    for by_flight in (True, False):
        assert benchmark.sending_s(2, by_flight) > 0
