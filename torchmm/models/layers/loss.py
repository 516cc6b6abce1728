"""Cross entropy over a large vocabulary that never stores all logits in float32.

`summed_cross_entropy` accepts the logits of the Hugging Face head, in the compute dtype and with
the scaling or soft capping of the family.

`cross_entropy_in_chunks` accepts the input of the head. The forward pass computes logits, loss and
gradients of one chunk of rows after the other. The backward pass only multiplies these gradients by
the incoming gradient. Logits are freed after each chunk, and nothing is recomputed. With tensor
parallelism, each rank computes the logits of its vocabulary shard, which are never all-gathered.
The gradient of the rows is all-reduced once.

On CUDA both functions use `_InPlaceCrossEntropy`: two compiled kernels in forward, and one in
backward that overwrites the logits with their gradient. Scaling and soft capping are separate
operators with a separate backward. On other devices, rows are cast to float32 in chunks, in forward
and again in backward.

`LossTerms` adds label smoothing and z-loss to the gradients. The returned loss remains the cross
entropy, so that training and validation losses are comparable with other runs.

Recomputing the logits of a chunk in backward would add a third matmul with the largest matrix of
the model. The Triton kernel of liger-kernel is not used: it rounds the gradient twice in half
precision, and synchronizes with the device in backward to compare the incoming gradient with 1.

Shape legend: L targets, N rows of a chunk, D features, V vocabulary (of a rank).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
import torch._dynamo
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DeviceMesh, DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from torchmm.common.processes import find_missing_compiler

CHUNK_TARGETS = 1024
"""Number of rows that are cast to float32 at once."""
MIN_CHUNKED_VOCABULARY = 1 << 15
"""Minimum vocabulary size for which sharded logits are computed in chunks by default."""
_ROWS = 512
"""Maximum number of rows of a chunk. Matmuls with more rows are not faster."""
_LOGIT_BYTES = 12
"""Bytes per logit of a chunk: float32 log-probabilities, their gradient and the logit gradient."""
_CHUNK_BYTES = 576 * 2**20
"""Maximum bytes of a chunk: less than a tenth of the logits of 8,192 targets in half precision.

Matmuls with fewer rows read the weight more often and are slower.
"""
_SCALED_ROWS = 4096
"""Number of rows of the weight gradient that are cast to float32 at once."""


RowLosses = list[Tensor]
"""Losses of consecutive rows, (L,) or shorter, float32, without gradients."""


class LossTerms:
    """Terms that training adds to the cross entropy: label smoothing and z-loss.

    The training loss of a target is

        cross entropy + label_smoothing * (target logit - mean logit) + z_loss * logsumexp**2

    The first two terms are `torch.nn.functional.cross_entropy(..., label_smoothing=...)`. Losses
    have the value of the cross entropy and the gradient of the training loss. The sums of the terms
    are stored until training reads them, as in `SourceLosses`.

    Args:
        label_smoothing: Probability that is divided among all tokens of the vocabulary.
        z_loss: Coefficient of the squared logsumexp of the logits.
    """

    def __init__(self, label_smoothing: float = 0.0, z_loss: float = 0.0) -> None:
        self.label_smoothing = label_smoothing
        self.z_loss = z_loss
        self._sums_3: Tensor | None = None

    def __bool__(self) -> bool:
        return self.label_smoothing > 0 or self.z_loss > 0

    def add(self, loss_L: Tensor, smoothing_L: Tensor, squares_L: Tensor) -> None:
        """Add the targets of a forward pass. Validation, which has no gradients, adds none.

        Args:
            loss_L: (L,), float32, cross entropies.
            smoothing_L: (L,), float32, target logits minus mean logits.
            squares_L: (L,), float32, squared logsumexp.
        """
        if not torch.is_grad_enabled():
            return
        smoothed_L = loss_L + self.label_smoothing * smoothing_L
        values_3L = torch.stack([smoothed_L, self.z_loss * squares_L, torch.ones_like(loss_L)])
        sums_3 = values_3L.detach().sum(1)
        self._sums_3 = sums_3 if self._sums_3 is None else self._sums_3 + sums_3

    def pop_sums(self, device: torch.device) -> Tensor:
        """Return and reset the sums of this rank since the last call, (3,), float32.

        The sums are the smoothed cross entropy, the z-loss and the number of targets. The result is
        (0,) without terms, and zero on ranks without the last stage of the LLM.
        """
        sums_3, self._sums_3 = self._sums_3, None
        return torch.zeros(3 if self else 0, device=device) if sums_3 is None else sums_3

    def means(self, sums: Sequence[float]) -> dict[str, float | None]:
        """Return the metrics of the sums over all ranks. Inactive terms are None."""
        smoothed, squares, targets = sums if self else (0.0, 0.0, 0.0)
        return {
            "loss_smoothed": smoothed / max(targets, 1.0) if self.label_smoothing else None,
            "loss_z": squares / max(targets, 1.0) if self.z_loss else None,
        }


NO_TERMS = LossTerms()


def uses_fused_loss(device: torch.device) -> bool:
    """Return True if losses on `device` use compiled kernels that write gradients in place."""
    return device.type == "cuda" and not find_missing_compiler(device.type)


def summed_cross_entropy(
    logits_LV: Tensor,
    targets_L: Tensor,
    rows: RowLosses | None = None,
    terms: LossTerms = NO_TERMS,
) -> Tensor:
    """Return the sum of the cross entropies of all rows, a float32 scalar.

    Backward may overwrite `logits_LV` (see `uses_fused_loss`). An operator that has saved them for
    backward then raises the error of autograd about modified tensors.

    Args:
        logits_LV: (L, V), logits.
        targets_L: (L,), int64, token ids.
        rows: List that receives the losses of the rows, if given.
        terms: Terms of the training loss, whose gradients the loss has.
    """
    # Chunks would not save memory.
    if _fits_at_once(logits_LV) or terms or _is_fused(logits_LV):
        return _cross_entropy(logits_LV, targets_L, rows, terms)
    if rows is None:
        return torch.stack(_losses_of_chunks(_cross_entropy, logits_LV, targets_L)).sum()
    # Backward recomputes each chunk, so that the losses of its rows are a result, not appended.
    losses = _losses_of_chunks(_row_cross_entropies, logits_LV, targets_L)
    rows += [loss.detach() for loss in losses]
    return torch.stack([loss.sum() for loss in losses]).sum()


def row_cross_entropies(logits_LV: Tensor, targets_L: Tensor) -> Tensor:
    """Return the cross entropy of each row with its gradient, (L,), float32.

    Args:
        logits_LV: (L, V), logits.
        targets_L: (L,), int64, token ids.
    """
    if _fits_at_once(logits_LV):
        return _row_cross_entropies(logits_LV, targets_L)
    return torch.cat(_losses_of_chunks(_row_cross_entropies, logits_LV, targets_L))


def _fits_at_once(logits_LV: Tensor) -> bool:
    """Return True if casting the logits to float32 in chunks would not save memory."""
    return logits_LV.dtype == torch.float32 or len(logits_LV) <= CHUNK_TARGETS


def _losses_of_chunks(
    function: Callable[[Tensor, Tensor], Tensor], logits_LV: Tensor, targets_L: Tensor
) -> list[Tensor]:
    """Return the results of `function` for chunks of rows. Backward recomputes each chunk."""
    chunks = zip(logits_LV.split(CHUNK_TARGETS), targets_L.split(CHUNK_TARGETS), strict=True)
    return [
        checkpoint(function, logits, targets, use_reentrant=False, preserve_rng_state=False)
        for logits, targets in chunks
    ]


def chunk_rows(vocabulary: int) -> int:
    """Return the number of rows per chunk of `cross_entropy_in_chunks`."""
    return max(1, min(_ROWS, _CHUNK_BYTES // (_LOGIT_BYTES * vocabulary)))


def cross_entropy_in_chunks(
    head: ChunkHead,
    compute_logits: Callable[[Tensor], Tensor],
    rows_LD: Tensor,
    targets_L: Tensor,
    rows: RowLosses | None = None,
    terms: LossTerms = NO_TERMS,
) -> Tensor:
    """Return the sum of the cross entropies of all rows, a float32 scalar.

    Args:
        head: Head with the weight of the LLM head, which `compute_logits` calls.
        compute_logits: Function from rows (1, N, D) to logits (1, N, V), with the scaling or
            capping of the family. If the weight is a DTensor, logits are DTensors sharded by
            vocabulary.
        rows_LD: (L, D), input of the head, identical on all tensor-parallel ranks.
        targets_L: (L,), int64, token ids.
        rows: List that receives the losses of the rows, if given.
        terms: Terms of the training loss, whose gradients the loss has.
    """
    learns = head.gradient_VD is not None or (torch.is_grad_enabled() and rows_LD.requires_grad)
    rows_gradient_LD = torch.empty_like(rows_LD) if learns else None
    parts = [torch.zeros((), device=rows_LD.device)]
    for start in range(0, len(targets_L), head.rows):
        chunk = slice(start, start + head.rows)
        rows_ND = rows_LD[chunk].detach().requires_grad_(learns)
        with loss_parallel() if head.mesh else nullcontext():
            # Not `[0]`, whose backward copies the gradient of all logits.
            # A variable would keep the logits until those of the next chunk are computed.
            loss = _cross_entropy(
                compute_logits(rows_ND[None]).squeeze(0), targets_L[chunk], rows, terms
            )
            if rows_gradient_LD is not None:
                (rows_gradient_LD[chunk],) = torch.autograd.grad(loss, rows_ND)
        loss = loss.detach()
        parts.append(loss.to_local() if isinstance(loss, DTensor) else loss)
    total = torch.stack(parts).sum()
    # The node of the rows is last, so that a backward pass for inputs (I) skips the weight node.
    if head.gradient_VD is not None:
        total = _PrecomputedWeightGradient.apply(total, head.local_VD, head.gradient_VD)
    if rows_gradient_LD is not None and rows_LD.requires_grad:
        total = _PrecomputedGradient.apply(total, rows_LD, head.reduce_gradient(rows_gradient_LD))
    return total


class ChunkHead(nn.Module):
    """The head for one loss in chunks, which accumulates the gradient of the weight in place.

    Args:
        head: Linear layer without a bias. With tensor parallelism its rows are sharded.
        rows: Number of rows per chunk of an unsharded head, if the loss is computed in float32
            (see `chunk_rows`).

    Attributes:
        rows: Number of rows per chunk. In-place gradients and vocabulary shards allow more rows
            with the same memory. The gradient of the weight is then read, rounded and written less
            often.
        gradient_VD: (V, D), gradient of the weight, summed over the previous chunks. None if the
            weight is frozen.
    """

    def __init__(self, head: nn.Module, rows: int) -> None:
        super().__init__()
        weight: Any = head.weight
        self.mesh = weight.device_mesh if isinstance(weight, DTensor) else None
        fused = self.mesh is None and uses_fused_loss(weight.device)
        ranks = self.mesh.size() if self.mesh is not None else 1
        self.rows = rows * (_LOGIT_BYTES // weight.itemsize if fused else ranks)
        # Not registered as a parameter: the gradient belongs to the parameter of the head.
        self.local_VD: Tensor
        object.__setattr__(self, "local_VD", weight.to_local() if self.mesh else weight)
        learns = torch.is_grad_enabled() and weight.requires_grad
        self.gradient_VD = torch.zeros_like(self.local_VD) if learns else None
        self._vocabulary = len(weight)

    def forward(self, rows_1ND: Tensor) -> Tensor:
        """Return the logits (1, N, V) of rows (1, N, D), as a DTensor if the head is one."""
        product_1NV = _HeadProduct.apply(rows_1ND, self.local_VD.detach(), self.gradient_VD)
        if self.mesh is None:
            return product_1NV
        shape = torch.Size((*rows_1ND.shape[:-1], self._vocabulary))
        strides = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            product_1NV, self.mesh, [Shard(2)], run_check=False, shape=shape, stride=strides
        )

    def reduce_gradient(self, gradient_LD: Tensor) -> Tensor:
        """Return the gradient of rows (L, D), summed over the vocabulary shards of all ranks."""
        if self.mesh is None:
            return gradient_LD
        partial_LD = DTensor.from_local(gradient_LD, self.mesh, [Partial()], run_check=False)
        return partial_LD.redistribute(placements=[Replicate()]).to_local()


class _HeadProduct(torch.autograd.Function):
    """The matmul of rows with the weight, whose backward adds to the gradient of the weight.

    Autograd would allocate the gradient of each chunk, as large as the weight, before adding it.
    """

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
        if total_VD is not None:  # not `addmm_`, which the FLOP counter of torch does not support
            torch.addmm(total_VD, logits_1NV[0].mT, rows_1ND[0], out=total_VD)
        return logits_1NV @ weight_VD, None, None


class _PrecomputedGradient(torch.autograd.Function):
    """A loss with a precomputed gradient, which backward multiplies by the incoming gradient."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, source: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor, Tensor, None]:
        gradient = ctx.gradient
        return factor, (gradient.float() * factor).to(gradient.dtype), None


class _PrecomputedWeightGradient(_PrecomputedGradient):
    """The same for the weight gradient, in place to save memory. Backward can run only once."""

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
        # A factor rounded to half precision would have the same error in each element.
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
    def forward(ctx: Any, logits_LV: Tensor, targets_L: Tensor) -> tuple[Tensor, Tensor]:
        # Without history, so that training and validation share a graph.
        compute = _compiled(_loss_of_rows)
        loss, loss_L, max_L1, sum_L1 = compute(_dynamic(logits_LV.detach()), _dynamic(targets_L))
        ctx.save_for_backward(logits_LV, targets_L, max_L1, sum_L1)
        ctx.mark_non_differentiable(loss_L)
        return loss, loss_L

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor: Tensor, _: Tensor) -> tuple[Tensor, None]:
        # Raises an error if the logits were overwritten already.
        logits_LV, targets_L, max_L1, sum_L1 = ctx.saved_tensors
        gradient_LV = _dynamic(logits_LV.detach())
        _compiled(_write_gradient)(
            gradient_LV, _dynamic(targets_L), _dynamic(max_L1), _dynamic(sum_L1), factor
        )
        return gradient_LV, None


def _loss_of_rows(logits_LV: Tensor, targets_L: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the summed loss, and the loss, maximum and sum of exponentials of each row.

    The logarithm of the sum and the maximum are separate. Their sum, the logsumexp, would lose the
    digits that distinguish confident predictions from certain ones.
    """
    x_LV = logits_LV.float()
    max_L1 = x_LV.amax(-1, keepdim=True)
    sum_L1 = (x_LV - max_L1).exp().sum(-1, keepdim=True)
    target_L1 = logits_LV.gather(1, targets_L[:, None]).float()
    loss_L1 = sum_L1.log() - (target_L1 - max_L1)
    return loss_L1.sum(), loss_L1[:, 0], max_L1, sum_L1


def _write_gradient(
    logits_LV: Tensor, targets_L: Tensor, max_L1: Tensor, sum_L1: Tensor, factor: Tensor
) -> None:
    """Overwrite the logits with `factor` times the gradient of the summed loss."""
    words_V = torch.arange(logits_LV.shape[1], device=logits_LV.device)
    probability_LV = (logits_LV.float() - max_L1).exp() / sum_L1
    logits_LV.copy_((probability_LV - (words_V == targets_L[:, None]).float()) * factor)


class _RegularizedCrossEntropy(torch.autograd.Function):
    """Summed cross entropy with the gradient of the training loss of `LossTerms`.

    Args of `apply`:
        logits_LV: (L, V), plain tensor, logits of the vocabulary of this rank.
        targets_L: (L,), int64, index in the vocabulary of this rank, or out of its range.
        terms: Terms of the training loss.
        shards: Ranks of the vocabulary and its full size. The mesh is None on one rank.
        is_fused: Whether compiled kernels are used, whose backward overwrites the logits.

    Returns:
        The summed cross entropy, and (L,) each: cross entropy, target logit minus mean logit, and
        squared logsumexp.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits_LV: Tensor,
        targets_L: Tensor,
        terms: LossTerms,
        shards: tuple[DeviceMesh | None, int],
        is_fused: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        mesh, vocabulary = shards
        parts = zip(*_row_chunks(is_fused, logits_LV.detach(), targets_L), strict=True)
        compute = _compiled(_row_statistics) if is_fused else _row_statistics
        statistics_4L = torch.cat([compute(*part) for part in parts], dim=1)
        max_L, *sums = statistics_4L
        if mesh is not None:
            local_max_L, max_L = max_L, _reduce(max_L, mesh, "max")
            sums[0] = sums[0] * (local_max_L - max_L).exp()
            sums = list(_reduce(torch.stack(sums), mesh, "sum"))
        sum_L, target_L, total_L = sums
        loss_L = sum_L.log() - (target_L - max_L)
        logsumexp_L = sum_L.log() + max_L
        weight_L = (1 + 2 * terms.z_loss * logsumexp_L) / sum_L
        ctx.save_for_backward(logits_LV, targets_L, max_L, weight_L)
        ctx.shares = 1 - terms.label_smoothing, terms.label_smoothing / vocabulary
        ctx.is_fused = is_fused
        smoothing_L = target_L - total_L / vocabulary
        squares_L = logsumexp_L.square()
        ctx.mark_non_differentiable(loss_L, smoothing_L, squares_L)
        return loss_L.sum(), loss_L, smoothing_L, squares_L

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor: Tensor, *_: Tensor) -> tuple[Tensor, None, None, None, None]:
        logits_LV, *rows = ctx.saved_tensors
        gradient_LV = logits_LV.detach() if ctx.is_fused else logits_LV.clone()
        write: Callable[..., None] = _write_regularized
        if ctx.is_fused:
            write = _compiled(_write_regularized)
        for part in zip(*_row_chunks(ctx.is_fused, gradient_LV, *rows), strict=True):
            write(*part, factor, *ctx.shares)
        return gradient_LV, None, None, None, None


def _row_chunks(is_fused: bool, *tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """Return consecutive rows of each tensor. Fused kernels need no chunks."""
    if is_fused:
        return [(_dynamic(tensor),) for tensor in tensors]
    return [tensor.split(CHUNK_TARGETS) for tensor in tensors]


def _row_statistics(logits_NV: Tensor, targets_N: Tensor) -> Tensor:
    """Return maximum, sum of exponentials below it, target logit and sum of logits, (4, N).

    The target logit is 0 if the target is not in the vocabulary of this rank.
    """
    x_NV = logits_NV.float()
    max_N1 = x_NV.amax(-1, keepdim=True)
    words = logits_NV.shape[1]
    is_local_N = (targets_N >= 0) & (targets_N < words)
    target_N = x_NV.gather(1, targets_N.clamp(0, words - 1)[:, None])[:, 0]
    sum_N = (x_NV - max_N1).exp().sum(-1)
    return torch.stack([max_N1[:, 0], sum_N, torch.where(is_local_N, target_N, 0.0), x_NV.sum(-1)])


def _write_regularized(
    logits_NV: Tensor,
    targets_N: Tensor,
    max_N: Tensor,
    weight_N: Tensor,
    factor: Tensor,
    target_share: float,
    uniform_share: float,
) -> None:
    """Overwrite the logits with `factor` times the gradient of the training loss."""
    words_V = torch.arange(logits_NV.shape[1], device=logits_NV.device)
    probability_NV = (logits_NV.float() - max_N[:, None]).exp() * weight_N[:, None]
    target_NV = (words_V == targets_N[:, None]).float() * target_share
    logits_NV.copy_((probability_NV - target_NV - uniform_share) * factor)


def _reduce(tensor: Tensor, mesh: DeviceMesh, operation: str) -> Tensor:
    """Return the sum or maximum of a tensor over the ranks of a mesh."""
    partial_tensor = DTensor.from_local(tensor, mesh, [Partial(operation)], run_check=False)
    return partial_tensor.redistribute(placements=[Replicate()]).to_local()


def _regularized_cross_entropy(
    logits_LV: Tensor, targets_L: Tensor, terms: LossTerms
) -> tuple[Tensor, Tensor]:
    """Return the summed cross entropy with the gradient of all terms, and those of the rows."""
    mesh = None
    vocabulary = logits_LV.shape[1]
    is_fused = _is_fused(logits_LV)
    if isinstance(logits_LV, DTensor):
        mesh = logits_LV.device_mesh
        # Shards have the sizes of `torch.chunk`.
        targets_L = targets_L - mesh.get_local_rank() * -(-vocabulary // mesh.size())
        logits_LV = logits_LV.to_local()
    loss, loss_L, smoothing_L, squares_L = _RegularizedCrossEntropy.apply(
        logits_LV, targets_L, terms, (mesh, vocabulary), is_fused
    )
    terms.add(loss_L, smoothing_L, squares_L)
    return loss, loss_L


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
    is_plain_tensor = type(logits_LV) is Tensor and logits_LV.is_contiguous() and len(logits_LV) > 1
    return is_plain_tensor and uses_fused_loss(logits_LV.device)


def _cross_entropy(
    logits_LV: Tensor,
    targets_L: Tensor,
    rows: RowLosses | None = None,
    terms: LossTerms = NO_TERMS,
) -> Tensor:
    """Return the summed cross entropy, computed in float32 from all rows at once."""
    if terms:
        loss, loss_L = _regularized_cross_entropy(logits_LV, targets_L, terms)
    elif _is_fused(logits_LV):
        loss, loss_L = _InPlaceCrossEntropy.apply(logits_LV, targets_L)
    elif rows is None:
        return functional.cross_entropy(logits_LV.float(), targets_L, reduction="sum")
    else:
        loss_L = _row_cross_entropies(logits_LV, targets_L)
        loss = loss_L.sum()
    if rows is not None:
        loss_L = loss_L.detach()
        rows.append(loss_L.full_tensor() if isinstance(loss_L, DTensor) else loss_L)
    return loss


def _row_cross_entropies(logits_LV: Tensor, targets_L: Tensor) -> Tensor:
    """Return the cross entropy of each row, (L,), float32."""
    return functional.cross_entropy(logits_LV.float(), targets_L, reduction="none")
