"""The run that disturbed ones have to end like: a small recipe on two ranks, saved each step."""

import time
from pathlib import Path

import torch
from tiny_recipe import records, weights

from torchmm.training.shutdown import read_status

STEPS = 24
COMMON = {
    "training__steps": STEPS,
    "training__global_batch_size": 2,
    "checkpoint__interval": 1,
    "parallel__timeout_s": 60,
}


def assert_same_end(run_dir: Path, reference: Path) -> None:
    """Every step recorded once, the same losses, every bit of the last checkpoint the same."""
    assert read_status(run_dir).state == "done"
    found, expected = records(run_dir), records(reference)
    assert [r["step"] for r in found] == list(range(1, STEPS + 1))
    assert [r["loss"] for r in found] == [r["loss"] for r in expected]
    ours, theirs = weights(run_dir), weights(reference)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def wait_for_step(run_dir: Path, step: int, timeout_s: float = 120) -> None:
    """Until metrics.jsonl has the record of `step`."""
    deadline = time.monotonic() + timeout_s
    file = run_dir / "metrics.jsonl"
    while not file.exists() or f'{{"step": {step},' not in file.read_text():
        assert time.monotonic() < deadline, f"step {step} was not reached"
        time.sleep(0.005)
