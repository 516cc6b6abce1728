"""Orchestration problem: units with their costs, a cluster and a batch.

A *unit* is a module with its connector on separate devices (DistTrain §4.1). Its costs are plain
numbers. A profile, a cost model or the tables of a paper can provide them. Frozen modules need no
special cases: an unneeded backward pass has 0 seconds, and a gradient that is not stored has 0
bytes. `torchmm.balance.disttrain.orchestration.unit_costs` computes them from a device profile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from torchmm.balance.disttrain.orchestration.tables import PlanSettings, UnitTables


@dataclass(frozen=True)
class UnitCosts:
    """Costs of one unit.

    Mappings map a tensor-parallel size to the cost on one of its ranks. Numbers describe the
    complete module.

    Attributes:
        name: Name of the module in the recipe.
        kind: Encoders feed the LLM, and the LLM feeds generators.
        layers: Number of layers that can be assigned to different pipeline ranks.
        seconds: Forward pass and required backward pass of an average sample, with tensor-parallel
            communication.
        relative_std: Standard deviation of the seconds of samples, as a fraction of the mean.
        activation_bytes: Activations that an average sample saves for its backward pass.
        activation_margin_bytes: Additional activations of n samples in flight, divided by the
            square root of n. They account for differences between samples. 0 for missing sizes.
        max_activation_bytes: Activations of the largest sample, the limit per sample in flight.
            Unlimited for missing sizes.
        workspace_bytes: Largest temporary buffer per sample. 0 for missing sizes.
        replica_bytes: Memory of every data-parallel rank: weights and gradients.
        sharded_bytes: Memory that is sharded over data-parallel ranks: optimizer state.
        transfer_s: Seconds to send the output of a sample to the next rank.
        grad_sync_s: Seconds to all-gather all weights and reduce all gradients over the link of one
            device.
        virtual_stages: Virtual stages per pipeline rank.
        has_backward: Whether activations are saved for a backward pass.
        flops: Model FLOPs per sample in the step, for FLOP ratios and MFU.

    Raises:
        ValueError: Numbers are negative or not finite, or mappings have different sizes.
    """

    name: str
    kind: Literal["encoder", "llm", "generator"]
    layers: int
    seconds: Mapping[int, float]
    activation_bytes: Mapping[int, float]
    replica_bytes: float
    sharded_bytes: float
    relative_std: float = 0.0
    activation_margin_bytes: Mapping[int, float] = field(default_factory=dict)
    max_activation_bytes: Mapping[int, float] = field(default_factory=dict)
    workspace_bytes: Mapping[int, float] = field(default_factory=dict)
    transfer_s: float = 0.0
    grad_sync_s: float = 0.0
    virtual_stages: int = 1
    has_backward: bool = True
    flops: float = 0.0

    def __post_init__(self) -> None:
        sizes = sorted(self.seconds)
        activation_sizes = sorted(self.activation_bytes)
        optional = {
            *self.workspace_bytes,
            *self.activation_margin_bytes,
            *self.max_activation_bytes,
        }
        if (
            not sizes
            or sizes != activation_sizes
            or sizes[0] < 1
            or not optional <= set(activation_sizes)
        ):
            raise ValueError(
                f"{self.name}: seconds have tensor-parallel degrees {sizes}, but "
                f"activation_bytes {activation_sizes}; use the same degrees >= 1 for both"
            )
        if not 1 <= self.virtual_stages <= self.layers:
            raise ValueError(
                f"{self.name}: {self.virtual_stages} virtual stages per rank of {self.layers} "
                "layers; use 1 to the number of layers"
            )
        numbers = [*self.seconds.values(), *self.activation_bytes.values()]
        numbers += [*self.workspace_bytes.values(), *self.activation_margin_bytes.values()]
        numbers += [*self.max_activation_bytes.values(), self.replica_bytes, self.sharded_bytes]
        numbers += [self.transfer_s, self.grad_sync_s, self.flops, self.relative_std]
        if not all(0 <= n < np.inf for n in numbers) or not min(self.seconds.values()) > 0:
            raise ValueError(
                f"{self.name}: seconds must be finite and > 0, bytes and FLOPs finite and >= 0"
            )


@dataclass(frozen=True)
class OrchestrationProblem:
    """Input of orchestration.

    Attributes:
        units: Encoders, one LLM, and generators, in pipeline order.
        devices: Number of devices of the cluster.
        memory_bytes: Memory per device that a step may use.
        global_batch_size: Samples per step.
        microbatch_size: Samples per microbatch of the LLM.
    """

    units: tuple[UnitCosts, ...]
    devices: int
    memory_bytes: float
    global_batch_size: int
    microbatch_size: int = 1

    def __post_init__(self) -> None:
        kinds = [unit.kind for unit in self.units]
        ordered = sorted(kinds, key=("encoder", "llm", "generator").index)
        if kinds != ordered or kinds.count("llm") != 1:
            raise ValueError(
                f"units are {kinds}; list encoders, one LLM and generators in this order"
            )
        if len({unit.name for unit in self.units}) < len(self.units):
            raise ValueError(f"units {[u.name for u in self.units]}: use a different name for each")
        if self.devices < len(self.units):
            raise ValueError(
                f"{self.devices} devices for {len(self.units)} units; each requires at least one"
            )
        if self.microbatch_size < 1 or self.global_batch_size % self.microbatch_size:
            raise ValueError(
                f"a global batch of {self.global_batch_size} samples is not a multiple of the "
                f"microbatch size {self.microbatch_size}"
            )
        if self.global_batch_size < 1 or not self.memory_bytes > 0:
            raise ValueError(
                f"global_batch_size = {self.global_batch_size}, memory_bytes = "
                f"{self.memory_bytes}: must be above 0"
            )

    @property
    def llm(self) -> int:
        """Index of the LLM among the units."""
        return next(i for i, unit in enumerate(self.units) if unit.kind == "llm")

    def tables(self, limits: Mapping[str, int]) -> UnitTables:
        """Return the costs as arrays.

        Args:
            limits: Maximum number of devices of each unit, by name.
        """
        units = self.units
        tensor = sorted({size for unit in units for size in unit.seconds})

        def by_size(of_unit: Sequence[Mapping[int, float]], missing: float) -> np.ndarray:
            rows = [[mapping.get(size, missing) for size in tensor] for mapping in of_unit]
            return np.array(rows, np.float64)

        def floats(values: Sequence[float]) -> np.ndarray:
            return np.array(values, np.float64)

        return UnitTables(
            tensor_T=np.array(tensor, np.int64),
            seconds_UT=by_size([u.seconds for u in units], np.inf),
            activation_bytes_UT=by_size([u.activation_bytes for u in units], np.inf),
            relative_std_U=floats([u.relative_std for u in units]),
            activation_margin_bytes_UT=by_size([u.activation_margin_bytes for u in units], 0.0),
            max_activation_bytes_UT=by_size([u.max_activation_bytes for u in units], np.inf),
            workspace_bytes_UT=by_size([u.workspace_bytes for u in units], 0.0),
            layers_U=np.array([u.layers for u in units], np.int64),
            virtual_U=np.array([u.virtual_stages for u in units], np.int64),
            replica_bytes_U=floats([u.replica_bytes for u in units]),
            sharded_bytes_U=floats([u.sharded_bytes for u in units]),
            has_backward_U=np.array([u.has_backward for u in units], np.bool_),
            transfer_s_U=floats([u.transfer_s for u in units]),
            grad_sync_s_U=floats([u.grad_sync_s for u in units]),
            max_devices_U=np.array([limits.get(u.name, self.devices) for u in units], np.int64),
        )

    def setting(self) -> PlanSettings:
        """Return the properties that all plans share."""
        return PlanSettings(
            llm=self.llm,
            batch=self.global_batch_size // self.microbatch_size,
            microbatch_size=self.microbatch_size,
            devices=self.devices,
            memory_bytes=float(self.memory_bytes),
        )
