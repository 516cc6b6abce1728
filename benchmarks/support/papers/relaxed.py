"""Orchestration with any real number of devices per unit: a bound for integer numbers of devices.

DistTrain (§5.2) solves this convex problem for each choice of data- and tensor-parallel sizes with
a solver. It has a closed form: with times and sizes given, the warm-up is constant, and the slowest
stage is as fast as possible when each unit has devices in proportion to its work, except for units
that need more for their memory.

The bound leaves out what only makes plans slower:
- stages of full layers (but no stage has less than one),
- activations kept for ranks of later units and beyond the average,
- the reduction of gradients.
"""

from __future__ import annotations

import numpy as np

from torchmm.balance.disttrain.orchestration.problem import OrchestrationProblem
from torchmm.balance.disttrain.orchestration.tables import PlanSettings, UnitTables
from torchmm.balance.numba_utils import Float64s, cached_njit


def relaxed_s(problem: OrchestrationProblem) -> float:
    """Return a time that no plan of a problem is faster than."""
    return float(relaxed_seconds(problem.tables({}), problem.setting()))


@cached_njit
def relaxed_seconds(tables: UnitTables, setting: PlanSettings) -> float:
    """Return the minimum time over data- and tensor-parallel sizes; infinite if none fits."""
    units, sizes = tables.seconds_UT.shape
    work_U = np.empty(units)
    floors_U = np.empty(units)
    best = np.inf
    for data in range(1, min(setting.batch, setting.devices) + 1):
        if setting.batch % data:
            continue
        steady = setting.batch // data - 1
        floors_UT = np.empty((units, sizes))
        for unit in range(units):
            for tensor in range(sizes):
                floors_UT[unit, tensor] = _least_devices(tables, setting, data, unit, tensor)
        for choice in range(sizes**units):
            warmup_s, least_s, rest = 0.0, 0.0, choice
            for unit in range(units):
                tensor, rest = rest % sizes, rest // sizes
                seconds = tables.seconds_UT[unit, tensor] * setting.microbatch_size
                transfer_s = tables.transfer_s_U[unit] * setting.microbatch_size
                warmup_s += (seconds + transfer_s) / tables.virtual_U[unit]
                least_s = max(least_s, seconds * tables.virtual_U[unit] / tables.layers_U[unit])
                work_U[unit] = seconds * tables.tensor_T[tensor] * data
                floors_U[unit] = floors_UT[unit, tensor]
            if floors_U.sum() <= setting.devices and warmup_s < best:
                slowest = max(least_s, _slowest_stage(work_U, floors_U, setting.devices))
                best = min(best, warmup_s + steady * slowest)
    return best


@cached_njit
def _slowest_stage(work_U: Float64s, floors_U: Float64s, devices: int) -> float:
    """Return the least t with sum(max(work / t, floor)) <= devices, for smaller sums of floors."""
    at_floor = np.zeros(len(work_U), np.bool_)
    while True:
        left = float(devices)
        work = 0.0
        for unit in range(len(work_U)):
            if at_floor[unit]:
                left -= floors_U[unit]
            else:
                work += work_U[unit]
        slowest = work / left if work > 0 else 0.0
        changed = False
        for unit in range(len(work_U)):
            if not at_floor[unit] and floors_U[unit] * slowest > work_U[unit]:
                at_floor[unit] = changed = True
        if not changed:
            return slowest


@cached_njit
def _least_devices(
    tables: UnitTables, setting: PlanSettings, data: int, unit: int, tensor: int
) -> float:
    """Return the minimum number of devices of a unit over data-parallel sizes, or infinity."""
    if tables.seconds_UT[unit, tensor] == np.inf:
        return np.inf
    microbatches = setting.batch // data
    best = np.inf
    for replicas in range(data if unit == setting.llm else 1, data + 1):
        if data % replicas:
            continue
        samples = setting.microbatch_size * data / replicas
        free = setting.memory_bytes - tables.workspace_bytes_UT[unit, tensor] * samples
        if free <= 0:
            continue
        held = tables.replica_bytes_U[unit] + tables.sharded_bytes_U[unit] / replicas
        held /= tables.tensor_T[tensor]
        kept = tables.activation_bytes_UT[unit, tensor] * samples
        # Each of P ranks holds 1/P of the unit for P microbatches, but at most for all: the
        # least P is the smaller one of both cases.
        if not tables.has_backward_U[unit]:
            pipeline = (held + kept) / free
        else:
            pipeline = (held + kept * microbatches) / free
            if kept < free:
                pipeline = min(pipeline, held / (free - kept))
        pipeline = max(pipeline, 1.0)
        if pipeline <= tables.layers_U[unit] // tables.virtual_U[unit]:
            best = min(best, tables.tensor_T[tensor] * replicas * pipeline)
    return best
