"""Figures of all ranks reach every rank, with their types."""

from __future__ import annotations

import torch.distributed as dist
from launch import run_distributed

from torchmm.training.metrics import RankStep, gather_rank_steps

TOKENS = 2**40 + 1  # more than float32 can count


def gather() -> list[RankStep]:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    local = RankStep(tokens=TOKENS + rank, step_ms=1.5 + rank, data_wait_ms=0, skipped_samples=rank)
    return gather_rank_steps(local)


def test_every_rank_knows_what_all_measured():
    on_rank = run_distributed(gather, 2)
    assert on_rank[0] == on_rank[1]
    assert [r.tokens for r in on_rank[0]] == [TOKENS, TOKENS + 1]
    assert [r.step_ms for r in on_rank[0]] == [1.5, 2.5]
    assert isinstance(on_rank[0][1].skipped_samples, int)
    assert isinstance(on_rank[0][1].data_wait_ms, float)
