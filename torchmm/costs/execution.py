"""Execution of a module: parallelism, recomputation, training states and placement.

`Execution` has the settings of one module. `States` has the bytes of training states per
parameter. `Setting` combines an `Execution` with the links of its process groups, and is the input
of operator counts in addition to sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Literal, NamedTuple

from torchmm.costs.devices import NODE, Link

Recompute = Literal["none", "selective", "full"]
"""Activation checkpointing mode of the cost model."""


class Matrices(NamedTuple):
    """Equal matrices that are stacked in one parameter of a layer."""

    inputs: float
    outputs: float
    stacked: int = 1
    """Number of matrices, which is the number of experts in an expert layer."""

    @property
    def small(self) -> float:
        """Minimum of inputs and outputs."""
        return min(self.inputs, self.outputs)

    @property
    def parameters(self) -> float:
        """Number of parameters of all matrices."""
        return self.stacked * self.inputs * self.outputs

    @property
    def orthogonal_flops(self) -> float:
        """FLOPs of 5 Newton-Schulz iterations of Muon.

        Each iteration has three matmuls: X @ X.T, its square, and the product with X.
        """
        return 5 * (4 * self.small * self.parameters + 2 * self.stacked * self.small**3)

    @property
    def iterated(self) -> float:
        """Maximum number of values in memory during an iteration.

        It is either four times the matrices plus one square, or two times plus four squares.
        """
        squares = self.stacked * self.small**2
        return max(4 * self.parameters + squares, 2 * self.parameters + 4 * squares)


@dataclass(frozen=True)
class States:
    """Bytes per parameter of training states, and of their update.

    Gradients are not included, because they are always accumulated in float32.

    Attributes:
        weight: Bytes of a parameter between steps.
        moments: Bytes of optimizer moments per trained parameter.
        layer_moments: Bytes of optimizer moments per trained parameter of layers. They differ from
            `moments` for Muon.
        average: Bytes of the moving average per trained parameter.
        updated: Bytes that an update reads and writes per parameter.
        fused: Bytes that the fused GPU kernel reads and writes per parameter, including clipping.
        visiting: Bytes of offloaded moments that are copied to the device for the update.
        orthogonal: Whether the matrices of layers are orthogonalized (Muon).
        portion: Number of parameters per chunk of the update. If 0, updates are in place without
            temporaries.
        copy: Bytes of the float32 copy of a parameter, and of its gradient, during the update. 0 if
            updated in place.
        moment_copy: Bytes of the float32 copy of a moment during the update.
        rounding: Bytes of temporaries for converting a parameter to its storage dtype.
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
        """Return the bytes of temporaries of an update.

        They are the copies of one chunk, and buffers for the offloaded moments of three chunks:
        one is copied to the device, one is updated, and one is copied back.

        Args:
            trained: Number of trained parameters of a rank.
        """
        if not trained or not self.portion:
            return 0.0
        buffers = min(3, ceil(trained / self.portion))
        copies = self.copy + 2 * self.moment_copy + max(self.rounding, self.copy)
        return min(self.portion, trained) * (copies + buffers * self.visiting)

    def room_of_matrices_bytes(
        self, together: Sequence[Matrices], ranks: int, element_bytes: int
    ) -> float:
        """Return the bytes of temporaries of one round of Muon.

        Each rank gathers and orthogonalizes one matrix, and has zeros for the other matrices of
        the round. Results are converted to their storage dtype one by one.

        Args:
            together: Matrices of the round, at most one per rank.
            ranks: Number of ranks that share the matrices.
            element_bytes: Bytes of an element of the dtype of the iterations.
        """
        every = sum(matrix.parameters for matrix in together)
        largest = max(matrix.parameters for matrix in together)
        gathered = every if ranks > 1 else 0
        iterating = (gathered + max(matrix.iterated for matrix in together)) * element_bytes
        resting = (gathered + largest) * element_bytes
        resting += (2 * self.copy + self.rounding) * largest / ranks
        # Shards of all matrices.
        held = every / ranks * (element_bytes + self.moment_copy + 3 * self.visiting)
        return held + max(iterating, resting)


FLOAT32 = States()
"""Training states of fused AdamW with float32 weights."""


@dataclass(frozen=True)
class Execution:
    """Parallelism and options of one module.

    Attributes:
        tensor: Tensor-parallel size.
        sequence_parallel: Whether activations between tensor-parallel regions are sharded.
        async_tensor: Whether tensor-parallel communication overlaps with matmuls (async TP).
        shard: Number of data-parallel ranks that shard parameters.
        replicate: Number of replicas of these groups (HSDP).
        expert: Expert-parallel size, a divisor of `shard`.
        context: Context-parallel size, a divisor of `shard`. Its ranks divide the tokens of the
            LLM, and the heads in attention. Sizes of tasks are those of one rank (`module_tasks`).
        recompute: Activation checkpointing mode.
        compiled: Whether torch.compile compiles the layers.
        graphs: Whether layers are launched as CUDA graphs.
        states: Bytes of training states per parameter.
        reduces_every_microbatch: Whether FSDP2 reduces gradients in every backward pass instead of
            once per step.
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
    reduces_every_microbatch: bool = False

    @property
    def uses_fsdp(self) -> bool:
        """Return True if several ranks share a stage, as `torchmm.parallel.fsdp.needs_fsdp`."""
        return self.sharing > 1

    @property
    def sharing(self) -> int:
        """Number of ranks that have a shard or a replica of each parameter."""
        return self.tensor * self.shard * self.replicate

    @property
    def residual_share(self) -> float:
        """Fraction of the positions that a rank has between tensor-parallel regions."""
        return 1 / self.tensor if self.sequence_parallel else 1.0


class Setting(NamedTuple):
    """Inputs of operator and byte counts in addition to sizes."""

    execution: Execution
    element_bytes: int
    """Bytes of an element of the compute dtype."""
    tensor_link: Link = NODE
    expert_link: Link = NODE
    context_link: Link = NODE
    segment_calls: bool = True
    """Whether attention has a call per run of equally long segments (CPU) instead of one call."""
    accumulated: float = 1.0
    """Fraction of the backward passes that add to existing gradients. The first one does not."""

    @property
    def on_gpu(self) -> bool:
        """Return True if the device is a GPU, with kernels that CPUs do not have."""
        return not self.segment_calls

    @property
    def causal_block(self) -> int:
        """Keys per block of fused attention with a causal mask.

        The values are those of the CPU kernel of torch, and of FlashAttention.
        """
        return 512 if self.segment_calls else 128
