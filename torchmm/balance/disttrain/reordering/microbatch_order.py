"""Microbatch order of a data-parallel group with the least idle time of pipeline ranks.

INTER reordering of DistTrain (§6.2) for 1F1B and interleaved 1F1B. If the encoder time differs
between microbatches, the order determines how long other ranks wait for a long microbatch. All
microbatches stay in their step and group, so losses and gradients are equal.

`fill_interval_orders` is Algorithm 3 of the paper:

    smallest first | fill each interval with the closest forward | P - 1 small ones, smallest last
    all ranks start                                                no forward fills the waiting time
    soon                                                           for gradients at the end

The paper leaves some choices open. The first interval is filled by P - 1 microbatches: each is the
closest to an equal fraction of the remaining time. The reserved microbatches are appended once, the
smallest last (the reverse order loses up to three times as much). M <= P microbatches are in
ascending order. Interleaved schedules have the same intervals, between the forward passes of the
first virtual stage of the rank and the next backward pass.

`reorder_microbatches` is better. It starts from the best of three orders: the original order,
Algorithm 3, and `uneven_first_rank`. Simulated annealing then swaps microbatches with the exact
makespan as the cost. The result is never worse than the original order or Algorithm 3.

Equal durations and seeds produce equal orders on all processors if durations are whole numbers of
any unit. Sums are then independent of the order of their terms. Logarithms and powers, whose
rounding differs between processors, are truncated to 24 bits.

Exact search is not feasible: annealing is 0.1 % above the optimum of 7 microbatches on 4 ranks, and
exact search does not finish with 8.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from torchmm.balance.disttrain.reordering.compiled_schedule import CompiledSchedule
from torchmm.balance.disttrain.reordering.compiled_schedule_kernels import (
    LaneCosts,
    advance_lanes,
    anneal,
    fill_intervals,
    fill_lanes,
)
from torchmm.balance.disttrain.reordering.uneven_first_rank import (
    anneal_first_rank,
    first_rank_makespans,
)
from torchmm.balance.numba_utils import Float64s, Int64s

INITIAL_TEMPERATURE = 0.01
"""Initial temperature as a fraction of the time of a microbatch on the slowest rank."""


@dataclass(frozen=True)
class SwapBudget:
    """Number of attempted swaps per group.

    Attributes:
        formula: Swaps evaluated by the closed form for 1F1B, 25 ns each. If the closed form is not
            exact, an eighth of them.
        exact: Swaps evaluated by simulation, 0.1 to 0.5 microseconds each. None if the closed form
            is exact.
    """

    formula: int
    exact: int

    @classmethod
    def default(cls, program: CompiledSchedule) -> SwapBudget:
        """Return an effort with about the planning time of Algorithm 3 as implemented in the paper.

        1F1B needs less time.
        """
        slots = program.microbatches
        if slots < 12:  # fewer than 100 microseconds per group
            return cls(1024, 384)
        exact = (4 if program.lead_slots else 7) * slots
        return cls(slots * (3 * slots // 2 - 8), exact)


def reorder_microbatches(
    program: CompiledSchedule,
    forward_ms_GSM: Float64s,
    backward_ms_GSM: Float64s,
    *,
    swap_budget: SwapBudget | None = None,
    seed: int = 0,
) -> Int64s:
    """Return good microbatch orders for all groups of a step.

    Args:
        program: Program of the schedule.
        forward_ms_GSM: Forward times by group, stage and microbatch.
        backward_ms_GSM: Backward times by group, stage and microbatch.
        swap_budget: Search effort. None for `SwapBudget.default`.
        seed: Random seed of the search.

    Returns:
        (G, M): microbatch of each slot.

    Raises:
        ValueError: As for `CompiledSchedule.stack_durations`.
    """
    costs_GKM = program.stack_durations(forward_ms_GSM, backward_ms_GSM)
    swap_budget = swap_budget or SwapBudget.default(program)
    # Time of a microbatch on each rank.
    on_rank_RS = np.arange(program.ranks)[:, None] == program.rank_S
    both_GSM = costs_GKM[:, : program.stages] + costs_GKM[:, program.stages :]
    rank_ms_GRM = on_rank_RS.astype(np.float64) @ both_GSM
    lanes = _build_lane_costs(program, costs_GKM)
    groups, _, slots = costs_GKM.shape
    default_GM = np.tile(np.arange(slots), (groups, 1))
    candidates = [default_GM, fill_interval_orders(program, costs_GKM, lanes)]
    times_ms = [_lane_makespans_ms(program, lanes, costs_GKM, orders) for orders in candidates]
    exact = False
    if program.lead_slots:
        other_ranks_GR = np.delete(rank_ms_GRM, program.rank_S[0], axis=1).mean(axis=2)
        others_G = other_ranks_GR.max(axis=1, initial=0.0)
        forward_GM, backward_GM = _first_rank_times(program, costs_GKM)
        formula_ms = first_rank_makespans(
            forward_GM, backward_GM, others_G, program.lead_slots, default_GM
        )
        exact = np.allclose(formula_ms, times_ms[0], rtol=1e-9)
        steps = swap_budget.formula if exact else swap_budget.formula // 8
        candidates.append(
            anneal_first_rank(
                forward_GM, backward_GM, others_G, program.lead_slots, default_GM, steps, seed
            )
        )
        times_ms.append(_lane_makespans_ms(program, lanes, costs_GKM, candidates[-1]))
    best_G = np.argmin(times_ms, axis=0)
    orders_GM = np.stack(candidates)[best_G, np.arange(groups)]
    if not exact and swap_budget.exact:
        fill_lanes(lanes, costs_GKM, orders_GM, 0, slots)
        temperature_ms_G = INITIAL_TEMPERATURE * rank_ms_GRM.mean(axis=2).max(axis=1)
        orders_MG = anneal(
            program.tables, lanes, orders_GM.T.copy(), temperature_ms_G, swap_budget.exact, seed
        )
        orders_GM = orders_MG.T.copy()
    return orders_GM


def makespans_ms(
    program: CompiledSchedule,
    forward_ms_GSM: Float64s,
    backward_ms_GSM: Float64s,
    orders_GM: Int64s | None = None,
) -> Float64s:
    """Return the makespan (G) of each group.

    Args:
        program: Program of the schedule.
        forward_ms_GSM: Forward times by group, stage and microbatch.
        backward_ms_GSM: Backward times by group, stage and microbatch. Backward passes that the
            schedule does not have are ignored.
        orders_GM: Microbatch of each slot. None for the original order.

    Raises:
        ValueError: As for `CompiledSchedule.stack_durations`.
    """
    costs_GKM = program.stack_durations(forward_ms_GSM, backward_ms_GSM)
    if orders_GM is None:
        orders_GM = np.tile(np.arange(program.microbatches), (len(costs_GKM), 1))
    return _lane_makespans_ms(program, _build_lane_costs(program, costs_GKM), costs_GKM, orders_GM)


def fill_interval_orders(
    program: CompiledSchedule, costs_GKM: Float64s, lanes: LaneCosts | None = None
) -> Int64s:
    """Return the order of Algorithm 3 for each group.

    Intervals are those of the first rank. The size of a microbatch is its time on all ranks,
    because only differences between microbatches matter.

    Args:
        program: Program of the schedule.
        costs_GKM: Durations from `CompiledSchedule.stack_durations`.
        lanes: Scratch memory for the durations in slot order; overwritten.

    Returns:
        (G, M): microbatch of each slot.
    """
    total_GM = costs_GKM.sum(axis=1)
    forward_GM, backward_GM = _first_rank_times(program, costs_GKM)
    return fill_intervals(
        program.tables,
        _build_lane_costs(program, costs_GKM) if lanes is None else lanes,
        costs_GKM,
        np.ascontiguousarray(costs_GKM[:, 0]),
        total_GM,
        total_GM - forward_GM - backward_GM,
        program.ranks - 1,
    )


def _first_rank_times(program: CompiledSchedule, costs_GKM: Float64s) -> tuple[Float64s, Float64s]:
    """Return the forward and backward times (G, M) of the rank of stage 0."""
    on_first_rank = program.rank_S == program.rank_S[0]
    stages = len(on_first_rank)
    forward_GM = costs_GKM[:, :stages][:, on_first_rank].sum(axis=1)
    backward_GM = costs_GKM[:, stages:][:, on_first_rank].sum(axis=1)
    return np.ascontiguousarray(forward_GM), np.ascontiguousarray(backward_GM)


def _build_lane_costs(program: CompiledSchedule, costs_GKM: Float64s) -> LaneCosts:
    groups, rows, slots = costs_GKM.shape
    varies_K = (costs_GKM != costs_GKM[:, :, :1]).any(axis=(0, 2))
    varying = np.flatnonzero(varies_K)
    fixed = np.flatnonzero(~varies_K)
    cost_index = np.empty(rows * slots + 1, np.uint64)
    by_row = cost_index[:-1].reshape(rows, slots)
    count = len(varying) * slots
    by_row[varying] = np.arange(count).reshape(-1, slots)
    by_row[fixed] = count + np.arange(len(fixed))[:, None]
    cost_index[-1] = count + len(fixed)
    costs_RG = np.zeros((count + len(fixed) + 1, groups))
    return LaneCosts(cost_index[program.tables.duration_index_N], varying, fixed, costs_RG)


def _lane_makespans_ms(
    program: CompiledSchedule, lanes: LaneCosts, costs_GKM: Float64s, orders_GM: Int64s
) -> Float64s:
    fill_lanes(lanes, costs_GKM, orders_GM, 0, program.microbatches)
    result = np.empty(len(costs_GKM))
    ends = np.zeros((len(program.tables.duration_index_N) + 1, len(costs_GKM)))
    advance_lanes(program.tables, lanes, ends, 0, result)
    return result
