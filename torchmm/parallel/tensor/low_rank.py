"""Low-rank adapters of tensor-parallel linears.

An adapter is sharded like its linear. If outputs are sharded, B is sharded, and all ranks compute
the low-rank features from the full input. If inputs are sharded, A is sharded, and each rank adds
its partial product to the partial output of the linear, before the reduction of the linear. An
adapter needs no additional communication. The gradient of the replicated matrix is a partial sum,
which is reduced with those of norms, once per step.

    sharded     A           low-rank features  B             added to
    outputs     replicated  full, replicated   rows          local outputs
    inputs      columns     partial sums       replicated    partial sums
    none        replicated  full, replicated   replicated    all outputs, or the local outputs

Magnitudes of DoRA are sharded like the rows of B. Their norms are complete if a rank has complete
rows. If inputs are sharded, squared norms are summed over the ranks, one number per output and
forward pass. Partial sums are scaled before the reduction.

DTensor operations would reduce gradients of the low-rank features for every microbatch. They would
also convert the partial gradient of the shared scope input into a full gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from torchmm.models.layers.lora import Lora, LoraSharding
from torchmm.parallel.tensor.sequence import distribute_parameters

LOCAL_ROWS = "local_rows"
"""Attribute of a packed linear: function from a parameter (a replicated DTensor) to the rows that
this rank computes with."""


def shard_lora(linear: nn.Linear, lora: Lora, mesh: DeviceMesh) -> None:
    """Shard an adapter like its linear, in place. The linear must have its style already."""
    weight = linear.weight
    if not isinstance(weight, DTensor):
        return  # replicated, with equal results on every rank
    (placement,) = weight.placements
    distribute_parameters(
        lora,
        mesh,
        down=Shard(1) if placement == Shard(1) else Replicate(),
        **dict.fromkeys(("up", "magnitude"), Shard(0) if placement == Shard(0) else Replicate()),
    )
    local_rows: Callable[[Any], Tensor] | None = getattr(linear, LOCAL_ROWS, None)
    is_partial = placement == Shard(1)
    lora.sharding = LoraSharding(
        shard_input=_local_summed,
        shard_down=_local_summed,
        shard_rows=local_rows or _local_summed,
        sum_squares=partial(_sum, mesh) if is_partial else _local,
        adds_bias=not is_partial,
    )


def _local(x: Tensor, summed: bool = False) -> Tensor:
    """Return the local tensor.

    Args:
        x: Tensor or DTensor.
        summed: Whether gradients of replicated tensors are partial sums.
    """
    if not isinstance(x, DTensor):
        return x
    is_replicated = x.placements == (Replicate(),)
    return x.to_local(grad_placements=[Partial()] if is_replicated and summed else None)


_local_summed = partial(_local, summed=True)


def _sum(mesh: DeviceMesh, partial_sum: Tensor) -> Tensor:
    """Return the sum of partial sums over the ranks."""
    distributed = DTensor.from_local(partial_sum, mesh, [Partial()], run_check=False)
    return distributed.redistribute(placements=[Replicate()]).to_local()
