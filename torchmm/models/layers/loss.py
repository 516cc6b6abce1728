"""Cross entropy over a large vocabulary that never holds all logits in float32, or none at all.

`summed_cross_entropy` takes logits that Hugging Face's own head has computed, in the compute dtype
and with whatever scaling or capping the family applies. Rows are cast, used and dropped one chunk
at a time, in forward and again in backward.

`cross_entropy_in_chunks` takes what the head reads. The logits of a chunk of rows are computed,
their loss taken and differentiated at once, in forward, so that backward only multiplies gradients
that are there already by the one that arrives: no logits outlive their chunk and nothing is
computed twice. Under tensor parallelism each rank has the logits of its part of the vocabulary,
which are never gathered; the gradient of the rows is summed over ranks once.

Rejected: recomputing a chunk's logits in backward, as checkpointing would: a third product with the
largest matrix of the model. A fused kernel: families scale and cap logits each in its own way.

Shape legend: L targets, N rows of a chunk, D features, V vocabulary (of a rank).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

CHUNK_TARGETS = 1024
"""Rows cast to float32 at a time."""
_ROWS = 512
"""The most of a chunk computed from rows: products of more are not faster."""
_LOGIT_BYTES = 12
"""What a chunk needs for a logit: float32 log-probabilities, their gradient and the logit's."""
_CHUNK_BYTES = 576 * 2**20
"""The most of a chunk, which is less than a tenth of what all logits of 8,192 targets need, in
half precision too. Products of fewer rows read the weight more often and are slower."""
_SCALED_ROWS = 4096
"""Rows of a weight's gradient that are float32 at a time."""


def summed_cross_entropy(logits_LV: Tensor, targets_L: Tensor) -> Tensor:
    """float32 scalar: sum of the cross entropies of all rows.

    Without chunks if they save nothing: for logits that are float32 already or fit into one chunk.
    """
    if logits_LV.dtype == torch.float32 or len(targets_L) <= CHUNK_TARGETS:
        return _in_float32(logits_LV, targets_L)
    chunks = zip(logits_LV.split(CHUNK_TARGETS), targets_L.split(CHUNK_TARGETS), strict=True)
    losses = [
        checkpoint(_in_float32, logits, targets, use_reentrant=False, preserve_rng_state=False)
        for logits, targets in chunks
    ]
    return torch.stack(losses).sum()


def chunk_rows(vocabulary: int) -> int:
    """Rows whose logits `cross_entropy_in_chunks` should compute at a time."""
    return max(1, min(_ROWS, _CHUNK_BYTES // (_LOGIT_BYTES * vocabulary)))


def cross_entropy_in_chunks(
    head: ChunkHead, logits_of: Callable[[Tensor], Tensor], rows_LD: Tensor, targets_L: Tensor
) -> Tensor:
    """float32 scalar: sum of the cross entropies of all rows, equal to that of all logits at once.

    Args:
        head: the product with the head's weight, which `logits_of` goes through.
        logits_of: (1, N, V) logits of (1, N, D) rows, scaled or capped as the family does; DTensors
            over the vocabulary if the head's weight is one.
        rows_LD: what the head reads, on every tensor-parallel rank the same.
        targets_L: token ids.
    """
    learns = head.gradient_VD is not None or (torch.is_grad_enabled() and rows_LD.requires_grad)
    rows_gradient_LD = torch.empty_like(rows_LD) if learns else None
    parts = [torch.zeros((), device=rows_LD.device)]
    for start in range(0, len(targets_L), head.rows):
        own = slice(start, start + head.rows)
        rows_ND = rows_LD[own].detach().requires_grad_(learns)
        with loss_parallel() if head.mesh else nullcontext():
            loss = _in_float32(logits_of(rows_ND[None])[0], targets_L[own])
            if rows_gradient_LD is not None:
                (rows_gradient_LD[own],) = torch.autograd.grad(loss, rows_ND)
        loss = loss.detach()
        parts.append(loss.to_local() if isinstance(loss, DTensor) else loss)
    total = torch.stack(parts).sum()
    # The rows' last: a backward for inputs alone passes it, and not the weight's.
    if head.gradient_VD is not None:
        total = _HeldWeightGradient.apply(total, head.local_VD, head.gradient_VD)
    if rows_gradient_LD is not None and rows_LD.requires_grad:
        total = _HeldGradient.apply(total, rows_LD, head.summed(rows_gradient_LD))
    return total


class ChunkHead(nn.Module):
    """The head's product for one loss in chunks: sums its weight's gradients in place.

    Args:
        head: a linear without a bias; under tensor parallelism its rows are divided among ranks.
        rows: of a chunk.

    Attributes:
        gradient_VD: of the weight, summed over the chunks so far; None: not needed.
    """

    def __init__(self, head: nn.Module, rows: int) -> None:
        super().__init__()
        weight: Any = head.weight
        self.rows = rows
        self.mesh = weight.device_mesh if isinstance(weight, DTensor) else None
        # Not a parameter of this module: the gradient belongs to the head's.
        self.local_VD: Tensor
        object.__setattr__(self, "local_VD", weight.to_local() if self.mesh else weight)
        learns = torch.is_grad_enabled() and weight.requires_grad
        self.gradient_VD = torch.zeros_like(self.local_VD) if learns else None
        self._vocabulary = len(weight)

    def forward(self, rows_1ND: Tensor) -> Tensor:
        product_1NV = _HeadProduct.apply(rows_1ND, self.local_VD.detach(), self.gradient_VD)
        if self.mesh is None:
            return product_1NV
        shape = torch.Size((*rows_1ND.shape[:-1], self._vocabulary))
        strides = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            product_1NV, self.mesh, [Shard(2)], run_check=False, shape=shape, stride=strides
        )

    def summed(self, gradient_LD: Tensor) -> Tensor:
        """Gradients of rows, of which every rank has found its vocabulary's part."""
        if self.mesh is None:
            return gradient_LD
        found = DTensor.from_local(gradient_LD, self.mesh, [Partial()], run_check=False)
        return found.redistribute(placements=[Replicate()]).to_local()


class _HeadProduct(torch.autograd.Function):
    """Rows times the weight; backward adds to a sum, where autograd would make every chunk's
    gradient, as large as the weight, before adding it."""

    @staticmethod
    def forward(
        ctx: Any, rows_1ND: Tensor, weight_VD: Tensor, gradient_VD: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(rows_1ND, weight_VD)
        ctx.gradient_VD = gradient_VD
        return functional.linear(rows_1ND, weight_VD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, logits_1NV: Tensor) -> tuple[Tensor, None, None]:
        rows_1ND, weight_VD = ctx.saved_tensors
        total_VD = ctx.gradient_VD
        if total_VD is not None:  # not `addmm_`, which torch's counter of FLOPs does not know
            torch.addmm(total_VD, logits_1NV[0].mT, rows_1ND[0], out=total_VD)
        return logits_1NV @ weight_VD, None, None


class _HeldGradient(torch.autograd.Function):
    """A loss whose gradient by one tensor is known: backward multiplies it by what arrives."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, source: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor, Tensor, None]:
        gradient = ctx.gradient
        return factor, (gradient.float() * factor).to(gradient.dtype), None


class _HeldWeightGradient(_HeldGradient):
    """The same in place, as it is as large as the weight; so only once."""

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor, Tensor, None]:
        if ctx.gradient is None:
            raise RuntimeError("a loss in chunks has one backward: its gradients are used up")
        gradient, ctx.gradient = ctx.gradient, None
        if gradient.dtype == torch.float32:
            return factor, gradient.mul_(factor), None
        # A factor in half precision would be off by the same rounding in every element.
        for part in gradient.split(_SCALED_ROWS):
            part.copy_(part.float() * factor)
        return factor, gradient, None


def _in_float32(logits_LV: Tensor, targets_L: Tensor) -> Tensor:
    return functional.cross_entropy(logits_LV.float(), targets_L, reduction="sum")
