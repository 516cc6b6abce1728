"""Compiled search for the fastest sizes of all units; `orchestrate` says what is searched."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from torchmm.balance.compiled import Float64s, Int64s, compiled, loop
from torchmm.balance.disttrain.orchestration.tables import PlanSetting, UnitTables

# [Note: branch and bound over options]
#
# For every data-parallel size D of the LLM, most promising first (`data_sizes`), each unit has a
# list of *options*, rows of
TENSOR, DATA, PIPELINE, DEVICES, DEPTH, STAGE_S, WARMUP_S, SYNC_S = range(8)
# sizes (tensor as an index), and what they mean for the step. Listed are those that fit and with
# which the step may become faster than the best one so far; options that another one beats or
# equals in all columns that matter are dropped.
#
# Depth is how many pipeline ranks there may be from the unit's first to the last of all, for 1F1B
# keeps as many microbatches on that first rank, until memory is full. To know it, the units after
# one have to be chosen before it. So for one option of the LLM, the others come in this order:
#
#     pipeline   encoder 0   encoder 1   LLM   generator 0   generator 1
#     place          3           2                  1             0
#
# `complete` walks depth-first through the places. With u the places chosen and r the others, a
# combination is given up as soon as this bound is no less than the best step so far:
#
#     sum_u(warm-up) + sum_r(least warm-up)
#         + (K - 1) max(max_u(stage), sum_r(least device-seconds) / devices left) + max_u(sync)
#
# The slowest of r takes at least as long as all would with the devices left divided among them in
# proportion to their work. The bound never exceeds what can become of a combination, so nothing is
# lost: the result is the optimum, as if all combinations were tried.

ANY_DEPTH = 1 << 40
"""Depth of an option whose memory does not depend on it."""


@loop
def stage_share(layers: int, virtual: int, pipeline: int) -> float:
    """Part of a unit that its fullest rank has."""
    return virtual * ((layers + pipeline * virtual - 1) // (pipeline * virtual)) / layers


@loop
def unit_seconds(
    tables: UnitTables, unit: int, tensor: int, data: int, pipeline: int, samples: float
) -> tuple[float, float, float]:
    """Time of a unit.

    Args:
        tensor: index of the size.
        samples: of a microbatch, on each data-parallel rank of the unit.

    Returns:
        of a microbatch on one rank, a standard deviation above the mean; of the first microbatch on
        all; of the gradients' reduction.
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
    """Memory of the unit's first rank, which keeps most activations."""
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
    """Whose activations the unit's first rank keeps at once, `depth` ranks before the end."""
    if not tables.keeps_U[unit]:
        return 1.0
    virtual = tables.virtual_U[unit]
    # Bursts of interleaved 1F1B, and once more where a unit after this one answers with another.
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
    """How many ranks there may be from the unit's first to the last of all; 0: does not fit."""
    tensor, data, pipeline = sizes
    # Memory rises with the depth up to as many ranks as there are microbatches.
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
    """Bounds for the LLM's data-parallel size `data`, memory and whole numbers left aside.

    Returns:
        by unit: warm-up; device-seconds of a microbatch; and the longest time that a rank with a
        single layer takes.
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
    """Sizes of a unit that fit and with which the step may take less than the limit.

    Args:
        llm: options of the LLM, of which one is to be combined with; none for the LLM itself.

    Returns:
        (O, 8), by number of devices.
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
                    continue  # one more rank, but the fullest has as many layers
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
    """All sizes of a unit, as rows of `list_options`, whether they fit (a depth of 0: they do not)
    or are of use.

    Args:
        most: devices that it may have.
    """
    # The loops of `list_options` once more: sizes listed first and filtered then, for both, make
    # that one, of which a search calls hundreds, 1.8 times as slow.
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
    """Data-parallel sizes of the LLM that fit, and a bound of the time with each.

    The most promising comes first.
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
    """Leave out options that another one beats or equals in all that matters."""
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
    """By place: whether its unit comes after the LLM."""
    begin_W: Int64s
    """The options of place w are `begin_W[w]` to `begin_W[w + 1]`."""
    options: Float64s
    devices_W: Float64s
    """By place: the least that this place and later ones need."""
    work_W: Float64s
    """The same for device-seconds per microbatch."""
    warmup_s_W: Float64s


@compiled
def list_others(
    tables: UnitTables, setting: PlanSetting, data: int, limit_s: float, llm: Float64s
) -> Others:
    """Options of all units other than the LLM; none at all if a unit has none."""
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
    """The best options of the other units for one option of the LLM.

    Args:
        llm: the option.
        steady: microbatches less one.
        limit_s: what the time has to be less than.

    Returns:
        the time, or the limit if it cannot be less; options by place.
    """
    places = len(others.behind_W)
    best = limit_s
    best_rows = np.zeros(places, np.int64)
    if places == 0:
        return min(best, llm[WARMUP_S] + steady * llm[STAGE_S] + llm[SYNC_S]), best_rows
    rows = np.zeros(places, np.int64)
    row = others.begin_W[:-1].copy()
    # By place: sums and maxima of what has been chosen before. The LLM's pipeline ranks count only
    # for units before it, and are added there.
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
            place -= 1  # options are sorted by devices: the next ones need even more
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
    """The fastest plans, one for each layout of the LLM.

    Returns:
        (K,) seconds, infinite where there are no more plans; (K, U, 3) tensor (as an index), data
        and pipeline of each unit.
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
