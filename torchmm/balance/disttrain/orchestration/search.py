"""How many devices each module gets, and in which parallel sizes: the fastest step that fits.

Disaggregated orchestration of DistTrain (§5): encoders, LLM and generators are *units* on devices
of their own, one pipeline from the first to the last. Searched are the tensor-, data- and
pipeline-parallel sizes of all units; the time of a step is

    T = sum_u (C_u k_u + P_u x_u k_u) / V_u + max_u(C_u k_u q_u r_u) (K - 1) + max_u(sync_u)

with C_u seconds of forward and backward per sample for the unit's tensor-parallel size; k_u samples
of a microbatch on each of the unit's D_u replicas, the LLM's microbatch size times D / D_u; x_u the
transfer of a sample's output; V_u virtual stages per rank (the paper's correction of the warm-up);
q_u the part of the unit on its fullest rank, ceil(L_u / P_u V_u) V_u / L_u; K microbatches; and r_u
a reserve of one standard deviation where samples differ: a unit that is only just as fast as the
others on average holds them up whenever a sample is larger, which the paper leaves out. D
divides the batch and D_u divides D, so that microbatches are whole. Memory of a unit's first rank:
weights and gradients, optimizer state divided by D_u, and activations of as many microbatches as
1F1B keeps there, which is the number of ranks from there to the end of the *whole* pipeline.

The paper relaxes the numbers of devices to real ones and rounds. The optimum in whole numbers is
found here directly (`kernels`). Rejected: P_u microbatches in flight, as printed, which overlooks
that the LLM's first rank waits for the generator too; a convex solver, which is slower.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from torchmm.balance.disttrain.orchestration.kernels import (
    fastest_plans,
    microbatches_in_flight,
    unit_bytes,
    unit_seconds,
)
from torchmm.balance.disttrain.orchestration.problem import OrchestrationProblem
from torchmm.balance.disttrain.orchestration.tables import UnitTables


@dataclass(frozen=True)
class UnitSizes:
    """Parallel sizes of one unit."""

    tensor: int
    data: int
    pipeline: int

    @property
    def devices(self) -> int:
        """Devices of the unit."""
        return self.tensor * self.data * self.pipeline


@dataclass(frozen=True)
class UnitPlan:
    """One unit of a plan.

    Attributes:
        stage_s: of a microbatch on the unit's fullest rank, forward and backward, with the reserve.
        warmup_s: of the first microbatch on all ranks of the unit, divided by virtual stages.
        sync_s: of gathering weights and reducing gradients.
        used_bytes: memory of its first rank.
    """

    name: str
    sizes: UnitSizes
    stage_s: float
    warmup_s: float
    sync_s: float
    used_bytes: float


@dataclass(frozen=True)
class OrchestrationPlan:
    """Sizes of all units and what a step with them takes.

    Attributes:
        units: in the order of the pipeline.
        microbatches: per data-parallel rank of the LLM.
        fits: whether no rank needs more memory than there is.
    """

    units: tuple[UnitPlan, ...]
    microbatches: int
    fits: bool

    @property
    def devices(self) -> int:
        """Devices that are used."""
        return sum(unit.sizes.devices for unit in self.units)

    @property
    def warmup_s(self) -> float:
        """The first microbatch, from end to end."""
        return sum(unit.warmup_s for unit in self.units)

    @property
    def bottleneck(self) -> UnitPlan:
        """The unit whose ranks take longest for a microbatch; the first of equals."""
        return max(self.units, key=lambda unit: unit.stage_s)

    @property
    def steady_s(self) -> float:
        """The other microbatches, at the pace of the slowest rank."""
        return (self.microbatches - 1) * self.bottleneck.stage_s

    @property
    def sync_s(self) -> float:
        """Gathering weights and reducing gradients, which units do at the same time."""
        return max(unit.sync_s for unit in self.units)

    @property
    def step_s(self) -> float:
        """A step."""
        return self.warmup_s + self.steady_s + self.sync_s


def orchestrate(
    problem: OrchestrationProblem,
    *,
    alternatives: int = 5,
    limits: Mapping[str, int] | None = None,
) -> list[OrchestrationPlan]:
    """Return the fastest plan that fits, and the next-best plans with other sizes of the LLM.

    Args:
        problem: Units with their costs, cluster and batch.
        alternatives: Largest number of next-best plans.
        limits: Devices that units may have at most, by name.

    Raises:
        ValueError: No plan fits; the message has what each unit needs at least.
    """
    tables = problem.tables(limits or {})
    seconds, sizes = fastest_plans(tables, problem.setting(), 1 + alternatives)
    plans = [
        plan_with(problem, [UnitSizes(int(tables.tensor_T[t]), int(d), int(p)) for t, d, p in plan])
        for plan, step_s in zip(sizes, seconds, strict=True)
        if step_s < np.inf
    ]
    if not plans:
        raise ValueError(_why_nothing_fits(problem, tables))
    return plans


def plan_with(problem: OrchestrationProblem, sizes: Sequence[UnitSizes]) -> OrchestrationPlan:
    """What a step takes with given sizes, whether it fits or not.

    Args:
        sizes: by unit.

    Raises:
        ValueError: sizes that a unit does not offer, that do not divide the batch or each other,
            or that take more devices than there are.
    """
    tables = problem.tables({})
    setting = problem.setting()
    _check_sizes(problem, sizes)
    data = sizes[problem.llm].data
    microbatches = setting.batch // data
    units, fits = [], True
    for index, (unit, own) in enumerate(zip(problem.units, sizes, strict=True)):
        tensor = int(np.flatnonzero(tables.tensor_T == own.tensor)[0])
        samples = problem.microbatch_size * (data / own.data)
        stage_s, warmup_s, sync_s = unit_seconds(
            tables, index, tensor, own.data, own.pipeline, samples
        )
        depth = sum(other.pipeline for other in sizes[index:])
        in_flight = microbatches_in_flight(tables, index, own.pipeline, depth, microbatches)
        used = unit_bytes(tables, index, tensor, own.data, own.pipeline, samples, in_flight)
        fits &= used <= problem.memory_bytes
        units.append(UnitPlan(unit.name, own, stage_s, warmup_s, sync_s, used))
    return OrchestrationPlan(tuple(units), microbatches, bool(fits))


def _check_sizes(problem: OrchestrationProblem, sizes: Sequence[UnitSizes]) -> None:
    if len(sizes) != len(problem.units):
        raise ValueError(f"{len(sizes)} sizes for {len(problem.units)} units; pass one per unit")
    batch = problem.global_batch_size // problem.microbatch_size
    data = sizes[problem.llm].data
    for unit, own in zip(problem.units, sizes, strict=True):
        whole = batch if unit.kind == "llm" else data
        if own.data < 1 or whole % own.data:
            what = "microbatches of a step" if unit.kind == "llm" else "LLM data-parallel degree"
            raise ValueError(f"{unit.name}: data = {own.data} must divide the {what}, {whole}")
        if own.tensor not in unit.seconds:
            raise ValueError(
                f"{unit.name}: tensor = {own.tensor}, but costs exist only for "
                f"{sorted(unit.seconds)}"
            )
        most = unit.layers // unit.virtual_stages
        if not 1 <= own.pipeline <= most:
            raise ValueError(f"{unit.name}: pipeline = {own.pipeline}; must be 1 to {most}")
    total = sum(own.devices for own in sizes)
    if total > problem.devices:
        raise ValueError(
            f"the degrees require {total} devices, but {problem.devices} are available"
        )


def _why_nothing_fits(problem: OrchestrationProblem, tables: UnitTables) -> str:
    """The least memory of each unit's devices, all of the cluster being its own."""
    texts = []
    for index, unit in enumerate(problem.units):
        least = np.inf
        for column in np.flatnonzero(np.isfinite(tables.seconds_UT[index])).tolist():
            ranks = problem.devices // int(tables.tensor_T[column])
            for pipeline in range(1, min(unit.layers // unit.virtual_stages, ranks) + 1):
                data = ranks // pipeline
                samples = float(problem.microbatch_size)
                own = unit_bytes(tables, index, column, data, pipeline, samples, 1.0)
                least = min(least, own)
        texts.append(f"{unit.name} {least / 2**30:.1f} GiB")
    return (
        f"no plan fits on {problem.devices} devices of {problem.memory_bytes / 2**30:.1f} "
        f"GiB. Even with all devices, ranks of a unit would require about {', '.join(texts)}; "
        "use more devices, recompute activations, or freeze modules"
    )
