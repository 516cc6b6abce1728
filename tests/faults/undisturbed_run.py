"""Reference run of fault tests: a small recipe on two ranks that saves each step."""

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
    """Check that each step is recorded once, and losses and weights are bitwise equal."""
    assert read_status(run_dir).state == "done"
    steps, expected = records(run_dir), records(reference)
    assert [r["step"] for r in steps] == list(range(1, STEPS + 1))
    assert [r["loss"] for r in steps] == [r["loss"] for r in expected]
    actual, expected_weights = weights(run_dir), weights(reference)
    assert actual.keys() == expected_weights.keys()
    assert [name for name in actual if not torch.equal(actual[name], expected_weights[name])] == []


def wait_for_step(run_dir: Path, step: int, timeout_s: float = 120) -> None:
    """Wait until metrics.jsonl has the record of `step`."""
    deadline = time.monotonic() + timeout_s
    file = run_dir / "metrics.jsonl"
    while not file.exists() or f'{{"step": {step},' not in file.read_text():
        assert time.monotonic() < deadline, f"step {step} was not reached"
        time.sleep(0.005)
