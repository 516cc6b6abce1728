"""The benchmark of memory: rows, predictions that hold, and how little a chunked loss takes."""

import importlib
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("memory")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_loss_in_chunks_is_measured_and_as_planned(benchmark, dtype):
    rows = benchmark.loss_rows(benchmark.Size(2048, 6000, 32, dtype), pairs=1)
    found = {row.metric: row for row in rows}
    assert found["peak"].ours < found["peak"].baseline
    assert found["peak / prediction"].ours == pytest.approx(1, rel=0.05)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_memory_is_that_of_a_chunk(benchmark, dtype):
    loss = benchmark.Loss(benchmark.Size(4096, 8192, 64, dtype), rows=256)
    chunks = loss.peak_bytes(loss.in_chunks)
    assert chunks < 0.25 * loss.peak_bytes(loss.at_once)
    assert chunks == pytest.approx(loss.planned_bytes(), rel=0.05)


@pytest.mark.parametrize("rows", ["state_rows", "recompute_rows"])
def test_switches_hold_what_is_planned(benchmark, rows):
    torch.manual_seed(0)
    found = getattr(benchmark, rows)()
    held = [row.ours for row in found if "prediction" not in row.metric]
    assert all(
        row.ours == pytest.approx(1, rel=0.05) for row in found if "prediction" in row.metric
    )
    assert len(held) >= 3 and min(held) < 0.7 * held[0]  # the first has no switch set
