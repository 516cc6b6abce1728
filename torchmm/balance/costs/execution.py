"""How a module is run: over how many ranks it is split, what it recomputes, on which device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from torchmm.balance.costs.devices import Link

Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True)
class States:
    """What training holds on a device of every parameter, and what its update takes, in bytes.

    Gradients are not here: sums of them are float32 in any case.

    Attributes:
        weight: of a parameter between steps.
        moments: of the optimizer, of a trained parameter.
        layer_moments: the same of those in layers, which have others under Muon.
        updated: what the update of one reads and writes.
        visiting: moments that come from the host for the update, and go back.
        orthogonal: whether layers' matrices are made orthogonal, which takes products.
    """

    weight: float = 4.0
    moments: float = 8.0
    layer_moments: float = 8.0
    updated: float = 28.0
    visiting: float = 0.0
    orthogonal: bool = False


FLOAT32 = States()
"""Weights in float32, fused AdamW."""


@dataclass(frozen=True)
class Execution:
    """How one module runs.

    Attributes:
        tensor: tensor-parallel ranks.
        sequence_parallel: whether activations between tensor-parallel regions are split too.
        async_tensor: whether communication of linears overlaps with their matrix products.
        expert: ranks out of `shard` that divide experts among themselves.
        context: ranks out of `shard` that divide the LLM's tokens among themselves, and in
            attention its heads; sizes of tasks are those of one of them (`module_tasks`).
        shard, replicate: data-parallel ranks that share parameters, and copies of those groups.
        recompute: activation checkpointing.
        states: of its parameters.
    """

    tensor: int = 1
    sequence_parallel: bool = False
    async_tensor: bool = False
    shard: int = 1
    replicate: int = 1
    expert: int = 1
    context: int = 1
    recompute: Recompute = "none"
    states: States = FLOAT32

    @property
    def residual_share(self) -> float:
        """What share of the positions a rank has between tensor-parallel regions."""
        return 1 / self.tensor if self.sequence_parallel else 1.0


class Setting(NamedTuple):
    """What operators and bytes depend on besides sizes."""

    execution: Execution
    element_bytes: int
    """Of the compute dtype."""
    tensor_link: Link = "node"
    expert_link: Link = "node"
    context_link: Link = "node"
    segment_calls: bool = True
    """Whether attention makes a call per run of equally long segments (CPU), or one for all."""
    accumulated: float = 1.0
    """Share of the backwards that add to gradients of others; a step's first one has none."""

    @property
    def causal_block(self) -> int:
        """Keys that fused attention computes together, masked or not: of torch's kernel for CPUs,
        of FlashAttention."""
        return 512 if self.segment_calls else 128
