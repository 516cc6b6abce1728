"""In which order a data-parallel group runs its microbatches, so that ranks wait least.

INTER reordering of DistTrain (§6.2) for 1F1B and interleaved 1F1B: with an encoder whose time
differs between microbatches, the order decides how much of a long microbatch others wait for. All
microbatches stay in their step and group, so losses and gradients are the same.

Two algorithms. `interval_orders` is the paper's Algorithm 3: the smallest microbatch first, so that
all ranks start soon; P - 1 small ones last, where the first rank's forwards no longer fill the
time until a gradient comes back; and in between always the one whose forward best fills the
current interval. Its free choices: the first interval, which P - 1 microbatches fill, takes the
one nearest to an equal share of what is left, again and again; the held-back ones are appended
once, the smallest last (the other way round it loses up to three times as much); M <= P
microbatches are in ascending order. Interleaved schedules have the same intervals, between the
forwards of the rank's first virtual stage and the next backward.

`reorder_microbatches` is better: it starts from the best of the natural order, Algorithm 3's and
`first_rank`'s, and swaps microbatches at random while the makespan, exact for the durations given,
gets shorter (simulated annealing). Its result is never worse than natural or Algorithm 3's order.

Equal durations and seed give equal orders on all processors, if the durations are whole numbers of
any unit: then no sum depends on the order of its terms, and what is rounded differently elsewhere,
logarithms and powers, is cut to 24 bits first.

Rejected: exact search for tiny steps; annealing is 0.1 % above the optimum of 7 microbatches on 4
ranks and does not end at 8.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from torchmm.balance.compiled import Float64s, Int64s
from torchmm.balance.disttrain.reordering.first_rank import anneal_first_rank, first_rank_makespans
from torchmm.balance.disttrain.reordering.program import StepProgram
from torchmm.balance.disttrain.reordering.program_kernels import (
    LaneCosts,
    advance_lanes,
    anneal,
    fill_intervals,
    fill_lanes,
)

START_HEAT = 0.01
"""What the search accepts at first, as a share of a microbatch's time on the slowest rank."""


@dataclass(frozen=True)
class SearchEffort:
    """Swaps tried per group.

    Attributes:
        formula: on the closed form for 1F1B, at 25 ns each; an eighth of them where it is not
            exact.
        exact: on the simulated makespan, at 0.1 to 0.5 microseconds each; none where the closed
            form is exact.
    """

    formula: int
    exact: int

    @classmethod
    def default(cls, program: StepProgram) -> SearchEffort:
        """About what the paper's implementation of Algorithm 3 takes; for 1F1B, the less."""
        slots = program.microbatches
        if slots < 12:  # fewer than 100 microseconds per group
            return cls(1024, 384)
        exact = (4 if program.lag else 7) * slots
        return cls(slots * (3 * slots // 2 - 8), exact)


def reorder_microbatches(
    program: StepProgram,
    forward_ms_GSM: Float64s,
    backward_ms_GSM: Float64s,
    *,
    effort: SearchEffort | None = None,
    seed: int = 0,
) -> Int64s:
    """Good orders for all groups of a step.

    Args:
        program: of the schedule.
        forward_ms_GSM, backward_ms_GSM: by group, stage and microbatch.
        effort: None: `SearchEffort.default`.
        seed: of the search.

    Returns:
        (G, M): microbatch of each slot.

    Raises:
        ValueError: as `StepProgram.checked`.
    """
    costs_GKM = program.checked(forward_ms_GSM, backward_ms_GSM)
    effort = effort or SearchEffort.default(program)
    # Time of a microbatch on each rank.
    on_rank_RS = np.arange(program.ranks)[:, None] == program.rank_S
    both_GSM = costs_GKM[:, : program.stages] + costs_GKM[:, program.stages :]
    rank_ms_GRM = on_rank_RS.astype(np.float64) @ both_GSM
    lanes = _lanes(program, costs_GKM)
    groups, _, slots = costs_GKM.shape
    natural = np.tile(np.arange(slots), (groups, 1))
    tried = [natural, interval_orders(program, costs_GKM)]
    times_ms = [_lane_makespans_ms(program, lanes, costs_GKM, orders) for orders in tried]
    exact = False
    if program.lag:
        others = np.delete(rank_ms_GRM, program.rank_S[0], axis=1).mean(axis=2)
        others_G = others.max(axis=1, initial=0.0)
        forward_GM, backward_GM = _first_rank(program, costs_GKM)
        of_formula = first_rank_makespans(forward_GM, backward_GM, others_G, program.lag, natural)
        exact = np.allclose(of_formula, times_ms[0], rtol=1e-9)
        steps = effort.formula if exact else effort.formula // 8
        tried.append(
            anneal_first_rank(forward_GM, backward_GM, others_G, program.lag, natural, steps, seed)
        )
        times_ms.append(_lane_makespans_ms(program, lanes, costs_GKM, tried[-1]))
    best_G = np.argmin(times_ms, axis=0)
    orders_GM = np.stack(tried)[best_G, np.arange(groups)]
    if not exact and effort.exact:
        fill_lanes(lanes, costs_GKM, orders_GM, 0, slots)
        heat_ms_G = START_HEAT * rank_ms_GRM.mean(axis=2).max(axis=1)
        orders_MG = anneal(program.tables, lanes, orders_GM.T.copy(), heat_ms_G, effort.exact, seed)
        orders_GM = orders_MG.T.copy()
    return orders_GM


def makespans_ms(
    program: StepProgram,
    forward_ms_GSM: Float64s,
    backward_ms_GSM: Float64s,
    orders_GM: Int64s | None = None,
) -> Float64s:
    """Return the makespan (G) of each group.

    Args:
        program: Of the schedule.
        forward_ms_GSM, backward_ms_GSM: By group, stage and microbatch. Backward passes that the
            schedule does not have are ignored.
        orders_GM: Microbatch of each slot. If None, microbatches stay in their order.

    Raises:
        ValueError: as `StepProgram.checked`.
    """
    costs_GKM = program.checked(forward_ms_GSM, backward_ms_GSM)
    if orders_GM is None:
        orders_GM = np.tile(np.arange(program.microbatches), (len(costs_GKM), 1))
    return _lane_makespans_ms(program, _lanes(program, costs_GKM), costs_GKM, orders_GM)


def interval_orders(program: StepProgram, costs_GKM: Float64s) -> Int64s:
    """Algorithm 3 for each group.

    The intervals are those of the first rank, and the size of a microbatch is its time on all
    ranks: only what differs between microbatches matters.

    Args:
        costs_GKM: from `StepProgram.checked`.

    Returns:
        (G, M): microbatch of each slot.
    """
    total_GM = costs_GKM.sum(axis=1)
    forward_GM, backward_GM = _first_rank(program, costs_GKM)
    return fill_intervals(
        program.tables,
        _lanes(program, costs_GKM),
        costs_GKM,
        np.ascontiguousarray(costs_GKM[:, 0]),
        total_GM,
        total_GM - forward_GM - backward_GM,
        program.ranks - 1,
    )


def _first_rank(program: StepProgram, costs_GKM: Float64s) -> tuple[Float64s, Float64s]:
    """(G, M) each: forwards and backwards of the rank of stage 0."""
    mine = program.rank_S == program.rank_S[0]
    stages = len(mine)
    return costs_GKM[:, :stages][:, mine].sum(axis=1), costs_GKM[:, stages:][:, mine].sum(axis=1)


def _lanes(program: StepProgram, costs_GKM: Float64s) -> LaneCosts:
    groups, rows, slots = costs_GKM.shape
    varies_K = (costs_GKM != costs_GKM[:, :, :1]).any(axis=(0, 2))
    varying = np.flatnonzero(varies_K)
    fixed = np.flatnonzero(~varies_K)
    place = np.empty((rows, slots), np.uint64)
    count = len(varying) * slots
    place[varying] = np.arange(count).reshape(-1, slots)
    place[fixed] = count + np.arange(len(fixed))[:, None]
    costs_RG = np.zeros((count + len(fixed), groups))
    return LaneCosts(place.reshape(-1)[program.tables.row_N], varying, fixed, costs_RG)


def _lane_makespans_ms(
    program: StepProgram, lanes: LaneCosts, costs_GKM: Float64s, orders_GM: Int64s
) -> Float64s:
    fill_lanes(lanes, costs_GKM, orders_GM, 0, program.microbatches)
    result = np.empty(len(costs_GKM))
    ends = np.zeros((len(program.tables.row_N), len(costs_GKM)))
    advance_lanes(program.tables, lanes, ends, 0, result)
    return result
