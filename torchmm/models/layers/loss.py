"""Cross entropy over a large vocabulary that never stores all logits in float32.

`summed_cross_entropy` takes the logits of the Hugging Face head, in the compute dtype and with the
scaling or soft capping of the family. `cross_entropy_in_chunks` takes the input of the head. It
computes the logits, the loss and the gradients of one chunk of rows at a time, in forward. Backward
only multiplies these gradients by the incoming gradient. No logits outlive their chunk, and nothing
is recomputed. With tensor parallelism each rank computes the logits of its vocabulary shard, which
are never gathered. The gradient of the rows is all-reduced once.

On CUDA both use `_InPlaceCrossEntropy`: two compiled kernels in forward, and one in backward that
overwrites the logits with their gradient. Scaling and soft capping stay outside and have their own
backward. Elsewhere, rows are cast to float32 chunk by chunk, in forward and again in backward.

Rejected: recomputing the logits of a chunk in backward, which adds a third product with the largest
matrix of the model. The Triton kernel of liger-kernel, which writes the gradient in forward, rounds
it twice in half precision, and waits for the device in backward to compare the incoming gradient
with 1.

Shape legend: L targets, N rows of a chunk, D features, V vocabulary (of a rank).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
import torch._dynamo
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from torchmm.common.processes import missing_compiler

CHUNK_TARGETS = 1024
"""Rows cast to float32 at a time."""
MIN_CHUNKED_VOCABULARY = 1 << 15
"""Words from which sharded logits are computed in chunks by default."""
_ROWS = 512
"""The most of a chunk computed from rows: products of more are not faster."""
_LOGIT_BYTES = 12
"""What a chunk needs for a logit: float32 log-probabilities, their gradient and the logit's."""
_CHUNK_BYTES = 576 * 2**20
"""The most of a chunk, which is less than a tenth of what all logits of 8,192 targets need, in
half precision too. Products of fewer rows read the weight more often and are slower."""
_SCALED_ROWS = 4096
"""Rows of a weight's gradient that are float32 at a time."""


def uses_fused_loss(device: torch.device) -> bool:
    """Return True if losses on `device` use compiled kernels that write gradients in place."""
    return device.type == "cuda" and not missing_compiler(device.type)


def summed_cross_entropy(logits_LV: Tensor, targets_L: Tensor) -> Tensor:
    """Return the sum of the cross entropies of all rows, a float32 scalar.

    Backward may overwrite `logits_LV` (see `uses_fused_loss`). An operator that has saved them for
    its own backward then raises the error of autograd about modified tensors.
    """
    at_once = logits_LV.dtype == torch.float32 or len(targets_L) <= CHUNK_TARGETS
    if at_once or _is_fused(logits_LV):  # chunks would not save memory
        return _cross_entropy(logits_LV, targets_L)
    chunks = zip(logits_LV.split(CHUNK_TARGETS), targets_L.split(CHUNK_TARGETS), strict=True)
    losses = [
        checkpoint(_cross_entropy, logits, targets, use_reentrant=False, preserve_rng_state=False)
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
            # Not `[0]`, whose backward copies the gradient of all logits.
            loss = _cross_entropy(logits_of(rows_ND[None]).squeeze(0), targets_L[own])
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
    """Product of the head for one loss in chunks. Sums the gradients of the weight in place.

    Args:
        head: a linear without a bias. With tensor parallelism its rows are sharded.
        rows: number of rows per chunk of an unsharded head, if the loss is computed in float32
            (see `chunk_rows`).

    Attributes:
        rows: number of rows per chunk. Gradients in place and shards of the vocabulary leave room
            for more rows in the same memory. The gradient of the weight is then read, rounded and
            written less often.
        gradient_VD: gradient of the weight, summed over the previous chunks. None if frozen.
    """

    def __init__(self, head: nn.Module, rows: int) -> None:
        super().__init__()
        weight: Any = head.weight
        self.mesh = weight.device_mesh if isinstance(weight, DTensor) else None
        fused = self.mesh is None and uses_fused_loss(weight.device)
        ranks = self.mesh.size() if self.mesh is not None else 1
        self.rows = rows * (_LOGIT_BYTES // weight.itemsize if fused else ranks)
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
            raise RuntimeError(
                "the chunked loss supports only one backward pass, because its gradients are "
                "already used"
            )
        gradient, ctx.gradient = ctx.gradient, None
        if gradient.dtype == torch.float32:
            return factor, gradient.mul_(factor), None
        # A factor in half precision would be off by the same rounding in every element.
        for part in gradient.split(_SCALED_ROWS):
            part.copy_(part.float() * factor)
        return factor, gradient, None


class _InPlaceCrossEntropy(torch.autograd.Function):
    """Summed cross entropy whose backward overwrites the logits with their gradient.

    Forward reads the logits once (twice on the CPU) and stores two float32 values per row. Backward
    reads and writes them once. The gradient is float32 until it is rounded, once, to the dtype of
    the logits.
    """

    @staticmethod
    def forward(ctx: Any, logits_LV: Tensor, targets_L: Tensor) -> Tensor:
        # Without history, so that training and validation share a graph.
        compute = _compiled(_loss_of_rows)
        loss, max_L1, sum_L1 = compute(_dynamic(logits_LV.detach()), _dynamic(targets_L))
        ctx.save_for_backward(logits_LV, targets_L, max_L1, sum_L1)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor, None]:
        # Raises an error if the logits were overwritten already.
        logits_LV, targets_L, max_L1, sum_L1 = ctx.saved_tensors
        gradient_LV = _dynamic(logits_LV.detach())
        _compiled(_write_gradient)(
            gradient_LV, _dynamic(targets_L), _dynamic(max_L1), _dynamic(sum_L1), factor
        )
        return gradient_LV, None


def _loss_of_rows(logits_LV: Tensor, targets_L: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the summed loss, and the maximum and the sum of exponentials of each row.

    The logarithm of the sum and the maximum are kept apart: their sum, the logsumexp, would have
    lost the digits that tell confident predictions from certain ones.
    """
    x_LV = logits_LV.float()
    max_L1 = x_LV.amax(-1, keepdim=True)
    sum_L1 = (x_LV - max_L1).exp().sum(-1, keepdim=True)
    target_L1 = logits_LV.gather(1, targets_L[:, None]).float()
    return (sum_L1.log() - (target_L1 - max_L1)).sum(), max_L1, sum_L1


def _write_gradient(
    logits_LV: Tensor, targets_L: Tensor, max_L1: Tensor, sum_L1: Tensor, factor: Tensor
) -> None:
    """Overwrite the logits with `factor` times the gradient of the summed loss."""
    words_V = torch.arange(logits_LV.shape[1], device=logits_LV.device)
    probability_LV = (logits_LV.float() - max_L1).exp() / sum_L1
    logits_LV.copy_((probability_LV - (words_V == targets_L[:, None]).float()) * factor)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` for torch.compile, whose compiler takes most of a second to import."""
    return torch.compile(function)


def _dynamic(tensor: Tensor) -> Tensor:
    """Mark the number of rows as dynamic, so that all microbatches share a graph."""
    torch._dynamo.maybe_mark_dynamic(tensor, 0)
    return tensor


def _is_fused(logits_LV: Tensor) -> bool:
    """Return True if the gradient replaces these logits.

    torch.compile would make another graph for a single row. Subclasses of tensors, like shards of a
    vocabulary, have their own operators.
    """
    plain = type(logits_LV) is Tensor and logits_LV.is_contiguous() and len(logits_LV) > 1
    return plain and uses_fused_loss(logits_LV.device)


def _cross_entropy(logits_LV: Tensor, targets_L: Tensor) -> Tensor:
    """Return the summed cross entropy, computed in float32 from all rows at once."""
    if _is_fused(logits_LV):
        return _InPlaceCrossEntropy.apply(logits_LV, targets_L)
    return functional.cross_entropy(logits_LV.float(), targets_L, reduction="sum")
