"""Execution of a module: parallelism, recomputation, training states and placement.

`Execution` has the settings of one module. `ParameterStates` has the bytes of training states per
parameter. `CostSetting` combines an `Execution` with the links of its process groups, and is the
input of operator counts in addition to sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Literal, NamedTuple

from torchmm.costs.devices import WITHIN_NODE, LinkRanks

RecomputeSetting = Literal["none", "selective", "full"]
"""Activation checkpointing mode of the cost model."""


class Matrices(NamedTuple):
    """Equal matrices that are stacked in one parameter of a layer."""

    inputs: float
    outputs: float
    matrix_count: int = 1
    """Number of matrices, which is the number of experts in an expert layer."""

    @property
    def min_size(self) -> float:
        """Minimum of inputs and outputs."""
        return min(self.inputs, self.outputs)

    @property
    def parameters(self) -> float:
        """Number of parameters of all matrices."""
        return self.matrix_count * self.inputs * self.outputs

    @property
    def orthogonal_flops(self) -> float:
        """FLOPs of 5 Newton-Schulz iterations of Muon.

        Each iteration has three matmuls: X @ X.T, its square, and the product with X.
        """
        return 5 * (4 * self.min_size * self.parameters + 2 * self.matrix_count * self.min_size**3)

    @property
    def iteration_values(self) -> float:
        """Maximum number of values in memory during an iteration.

        It is either four times the matrices plus one square, or two times plus four squares.
        """
        squares = self.matrix_count * self.min_size**2
        return max(4 * self.parameters + squares, 2 * self.parameters + 4 * squares)


@dataclass(frozen=True)
class ParameterStates:
    """Bytes per parameter of training states, and of their update.

    Gradients are not included, because they are always accumulated in float32.

    Attributes:
        weight: Bytes of a parameter between steps.
        moments: Bytes of optimizer moments per trained parameter.
        layer_moments: Bytes of optimizer moments per trained parameter of layers. They differ from
            `moments` for Muon.
        moving_average: Bytes of the moving average per trained parameter.
        update_traffic: Bytes that an update reads and writes per parameter.
        fused_update_traffic: Bytes that the fused GPU kernel reads and writes per parameter,
            including clipping.
        offloaded_moments: Bytes of offloaded moments that are copied to the device for the update.
        uses_muon: Whether the matrices of layers are orthogonalized (Muon).
        update_chunk: Number of parameters per chunk of the update. If 0, updates are in place
            without temporaries.
        float32_copy: Bytes of the float32 copy of a parameter, and of its gradient, during the
            update. 0 if updated in place.
        float32_moment_copy: Bytes of the float32 copy of a moment during the update.
        rounding_buffer: Bytes of temporaries for converting a parameter to its storage dtype.
    """

    weight: float = 4.0
    moments: float = 8.0
    layer_moments: float = 8.0
    moving_average: float = 0.0
    update_traffic: float = 28.0
    fused_update_traffic: float = 32.0
    offloaded_moments: float = 0.0
    uses_muon: bool = False
    update_chunk: int = 0
    float32_copy: float = 0.0
    float32_moment_copy: float = 0.0
    rounding_buffer: float = 0.0

    def update_buffer_bytes(self, trained: float) -> float:
        """Return the bytes of temporaries of an update.

        They are the copies of one chunk, and buffers for the offloaded moments of three chunks:
        one is copied to the device, one is updated, and one is copied back.

        Args:
            trained: Number of trained parameters of a rank.
        """
        if not trained or not self.update_chunk:
            return 0.0
        buffers = min(3, ceil(trained / self.update_chunk))
        copies = (
            self.float32_copy
            + 2 * self.float32_moment_copy
            + max(self.rounding_buffer, self.float32_copy)
        )
        return min(self.update_chunk, trained) * (copies + buffers * self.offloaded_moments)

    def muon_buffer_bytes(
        self, round_matrices: Sequence[Matrices], ranks: int, element_bytes: int
    ) -> float:
        """Return the bytes of temporaries of one round of Muon.

        Each rank gathers and orthogonalizes one matrix, and has zeros for the other matrices of
        the round. Results are converted to their storage dtype one by one.

        Args:
            round_matrices: Matrices of the round, at most one per rank.
            ranks: Number of ranks that share the matrices.
            element_bytes: Bytes of an element of the dtype of the iterations.
        """
        total_values = sum(matrix.parameters for matrix in round_matrices)
        largest = max(matrix.parameters for matrix in round_matrices)
        gathered = total_values if ranks > 1 else 0
        iteration_bytes = (
            gathered + max(matrix.iteration_values for matrix in round_matrices)
        ) * element_bytes
        conversion_bytes = (gathered + largest) * element_bytes
        conversion_bytes += (2 * self.float32_copy + self.rounding_buffer) * largest / ranks
        # Shards of all matrices.
        shard_bytes = (
            total_values
            / ranks
            * (element_bytes + self.float32_moment_copy + 3 * self.offloaded_moments)
        )
        return shard_bytes + max(iteration_bytes, conversion_bytes)


FLOAT32 = ParameterStates()
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
    recompute: RecomputeSetting = "none"
    compiled: bool = False
    graphs: bool = False
    states: ParameterStates = FLOAT32
    reduces_every_microbatch: bool = False

    @property
    def uses_fsdp(self) -> bool:
        """Return True if several ranks share a stage, as `torchmm.parallel.fsdp.needs_fsdp`."""
        return self.parameter_ranks > 1

    @property
    def parameter_ranks(self) -> int:
        """Number of ranks that have a shard or a replica of each parameter."""
        return self.tensor * self.shard * self.replicate

    @property
    def residual_fraction(self) -> float:
        """Fraction of the positions that a rank has between tensor-parallel regions."""
        return 1 / self.tensor if self.sequence_parallel else 1.0


class CostSetting(NamedTuple):
    """Inputs of operator and byte counts in addition to sizes."""

    execution: Execution
    element_bytes: int
    """Bytes of an element of the compute dtype."""
    tensor_link: LinkRanks = WITHIN_NODE
    expert_link: LinkRanks = WITHIN_NODE
    context_link: LinkRanks = WITHIN_NODE
    calls_per_segment: bool = True
    """Whether attention has a call per run of equally long segments (CPU) instead of one call."""
    accumulated_fraction: float = 1.0
    """Fraction of the backward passes that add to existing gradients. The first one does not."""

    @property
    def is_gpu(self) -> bool:
        """Return True if the device is a GPU, with kernels that CPUs do not have."""
        return not self.calls_per_segment

    @property
    def causal_block(self) -> int:
        """Keys per block of fused attention with a causal mask.

        The values are those of the CPU kernel of torch, and of FlashAttention.
        """
        return 512 if self.calls_per_segment else 128
