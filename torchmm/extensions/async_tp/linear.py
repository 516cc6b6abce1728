"""Column- and row-wise linear layers whose communication overlaps with their matmuls.

`gather_linear` is the all-gather of a sequence-parallel input with all column-wise linear layers
that share it (q, k, v; gate, up). `linear_scatter` is a row-wise linear layer with the
reduce-scatter of its output. Both process tokens. The backend defines the communication between
ranks (`torchmm.extensions.async_tp.backends`).

Backward of `gather_linear` all-gathers the input again while it computes the input gradient. The
full input is not saved, because sequence parallelism exists to save this memory. The reduce-scatter
of the input gradient overlaps with the weight gradients. With frozen weights, neither the
all-gather nor weight gradients are required, and the reduce-scatter overlaps with the blocks of the
input gradient. Backward of `linear_scatter` all-gathers the output gradient in blocks during the
input gradient and saves it for the weight gradient.

The functions are custom operators with names instead of objects as arguments. torch.compile
therefore accepts them without a graph break, and selective recomputation saves their results like
those of other matmuls. In an `autograd.Function`, dynamo would trace sends and receives. The
`_micro_pipeline_tp` pass of torch finds the pattern only in compiled graphs and requires symmetric
memory.

Shape legend: T tokens of the full sequence, S tokens of one slice, D and F features.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from torchmm.extensions.async_tp.backends import BACKENDS, OverlapBackend
from torchmm.parallel import torch_compat


class Overlap(NamedTuple):
    """Communication settings of one tensor-parallel group."""

    backend: str
    """Key of `BACKENDS`."""
    group: str
    """Name of the process group."""
    chunks: int = 1
    """Number of blocks per slice ("ring")."""


def gather_linear(
    x_SD: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    rows: int,
    overlap: Overlap,
) -> list[Tensor]:
    """Return matmuls of the tokens of all ranks with the local weights. Differentiable.

    Args:
        x_SD: Slice of this rank. All slices have equal length, and the last ones are padded.
        weights: Weights (F, D).
        biases: Bias (F,) or None for each weight.
        rows: Number of tokens T of all slices without padding.
        overlap: Communication settings.

    Returns:
        One output (T, F) per weight.

    Raises:
        RuntimeError: A peer was lost.
    """
    bias_tensors = [
        w.new_empty(0) if b is None else b for w, b in zip(weights, biases, strict=True)
    ]
    return _gather_linear(x_SD, list(weights), bias_tensors, rows, *overlap)


def linear_scatter(
    x_TF: Tensor, weight_DF: Tensor, bias_D: Tensor | None, slice_rows: int, overlap: Overlap
) -> Tensor:
    """Return the local tokens of the sum over ranks of x @ weight^T, plus bias. Differentiable.

    Args:
        x_TF: All tokens of the sequence, with the features of this rank.
        weight_DF: Local weight.
        bias_D: Bias, identical on all ranks. Its gradient is the local part of the sum.
        slice_rows: Slice length S, with ranks x S >= T.
        overlap: Communication settings.

    Returns:
        The slice (S, D), with zeros as padding.

    Raises:
        RuntimeError: A peer was lost.
    """
    return _linear_scatter(x_TF, weight_DF, bias_D, slice_rows, *overlap)


def gather_slices(x_SD: Tensor, rows: int, overlap: Overlap) -> Tensor:
    """Return the tokens of the slices of all ranks, (T, D). Differentiable.

    The following computation must be identical on all ranks: backward returns the local slice of
    the gradient.
    """
    return _gather_slices(x_SD, rows, *overlap)


def take_slice(x_TD: Tensor, slice_rows: int, overlap: Overlap) -> Tensor:
    """Return the local slice (S, D) of replicated tokens, padded with zeros. Differentiable.

    Backward all-gathers, because the gradient is also identical on all ranks.
    """
    return _take_slice(x_TD, slice_rows, *overlap)


def _backend(backend: str, group: str, chunks: int) -> OverlapBackend:
    return BACKENDS[backend](torch_compat.find_process_group(group), chunks)


@torch.library.custom_op("torchmm::gather_linear", mutates_args=())
def _gather_linear(
    x_SD: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    rows: int,
    backend: str,
    group: str,
    chunks: int,
) -> list[Tensor]:
    bias_tensors = [bias if bias.numel() else None for bias in biases]
    return _backend(backend, group, chunks).gather_linear(x_SD, weights, bias_tensors, rows)


@_gather_linear.register_fake
def _(x_SD, weights, biases, rows, backend, group, chunks):  # type: ignore[no-untyped-def]
    return [x_SD.new_empty(rows, weight.shape[0]) for weight in weights]


@torch.library.custom_op("torchmm::gather_linear_backward", mutates_args=())
def _gather_linear_backward(
    grads: list[Tensor],
    x_SD: Tensor | None,
    weights: list[Tensor],
    slice_rows: int,
    needed: list[bool],
    backend: str,
    group: str,
    chunks: int,
) -> list[Tensor]:
    """Return the `needed` gradients of the input and of each weight with its bias."""
    communication = _backend(backend, group, chunks)
    gathering = scattering = None
    if x_SD is not None:
        gathering = communication.start_gather(x_SD, len(grads[0]))
    if needed[0]:
        transposed = [weight.t() for weight in weights]
        scattering = communication.start_linear_scatter(grads, transposed, slice_rows)
    gradients = []
    if gathering is not None:
        whole_TD = gathering.wait()
        gradients = [
            g.t() @ whole_TD for g, is_needed in zip(grads, needed[1:], strict=True) if is_needed
        ]
    return gradients if scattering is None else [scattering.wait(), *gradients]


@_gather_linear_backward.register_fake
def _(grads, x_SD, weights, slice_rows, needed, backend, group, chunks):  # type: ignore[no-untyped-def]
    slice_grad = grads[0].new_empty(slice_rows, weights[0].shape[1])
    of_weights = [w.new_empty(w.shape) for w in weights]
    return [x for x, is_needed in zip([slice_grad, *of_weights], needed, strict=True) if is_needed]


def _save_for_gather_linear(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x_SD, weights, _, _, *ctx.overlap = inputs
    ctx.slice_rows = x_SD.shape[0]
    ctx.saves_input = any(weight.requires_grad for weight in weights)
    ctx.save_for_backward(*weights, *([x_SD] if ctx.saves_input else []))


def _backward_of_gather_linear(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    needs_x, needs_weights, needs_biases, *_ = ctx.needs_input_grad
    saved = list(ctx.saved_tensors)
    x_SD = saved.pop() if ctx.saves_input else None
    needed = [needs_x, *needs_weights]
    gradients: list[Tensor | None] = [None] * len(needed)
    if any(needed):
        contiguous = [grad.contiguous() for grad in grads]
        parts = _gather_linear_backward(
            contiguous, x_SD, saved, ctx.slice_rows, needed, *ctx.overlap
        )
        gradients = _spread(parts, needed)
    of_biases = [
        g.sum(0) if is_needed else None for g, is_needed in zip(grads, needs_biases, strict=True)
    ]
    return gradients[0], gradients[1:], of_biases, None, None, None, None


_gather_linear.register_autograd(_backward_of_gather_linear, setup_context=_save_for_gather_linear)


@torch.library.custom_op("torchmm::linear_scatter", mutates_args=())
def _linear_scatter(
    x_TF: Tensor,
    weight_DF: Tensor,
    bias_D: Tensor | None,
    slice_rows: int,
    backend: str,
    group: str,
    chunks: int,
) -> Tensor:
    communication = _backend(backend, group, chunks)
    out_SD = communication.start_linear_scatter([x_TF], [weight_DF], slice_rows).wait()
    if bias_D is not None:
        start, stop = communication.slice_of(communication.rank, slice_rows, len(x_TF))
        out_SD[: stop - start] += bias_D
    return out_SD


@_linear_scatter.register_fake
def _(x_TF, weight_DF, bias_D, slice_rows, backend, group, chunks):  # type: ignore[no-untyped-def]
    return x_TF.new_empty(slice_rows, weight_DF.shape[0])


@torch.library.custom_op("torchmm::linear_scatter_backward", mutates_args=())
def _linear_scatter_backward(
    grad_SD: Tensor,
    x_TF: Tensor | None,
    weight_DF: Tensor,
    rows: int,
    needed: list[bool],
    backend: str,
    group: str,
    chunks: int,
) -> list[Tensor]:
    """Return the `needed` gradients of input, weight and bias."""
    communication = _backend(backend, group, chunks)
    gradients = []
    grad_TD = None
    if needed[0]:
        grad_TF, grad_TD = communication.gather_linear_and_input(grad_SD, weight_DF.t(), rows)
        gradients.append(grad_TF)
    if needed[1]:
        assert x_TF is not None
        grad_TD = communication.start_gather(grad_SD, rows).wait() if grad_TD is None else grad_TD
        gradients.append(grad_TD.t() @ x_TF)
    if needed[2]:
        start, stop = communication.slice_of(communication.rank, len(grad_SD), rows)
        gradients.append(grad_SD[: stop - start].sum(0))
    return gradients


@_linear_scatter_backward.register_fake
def _(grad_SD, x_TF, weight_DF, rows, needed, backend, group, chunks):  # type: ignore[no-untyped-def]
    gradients = [
        grad_SD.new_empty(rows, weight_DF.shape[1]),
        weight_DF.new_empty(weight_DF.shape),
        grad_SD.new_empty(weight_DF.shape[0]),
    ]
    return [x for x, is_needed in zip(gradients, needed, strict=True) if is_needed]


def _save_for_linear_scatter(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x_TF, weight_DF, _, _, *ctx.overlap = inputs
    ctx.rows = x_TF.shape[0]
    ctx.saves_input = weight_DF.requires_grad
    ctx.save_for_backward(weight_DF, *([x_TF] if ctx.saves_input else []))


def _backward_of_linear_scatter(ctx: Any, grad_SD: Tensor) -> tuple[Any, ...]:
    weight_DF, *saved = ctx.saved_tensors
    x_TF = saved[0] if saved else None
    needed = list(ctx.needs_input_grad[:3])
    gradients: list[Tensor | None] = [None] * 3
    if any(needed):
        grad = grad_SD.contiguous()
        parts = _linear_scatter_backward(grad, x_TF, weight_DF, ctx.rows, needed, *ctx.overlap)
        gradients = _spread(parts, needed)
    return *gradients, None, None, None, None


_linear_scatter.register_autograd(
    _backward_of_linear_scatter, setup_context=_save_for_linear_scatter
)


@torch.library.custom_op("torchmm::gather_slices", mutates_args=())
def _gather_slices(x_SD: Tensor, rows: int, backend: str, group: str, chunks: int) -> Tensor:
    return _backend(backend, group, chunks).start_gather(x_SD, rows).wait()


@_gather_slices.register_fake
def _(x_SD, rows, backend, group, chunks):  # type: ignore[no-untyped-def]
    return x_SD.new_empty(rows, x_SD.shape[1])


@torch.library.custom_op("torchmm::take_slice", mutates_args=())
def _take_slice(x_TD: Tensor, slice_rows: int, backend: str, group: str, chunks: int) -> Tensor:
    communication = _backend(backend, group, chunks)
    start, stop = communication.slice_of(communication.rank, slice_rows, len(x_TD))
    return functional.pad(x_TD[start:stop], (0, 0, 0, slice_rows - (stop - start)))


@_take_slice.register_fake
def _(x_TD, slice_rows, backend, group, chunks):  # type: ignore[no-untyped-def]
    return x_TD.new_empty(slice_rows, x_TD.shape[1])


def _save_rows(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, _, *ctx.overlap = inputs
    ctx.rows = x.shape[0]


def _backward_of_gather_slices(ctx: Any, grad_TD: Tensor) -> tuple[Any, ...]:
    return _take_slice(grad_TD.contiguous(), ctx.rows, *ctx.overlap), None, None, None, None


def _backward_of_take_slice(ctx: Any, grad_SD: Tensor) -> tuple[Any, ...]:
    return _gather_slices(grad_SD.contiguous(), ctx.rows, *ctx.overlap), None, None, None, None


_gather_slices.register_autograd(_backward_of_gather_slices, setup_context=_save_rows)
_take_slice.register_autograd(_backward_of_take_slice, setup_context=_save_rows)


def _spread(parts: Iterable[Tensor], needed: Sequence[bool]) -> list[Tensor | None]:
    """Return the computed gradients at the positions where they are needed, and None elsewhere."""
    following = iter(parts)
    return [next(following) if is_needed else None for is_needed in needed]
