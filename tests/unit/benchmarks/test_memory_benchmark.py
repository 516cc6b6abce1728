"""The memory benchmark: rows, accurate predictions, and the memory of a chunked loss."""

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
def test_chunked_loss_memory_matches_prediction(benchmark, dtype):
    rows = benchmark.loss_chunk_targets(benchmark.Size(2048, 6000, 32, dtype), pairs=1)
    actual = {row.metric: row for row in rows}
    assert actual["peak"].ours < actual["peak"].baseline
    assert actual["peak / prediction"].ours == pytest.approx(1, rel=0.05)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_chunked_loss_memory_is_one_chunk(benchmark, dtype):
    loss = benchmark.Loss(benchmark.Size(4096, 8192, 64, dtype), rows=256)
    chunks = loss.peak_bytes(loss.in_chunks)
    assert chunks < 0.25 * loss.peak_bytes(loss.at_once)
    assert chunks == pytest.approx(loss.planned_bytes(), rel=0.05)


@pytest.mark.parametrize("rows", ["state_rows", "recompute_rows"])
def test_memory_settings_match_predictions(benchmark, rows):
    torch.manual_seed(0)
    actual = getattr(benchmark, rows)()
    bytes_by_setting = [row.ours for row in actual if "prediction" not in row.metric]
    assert all(
        row.ours == pytest.approx(1, rel=0.05) for row in actual if "prediction" in row.metric
    )
    assert (
        len(bytes_by_setting) >= 3 and min(bytes_by_setting) < 0.7 * bytes_by_setting[0]
    )  # the first row has the default settings
