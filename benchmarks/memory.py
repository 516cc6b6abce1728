"""Memory of switches that save it: what is held at most, with and without them, and as planned.

Loss in chunks (`[model] chunked_loss`): head and cross entropy, forward and backward, against
Hugging Face's head with all logits and against what the planners expect. Every allocation is
followed, so peaks are exact; what is there without a loss (the weight, its gradient, the rows) is
not counted. Times are of pairs in turns, one thread.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from support.allocations import CountPeak
from support.harness import Row, describe_machine, make_parser, report, time_pairs
from torch import Tensor, nn

from torchmm.balance.costs.blocks import Head
from torchmm.balance.costs.execution import Execution, Setting
from torchmm.balance.costs.sizes import llm_sizes
from torchmm.common.batch import MicrobatchMeta, SampleMeta
from torchmm.models.layers.loss import (
    ChunkHead,
    chunk_rows,
    cross_entropy_in_chunks,
    summed_cross_entropy,
)

CPU = torch.device("cpu")
MIB = 2**20
GOAL_SHARE = 0.10
GOAL_SPEED = 1 / 1.05


class Size(NamedTuple):
    """Of a loss."""

    targets: int
    vocabulary: int
    hidden: int
    dtype: torch.dtype

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        return f"{self.targets:,} targets x {self.vocabulary:,} words of {self.hidden}, {kind}"


SIZES = [
    Size(8192, 151_936, 64, torch.bfloat16),
    Size(8192, 151_936, 64, torch.float32),
    Size(2048, 32_000, 256, torch.bfloat16),
]
QUICK = [Size(2048, 32_000, 64, torch.bfloat16), Size(2048, 32_000, 64, torch.float32)]


class Loss:
    """Head and rows with random values.

    Args:
        rows: of a chunk; 0: what a model takes.
    """

    def __init__(self, size: Size, rows: int = 0) -> None:
        torch.manual_seed(0)
        self.size = size
        self.rows = rows or chunk_rows(size.vocabulary)
        self.head = nn.Linear(size.hidden, size.vocabulary, bias=False, dtype=size.dtype)
        self.rows_LD = torch.randn(size.targets, size.hidden, dtype=size.dtype, requires_grad=True)
        self.targets_L = torch.randint(size.vocabulary, (size.targets,))

    def in_chunks(self) -> Tensor:
        head = ChunkHead(self.head, self.rows)
        return cross_entropy_in_chunks(head, head, self.rows_LD, self.targets_L)

    def at_once(self) -> Tensor:
        return summed_cross_entropy(self.head(self.rows_LD), self.targets_L)

    def run(self, loss: Callable[[], Tensor]) -> None:
        """Forward and backward."""
        self.head.weight.grad = self.rows_LD.grad = None
        loss().backward()

    def peak_bytes(self, loss: Callable[[], Tensor]) -> int:
        """Beyond weight, its gradient and rows."""
        self.run(loss)
        held = [self.head.weight, self.rows_LD, self.targets_L]
        gradient = self.head.weight.nbytes
        self.head.weight.grad = self.rows_LD.grad = None
        with CountPeak(held) as counter:
            loss().backward()
        return counter.peak_bytes - sum(t.nbytes for t in held) - gradient

    def planned_bytes(self) -> float:
        """What costs say of the same."""
        size = self.size
        meta = MicrobatchMeta((SampleMeta("", 0, size.targets),), size.targets)
        sizes = llm_sizes([meta], [size.targets], padding=False)
        linear = (size.hidden, size.vocabulary)
        head = Head(trained=True, linear=linear, norm="rms", rows=self.rows)
        norm = Head(trained=False, linear=(size.hidden, 0), norm="rms")
        setting = Setting(Execution(), size.dtype.itemsize)
        found_N = head.kept_bytes(sizes, setting, weights=True)
        found_N = found_N - norm.kept_bytes(sizes, setting, weights=False)
        found_N = found_N + head.temporary_bytes(sizes, setting, has_backward=found_N > 0)
        return float(found_N[0]) - self.head.weight.nbytes


def loss_rows(size: Size, pairs: int) -> list[Row]:
    """Of head and cross entropy."""
    loss = Loss(size)
    ours = loss.peak_bytes(loss.in_chunks)
    theirs = loss.peak_bytes(loss.at_once)
    chunks, whole = (partial(loss.run, f) for f in (loss.in_chunks, loss.at_once))
    times = time_pairs(chunks, whole, pairs, CPU)
    case = f"loss in chunks, {size}"
    return [
        Row(case, "peak", "MiB", ours / MIB, theirs / MIB, better="lower"),
        Row(case, "peak of all logits'", "share", ours / theirs, 1.0, goal=GOAL_SHARE,
            better="lower"),
        Row(case, "peak over prediction", "x", ours / loss.planned_bytes(), better="lower"),
        Row(case, "time", "s", times.median_ours_s, times.median_baseline_s, better="lower"),
        Row(case, "speed ratio", "x", times.speed_ratio, 1.0, goal=GOAL_SPEED),
    ]  # fmt: skip


def main() -> None:
    """Prints the table."""
    parser = make_parser(__doc__ or "")
    parser.add_argument("--pairs", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for size in QUICK if arguments.quick else SIZES:
        rows += loss_rows(size, arguments.pairs)
    report(f"Memory, seed 0; {describe_machine(CPU)}", rows, arguments.json)


if __name__ == "__main__":
    main()
