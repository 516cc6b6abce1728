"""What orchestration is asked: units with their costs, a cluster, a batch.

A *unit* is a module with its connector on devices of its own (DistTrain §4.1). Its costs are plain
numbers, so that profiling, a cost model or a paper's table can give them, and so that frozen
modules need no rules here: a backward that is not needed has no seconds, a gradient that is not
kept no bytes. `torchmm.balance.disttrain.orchestration.unit_costs` fills them in from a device
profile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from torchmm.balance.disttrain.orchestration.tables import PlanSetting, UnitTables


@dataclass(frozen=True)
class UnitCosts:
    """One unit.

    Mappings are by tensor-parallel size, for one of its ranks; numbers are of the whole module.

    Attributes:
        name: as in the recipe.
        kind: encoders feed the LLM, the LLM feeds generators.
        layers: that can be on different pipeline ranks.
        seconds: forward and the backward that the step needs, of one average sample, with the
            communication between tensor-parallel ranks.
        unevenness: standard deviation of samples' seconds, as a share of the mean.
        activation_bytes: kept from an average sample's forward until its backward.
        surge_bytes: n samples that wait at once may keep as much beyond n times that, times the
            square root of n, as samples differ; none where missing.
        peak_bytes: kept of the largest sample, which n samples do not exceed n times; unlimited
            where missing.
        workspace_bytes: largest temporary, per sample; none where missing.
        replica_bytes: what every data-parallel rank holds: weights, gradients.
        sharded_bytes: what they divide among them: optimizer state.
        transfer_s: handing one sample's output to the next rank.
        sync_s: gathering all weights and reducing all gradients over the link of one device.
        virtual_stages: per pipeline rank.
        has_backward: whether activations wait for one.
        flops: model FLOPs that the step needs for one sample, for FLOP ratios and MFU.

    Raises:
        ValueError: numbers are negative or not finite, or mappings have different sizes.
    """

    name: str
    kind: Literal["encoder", "llm", "generator"]
    layers: int
    seconds: Mapping[int, float]
    activation_bytes: Mapping[int, float]
    replica_bytes: float
    sharded_bytes: float
    unevenness: float = 0.0
    surge_bytes: Mapping[int, float] = field(default_factory=dict)
    peak_bytes: Mapping[int, float] = field(default_factory=dict)
    workspace_bytes: Mapping[int, float] = field(default_factory=dict)
    transfer_s: float = 0.0
    sync_s: float = 0.0
    virtual_stages: int = 1
    has_backward: bool = True
    flops: float = 0.0

    def __post_init__(self) -> None:
        sizes = sorted(self.seconds)
        kept = sorted(self.activation_bytes)
        others = {*self.workspace_bytes, *self.surge_bytes, *self.peak_bytes}
        if not sizes or sizes != kept or sizes[0] < 1 or not others <= set(kept):
            raise ValueError(
                f"{self.name}: seconds have tensor-parallel degrees {sizes}, but "
                f"activation_bytes {kept}; use the same degrees >= 1 for both"
            )
        if not 1 <= self.virtual_stages <= self.layers:
            raise ValueError(
                f"{self.name}: {self.virtual_stages} virtual stages per rank of {self.layers} "
                "layers; use 1 to the number of layers"
            )
        numbers = [*self.seconds.values(), *self.activation_bytes.values()]
        numbers += [*self.workspace_bytes.values(), *self.surge_bytes.values()]
        numbers += [*self.peak_bytes.values(), self.replica_bytes, self.sharded_bytes]
        numbers += [self.transfer_s, self.sync_s, self.flops, self.unevenness]
        if not all(0 <= n < np.inf for n in numbers) or not min(self.seconds.values()) > 0:
            raise ValueError(
                f"{self.name}: seconds must be finite and > 0, bytes and FLOPs finite and >= 0"
            )


@dataclass(frozen=True)
class OrchestrationProblem:
    """What to plan for.

    Attributes:
        units: encoders, one LLM, generators, in the order of the pipeline.
        devices: of the cluster.
        memory_bytes: of a device, as far as a step may use it.
        global_batch_size: samples per step.
        microbatch_size: samples of a microbatch of the LLM.
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
        """Position of the LLM among the units."""
        return next(i for i, unit in enumerate(self.units) if unit.kind == "llm")

    def tables(self, limits: Mapping[str, int]) -> UnitTables:
        """Costs as arrays.

        Args:
            limits: devices that units may have at most, by name.
        """
        units = self.units
        tensor = sorted({size for unit in units for size in unit.seconds})

        def by_size(of_unit: Sequence[Mapping[int, float]], missing: float) -> np.ndarray:
            rows = [[own.get(size, missing) for size in tensor] for own in of_unit]
            return np.array(rows, np.float64)

        def floats(values: Sequence[float]) -> np.ndarray:
            return np.array(values, np.float64)

        return UnitTables(
            tensor_T=np.array(tensor, np.int64),
            seconds_UT=by_size([u.seconds for u in units], np.inf),
            activation_bytes_UT=by_size([u.activation_bytes for u in units], np.inf),
            unevenness_U=floats([u.unevenness for u in units]),
            surge_bytes_UT=by_size([u.surge_bytes for u in units], 0.0),
            peak_bytes_UT=by_size([u.peak_bytes for u in units], np.inf),
            workspace_bytes_UT=by_size([u.workspace_bytes for u in units], 0.0),
            layers_U=np.array([u.layers for u in units], np.int64),
            virtual_U=np.array([u.virtual_stages for u in units], np.int64),
            replica_bytes_U=floats([u.replica_bytes for u in units]),
            sharded_bytes_U=floats([u.sharded_bytes for u in units]),
            keeps_U=np.array([u.has_backward for u in units], np.bool_),
            transfer_s_U=floats([u.transfer_s for u in units]),
            sync_s_U=floats([u.sync_s for u in units]),
            limit_U=np.array([limits.get(u.name, self.devices) for u in units], np.int64),
        )

    def setting(self) -> PlanSetting:
        """What is the same for all plans."""
        return PlanSetting(
            llm=self.llm,
            batch=self.global_batch_size // self.microbatch_size,
            microbatch_size=self.microbatch_size,
            devices=self.devices,
            memory_bytes=float(self.memory_bytes),
        )
