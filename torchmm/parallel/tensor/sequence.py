"""Sequence parallelism: slices of the sequence between the tensor-parallel regions of a module.

    stage 0: take slice -> layer -> layer ->(send slice)-> stage 1: layer -> layer -> all-gather
             rank 0: tokens 0-3, rank 1: tokens 4-7        norms and residuals process slices

The first layer takes the local slice of the sequence dimension (the second to last). The output of
the last layer is all-gathered, so modules around the layers process complete sequences. Stages send
slices to the next stage.

Slices have equal lengths. If the length is not divisible by the ranks, slices are padded with zeros
between the regions. Regions process unpadded sequences, so attention has only real positions.
Uneven slices can be empty, and collectives then hang (DTensor of torch 2.13 with gloo).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement
from torch.nn import functional

from torchmm.models.layered import LayeredModule
from torchmm.parallel.tensor.collectives import (
    HookedCollectives,
    all_gather_rows,
    as_replicated,
    reduce_scatter_rows,
)

_COMMON_ATTRIBUTES = vars(nn.Module()).keys() - {"training"}
"""Module attributes that no forward function reads."""
SEQUENCE_DIM = -2
"""Sequence dimension of hidden states (batch, tokens, features) or (tokens, features)."""


LocalRows = Callable[[DTensor], Tensor]
"""Differentiable function from a parameter to the rows that this rank computes with."""


class OverlapStyles(ABC):
    """Styles of linears whose communication overlaps with their matmuls.

    A scope is an attention or MLP. It has column-wise linears with a common input and one row-wise
    linear at its end. Between scopes, each rank has a slice of the sequence.
    """

    @abstractmethod
    def column(self, linear: nn.Module, local_rows: LocalRows) -> Callable[..., Tensor]:
        """Return the forward of a column-wise linear, called within its scope.

        Args:
            linear: Linear with DTensor parameters.
            local_rows: Function that is applied to weight and bias.
        """

    @abstractmethod
    def row(self, slices: SequenceSlices) -> ParallelStyle:
        """Return the style of row-wise linears, whose output is a slice of the sum over ranks."""

    @abstractmethod
    def scope(self, slices: SequenceSlices) -> ParallelStyle:
        """Return the style of scopes, whose input is a slice. Applied after styles of linears."""

    @abstractmethod
    def take_slice(self, x_TD: Tensor, slice_rows: int) -> Tensor:
        """Return the slice of this rank, padded with zeros. The backward pass all-gathers.

        Args:
            x_TD: All rows of the sequence, equal on all ranks.
            slice_rows: Number of rows of a slice. All slices cover at least T rows.
        """

    @abstractmethod
    def gather_slices(self, x_SD: Tensor, rows: int) -> Tensor:
        """Return `rows` rows of all slices, without padding. The backward pass takes a slice."""


class SequenceSlices:
    """Slices of the layers of one module.

    Slices have equal lengths: the sequence is padded to a multiple of the number of ranks. The
    length is recorded on entry, and again by a layer that is recomputed.

    Args:
        mesh: 1-D mesh of the tensor-parallel ranks.
        overlap: Styles of linears whose communication overlaps with their matmuls, or None.
        exchange: Collectives with a hook (`collectives`). None: ranks wait immediately.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        overlap: OverlapStyles | None = None,
        exchange: HookedCollectives | None = None,
    ) -> None:
        self._mesh = mesh
        self.overlap = overlap
        self.exchange = exchange
        self._extent = torch.empty(0, 0)
        self._arrived: Tensor | None = None
        """Slice from the previous stage, until the first layer takes it."""
        self._has_layers = False
        self._is_first = self._is_last = True

    def attach(self, module: LayeredModule) -> None:
        """Install hooks so that the layers of a stage process slices."""
        layers = module.layers
        module.sequence_ops = self
        self._has_layers = bool(layers)
        self._is_first = module.is_first
        self._is_last = module.is_last
        if layers:  # first, because it records the length that the other layers use
            layers[0].register_forward_pre_hook(
                self.take_local_slice if self._is_first else self.resume_slice
            )
        for layer in layers:
            self.record_length(layer)
        if layers and self._is_last:
            layers[-1].register_forward_hook(self.gather_output)

    @property
    def length(self) -> int:
        """Number of positions on all ranks, without padding.

        It is stored as the size of an empty tensor. A compiled layer treats it as a dynamic size,
        but would be recompiled for each value of a number.
        """
        return len(self._extent)

    @property
    def slice_length(self) -> int:
        """Number of positions of a rank, including padding."""
        return -(-self.length // self._mesh.size())

    def take_local_slice(self, _: nn.Module | None, args: tuple) -> tuple:
        """Take the local slice before the first layer. The backward pass all-gathers."""
        hidden = args[0]
        self._extent = torch.empty(hidden.shape[SEQUENCE_DIM], 0)
        if self.overlap is None:
            return (self._slice(hidden, Replicate()), *args[1:])
        rows, batch = sequence_first(hidden)
        slice_rows = self.slice_length * batch.numel()
        return (batch_first(self.overlap.take_slice(rows, slice_rows), batch), *args[1:])

    def from_previous_stage(self, hidden: Tensor, positions: int) -> Tensor:
        """Return the argument of the layers for a slice from the previous stage.

        Code around the layers expects all positions, so the result is a tensor of that size
        without memory. `resume_slice` replaces it by the slice.
        """
        self._extent = torch.empty(positions, 0)
        if hidden.shape[SEQUENCE_DIM] != self.slice_length:
            raise ValueError(
                f"received {hidden.shape[SEQUENCE_DIM]} of {positions} positions on one of "
                f"{self._mesh.size()} ranks, whose slices have {self.slice_length}"
            )
        if not self._has_layers:
            return self.gather_output(None, (), hidden) if self._is_last else hidden
        self._arrived = hidden
        return hidden.new_empty(()).expand(*hidden.shape[:-2], positions, hidden.shape[-1])

    def resume_slice(self, _: nn.Module, args: tuple) -> tuple:
        """Replace the input of the first layer of a later stage by the received slice."""
        slice_, self._arrived = self._arrived, None
        assert slice_ is not None, "no slice was received"
        return (slice_.reshape(*args[0].shape[:-2], *slice_.shape[-2:]), *args[1:])

    def to_next_stage(self, hidden: Tensor) -> Tensor:
        """Return the slice to send to the next stage."""
        if self._has_layers or not self._is_first:
            return hidden
        return self.take_local_slice(None, (hidden,))[0]

    def record_length(self, layer: nn.Module) -> None:
        """Pass the sequence length to a layer, so that recomputation uses the original length.

        Other microbatches with different lengths run between the forward pass and recomputation.
        The length is an argument of `forward`, so activation checkpointing, which wraps it, passes
        it to both runs.
        """
        forward: Any = layer.forward

        def forward_at_length(*args: Any, sequence_length: Tensor, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling():  # compiled layers recompute in their graph
                self._extent = sequence_length
            return forward(*args, **kwargs)

        def add_length(_: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict]:
            return args, {**kwargs, "sequence_length": self._extent}

        layer.forward = forward_at_length
        layer.register_forward_pre_hook(add_length, with_kwargs=True)

    def reduce(self, _: nn.Module, __: tuple, partial: Tensor) -> Tensor:
        """Sum the output of a row-wise linear over the ranks, and return the local slice."""
        if self.exchange is not None:
            return reduce_scatter_rows(self._padded(partial), self.exchange)
        return self._slice(partial, Partial())

    def gather_for_scope(self, slice_: Tensor) -> DTensor:
        """Return all positions as a DTensor whose gradients are partial sums."""
        if self.exchange is None:
            return self.gather_replicated(slice_)
        rows = all_gather_rows(slice_, self.exchange)
        return as_replicated(rows[..., : self.length, :], self._mesh)

    def gather_replicated(self, slice_: Tensor) -> DTensor:
        """All-gather the slices of all ranks to a replicated DTensor without padding."""
        sharded = DTensor.from_local(slice_, self._mesh, [Shard(SEQUENCE_DIM)], run_check=False)
        padded = sharded.redistribute(placements=[Replicate()])
        if padded.shape[SEQUENCE_DIM] == self.length:
            return padded
        return padded[..., : self.length, :]  # type: ignore[return-value]

    def all_gather(self, hidden: Tensor) -> Tensor:
        """All-gather all positions. The backward pass takes a slice."""
        return self.gather_replicated(hidden).to_local()

    def add_rows(self, hidden: Tensor, positions_K: Tensor, rows_KD: Tensor) -> Tensor:
        """Add rows at their positions to the local slice. The backward pass sums over the ranks.

        All ranks have all rows. Rows of other slices are added as zeros, because their number is
        unknown without synchronizing with the device.
        """
        replicated = DTensor.from_local(rows_KD, self._mesh, [Replicate()], run_check=False)
        rows_KD = replicated.to_local(grad_placements=[Partial()])
        at_K = positions_K - self._mesh.get_local_rank() * self.slice_length
        inside_K = (at_K >= 0) & (at_K < self.slice_length)
        at_K = at_K.clamp(0, self.slice_length - 1)
        rows_KD = rows_KD * inside_K[:, None]
        return hidden.index_add(SEQUENCE_DIM, at_K, rows_KD.expand(*hidden.shape[:-2], -1, -1))

    def use_replicated(self, values: Tensor) -> Tensor:
        """Return a replicated tensor that layers read with their slices.

        Gradients are partial sums. The backward pass sums them over the ranks.
        """
        replicated = DTensor.from_local(values, self._mesh, [Replicate()], run_check=False)
        return replicated.to_local(grad_placements=[Partial()])

    def gather_output(self, _: nn.Module | None, __: tuple, output: Tensor) -> Tensor:
        """All-gather the output of the last layer."""
        if self.overlap is None:
            return self.gather_replicated(output).to_local()
        rows, batch = sequence_first(output)
        gathered_rows = self.overlap.gather_slices(rows, self.length * batch.numel())
        return batch_first(gathered_rows, batch)

    def _slice(self, local: Tensor, placement: Placement) -> Tensor:
        padded = self._padded(local)
        distributed = DTensor.from_local(padded, self._mesh, [placement], run_check=False)
        return distributed.redistribute(placements=[Shard(padded.ndim + SEQUENCE_DIM)]).to_local()

    def _padded(self, local: Tensor) -> Tensor:
        padding = -self.length % self._mesh.size()
        return functional.pad(local, (0, 0, 0, padding)) if padding else local


class TensorParallelRows:
    """Rows that tensor-parallel ranks have completely, or a part of (`RowSharding`)."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh

    def local_rows(self, rows: Tensor) -> Tensor:
        replicated = DTensor.from_local(rows, self._mesh, [Replicate()], run_check=False)
        return replicated.redistribute(placements=[Shard(rows.ndim + SEQUENCE_DIM)]).to_local()

    def all_gather_rows(self, own: Tensor) -> Tensor:
        part = [Shard(own.ndim + SEQUENCE_DIM)]
        sharded = DTensor.from_local(own, self._mesh, part, run_check=False)
        return sharded.redistribute(placements=[Replicate()]).to_local()


def sequence_first(hidden: Tensor) -> tuple[Tensor, torch.Size]:
    """Return rows (tokens x batch, features), sorted by token, and the shape of the batch.

    A range of tokens is then a range of rows.
    """
    hidden = hidden.movedim(SEQUENCE_DIM, 0)
    return hidden.flatten(0, -2), hidden.shape[1:-1]


def batch_first(rows: Tensor, batch: torch.Size) -> Tensor:
    """Return a view of shape (*batch, tokens, features), the inverse of `sequence_first`."""
    return rows.view(-1, *batch, rows.shape[-1]).movedim(0, SEQUENCE_DIM)


def convert_input(
    module: nn.Module, convert: Callable[[Any], Any], *, prepend: bool = False
) -> None:
    """Change the first argument of a submodule, or its argument `hidden_states`, with a hook."""

    def hook(_: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict]:
        if args:
            return (convert(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": convert(kwargs["hidden_states"])}

    module.register_forward_pre_hook(hook, with_kwargs=True, prepend=prepend)


class LocalNorm(ParallelStyle):
    """Norm that each rank applies to its slice of the sequence, or to its local heads.

    Also suitable for layers with their own parameters, such as the table of shifts and scales of a
    DiT. Weights are replicated, and gradients are summed over the ranks. `SequenceParallel` of
    torch computes the same with DTensor activations. It is slower, and torch.compile does not
    support it for changing lengths (2.13).
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        distribute_parameters(module, device_mesh)
        settings = {k: v for k, v in vars(module).items() if k not in _COMMON_ATTRIBUTES}
        settings |= dict(module.named_children())  # for routers and layers
        settings |= {name: None for name, p in module._parameters.items() if p is None}
        norm: Any = type(module).forward

        def forward(
            *inputs: Tensor, **keyword_arguments: Any
        ) -> Tensor:  # two inputs if the norm has a gate
            weights = {
                name: cast(DTensor, parameter).to_local(grad_placements=[Partial()])
                for name, parameter in module.named_parameters(recurse=False)
            }
            weights |= dict(module.named_buffers(recurse=False))
            return norm(LocalWeights(type(module), settings, weights), *inputs, **keyword_arguments)

        module.forward = forward
        return module


class LocalWeights:
    """Attributes that a forward reads from its module, with plain tensors instead of DTensors."""

    def __init__(
        self, kind: type[nn.Module], settings: Mapping[str, Any], weights: Mapping[str, Tensor]
    ) -> None:
        self._kind = kind
        for name, value in (*settings.items(), *weights.items()):
            setattr(self, name, value)

    def __getattr__(self, name: str) -> Any:  # for methods of the module, such as `_norm` in Gemma
        return getattr(self._kind, name).__get__(self)


def distribute_parameters(module: nn.Module, mesh: DeviceMesh, **placements: Placement) -> None:
    """Convert the parameters of a module itself to DTensors. By default, they are replicated."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        placement = placements.get(name, Replicate())
        distributed = distribute_tensor(parameter, mesh, [placement])
        module.register_parameter(name, nn.Parameter(distributed, parameter.requires_grad))
