"""The benchmark of memory: rows, and predictions that hold."""

import importlib
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_loss_in_chunks_is_measured_and_as_planned(monkeypatch, dtype):
    monkeypatch.syspath_prepend(BENCHMARKS)
    benchmark = importlib.import_module("memory")
    rows = benchmark.loss_rows(benchmark.Size(2048, 6000, 32, dtype), pairs=1)
    found = {row.metric: row for row in rows}
    assert found["peak"].ours < found["peak"].baseline
    assert found["peak over prediction"].ours == pytest.approx(1, rel=0.05)
