"""The benchmark of preprocessing: equal pixels from producers, and rows of waiting times."""

import importlib
from pathlib import Path


def test_waiting_times_of_both_loaders_are_reported(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "benchmarks")
    benchmark = importlib.import_module("preprocessing")
    step_s = 0.01
    waits, fraction, planned, ratio = benchmark.case_rows(
        images=1, side_px=64, step_s=step_s, steps=2
    )
    assert waits.ours > 0 and waits.baseline > 0 and waits.better == "lower"
    assert ratio.ours == waits.ours / waits.baseline
    assert fraction.ours == waits.ours / 1e3 / step_s and planned.ours > 0
    assert fraction.met == (fraction.ours <= fraction.goal)


def test_sending_time_is_reported_for_both_transports(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "benchmarks")
    benchmark = importlib.import_module("preprocessing")
    for by_flight in (True, False):
        assert benchmark.sending_s(2, by_flight) > 0
