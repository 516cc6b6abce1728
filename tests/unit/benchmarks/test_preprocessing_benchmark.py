"""The benchmark of preprocessing: the same pixels from producers, and rows that say so."""

import importlib
from pathlib import Path


def test_waits_of_both_sides_are_told(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "benchmarks")
    benchmark = importlib.import_module("preprocessing")
    waits, share = benchmark.case_rows(images=1, side_px=64, step_s=0.0, steps=2)
    assert waits.ours > 0 and waits.baseline > 0 and waits.better == "lower"
    assert share.ours == waits.ours / waits.baseline
    assert share.met == (share.ours <= share.goal)
