"""The benchmark of async tensor parallelism: rows and the emulated link."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


class _Done:
    """A transfer that has already finished."""

    def wait(self):
        return True


@pytest.fixture
def load(monkeypatch):
    """Return a function that imports a module of benchmarks/, which is not a package."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module


def test_link_transfers_sequentially_and_clears_records(load):
    link = load("support.slow_link").Link()
    link.s_per_byte = 1e-4
    first, second = link.post(100), link.post(200)
    assert second - first == pytest.approx(0.02)
    link.wait(_Done(), second)
    records = link.take_records()
    assert records.received_bytes == 300 and len(records.transfers) == 2
    assert records.waits[0].end_s >= second
    assert link.take_records() == ([], [], 0)


def test_overlap_bound_is_maximum_of_compute_and_transfers(load):
    actual = load("async_tensor_parallel").OverlapTimes
    common = {"case": "", "ratio": 1, "mb_per_s": 1, "chunks": 1, "step_s": {}, "disturbed": ""}
    for compute_s, transfer_s, bound in ((2.0, 1.25, 2 / 3), (1.0, 2.5, 2.5 / 3)):
        transfers = {"plain": transfer_s / 1.25, "overlapped": transfer_s}
        case = actual(**common, compute_s=compute_s, transfer_s=transfers, steps=[])
        assert case.bound == pytest.approx(bound)


def test_predictions_are_labeled_and_bounded(load, monkeypatch):
    prediction = load("support.models.async_prediction")
    monkeypatch.setattr(prediction, "BACKBONES", {"7B": "disttrain_mllm_9b"})
    rows = prediction.prediction_rows()
    assert [row.metric for row in rows] == ["speedup", "exposed communication per layer"] * 2
    for faster, exposed in zip(rows[::2], rows[1::2], strict=True):
        assert {faster.kind, exposed.kind} == {"simulated"}
        assert faster.ours > 1 and 0 < exposed.ours < exposed.baseline


@pytest.mark.slow
def test_async_benchmark_writes_rows_and_plot(tmp_path):
    """Check the output. The benchmark also compares the gradients of both programs."""
    rows_file, plot = tmp_path / "rows.json", tmp_path / "overlap.svg"
    done = subprocess.run(
        [
            sys.executable, BENCHMARKS / "async_tensor_parallel.py",
            "--tiny", "--json", rows_file, "--plot", plot,
        ],
        check=False, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = json.loads(rows_file.read_text())
    assert [row["metric"] for row in rows] == [
        *(f"matmul in {blocks} blocks" for blocks in (2, 3, 5)),
        *("step", "step / step without overlap") * 2,
    ]
    assert all(row["ours"] > 0 and row["better"] == "lower" for row in rows)
    mlps, layers = (row for row in rows if row["metric"] == "step / step without overlap")
    assert mlps["goal"] is not None and layers["goal"] is None
    assert "<svg" in plot.read_text()
