"""An all-to-all of rows whose backward sends gradients the other way."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx


class Counts(NamedTuple):
    """Rows that this rank and each other one exchange."""

    sent: list[int]
    received: list[int]

    @property
    def back(self) -> Counts:
        """Of the way back."""
        return Counts(self.received, self.sent)


def exchange(rows: Tensor, counts: Counts, group: dist.ProcessGroup) -> Tensor:
    """What the ranks of a group have for this one; collective, and so is its backward.

    Args:
        rows: (S, ...), first what is for rank 0, then for rank 1, and so on.

    Returns:
        (R, ...): first what comes from rank 0, then from rank 1, and so on.
    """
    return _Exchange.apply(rows, counts, group)


class _Exchange(torch.autograd.Function):
    """Rows to the ranks they are for; their gradients go back."""

    @staticmethod
    def forward(ctx: FunctionCtx, rows: Tensor, counts: Counts, group: dist.ProcessGroup) -> Tensor:
        context: Any = ctx
        context.counts, context.group = counts, group
        return _all_to_all(rows, counts, group)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor, None, None]:
        context: Any = ctx
        return _all_to_all(gradients[0], context.counts.back, context.group), None, None


def _all_to_all(rows: Tensor, counts: Counts, group: dist.ProcessGroup) -> Tensor:
    arrived = rows.new_empty(sum(counts.received), *rows.shape[1:])
    dist.all_to_all_single(arrived, rows.contiguous(), counts.received, counts.sent, group=group)
    return arrived
