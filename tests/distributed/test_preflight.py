"""Ranks that are slow before the first step are reported."""

import logging
import math
import time

import pytest
import torch
import torch.distributed as dist
from launch import run_distributed

from torchmm.parallel.health import preflight
from torchmm.parallel.health.preflight import TESTS, check_ranks, describe_slow_ranks
from torchmm.parallel.mesh import build_mesh, start_process_group
from torchmm.recipe.parallel_section import ParallelConfig

NONE = (math.nan,) * (len(TESTS) - 3)
HOSTS = ("n1", "n1", "n2", "n2")


def rates(product: float, gather: float = math.nan) -> tuple[float, ...]:
    return (product, 10.0, gather, *NONE)


def test_slow_rank_is_reported_with_host():
    lines = describe_slow_ranks(
        [rates(100), rates(99), rates(30), rates(101)], HOSTS, [range(4)], 1.5
    )
    assert lines == ["rank 2 on n2: matmuls at 30 TFLOP/s, 3.3 times slower than usual (100)"]
    assert not describe_slow_ranks(
        [rates(100), rates(99), rates(70), rates(101)], HOSTS, [range(4)], 1.5
    )


def test_slower_of_two_ranks_is_reported():
    lines = describe_slow_ranks([rates(100), rates(30)], HOSTS, [range(2)], 1.5)
    assert [line.split(":")[0] for line in lines] == ["rank 1 on n1"]


def test_ranks_of_different_modules_are_not_compared():
    four = [rates(30), rates(30), rates(100, 5.0), rates(100, 1.0)]
    assert len(describe_slow_ranks(four, HOSTS, [range(4)], 1.5)) == 3
    (line,) = describe_slow_ranks(four, HOSTS, [range(2), range(2, 4)], 1.5)
    assert line.startswith("rank 3 on n2: all-gather over pipeline at 1 GB/s")


def test_long_rank_list_is_truncated():
    many = [rates(1.0)] * 20 + [rates(100.0)] * 30
    lines = describe_slow_ranks(many, ["n"] * 50, [range(50)], 1.5)
    assert len(lines) == 9 and lines[-1] == "and 12 more"


def measure(slow: int, tolerance: float) -> list[str]:
    """Return the log lines of a rank, with an artificially slow rank."""
    start_process_group(ParallelConfig(), torch.device("cpu"))
    mesh = build_mesh(ParallelConfig(), torch.device("cpu"))
    lines: list[str] = []
    logger = logging.getLogger("preflight")
    logger.setLevel(logging.INFO)
    logger.addHandler(type("Lines", (logging.Handler,), {
        "emit": lambda self, record: lines.append(record.getMessage()),
    })())  # fmt: skip
    best_s = preflight._best_s

    def slowed(run, device):
        return best_s(lambda: (run(), time.sleep(0.5 if mesh.rank == slow else 0)), device)

    preflight._best_s = slowed
    check_ranks(mesh, torch.float32, tolerance, logger)
    dist.barrier()  # a rank that exits first would close the connections
    return lines


@pytest.mark.parametrize(("slow", "tolerance"), [(1, 20.0), (-1, 20.0), (1, 0.0)])
def test_two_ranks_compare_their_speeds(slow, tolerance):
    lines, other = run_distributed(measure, 2, slow, tolerance)
    assert not other
    if not tolerance:
        assert not lines
        return
    *warnings, summary = lines
    assert summary.startswith("preflight: matmuls ") and "all-gather over shard" in summary
    named = [line for line in warnings if line.startswith("preflight: rank 1 on ")]
    assert any("matmuls" in line for line in named) == (slow == 1)
