"""How a module is run: over how many ranks it is split, what it recomputes, on which device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Literal, NamedTuple

from torchmm.costs.devices import NODE, Link

Recompute = Literal["none", "selective", "full"]


class Matrices(NamedTuple):
    """Matrices of one size that are one parameter of a layer."""

    inputs: float
    outputs: float
    stacked: int = 1
    """Experts are stacked."""

    @property
    def small(self) -> float:
        """The shorter side."""
        return min(self.inputs, self.outputs)

    @property
    def parameters(self) -> float:
        """Of all of them."""
        return self.stacked * self.inputs * self.outputs

    @property
    def orthogonal_flops(self) -> float:
        """Of Muon's iterations: three products each, two of them with the whole."""
        return 5 * (4 * self.small * self.parameters + 2 * self.stacked * self.small**3)

    @property
    def iterated(self) -> float:
        """The most values that are there in an iteration: four times the matrices and once a
        square, or twice and four squares."""
        squares = self.stacked * self.small**2
        return max(4 * self.parameters + squares, 2 * self.parameters + 4 * squares)


@dataclass(frozen=True)
class States:
    """What training holds on a device of every parameter, and what its update takes, in bytes.

    Gradients are not here: sums of them are float32 in any case.

    Attributes:
        weight: of a parameter between steps.
        moments: of the optimizer, of a trained parameter.
        layer_moments: the same of those in layers, which have others under Muon.
        average: of a trained parameter's moving average.
        updated: what the update of one reads and writes.
        fused: the same of the kernel that updates on GPUs, clipping included.
        visiting: moments that come from the host for the update, and go back.
        orthogonal: whether layers' matrices are made orthogonal, which takes products.
        portion: parameters that are updated together; 0: in place, which needs no room.
        copy, moment_copy: of each of them meanwhile, in float32: of the parameter and its gradient
            each, and of a moment; 0: updated where they are.
        rounding: what putting one to rest takes beyond.
    """

    weight: float = 4.0
    moments: float = 8.0
    layer_moments: float = 8.0
    average: float = 0.0
    updated: float = 28.0
    fused: float = 32.0
    visiting: float = 0.0
    orthogonal: bool = False
    portion: int = 0
    copy: float = 0.0
    moment_copy: float = 0.0
    rounding: float = 0.0

    def room_bytes(self, trained: float) -> float:
        """What an update needs for a moment: a portion's copies, and places for moments of the host
        where one portion comes, one is computed with and one goes.

        Args:
            trained: parameters of a rank.
        """
        if not trained or not self.portion:
            return 0.0
        places = min(3, ceil(trained / self.portion))
        copies = self.copy + 2 * self.moment_copy + max(self.rounding, self.copy)
        return min(self.portion, trained) * (copies + places * self.visiting)

    def room_of_matrices_bytes(
        self, together: Sequence[Matrices], ranks: int, element_bytes: int
    ) -> float:
        """The same of matrices that are made orthogonal: at most as many as ranks share them.

        Each rank gathers and iterates one, and has zeros in place of the others; results are put to
        rest one by one.

        Args:
            together: which ranks do in one round.
            element_bytes: in which they are made orthogonal.
        """
        every = sum(own.parameters for own in together)
        largest = max(own.parameters for own in together)
        gathered = every if ranks > 1 else 0
        iterating = (gathered + max(own.iterated for own in together)) * element_bytes
        resting = (gathered + largest) * element_bytes
        resting += (2 * self.copy + self.rounding) * largest / ranks
        # Each rank's part of all of them.
        held = every / ranks * (element_bytes + self.moment_copy + 3 * self.visiting)
        return held + max(iterating, resting)


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
        compiled: whether torch.compile compiles its layers.
        graphs: whether its layers are launched as CUDA graphs.
        states: of its parameters.
        reduces_each: whether FSDP2 reduces gradients in every backward, not once per step.
    """

    tensor: int = 1
    sequence_parallel: bool = False
    async_tensor: bool = False
    shard: int = 1
    replicate: int = 1
    expert: int = 1
    context: int = 1
    recompute: Recompute = "none"
    compiled: bool = False
    graphs: bool = False
    states: States = FLOAT32
    reduces_each: bool = False

    @property
    def uses_fsdp(self) -> bool:
        """Return True if several ranks share a stage, as `torchmm.parallel.fsdp.needs_fsdp`."""
        return self.sharing > 1

    @property
    def sharing(self) -> int:
        """Ranks that have a part of each parameter, or a copy of one."""
        return self.tensor * self.shard * self.replicate

    @property
    def residual_share(self) -> float:
        """What share of the positions a rank has between tensor-parallel regions."""
        return 1 / self.tensor if self.sequence_parallel else 1.0


class Setting(NamedTuple):
    """What operators and bytes depend on besides sizes."""

    execution: Execution
    element_bytes: int
    """Of the compute dtype."""
    tensor_link: Link = NODE
    expert_link: Link = NODE
    context_link: Link = NODE
    segment_calls: bool = True
    """Whether attention makes a call per run of equally long segments (CPU), or one for all."""
    accumulated: float = 1.0
    """Share of the backwards that add to gradients of others; a step's first one has none."""

    @property
    def on_gpu(self) -> bool:
        """Return True if the device is a GPU, with kernels that CPUs do not have."""
        return not self.segment_calls

    @property
    def causal_block(self) -> int:
        """Keys that fused attention computes together, masked or not: of torch's kernel for CPUs,
        of FlashAttention."""
        return 512 if self.segment_calls else 128
