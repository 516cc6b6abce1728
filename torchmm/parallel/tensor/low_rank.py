"""Low-rank adapters of linears that tensor-parallel ranks divide.

An adapter follows its linear. Where the linear's outputs are divided, so are B's, and all ranks
compute the few features from the whole input; where its inputs are divided, so are A's, and each
rank adds its part of the product to its part of the linear's output, before the linear's own sum
over the ranks. Either way an adapter sends nothing more than its linear does: the matrix that is
whole on every rank gets parts of its gradient, which are summed with those of norms, once per step.

    divided     A           few features       B             added to
    outputs     replicated  whole, replicated  rows          this rank's outputs
    inputs      columns     parts of a sum     replicated    parts of a sum
    neither     replicated  whole, replicated  replicated    all outputs, or this rank's of them

DoRA's magnitudes are divided like the rows of B. The norms that divide them are whole where a rank
has whole rows; where inputs are divided, their squares are summed over the ranks, one number for
each output and forward, and what is a part of a sum is scaled before it is summed.

Rejected: DTensor operations, which sum gradients of the few features for every microbatch, and turn
the partial gradient of the scope's input, which several linears share, into a whole one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from torchmm.models.layers.lora import Lora, Part
from torchmm.parallel.tensor.sequence import distribute_parameters

OWN_ROWS = "own_rows"
"""Attribute of a linear that holds several matrices: a function of a parameter (a replicated
DTensor) that gives the rows of it that this rank computes with."""


def split_lora(linear: nn.Linear, lora: Lora, mesh: DeviceMesh) -> None:
    """Divides an adapter like its linear, which has its style already, in place."""
    weight = linear.weight
    if not isinstance(weight, DTensor):
        return  # computed whole, and alike, on every rank
    (placement,) = weight.placements
    distribute_parameters(
        lora,
        mesh,
        down=Shard(1) if placement == Shard(1) else Replicate(),
        **dict.fromkeys(("up", "magnitude"), Shard(0) if placement == Shard(0) else Replicate()),
    )
    own_rows: Callable[[Any], Tensor] | None = getattr(linear, OWN_ROWS, None)
    parts = placement == Shard(1)
    lora.part = Part(
        of_input=_local_summed,
        of_down=_local_summed,
        of_rows=own_rows or _local_summed,
        summed=partial(_sum, mesh) if parts else _local,
        biased=not parts,
    )


def _local(x: Tensor, summed: bool = False) -> Tensor:
    """What this rank has of a tensor.

    Args:
        summed: whether gradients of what all ranks have are parts of a sum.
    """
    if not isinstance(x, DTensor):
        return x
    whole = x.placements == (Replicate(),)
    return x.to_local(grad_placements=[Partial()] if whole and summed else None)


_local_summed = partial(_local, summed=True)


def _sum(mesh: DeviceMesh, own: Tensor) -> Tensor:
    """Over the ranks, of which each has parts."""
    parts = DTensor.from_local(own, mesh, [Partial()], run_check=False)
    return parts.redistribute(placements=[Replicate()]).to_local()
