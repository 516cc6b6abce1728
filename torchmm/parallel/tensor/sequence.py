"""Sequence parallelism: what lies between the tensor-parallel regions of a module's layers.

A module's first layer keeps this rank's slice of the sequence (the last dimension but one), norms
and residuals work on slices, and its last layer's output is gathered, so what stands around the
layers sees whole sequences. Slices also travel from one stage of a module to the next: a later
stage's first layer starts with one, an earlier stage's last layer leaves one. A length that the
ranks do not divide is padded with zeros between the regions, never inside of them: attention sees
only real positions. Rejected: uneven slices; they may be empty, and collectives then hang (DTensor
on torch 2.13 with gloo).
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
from torchmm.parallel.tensor.collectives import Exchange, gathered, replicated, scattered

_OF_EVERY_MODULE = vars(nn.Module()).keys() - {"training"}
"""Attributes that no forward reads."""
SEQUENCE_DIM = -2
"""Hidden states are (batch, tokens, features) or (tokens, features)."""


LocalRows = Callable[[DTensor], Tensor]
"""Function from a parameter to the rows that this rank computes with; differentiable."""


class OverlapStyles(ABC):
    """Styles of linears whose communication overlaps with their matrix products.

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
        """Return the style of scopes, whose input is a slice. Applied after linears have styles."""

    @abstractmethod
    def take_slice(self, x_TD: Tensor, slice_rows: int) -> Tensor:
        """Return the slice of this rank, padded with zeros. Backward gathers.

        Args:
            x_TD: All rows of the sequence, equal on all ranks.
            slice_rows: Rows of a slice. All slices cover at least T rows.
        """

    @abstractmethod
    def gather_slices(self, x_SD: Tensor, rows: int) -> Tensor:
        """Return the slices of all ranks without padding, `rows` rows. Backward takes a slice."""


class SequenceSlices:
    """The layers of one module, between which a rank has its slice of the sequence only.

    Slices are of equal length: the sequence is padded to a multiple of the ranks. Its true length
    is noted on entry, and again by a layer that is recomputed.

    Args:
        overlap: styles of linears whose communication overlaps with their products, or None.
        exchange: how they do while something else is done (`collectives`); None: it is waited for.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        overlap: OverlapStyles | None = None,
        exchange: Exchange | None = None,
    ) -> None:
        self._mesh = mesh
        self.overlap = overlap
        self.exchange = exchange
        self._extent = torch.empty(0, 0)
        self._arrived: Tensor | None = None
        """The slice from the stage before, until the first layer takes it."""
        self._has_layers = False
        self._is_first = self._is_last = True

    def attach(self, module: LayeredModule) -> None:
        """Lets the layers of a module's stage work on slices."""
        layers = module.layers
        module.between = self
        self._has_layers = bool(layers)
        self._is_first = module.is_first
        self._is_last = module.is_last
        if layers:  # first, as it notes the length that the others pass on
            layers[0].register_forward_pre_hook(self.enter if self._is_first else self.go_on)
        for layer in layers:
            self.remember(layer)
        if layers and self._is_last:
            layers[-1].register_forward_hook(self.leave)

    @property
    def length(self) -> int:
        """Positions of all ranks, without padding.

        The size of a tensor without values: a compiled layer takes it as one of its inputs' sizes,
        which may change, while it would be compiled anew for every number.
        """
        return len(self._extent)

    @property
    def slice_length(self) -> int:
        """Positions of a rank, padding included."""
        return -(-self.length // self._mesh.size())

    def enter(self, _: nn.Module | None, args: tuple) -> tuple:
        """Pre-hook of the first layer: keeps this rank's slice; backward gathers."""
        hidden = args[0]
        self._extent = torch.empty(hidden.shape[SEQUENCE_DIM], 0)
        if self.overlap is None:
            return (self._slice(hidden, Replicate()), *args[1:])
        rows, batch = sequence_first(hidden)
        slice_rows = self.slice_length * batch.numel()
        return (batch_first(self.overlap.take_slice(rows, slice_rows), batch), *args[1:])

    def arrived(self, hidden: Tensor, positions: int) -> Tensor:
        """What is handed to the layers for a slice that came from the stage before.

        Models that are kept whole expect all positions in front of the layers, so they get a tensor
        of that size without memory, for which `go_on` puts the slice.
        """
        self._extent = torch.empty(positions, 0)
        if hidden.shape[SEQUENCE_DIM] != self.slice_length:
            raise ValueError(
                f"received {hidden.shape[SEQUENCE_DIM]} of {positions} positions on one of "
                f"{self._mesh.size()} ranks, whose slices have {self.slice_length}"
            )
        if not self._has_layers:
            return self.leave(None, (), hidden) if self._is_last else hidden
        self._arrived = hidden
        return hidden.new_empty(()).expand(*hidden.shape[:-2], positions, hidden.shape[-1])

    def go_on(self, _: nn.Module, args: tuple) -> tuple:
        """Pre-hook of a later stage's first layer: takes the slice that has arrived."""
        slice_, self._arrived = self._arrived, None
        assert slice_ is not None, "no slice was received"
        return (slice_.reshape(*args[0].shape[:-2], *slice_.shape[-2:]), *args[1:])

    def leaving(self, hidden: Tensor) -> Tensor:
        """What goes to the next stage: slices, which the layers have left already."""
        if self._has_layers or not self._is_first:
            return hidden
        return self.enter(None, (hidden,))[0]

    def remember(self, layer: nn.Module) -> None:
        """Lets a layer that backward runs again have the length of its own forward.

        By then other microbatches, of other lengths, have entered the layers. The length is an
        argument of the layer's `forward`, so that activation checkpointing, which is applied
        around it, hands it to both runs.
        """
        forward: Any = layer.forward

        def forward_at_length(*args: Any, sequence_length: Tensor, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling():  # a compiled layer runs again inside its graph
                self._extent = sequence_length
            return forward(*args, **kwargs)

        def add_length(_: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict]:
            return args, {**kwargs, "sequence_length": self._extent}

        layer.forward = forward_at_length
        layer.register_forward_pre_hook(add_length, with_kwargs=True)

    def reduce(self, _: nn.Module, __: tuple, partial: Tensor) -> Tensor:
        """Hook of a row-wise linear: sums what the ranks computed, of which each keeps a slice."""
        if self.exchange is not None:
            return scattered(self._padded(partial), self.exchange)
        return self._slice(partial, Partial())

    def for_scope(self, slice_: Tensor) -> DTensor:
        """As `whole`, for what ranks use each for a part of a sum."""
        if self.exchange is None:
            return self.whole(slice_)
        rows = gathered(slice_, self.exchange)
        return replicated(rows[..., : self.length, :], self._mesh)

    def whole(self, slice_: Tensor) -> DTensor:
        """The slices of all ranks as a replicated DTensor, without padding."""
        sharded = DTensor.from_local(slice_, self._mesh, [Shard(SEQUENCE_DIM)], run_check=False)
        padded = sharded.redistribute(placements=[Replicate()])
        if padded.shape[SEQUENCE_DIM] == self.length:
            return padded
        return padded[..., : self.length, :]  # type: ignore[return-value]

    def gathered(self, hidden: Tensor) -> Tensor:
        """All positions, of which the ranks have slices; backward slices."""
        return self.whole(hidden).to_local()

    def add_rows(self, hidden: Tensor, positions_K: Tensor, rows_KD: Tensor) -> Tensor:
        """A slice with the rows added that belong into it; backward sums over the ranks.

        All ranks have all rows. Those of other slices are added as zeros, since how many there are
        would have to be asked of the device.
        """
        every = DTensor.from_local(rows_KD, self._mesh, [Replicate()], run_check=False)
        rows_KD = every.to_local(grad_placements=[Partial()])
        at_K = positions_K - self._mesh.get_local_rank() * self.slice_length
        inside_K = (at_K >= 0) & (at_K < self.slice_length)
        at_K = at_K.clamp(0, self.slice_length - 1)
        rows_KD = rows_KD * inside_K[:, None]
        return hidden.index_add(SEQUENCE_DIM, at_K, rows_KD.expand(*hidden.shape[:-2], -1, -1))

    def read(self, values: Tensor) -> Tensor:
        """What every rank's layers read with their slices, so that each has a part of its gradient;
        backward sums over the ranks."""
        whole = DTensor.from_local(values, self._mesh, [Replicate()], run_check=False)
        return whole.to_local(grad_placements=[Partial()])

    def leave(self, _: nn.Module | None, __: tuple, output: Tensor) -> Tensor:
        """Hook of the last layer: gathers."""
        if self.overlap is None:
            return self.whole(output).to_local()
        rows, batch = sequence_first(output)
        whole = self.overlap.gather_slices(rows, self.length * batch.numel())
        return batch_first(whole, batch)

    def _slice(self, local: Tensor, placement: Placement) -> Tensor:
        padded = self._padded(local)
        whole = DTensor.from_local(padded, self._mesh, [placement], run_check=False)
        return whole.redistribute(placements=[Shard(padded.ndim + SEQUENCE_DIM)]).to_local()

    def _padded(self, local: Tensor) -> Tensor:
        padding = -self.length % self._mesh.size()
        return functional.pad(local, (0, 0, 0, padding)) if padding else local


class MeshRows:
    """Rows that tensor-parallel ranks have all of, or each a part (`RowsOfRanks`)."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh

    def own_rows(self, rows: Tensor) -> Tensor:
        whole = DTensor.from_local(rows, self._mesh, [Replicate()], run_check=False)
        return whole.redistribute(placements=[Shard(rows.ndim + SEQUENCE_DIM)]).to_local()

    def every_row(self, own: Tensor) -> Tensor:
        part = [Shard(own.ndim + SEQUENCE_DIM)]
        sharded = DTensor.from_local(own, self._mesh, part, run_check=False)
        return sharded.redistribute(placements=[Replicate()]).to_local()


def sequence_first(hidden: Tensor) -> tuple[Tensor, torch.Size]:
    """Rows (tokens x batch, features), every token's batch together, and the batch's shape.

    A range of tokens is then a range of rows.
    """
    hidden = hidden.movedim(SEQUENCE_DIM, 0)
    return hidden.flatten(0, -2), hidden.shape[1:-1]


def batch_first(rows: Tensor, batch: torch.Size) -> Tensor:
    """The reverse of `sequence_first`: a view of shape (*batch, tokens, features)."""
    return rows.view(-1, *batch, rows.shape[-1]).movedim(0, SEQUENCE_DIM)


def change_input(module: nn.Module, change: Callable[[Any], Any], *, prepend: bool = False) -> None:
    """Lets a layer's part run on a changed input: its first argument, or its `hidden_states`."""

    def hook(_: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict]:
        if args:
            return (change(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": change(kwargs["hidden_states"])}

    module.register_forward_pre_hook(hook, with_kwargs=True, prepend=prepend)


class LocalNorm(ParallelStyle):
    """A norm that each rank applies to its part: its slice of the sequence, or its heads. Or a
    layer with parameters of its own, such as a DiT's table of shifts and scales.

    Weights are replicated; the ranks' gradients are summed. Rejected: torch's `SequenceParallel`,
    which does the same with activations as DTensors, slowly, and under torch.compile not for
    lengths that change (2.13).
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        distribute_parameters(module, device_mesh)
        settings = {k: v for k, v in vars(module).items() if k not in _OF_EVERY_MODULE}
        settings |= dict(module.named_children())  # of a router or a layer
        settings |= {name: None for name, p in module._parameters.items() if p is None}
        norm: Any = type(module).forward

        def forward(*inputs: Tensor, **others: Any) -> Tensor:  # two where the norm has a gate
            weights = {
                name: cast(DTensor, parameter).to_local(grad_placements=[Partial()])
                for name, parameter in module.named_parameters(recurse=False)
            }
            weights |= dict(module.named_buffers(recurse=False))
            return norm(LocalWeights(type(module), settings, weights), *inputs, **others)

        module.forward = forward
        return module


class LocalWeights:
    """What a forward reads from its module, with plain tensors for DTensors."""

    def __init__(
        self, kind: type[nn.Module], settings: Mapping[str, Any], weights: Mapping[str, Tensor]
    ) -> None:
        self._kind = kind
        for name, value in (*settings.items(), *weights.items()):
            setattr(self, name, value)

    def __getattr__(self, name: str) -> Any:  # a method of the module, such as Gemma's _norm
        return getattr(self._kind, name).__get__(self)


def distribute_parameters(module: nn.Module, mesh: DeviceMesh, **placements: Placement) -> None:
    """Makes a module's own parameters DTensors; those that are not named are replicated."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        placement = placements.get(name, Replicate())
        distributed = distribute_tensor(parameter, mesh, [placement])
        module.register_parameter(name, nn.Parameter(distributed, parameter.requires_grad))
