"""DistTrain orchestration (§5): parallelism degrees of all modules with the fastest step that fits.

Encoders, LLM and generator are *units* on separate devices. Together they form one pipeline. The
search chooses the tensor-, data- and pipeline-parallel sizes of all units. The step time is

    T = sum_u (C_u k_u + P_u x_u k_u) / V_u + max_u(C_u k_u q_u r_u) (K - 1) + max_u(sync_u)

    |  warm-up of all units  | (K - 1) microbatches at the slowest stage |  sync  |

with, for each unit u:

- C_u: seconds of forward and backward pass per sample, for the tensor-parallel size of the unit.
- k_u: samples of a microbatch on each of the D_u replicas, the LLM microbatch size times D / D_u.
- P_u: pipeline-parallel size. x_u: seconds to send the output of a sample to the next rank.
- V_u: virtual stages per rank, the correction of the warm-up in the paper.
- q_u: fraction of the unit on its rank with the most layers, ceil(L_u / P_u V_u) V_u / L_u.
- K: number of microbatches.
- r_u: reserve of one standard deviation if samples differ. Without it, a unit that is as fast as
  the others on average delays them whenever a sample is larger. The paper omits this.

D divides the batch and D_u divides D, so microbatches are not split. The first rank of a unit
stores weights, gradients, 1 / D_u of the optimizer state, and the activations of all microbatches
that 1F1B has in flight. Their number is the number of ranks from there to the end of the complete
pipeline. The paper uses P_u, which ignores that the first LLM rank also waits for the generator.

The paper solves a convex relaxation with real numbers of devices and rounds the result. `kernels`
finds the integer optimum directly, which is faster.
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
    """Parallelism degrees of one unit."""

    tensor: int
    data: int
    pipeline: int

    @property
    def devices(self) -> int:
        """Number of devices of the unit."""
        return self.tensor * self.data * self.pipeline


@dataclass(frozen=True)
class UnitPlan:
    """Parallelism degrees, times and memory of a unit.

    Attributes:
        name: Name of the module.
        sizes: Parallelism degrees.
        stage_s: Seconds per microbatch on the slowest rank, forward and backward, with the reserve.
        warmup_s: Seconds of the first microbatch on all ranks, divided by the virtual stages.
        grad_sync_s: Seconds of weight all-gather and gradient reduction.
        used_bytes: Memory of the first rank.
    """

    name: str
    sizes: UnitSizes
    stage_s: float
    warmup_s: float
    grad_sync_s: float
    used_bytes: float


@dataclass(frozen=True)
class OrchestrationPlan:
    """Parallelism degrees of all units, with the estimated step time.

    Attributes:
        units: Plans of the units in pipeline order.
        microbatches: Microbatches per data-parallel rank of the LLM.
        fits: Whether every rank has enough memory.
    """

    units: tuple[UnitPlan, ...]
    microbatches: int
    fits: bool

    @property
    def devices(self) -> int:
        """Number of used devices."""
        return sum(unit.sizes.devices for unit in self.units)

    @property
    def warmup_s(self) -> float:
        """Time of the first microbatch through all units."""
        return sum(unit.warmup_s for unit in self.units)

    @property
    def bottleneck(self) -> UnitPlan:
        """Unit with the longest time per microbatch and rank. The first if several are equal."""
        return max(self.units, key=lambda unit: unit.stage_s)

    @property
    def steady_s(self) -> float:
        """Time of the remaining microbatches at the pace of the slowest rank."""
        return (self.microbatches - 1) * self.bottleneck.stage_s

    @property
    def grad_sync_s(self) -> float:
        """Time of weight all-gather and gradient reduction. Units run these concurrently."""
        return max(unit.grad_sync_s for unit in self.units)

    @property
    def step_s(self) -> float:
        """Step time."""
        return self.warmup_s + self.steady_s + self.grad_sync_s


def orchestrate(
    problem: OrchestrationProblem,
    *,
    alternatives: int = 5,
    limits: Mapping[str, int] | None = None,
) -> list[OrchestrationPlan]:
    """Return the fastest plan that fits, and the next-best plans with other sizes of the LLM.

    Args:
        problem: Units with their costs, cluster and batch.
        alternatives: Maximum number of next-best plans.
        limits: Maximum number of devices of each unit, by name.

    Raises:
        ValueError: No plan fits. The message lists the minimum memory of each unit.
    """
    tables = problem.tables(limits or {})
    seconds, sizes = fastest_plans(tables, problem.setting(), 1 + alternatives)
    plans = [
        evaluate_sizes(
            problem, [UnitSizes(int(tables.tensor_T[t]), int(d), int(p)) for t, d, p in plan]
        )
        for plan, step_s in zip(sizes, seconds, strict=True)
        if step_s < np.inf
    ]
    if not plans:
        raise ValueError(_memory_error_message(problem, tables))
    return plans


def evaluate_sizes(problem: OrchestrationProblem, sizes: Sequence[UnitSizes]) -> OrchestrationPlan:
    """Return the plan with the given parallelism degrees, even if it does not fit.

    Args:
        problem: Units with their costs, cluster and batch.
        sizes: Parallelism degrees of each unit.

    Raises:
        ValueError: A unit has no costs for a size, sizes do not divide the batch or each other, or
            they need too many devices.
    """
    tables = problem.tables({})
    setting = problem.setting()
    _check_sizes(problem, sizes)
    data = sizes[problem.llm].data
    microbatches = setting.batch // data
    units, fits = [], True
    for index, (unit, unit_sizes) in enumerate(zip(problem.units, sizes, strict=True)):
        tensor = int(np.flatnonzero(tables.tensor_T == unit_sizes.tensor)[0])
        samples = problem.microbatch_size * (data / unit_sizes.data)
        stage_s, warmup_s, grad_sync_s = unit_seconds(
            tables, index, tensor, unit_sizes.data, unit_sizes.pipeline, samples
        )
        depth = sum(later.pipeline for later in sizes[index:])
        in_flight = microbatches_in_flight(tables, index, unit_sizes.pipeline, depth, microbatches)
        used = unit_bytes(
            tables, index, tensor, unit_sizes.data, unit_sizes.pipeline, samples, in_flight
        )
        fits &= used <= problem.memory_bytes
        units.append(UnitPlan(unit.name, unit_sizes, stage_s, warmup_s, grad_sync_s, used))
    return OrchestrationPlan(tuple(units), microbatches, bool(fits))


def _check_sizes(problem: OrchestrationProblem, sizes: Sequence[UnitSizes]) -> None:
    if len(sizes) != len(problem.units):
        raise ValueError(f"{len(sizes)} sizes for {len(problem.units)} units; pass one per unit")
    batch = problem.global_batch_size // problem.microbatch_size
    data = sizes[problem.llm].data
    for unit, unit_sizes in zip(problem.units, sizes, strict=True):
        total_data = batch if unit.kind == "llm" else data
        if unit_sizes.data < 1 or total_data % unit_sizes.data:
            what = "microbatches of a step" if unit.kind == "llm" else "LLM data-parallel degree"
            raise ValueError(
                f"{unit.name}: data = {unit_sizes.data} must divide the {what}, {total_data}"
            )
        if unit_sizes.tensor not in unit.seconds:
            raise ValueError(
                f"{unit.name}: tensor = {unit_sizes.tensor}, but costs exist only for "
                f"{sorted(unit.seconds)}"
            )
        max_pipeline = unit.layers // unit.virtual_stages
        if not 1 <= unit_sizes.pipeline <= max_pipeline:
            raise ValueError(
                f"{unit.name}: pipeline = {unit_sizes.pipeline}; must be 1 to {max_pipeline}"
            )
    total = sum(unit_sizes.devices for unit_sizes in sizes)
    if total > problem.devices:
        raise ValueError(
            f"the degrees require {total} devices, but {problem.devices} are available"
        )


def _memory_error_message(problem: OrchestrationProblem, tables: UnitTables) -> str:
    """Return the error message with the minimum memory per unit if it uses the complete cluster."""
    texts = []
    for index, unit in enumerate(problem.units):
        min_bytes = np.inf
        for column in np.flatnonzero(np.isfinite(tables.seconds_UT[index])).tolist():
            ranks = problem.devices // int(tables.tensor_T[column])
            for pipeline in range(1, min(unit.layers // unit.virtual_stages, ranks) + 1):
                data = ranks // pipeline
                samples = float(problem.microbatch_size)
                used = unit_bytes(tables, index, column, data, pipeline, samples, 1.0)
                min_bytes = min(min_bytes, used)
        texts.append(f"{unit.name} {min_bytes / 2**30:.1f} GiB")
    return (
        f"no plan fits on {problem.devices} devices of {problem.memory_bytes / 2**30:.1f} "
        f"GiB. Even with all devices, ranks of a unit would require about {', '.join(texts)}; "
        "use more devices, recompute activations, or freeze modules"
    )
