"""Compiled branch and bound over the parallelism degrees of all units.

`orchestrate` in `search` defines the problem and the step time formula. These loops return the
exact optimum of this formula:

    for D in data_sizes(...)                      LLM data-parallel sizes, lowest bound first
        for llm in list_options(..., LLM)         LLM options that can beat the best plan
            complete(list_non_llm_options(...), llm)       depth-first search over the other units

Invariants:

- Bounds never exceed the step time of any plan that they cover, so pruning does not lose the
  optimum.
- Options of a unit are sorted by devices, so a list can be left at the first option that is too
  large.
- A dominated option is dropped only if another option is at least as good in every column that the
  formula and the memory check read.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from torchmm.balance.disttrain.orchestration.tables import PlanSettings, UnitTables
from torchmm.balance.numba_utils import Float64s, Int64s, cached_njit, norefcount_njit

# [Note: branch and bound over options]
#
# Data-parallel sizes D of the LLM are visited in the order of their bounds (`data_sizes`). For each
# D, every unit has a list of *options*, which are rows with the columns
TENSOR, DATA, PIPELINE, DEVICES, DEPTH, STAGE_S, WARMUP_S, SYNC_S = range(8)
# The first four columns are parallelism degrees (tensor-parallel size as an index) and devices. The
# last three are times. Options are listed if they fit into memory and can beat the best plan.
# Dominated options are dropped.
#
# DEPTH is the maximum number of pipeline ranks from the first rank of the unit to the last rank of
# all units. 1F1B saves this number of microbatches on the first rank of the unit, which limits the
# depth by memory. The actual depth depends on all units that follow, so these are chosen first.
# For one option of the LLM, the other units have these positions:
#
#     pipeline   encoder 0   encoder 1   LLM   generator 0   generator 1
#     position       3           2                  1             0
#
# `search_combinations` searches the positions depth-first. With u the chosen units (and the LLM)
# and r the remaining units, a combination is pruned if this bound is not below the best step time:
#
#     sum_u(warm-up) + sum_r(min warm-up)
#         + (K - 1) max(max_u(stage), sum_r(min device-seconds) / remaining devices) + max_u(sync)
#
# The slowest unit of r takes at least as long as with an ideal division of the remaining devices in
# proportion to the work of the units. The bound therefore never exceeds the step time of a complete
# combination, and the result is the optimum over all combinations.

ANY_DEPTH = 1 << 40
"""Depth of an option whose memory does not depend on the depth."""


@norefcount_njit
def max_stage_fraction(layers: int, virtual: int, pipeline: int) -> float:
    """Return the fraction of the layers of a unit on its rank with the most layers."""
    return virtual * ((layers + pipeline * virtual - 1) // (pipeline * virtual)) / layers


@norefcount_njit
def unit_seconds(
    tables: UnitTables, unit: int, tensor: int, data: int, pipeline: int, samples: float
) -> tuple[float, float, float]:
    """Return the times of a unit.

    Args:
        tables: Costs of all units.
        unit: Index of the unit.
        tensor: Index of the tensor-parallel size.
        data: Data-parallel size.
        pipeline: Pipeline-parallel size.
        samples: Samples of a microbatch on each data-parallel rank of the unit.

    Returns:
        Seconds per microbatch on the slowest rank, one standard deviation above the mean; seconds
        of the first microbatch on all ranks; seconds of gradient reduction.
    """
    virtual = tables.virtual_U[unit]
    share = max_stage_fraction(tables.layers_U[unit], virtual, pipeline)
    seconds = tables.seconds_UT[unit, tensor] * samples
    warmup_s = (seconds + pipeline * tables.transfer_s_U[unit] * samples) / virtual
    grad_sync_s = tables.grad_sync_s_U[unit] * share / tables.tensor_T[tensor] * (data - 1) / data
    pace_s = seconds * share * (1 + tables.relative_std_U[unit] / np.sqrt(samples))
    return pace_s, warmup_s, grad_sync_s


@norefcount_njit
def unit_bytes(
    tables: UnitTables,
    unit: int,
    tensor: int,
    data: int,
    pipeline: int,
    samples: float,
    in_flight: float,
) -> float:
    """Return the memory of the first rank of a unit, which saves the most activations."""
    share = max_stage_fraction(tables.layers_U[unit], tables.virtual_U[unit], pipeline)
    state = tables.replica_bytes_U[unit] + tables.sharded_bytes_U[unit] / data
    waiting = samples * in_flight
    kept = tables.activation_bytes_UT[unit, tensor] * waiting
    kept += tables.activation_margin_bytes_UT[unit, tensor] * np.sqrt(waiting)
    kept = min(kept, tables.max_activation_bytes_UT[unit, tensor] * waiting)
    temporary = tables.workspace_bytes_UT[unit, tensor] * samples
    return (state / tables.tensor_T[tensor] + kept) * share + temporary


@norefcount_njit
def microbatches_in_flight(
    tables: UnitTables, unit: int, pipeline: int, depth: int, microbatches: int
) -> float:
    """Return the number of microbatches whose activations the first rank of a unit saves."""
    if not tables.has_backward_U[unit]:
        return 1.0
    virtual = tables.virtual_U[unit]
    # Interleaved 1F1B runs forward passes in bursts. A unit that follows adds a second burst.
    bursts = (virtual > 1) * (1 + (depth > pipeline))
    return min(depth + bursts * (pipeline - 1) / virtual, float(microbatches))


@norefcount_njit
def max_depth(
    tables: UnitTables,
    unit: int,
    sizes: tuple[int, int, int],
    samples: float,
    microbatches: int,
    memory_bytes: float,
) -> int:
    """Return the largest depth at which an option fits into memory.

    The depth is the number of pipeline ranks from the first rank of the unit to the last rank of
    all units.

    Args:
        tables: Costs of all units.
        unit: Index of the unit.
        sizes: Index of the tensor-parallel size, data-parallel size and pipeline-parallel size.
        samples: Samples of a microbatch on each data-parallel rank of the unit.
        microbatches: Microbatches of the step.
        memory_bytes: Memory of a device.

    Returns:
        The depth, 0 if the option never fits, or ANY_DEPTH.
    """
    tensor, data, pipeline = sizes
    # Memory increases with the depth until the depth equals the number of microbatches.
    fits = pipeline - 1
    too_deep = max(pipeline, microbatches) + 1
    depth = pipeline
    while fits + 1 < too_deep:
        in_flight = microbatches_in_flight(tables, unit, pipeline, depth, microbatches)
        used_bytes = unit_bytes(tables, unit, tensor, data, pipeline, samples, in_flight)
        if used_bytes <= memory_bytes:
            fits = depth
        else:
            too_deep = depth
        depth = too_deep - 1 if depth == pipeline else (fits + too_deep) // 2
    if fits < pipeline:
        return 0
    return fits if too_deep <= max(pipeline, microbatches) else ANY_DEPTH


@cached_njit
def lower_bound_times(
    tables: UnitTables, setting: PlanSettings, data: int
) -> tuple[Float64s, Float64s, float]:
    """Return lower bounds for a data-parallel size of the LLM.

    Memory and integer constraints are ignored.

    Returns:
        Warm-up time of each unit; device-seconds per microbatch of each unit; the largest
        single-layer time over all units.
    """
    units = len(tables.layers_U)
    warmup_U = np.full(units, np.inf)
    work_U = np.full(units, np.inf)
    layer_s = 0.0
    for unit in range(units):
        min_s = np.inf
        for tensor in range(len(tables.tensor_T)):
            seconds = tables.seconds_UT[unit, tensor] * setting.microbatch_size
            min_s = min(min_s, seconds)
            work_U[unit] = min(work_U[unit], tables.tensor_T[tensor] * seconds * data)
        transfer_s = tables.transfer_s_U[unit] * setting.microbatch_size
        warmup_U[unit] = (min_s + transfer_s) / tables.virtual_U[unit]
        layer_s = max(layer_s, min_s * tables.virtual_U[unit] / tables.layers_U[unit])
    return warmup_U, work_U, layer_s


@cached_njit
def list_options(
    tables: UnitTables, setting: PlanSettings, data: int, unit: int, limit_s: float, llm: Float64s
) -> Float64s:
    """Return the options of a unit that fit and can lead to a step time below a limit.

    Args:
        tables: Costs of all units.
        setting: Properties that all plans share.
        data: Data-parallel size of the LLM.
        unit: Index of the unit.
        limit_s: Upper limit of the step time.
        llm: Options of the LLM that the unit is combined with. Empty for the LLM.

    Returns:
        (O, 8) options, sorted by number of devices.
    """
    warmup_U, work_U, layer_s = lower_bound_times(tables, setting, data)
    microbatches = setting.batch // data
    virtual = tables.virtual_U[unit]
    max_devices = setting.devices - len(warmup_U) + 1
    if len(llm) > 0:
        max_devices -= int(llm[:, DEVICES].min()) - 1
        warmup_U[setting.llm] = llm[:, WARMUP_S].min()
        layer_s = max(layer_s, llm[:, STAGE_S].min())
    warmup_s = warmup_U.sum() - warmup_U[unit]
    work = work_U.sum() - work_U[unit]
    max_devices = min(tables.max_devices_U[unit], max_devices)
    options = np.empty((64, 8))
    count = 0
    for tensor in range(len(tables.tensor_T)):
        has_costs = tables.seconds_UT[unit, tensor] < np.inf
        for data_size in range(data if unit == setting.llm else 1, data + 1 if has_costs else 0):
            group = data_size * tables.tensor_T[tensor]
            if group > max_devices or data % data_size:
                continue
            samples = setting.microbatch_size * (data / data_size)
            share = np.inf
            for pipeline in range(
                1, min(max_devices // group, tables.layers_U[unit] // virtual) + 1
            ):
                if max_stage_fraction(tables.layers_U[unit], virtual, pipeline) >= share:
                    continue  # one more rank does not reduce the maximum layers per rank
                share = max_stage_fraction(tables.layers_U[unit], virtual, pipeline)
                times = unit_seconds(tables, unit, tensor, data_size, pipeline, samples)
                remaining = max(setting.devices - group * pipeline, 1)
                slowest = max(times[0], layer_s, work / remaining)
                if times[1] + warmup_s + slowest * (microbatches - 1) + times[2] >= limit_s:
                    continue
                sizes = (tensor, data_size, pipeline)
                depth = max_depth(tables, unit, sizes, samples, microbatches, setting.memory_bytes)
                if depth == 0:
                    continue
                if count == len(options):
                    options = np.concatenate((options, np.empty_like(options)))
                options[count, TENSOR : DEPTH + 1] = (
                    tensor,
                    data_size,
                    pipeline,
                    group * pipeline,
                    depth,
                )
                options[count, STAGE_S:] = times
                count += 1
    return options[:count][np.argsort(options[:count, DEVICES], kind="mergesort")]


@cached_njit
def list_all_options(
    tables: UnitTables, setting: PlanSettings, data: int, unit: int, max_devices: int
) -> Float64s:
    """Return all options of a unit, including options that do not fit (depth 0).

    Args:
        tables: Costs of all units.
        setting: Properties that all plans share.
        data: Data-parallel size of the LLM.
        unit: Index of the unit.
        max_devices: Maximum number of devices of the unit.

    Returns:
        (O, 8) options with the columns of `list_options`, unsorted.
    """
    # Duplicates the loops of `list_options`. A shared list that is filtered afterwards would make
    # `list_options`, which a search calls hundreds of times, 1.8 times slower.
    virtual = tables.virtual_U[unit]
    options = np.empty((64, 8))
    count = 0
    for tensor in range(len(tables.tensor_T)):
        has_costs = tables.seconds_UT[unit, tensor] < np.inf
        for data_size in range(data if unit == setting.llm else 1, data + 1 if has_costs else 0):
            group = data_size * tables.tensor_T[tensor]
            if group > max_devices or data % data_size:
                continue
            samples = setting.microbatch_size * (data / data_size)
            for pipeline in range(
                1, min(max_devices // group, tables.layers_U[unit] // virtual) + 1
            ):
                depth = max_depth(
                    tables,
                    unit,
                    (tensor, data_size, pipeline),
                    samples,
                    setting.batch // data,
                    setting.memory_bytes,
                )
                if count == len(options):
                    options = np.concatenate((options, np.empty_like(options)))
                options[count, TENSOR : DEPTH + 1] = (
                    tensor,
                    data_size,
                    pipeline,
                    group * pipeline,
                    depth,
                )
                options[count, STAGE_S:] = unit_seconds(
                    tables, unit, tensor, data_size, pipeline, samples
                )
                count += 1
    return options[:count]


@cached_njit
def data_sizes(tables: UnitTables, setting: PlanSettings) -> tuple[Int64s, Float64s]:
    """Return the feasible data-parallel sizes of the LLM, each with a lower bound of the step time.

    Sizes are sorted by bound.
    """
    sizes = np.empty(setting.batch, np.int64)
    bounds = np.empty(setting.batch)
    count = 0
    for data in range(1, min(setting.batch, setting.devices) + 1):
        if setting.batch % data:
            continue
        llm_options = list_options(tables, setting, data, setting.llm, np.inf, np.empty((0, 8)))
        warmup_U, work_U, layer_s = lower_bound_times(tables, setting, data)
        warmup_s = warmup_U.sum() - warmup_U[setting.llm]
        work = work_U.sum() - work_U[setting.llm]
        bound = np.inf
        for row in range(len(llm_options)):
            remaining = max(setting.devices - llm_options[row, DEVICES], 1)
            slowest = max(llm_options[row, STAGE_S], layer_s, work / remaining)
            steady_s = slowest * (setting.batch // data - 1)
            bound = min(
                bound, warmup_s + llm_options[row, WARMUP_S] + steady_s + llm_options[row, SYNC_S]
            )
        if bound < np.inf:
            sizes[count], bounds[count] = data, bound
            count += 1
    order = np.argsort(bounds[:count], kind="mergesort")
    return sizes[order], bounds[order]


@cached_njit
def drop_dominated(options: Float64s) -> Float64s:
    """Return the options that no other option equals or beats in all relevant columns."""
    count = 0
    for row in range(len(options)):
        option = options[row]
        dominated = False
        for other in range(count):
            better = options[other]
            dominated |= (
                better[DEVICES] <= option[DEVICES]
                and better[STAGE_S] <= option[STAGE_S]
                and better[WARMUP_S] <= option[WARMUP_S]
                and better[SYNC_S] <= option[SYNC_S]
                and better[PIPELINE] <= option[PIPELINE]
                and better[DEPTH] - better[PIPELINE] >= option[DEPTH] - option[PIPELINE]
            )
        if not dominated:
            options[count] = option
            count += 1
    return options[:count].copy()


class NonLlmOptions(NamedTuple):
    """Options of the units other than the LLM, in the order in which they are chosen."""

    is_after_llm_W: NDArray[np.bool_]
    """Whether the unit of each position follows the LLM."""
    offsets_W: Int64s
    """Offsets of the options of each position. Position w has options `offsets_W[w]` to
    `offsets_W[w + 1]`."""
    options: Float64s
    min_devices_W: Float64s
    """Minimum number of devices of each position and all later positions together."""
    min_work_W: Float64s
    """Minimum device-seconds per microbatch of each position and all later positions together."""
    min_warmup_s_W: Float64s


@cached_njit
def list_non_llm_options(
    tables: UnitTables, setting: PlanSettings, data: int, limit_s: float, llm: Float64s
) -> NonLlmOptions:
    """Return the options of all units other than the LLM.

    The result is empty if a unit has no option.
    """
    units = len(tables.layers_U)
    is_after_llm = np.array(
        [position < units - 1 - setting.llm for position in range(units - 1)], np.bool_
    )
    offsets = np.zeros(units, np.int64)
    options = np.empty((0, 8))
    devices = np.zeros(units)
    work = np.zeros(units)
    warmup = np.zeros(units)
    for position in range(units - 1):
        unit = units - 1 - position if is_after_llm[position] else units - 2 - position
        unit_options = drop_dominated(list_options(tables, setting, data, unit, limit_s, llm))
        if len(unit_options) == 0:
            return NonLlmOptions(is_after_llm, offsets * 0, options[:0], devices, work, warmup)
        options = np.concatenate((options, unit_options))
        offsets[position + 1] = len(options)
        devices[position] = unit_options[:, DEVICES].min()
        work[position] = (unit_options[:, DEVICES] * unit_options[:, STAGE_S]).min()
        warmup[position] = unit_options[:, WARMUP_S].min()
    for position in range(units - 2, -1, -1):
        devices[position] += devices[position + 1]
        work[position] += work[position + 1]
        warmup[position] += warmup[position + 1]
    return NonLlmOptions(is_after_llm, offsets, options, devices, work, warmup)


@cached_njit
def search_combinations(
    non_llm: NonLlmOptions, llm: Float64s, devices: int, steady: int, limit_s: float
) -> tuple[float, Int64s]:
    """Return the best options of the other units for one option of the LLM.

    Args:
        non_llm: Options of the other units.
        llm: Option of the LLM.
        devices: Number of available devices.
        steady: Number of microbatches minus 1.
        limit_s: Upper limit of the step time.

    Returns:
        The step time, or the limit if no combination is faster; the chosen option of each position.
    """
    positions = len(non_llm.is_after_llm_W)
    best = limit_s
    best_rows = np.zeros(positions, np.int64)
    if positions == 0:
        return min(best, llm[WARMUP_S] + steady * llm[STAGE_S] + llm[SYNC_S]), best_rows
    rows = np.zeros(positions, np.int64)
    row = non_llm.offsets_W[:-1].copy()
    # Sums and maxima over the options that are chosen before each position. Pipeline ranks of the
    # LLM are added only for units before the LLM.
    totals_before = np.zeros((positions + 1, 8))
    totals_before[0, DEVICES:] = llm[DEVICES:]
    position = 0
    while position >= 0:
        if row[position] == non_llm.offsets_W[position + 1]:
            position -= 1
            continue
        option = non_llm.options[row[position]]
        totals = totals_before[position]
        next_totals = totals_before[position + 1]
        rows[position] = row[position]
        row[position] += 1
        next_totals[DEVICES] = totals[DEVICES] + option[DEVICES]
        if next_totals[DEVICES] + non_llm.min_devices_W[position + 1] > devices:
            position -= 1  # options are sorted by devices, so later options need even more
            continue
        next_totals[PIPELINE] = totals[PIPELINE] + option[PIPELINE]
        depth = next_totals[PIPELINE] + (0 if non_llm.is_after_llm_W[position] else llm[PIPELINE])
        fits = depth <= option[DEPTH]
        if non_llm.is_after_llm_W[position]:
            fits &= next_totals[PIPELINE] + llm[PIPELINE] <= llm[DEPTH]
        next_totals[WARMUP_S] = totals[WARMUP_S] + option[WARMUP_S]
        next_totals[STAGE_S] = max(totals[STAGE_S], option[STAGE_S])
        next_totals[SYNC_S] = max(totals[SYNC_S], option[SYNC_S])
        remaining = max(devices - next_totals[DEVICES], 1)
        slowest = max(next_totals[STAGE_S], non_llm.min_work_W[position + 1] / remaining)
        warmup_s = next_totals[WARMUP_S] + non_llm.min_warmup_s_W[position + 1]
        bound = warmup_s + steady * slowest + next_totals[SYNC_S]
        if not fits or bound >= best:
            continue
        if position == positions - 1:
            best = bound
            best_rows[:] = rows
        else:
            position += 1
            row[position] = non_llm.offsets_W[position]
    return best, best_rows


@cached_njit
def fastest_plans(tables: UnitTables, setting: PlanSettings, keep: int) -> tuple[Float64s, Int64s]:
    """Return the fastest plans, at most one for each LLM option.

    Returns:
        (K,) step times in seconds, infinite for missing plans; (K, U, 3) tensor-parallel size (as
        an index), data-parallel size and pipeline-parallel size of each unit.
    """
    units = len(tables.layers_U)
    best = np.full(keep, np.inf)
    plans = np.zeros((keep, units, 3), np.int64)
    sizes, bounds = data_sizes(tables, setting)
    for index in range(len(sizes)):
        data = sizes[index]
        if bounds[index] >= best[-1]:
            break
        steady = setting.batch // data - 1
        llm_options = list_options(tables, setting, data, setting.llm, best[-1], np.empty((0, 8)))
        if len(llm_options) == 0:
            continue
        non_llm = list_non_llm_options(tables, setting, data, best[-1], llm_options)
        if units > 1 and non_llm.offsets_W[-1] == 0:
            continue
        for llm in llm_options[
            np.argsort(llm_options[:, WARMUP_S] + steady * llm_options[:, STAGE_S])
        ]:
            seconds, rows = search_combinations(non_llm, llm, setting.devices, steady, best[-1])
            if seconds >= best[-1]:
                continue
            rank = np.searchsorted(best, seconds, side="right")
            best[rank + 1 :] = best[rank:-1].copy()
            plans[rank + 1 :] = plans[rank:-1].copy()
            best[rank] = seconds
            for column in range(3):
                plans[rank, setting.llm, column] = int(llm[column])
                for position, row in enumerate(rows):
                    is_after_llm = non_llm.is_after_llm_W[position]
                    unit = units - 1 - position if is_after_llm else units - 2 - position
                    plans[rank, unit, column] = int(non_llm.options[row, column])
    return best, plans
