"""Compiled branch and bound over the parallelism degrees of all units.

`orchestrate` in `search` defines the problem and the step time formula. These loops return the
exact optimum of this formula:

    for D in data_sizes(...)                      LLM data-parallel sizes, lowest bound first
        for llm in list_options(..., LLM)         LLM options that can beat the best plan
            complete(list_others(...), llm)       depth-first search over the other units

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

from torchmm.balance.compiled import Float64s, Int64s, compiled, loop
from torchmm.balance.disttrain.orchestration.tables import PlanSetting, UnitTables

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
# `complete` searches the positions depth-first. With u the chosen units (and the LLM) and r the
# remaining units, a combination is pruned if this bound is not below the best step time:
#
#     sum_u(warm-up) + sum_r(min warm-up)
#         + (K - 1) max(max_u(stage), sum_r(min device-seconds) / remaining devices) + max_u(sync)
#
# The slowest unit of r takes at least as long as with an ideal division of the remaining devices in
# proportion to the work of the units. The bound therefore never exceeds the step time of a complete
# combination, and the result is the optimum over all combinations.

ANY_DEPTH = 1 << 40
"""Depth of an option whose memory does not depend on the depth."""


@loop
def stage_share(layers: int, virtual: int, pipeline: int) -> float:
    """Return the fraction of the layers of a unit on its rank with the most layers."""
    return virtual * ((layers + pipeline * virtual - 1) // (pipeline * virtual)) / layers


@loop
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
    share = stage_share(tables.layers_U[unit], virtual, pipeline)
    seconds = tables.seconds_UT[unit, tensor] * samples
    warmup_s = (seconds + pipeline * tables.transfer_s_U[unit] * samples) / virtual
    sync_s = tables.sync_s_U[unit] * share / tables.tensor_T[tensor] * (data - 1) / data
    pace_s = seconds * share * (1 + tables.unevenness_U[unit] / np.sqrt(samples))
    return pace_s, warmup_s, sync_s


@loop
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
    share = stage_share(tables.layers_U[unit], tables.virtual_U[unit], pipeline)
    state = tables.replica_bytes_U[unit] + tables.sharded_bytes_U[unit] / data
    waiting = samples * in_flight
    kept = tables.activation_bytes_UT[unit, tensor] * waiting
    kept += tables.surge_bytes_UT[unit, tensor] * np.sqrt(waiting)
    kept = min(kept, tables.peak_bytes_UT[unit, tensor] * waiting)
    temporary = tables.workspace_bytes_UT[unit, tensor] * samples
    return (state / tables.tensor_T[tensor] + kept) * share + temporary


@loop
def microbatches_in_flight(
    tables: UnitTables, unit: int, pipeline: int, depth: int, microbatches: int
) -> float:
    """Return the number of microbatches whose activations the first rank of a unit saves."""
    if not tables.keeps_U[unit]:
        return 1.0
    virtual = tables.virtual_U[unit]
    # Interleaved 1F1B runs forward passes in bursts. A unit that follows adds a second burst.
    bursts = (virtual > 1) * (1 + (depth > pipeline))
    return min(depth + bursts * (pipeline - 1) / virtual, float(microbatches))


@loop
def greatest_depth(
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
        held = unit_bytes(tables, unit, tensor, data, pipeline, samples, in_flight)
        if held <= memory_bytes:
            fits = depth
        else:
            too_deep = depth
        depth = too_deep - 1 if depth == pipeline else (fits + too_deep) // 2
    if fits < pipeline:
        return 0
    return fits if too_deep <= max(pipeline, microbatches) else ANY_DEPTH


@compiled
def least_times(
    tables: UnitTables, setting: PlanSetting, data: int
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
        least = np.inf
        for tensor in range(len(tables.tensor_T)):
            seconds = tables.seconds_UT[unit, tensor] * setting.microbatch_size
            least = min(least, seconds)
            work_U[unit] = min(work_U[unit], tables.tensor_T[tensor] * seconds * data)
        transfer_s = tables.transfer_s_U[unit] * setting.microbatch_size
        warmup_U[unit] = (least + transfer_s) / tables.virtual_U[unit]
        layer_s = max(layer_s, least * tables.virtual_U[unit] / tables.layers_U[unit])
    return warmup_U, work_U, layer_s


@compiled
def list_options(
    tables: UnitTables, setting: PlanSetting, data: int, unit: int, limit_s: float, llm: Float64s
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
    warmup_U, work_U, layer_s = least_times(tables, setting, data)
    microbatches = setting.batch // data
    virtual = tables.virtual_U[unit]
    most = setting.devices - len(warmup_U) + 1
    if len(llm) > 0:
        most -= int(llm[:, DEVICES].min()) - 1
        warmup_U[setting.llm] = llm[:, WARMUP_S].min()
        layer_s = max(layer_s, llm[:, STAGE_S].min())
    warmup_s = warmup_U.sum() - warmup_U[unit]
    work = work_U.sum() - work_U[unit]
    most = min(tables.limit_U[unit], most)
    found = np.empty((64, 8))
    count = 0
    for tensor in range(len(tables.tensor_T)):
        offered = tables.seconds_UT[unit, tensor] < np.inf
        for own in range(data if unit == setting.llm else 1, data + 1 if offered else 0):
            group = own * tables.tensor_T[tensor]
            if group > most or data % own:
                continue
            samples = setting.microbatch_size * (data / own)
            share = np.inf
            for pipeline in range(1, min(most // group, tables.layers_U[unit] // virtual) + 1):
                if stage_share(tables.layers_U[unit], virtual, pipeline) >= share:
                    continue  # one more rank does not reduce the maximum layers per rank
                share = stage_share(tables.layers_U[unit], virtual, pipeline)
                times = unit_seconds(tables, unit, tensor, own, pipeline, samples)
                rest = max(setting.devices - group * pipeline, 1)
                slowest = max(times[0], layer_s, work / rest)
                if times[1] + warmup_s + slowest * (microbatches - 1) + times[2] >= limit_s:
                    continue
                sizes = (tensor, own, pipeline)
                depth = greatest_depth(
                    tables, unit, sizes, samples, microbatches, setting.memory_bytes
                )
                if depth == 0:
                    continue
                if count == len(found):
                    found = np.concatenate((found, np.empty_like(found)))
                found[count, TENSOR : DEPTH + 1] = (tensor, own, pipeline, group * pipeline, depth)
                found[count, STAGE_S:] = times
                count += 1
    return found[:count][np.argsort(found[:count, DEVICES], kind="mergesort")]


@compiled
def every_option(
    tables: UnitTables, setting: PlanSetting, data: int, unit: int, most: int
) -> Float64s:
    """Return all options of a unit, including options that do not fit (depth 0).

    Args:
        tables: Costs of all units.
        setting: Properties that all plans share.
        data: Data-parallel size of the LLM.
        unit: Index of the unit.
        most: Maximum number of devices of the unit.

    Returns:
        (O, 8) options with the columns of `list_options`, unsorted.
    """
    # Duplicates the loops of `list_options`. A shared list that is filtered afterwards would make
    # `list_options`, which a search calls hundreds of times, 1.8 times slower.
    virtual = tables.virtual_U[unit]
    found = np.empty((64, 8))
    count = 0
    for tensor in range(len(tables.tensor_T)):
        offered = tables.seconds_UT[unit, tensor] < np.inf
        for own in range(data if unit == setting.llm else 1, data + 1 if offered else 0):
            group = own * tables.tensor_T[tensor]
            if group > most or data % own:
                continue
            samples = setting.microbatch_size * (data / own)
            for pipeline in range(1, min(most // group, tables.layers_U[unit] // virtual) + 1):
                depth = greatest_depth(
                    tables,
                    unit,
                    (tensor, own, pipeline),
                    samples,
                    setting.batch // data,
                    setting.memory_bytes,
                )
                if count == len(found):
                    found = np.concatenate((found, np.empty_like(found)))
                found[count, TENSOR : DEPTH + 1] = (tensor, own, pipeline, group * pipeline, depth)
                found[count, STAGE_S:] = unit_seconds(tables, unit, tensor, own, pipeline, samples)
                count += 1
    return found[:count]


@compiled
def data_sizes(tables: UnitTables, setting: PlanSetting) -> tuple[Int64s, Float64s]:
    """Return the feasible data-parallel sizes of the LLM, each with a lower bound of the step time.

    Sizes are sorted by bound.
    """
    sizes = np.empty(setting.batch, np.int64)
    bounds = np.empty(setting.batch)
    count = 0
    for data in range(1, min(setting.batch, setting.devices) + 1):
        if setting.batch % data:
            continue
        own = list_options(tables, setting, data, setting.llm, np.inf, np.empty((0, 8)))
        warmup_U, work_U, layer_s = least_times(tables, setting, data)
        warmup_s = warmup_U.sum() - warmup_U[setting.llm]
        work = work_U.sum() - work_U[setting.llm]
        bound = np.inf
        for row in range(len(own)):
            rest = max(setting.devices - own[row, DEVICES], 1)
            slowest = max(own[row, STAGE_S], layer_s, work / rest)
            steady_s = slowest * (setting.batch // data - 1)
            bound = min(bound, warmup_s + own[row, WARMUP_S] + steady_s + own[row, SYNC_S])
        if bound < np.inf:
            sizes[count], bounds[count] = data, bound
            count += 1
    order = np.argsort(bounds[:count], kind="mergesort")
    return sizes[order], bounds[order]


@compiled
def drop_dominated(options: Float64s) -> Float64s:
    """Return the options that no other option equals or beats in all relevant columns."""
    kept = 0
    for option in range(len(options)):
        own = options[option]
        dominated = False
        for other in range(kept):
            better = options[other]
            dominated |= (
                better[DEVICES] <= own[DEVICES]
                and better[STAGE_S] <= own[STAGE_S]
                and better[WARMUP_S] <= own[WARMUP_S]
                and better[SYNC_S] <= own[SYNC_S]
                and better[PIPELINE] <= own[PIPELINE]
                and better[DEPTH] - better[PIPELINE] >= own[DEPTH] - own[PIPELINE]
            )
        if not dominated:
            options[kept] = own
            kept += 1
    return options[:kept].copy()


class Others(NamedTuple):
    """Options of the units other than the LLM, in the order in which they are chosen."""

    behind_W: NDArray[np.bool_]
    """Whether the unit of each position follows the LLM."""
    begin_W: Int64s
    """Offsets of the options of each position. Position w has options `begin_W[w]` to `begin_W[w +
    1]`."""
    options: Float64s
    devices_W: Float64s
    """Minimum number of devices of each position and all later positions together."""
    work_W: Float64s
    """Minimum device-seconds per microbatch of each position and all later positions together."""
    warmup_s_W: Float64s


@compiled
def list_others(
    tables: UnitTables, setting: PlanSetting, data: int, limit_s: float, llm: Float64s
) -> Others:
    """Return the options of all units other than the LLM.

    The result is empty if a unit has no option.
    """
    units = len(tables.layers_U)
    behind = np.array([place < units - 1 - setting.llm for place in range(units - 1)], np.bool_)
    begin = np.zeros(units, np.int64)
    options = np.empty((0, 8))
    devices = np.zeros(units)
    work = np.zeros(units)
    warmup = np.zeros(units)
    for place in range(units - 1):
        unit = units - 1 - place if behind[place] else units - 2 - place
        own = drop_dominated(list_options(tables, setting, data, unit, limit_s, llm))
        if len(own) == 0:
            return Others(behind, begin * 0, options[:0], devices, work, warmup)
        options = np.concatenate((options, own))
        begin[place + 1] = len(options)
        devices[place] = own[:, DEVICES].min()
        work[place] = (own[:, DEVICES] * own[:, STAGE_S]).min()
        warmup[place] = own[:, WARMUP_S].min()
    for place in range(units - 2, -1, -1):
        devices[place] += devices[place + 1]
        work[place] += work[place + 1]
        warmup[place] += warmup[place + 1]
    return Others(behind, begin, options, devices, work, warmup)


@compiled
def complete(
    others: Others, llm: Float64s, devices: int, steady: int, limit_s: float
) -> tuple[float, Int64s]:
    """Return the best options of the other units for one option of the LLM.

    Args:
        others: Options of the other units.
        llm: Option of the LLM.
        devices: Number of available devices.
        steady: Number of microbatches minus 1.
        limit_s: Upper limit of the step time.

    Returns:
        The step time, or the limit if no combination is faster; the chosen option of each position.
    """
    places = len(others.behind_W)
    best = limit_s
    best_rows = np.zeros(places, np.int64)
    if places == 0:
        return min(best, llm[WARMUP_S] + steady * llm[STAGE_S] + llm[SYNC_S]), best_rows
    rows = np.zeros(places, np.int64)
    row = others.begin_W[:-1].copy()
    # Sums and maxima over the options that are chosen before each position. Pipeline ranks of the
    # LLM are added only for units before the LLM.
    so_far = np.zeros((places + 1, 8))
    so_far[0, DEVICES:] = llm[DEVICES:]
    place = 0
    while place >= 0:
        if row[place] == others.begin_W[place + 1]:
            place -= 1
            continue
        own = others.options[row[place]]
        chosen = so_far[place]
        after = so_far[place + 1]
        rows[place] = row[place]
        row[place] += 1
        after[DEVICES] = chosen[DEVICES] + own[DEVICES]
        if after[DEVICES] + others.devices_W[place + 1] > devices:
            place -= 1  # options are sorted by devices, so later options need even more
            continue
        after[PIPELINE] = chosen[PIPELINE] + own[PIPELINE]
        depth = after[PIPELINE] + (0 if others.behind_W[place] else llm[PIPELINE])
        fits = depth <= own[DEPTH]
        if others.behind_W[place]:
            fits &= after[PIPELINE] + llm[PIPELINE] <= llm[DEPTH]
        after[WARMUP_S] = chosen[WARMUP_S] + own[WARMUP_S]
        after[STAGE_S] = max(chosen[STAGE_S], own[STAGE_S])
        after[SYNC_S] = max(chosen[SYNC_S], own[SYNC_S])
        rest = max(devices - after[DEVICES], 1)
        slowest = max(after[STAGE_S], others.work_W[place + 1] / rest)
        warmup_s = after[WARMUP_S] + others.warmup_s_W[place + 1]
        bound = warmup_s + steady * slowest + after[SYNC_S]
        if not fits or bound >= best:
            continue
        if place == places - 1:
            best = bound
            best_rows[:] = rows
        else:
            place += 1
            row[place] = others.begin_W[place]
    return best, best_rows


@compiled
def fastest_plans(tables: UnitTables, setting: PlanSetting, keep: int) -> tuple[Float64s, Int64s]:
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
        trunks = list_options(tables, setting, data, setting.llm, best[-1], np.empty((0, 8)))
        if len(trunks) == 0:
            continue
        others = list_others(tables, setting, data, best[-1], trunks)
        if units > 1 and others.begin_W[-1] == 0:
            continue
        for trunk in trunks[np.argsort(trunks[:, WARMUP_S] + steady * trunks[:, STAGE_S])]:
            seconds, rows = complete(others, trunk, setting.devices, steady, best[-1])
            if seconds >= best[-1]:
                continue
            rank = np.searchsorted(best, seconds, side="right")
            best[rank + 1 :] = best[rank:-1].copy()
            plans[rank + 1 :] = plans[rank:-1].copy()
            best[rank] = seconds
            for column in range(3):
                plans[rank, setting.llm, column] = int(trunk[column])
                for place, row in enumerate(rows):
                    behind = others.behind_W[place]
                    unit = units - 1 - place if behind else units - 2 - place
                    plans[rank, unit, column] = int(others.options[row, column])
    return best, plans
