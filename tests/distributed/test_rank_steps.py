"""Records combine the values of all ranks and preserve their types."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from launch import run_distributed
from tracked_run import rank_values

from torchmm.training.metrics import METRICS, Record, StepMeter

TOKENS = 2**40 + 1  # not representable as float32


def combine() -> Record:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh: Any = SimpleNamespace(rank=rank, device=torch.device("cpu"))
    pipeline: Any = SimpleNamespace(descriptions=(), dtype=torch.float32)
    batch: Any = SimpleNamespace(imbalance={}, epoch=0.5, stream_total=lambda kind: None)
    local = rank_values(data_read_bytes=TOKENS + rank, step_ms=1.5 + rank, skipped_samples=rank)
    return StepMeter(mesh, pipeline, 1.0).combine(local, batch, step=3, loss_text=1.0)


def test_records_are_equal_on_all_ranks():
    first, second = run_distributed(combine, 2)
    assert first == second
    assert first["data_read_bytes"] == 2 * TOKENS + 1 and first["step_ms"] == 2.5
    assert first["slowest_rank"] == 0 and first["epoch"] == 0.5
    assert (first["step"], first["skipped_samples"], first["compiled_graphs"]) == (3, 1, 0)
    assert isinstance(first["skipped_samples"], int) and isinstance(first["data_wait_ms"], float)
    assert first["loss_text"] is None, "without a generator, the text loss is `loss`"
    assert list(first) == list(METRICS)
