"""Column- and row-wise linears whose communication runs below their own products.

`gather_linear` is the all-gather of a sequence-parallel input with all column-wise linears that
share it (q, k, v; gate, up); `linear_scatter` a row-wise linear with the reduce-scatter of its
output. Both work on rows; how ranks exchange rows is the backend's business
(`torchmm.extensions.async_tp.backends`).

Backward of `gather_linear` gathers the input anew (it is not kept: that is what sequence
parallelism saves) while it computes the input's gradient, whose reduce-scatter runs below the
weight gradients. Frozen weights need neither; then the reduce-scatter runs below the input
gradient's own blocks. Backward of `linear_scatter` gathers the output's gradient block by block
below the input gradient and keeps it for the weight gradient.

They are custom operators with names instead of objects for arguments, so torch.compile takes them
as they are, without a break, and selective recomputation keeps their results like those of other
matrix products. Rejected: `autograd.Function`, in which dynamo would trace sends and receives;
torch's `_micro_pipeline_tp` pass, which finds the pattern in compiled graphs only, on symmetric
memory only.

Shape legend: T rows of the whole sequence, S rows of one slice, D and F features.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from torchmm.extensions.async_tp.backends import BACKENDS, Backend
from torchmm.parallel import torch_private


class Overlap(NamedTuple):
    """How the ranks of one tensor-parallel group communicate."""

    backend: str
    """A key of `BACKENDS`."""
    group: str
    """Name of the process group."""
    chunks: int = 1
    """Blocks per slice ("ring")."""


def gather_linear(
    x_SD: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    rows: int,
    overlap: Overlap,
) -> list[Tensor]:
    """Products of all ranks' rows with this rank's weights; differentiable.

    Args:
        x_SD: This rank's slice; slices of all ranks are equally long, the last ones padded.
        weights: (F, D) each.
        biases: (F,) or None for each weight.
        rows: T, rows of all slices without padding.

    Returns:
        (T, F) for each weight.

    Raises:
        RuntimeError: A peer was lost.
    """
    given = [w.new_empty(0) if b is None else b for w, b in zip(weights, biases, strict=True)]
    return _gather_linear(x_SD, list(weights), given, rows, *overlap)


def linear_scatter(
    x_TF: Tensor, weight_DF: Tensor, bias_D: Tensor | None, slice_rows: int, overlap: Overlap
) -> Tensor:
    """This rank's rows of the sum over ranks of x @ weight^T, plus bias; differentiable.

    Args:
        x_TF: All rows of the sequence, this rank's features.
        bias_D: The same on all ranks; gradients are this rank's share of the sum.
        slice_rows: S; ranks x S >= T.

    Returns:
        (S, D); zeros where the slice reaches past the sequence.

    Raises:
        RuntimeError: A peer was lost.
    """
    return _linear_scatter(x_TF, weight_DF, bias_D, slice_rows, *overlap)


def gather_slices(x_SD: Tensor, rows: int, overlap: Overlap) -> Tensor:
    """The rows of all ranks' slices, (T, D); differentiable.

    What follows must be the same on all ranks: backward keeps this rank's slice of the gradient.
    """
    return _gather_slices(x_SD, rows, *overlap)


def take_slice(x_TD: Tensor, slice_rows: int, overlap: Overlap) -> Tensor:
    """This rank's slice (S, D) of rows that all ranks have, padded with zeros; differentiable.

    Backward gathers: the gradient, too, is the same on all ranks.
    """
    return _take_slice(x_TD, slice_rows, *overlap)


def _backend(backend: str, group: str, chunks: int) -> Backend:
    return BACKENDS[backend](torch_private.group_named(group), chunks)


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
    given = [bias if bias.numel() else None for bias in biases]
    return _backend(backend, group, chunks).gather_linear(x_SD, weights, given, rows)


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
    """Gradients that are `needed`, of the input and each weight (which a bias goes along with)."""
    communication = _backend(backend, group, chunks)
    gathering = scattering = None
    if x_SD is not None:
        gathering = communication.start_gather(x_SD, len(grads[0]))
    if needed[0]:
        transposed = [weight.t() for weight in weights]
        scattering = communication.start_linear_scatter(grads, transposed, slice_rows)
    found = []
    if gathering is not None:
        whole_TD = gathering.wait()
        found = [g.t() @ whole_TD for g, wanted in zip(grads, needed[1:], strict=True) if wanted]
    return found if scattering is None else [scattering.wait(), *found]


@_gather_linear_backward.register_fake
def _(grads, x_SD, weights, slice_rows, needed, backend, group, chunks):  # type: ignore[no-untyped-def]
    slice_grad = grads[0].new_empty(slice_rows, weights[0].shape[1])
    of_weights = [w.new_empty(w.shape) for w in weights]
    return [x for x, wanted in zip([slice_grad, *of_weights], needed, strict=True) if wanted]


def _keep_for_gather_linear(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x_SD, weights, _, _, *ctx.overlap = inputs
    ctx.slice_rows = x_SD.shape[0]
    ctx.keeps_input = any(weight.requires_grad for weight in weights)
    ctx.save_for_backward(*weights, *([x_SD] if ctx.keeps_input else []))


def _backward_of_gather_linear(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    needs_x, needs_weights, needs_biases, *_ = ctx.needs_input_grad
    saved = list(ctx.saved_tensors)
    x_SD = saved.pop() if ctx.keeps_input else None
    needed = [needs_x, *needs_weights]
    found: list[Tensor | None] = [None] * len(needed)
    if any(needed):
        contiguous = [grad.contiguous() for grad in grads]
        parts = _gather_linear_backward(
            contiguous, x_SD, saved, ctx.slice_rows, needed, *ctx.overlap
        )
        found = _spread(parts, needed)
    of_biases = [
        g.sum(0) if wanted else None for g, wanted in zip(grads, needs_biases, strict=True)
    ]
    return found[0], found[1:], of_biases, None, None, None, None


_gather_linear.register_autograd(_backward_of_gather_linear, setup_context=_keep_for_gather_linear)


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
    """Gradients that are `needed`, of input, weight and bias."""
    communication = _backend(backend, group, chunks)
    found = []
    grad_TD = None
    if needed[0]:
        grad_TF, grad_TD = communication.gather_linear_keeping(grad_SD, weight_DF.t(), rows)
        found.append(grad_TF)
    if needed[1]:
        assert x_TF is not None
        grad_TD = communication.start_gather(grad_SD, rows).wait() if grad_TD is None else grad_TD
        found.append(grad_TD.t() @ x_TF)
    if needed[2]:
        start, stop = communication.slice_of(communication.rank, len(grad_SD), rows)
        found.append(grad_SD[: stop - start].sum(0))
    return found


@_linear_scatter_backward.register_fake
def _(grad_SD, x_TF, weight_DF, rows, needed, backend, group, chunks):  # type: ignore[no-untyped-def]
    every = [
        grad_SD.new_empty(rows, weight_DF.shape[1]),
        weight_DF.new_empty(weight_DF.shape),
        grad_SD.new_empty(weight_DF.shape[0]),
    ]
    return [x for x, wanted in zip(every, needed, strict=True) if wanted]


def _keep_for_linear_scatter(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x_TF, weight_DF, _, _, *ctx.overlap = inputs
    ctx.rows = x_TF.shape[0]
    ctx.keeps_input = weight_DF.requires_grad
    ctx.save_for_backward(weight_DF, *([x_TF] if ctx.keeps_input else []))


def _backward_of_linear_scatter(ctx: Any, grad_SD: Tensor) -> tuple[Any, ...]:
    weight_DF, *kept = ctx.saved_tensors
    x_TF = kept[0] if kept else None
    needed = list(ctx.needs_input_grad[:3])
    found: list[Tensor | None] = [None] * 3
    if any(needed):
        grad = grad_SD.contiguous()
        parts = _linear_scatter_backward(grad, x_TF, weight_DF, ctx.rows, needed, *ctx.overlap)
        found = _spread(parts, needed)
    return *found, None, None, None, None


_linear_scatter.register_autograd(
    _backward_of_linear_scatter, setup_context=_keep_for_linear_scatter
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


def _keep_rows(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, _, *ctx.overlap = inputs
    ctx.rows = x.shape[0]


def _backward_of_gather_slices(ctx: Any, grad_TD: Tensor) -> tuple[Any, ...]:
    return _take_slice(grad_TD.contiguous(), ctx.rows, *ctx.overlap), None, None, None, None


def _backward_of_take_slice(ctx: Any, grad_SD: Tensor) -> tuple[Any, ...]:
    return _gather_slices(grad_SD.contiguous(), ctx.rows, *ctx.overlap), None, None, None, None


_gather_slices.register_autograd(_backward_of_gather_slices, setup_context=_keep_rows)
_take_slice.register_autograd(_backward_of_take_slice, setup_context=_keep_rows)


def _spread(parts: Iterable[Tensor], needed: Sequence[bool]) -> list[Tensor | None]:
    """What was computed, in the places where it was needed."""
    following = iter(parts)
    return [next(following) if wanted else None for wanted in needed]
