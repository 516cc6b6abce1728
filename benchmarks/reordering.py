"""Measure the reordering algorithms: CPU time and distance from the optimum.

A global batch has 1920 microbatches for 30, 60 or 120 data-parallel groups, as in DistTrain
(section 8). Sizes follow images per sequence: no image in 30 % of sequences, otherwise 1 to 48.
Heavy-tailed sizes are harder than real data. The pipeline has 12 ranks. The first rank is an
encoder with the mean speed of an LLM stage, and with a generator the last rank is uneven as well.
Times are the minimum CPU time of many repetitions for all groups, one thread. "Best known" is the
better of two searches with 50 times the budget and other seeds. Ranks that synchronize in every
layer are simulated with the sequences of three recipes (`reorder_slices`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import permutations

import numpy as np
import torch
from numpy.typing import NDArray
from support.cases import reorder_slices
from support.harness import Row, describe_machine, make_parser, report

from torchmm.balance.disttrain.reordering.compiled_schedule import (
    CompiledSchedule,
    compile_schedule,
)
from torchmm.balance.disttrain.reordering.group_balancing import balance_groups, load_bound
from torchmm.balance.disttrain.reordering.microbatch_order import (
    SwapBudget,
    fill_interval_orders,
    makespans_ms,
    reorder_microbatches,
)
from torchmm.pipelining.plan.graph import StageGraph, StageLayout, StageSpec
from torchmm.pipelining.schedules.classic import interleaved_1f1b, one_f_one_b

Float64s = NDArray[np.float64]

SEED = 0
BATCH, RANKS = 1920, 12
PAPER_MS = {30: (1.82, 5.87), 60: (1.87, 3.02), 120: (1.89, 1.71)}
"""By groups: milliseconds across groups and inside them; table 3 of MMScale, DistTrain's first
version."""
SIZES: dict[str, Callable[[np.random.Generator, int], Float64s]] = {
    "images": lambda rng, n: 0.1 + np.where(rng.random(n) < 0.3, 0, rng.integers(1, 49, n)) / 14,
    "lognormal": lambda rng, n: rng.lognormal(0, 0.5, n),
    "heavy-tailed": lambda rng, n: rng.lognormal(0, 1.5, n),
}


def least_ms(function: Callable[[], object], repetitions: int) -> float:
    """Return the minimum CPU time of a call in ms, without the first call, which may compile."""
    function()
    best = float("inf")
    for _ in range(repetitions):
        begin_s = time.thread_time()
        function()
        best = min(best, time.thread_time() - begin_s)
    return best * 1e3


def groups_rows(repetitions: int) -> list[Row]:
    """Return the rows about balancing over groups."""
    rows = []
    for kind, groups in ((k, g) for k in SIZES for g in PAPER_MS):
        sizes = SIZES[kind](np.random.default_rng(SEED), BATCH)
        assignment = balance_groups(sizes, groups)
        natural = sizes.reshape(groups, -1).sum(axis=1).max()
        bound = load_bound(sizes, groups)
        ours = sizes[assignment].sum(axis=1).max()
        case = f"intra, {kind}, {groups} groups"
        spent_ms = least_ms(lambda s=sizes, g=groups: balance_groups(s, g), repetitions)
        counts = len({len(group) for group in assignment.tolist()})
        rows += [
            Row(case, "time", "ms", spent_ms, None, PAPER_MS[groups][0], 0.2, "lower"),
            Row(case, "largest load / bound", "x", ours / bound, natural / bound, None, 1.004,
                "lower"),
            Row(case, "different group sizes", "", counts, goal=1, better="lower"),
        ]  # fmt: skip
    return rows


def pipeline(ranks: int, microbatches: int, per_rank: int = 1) -> CompiledSchedule:
    """Return 1F1B, or interleaved 1F1B for several stages per rank."""
    count = ranks * per_rank
    stages = tuple(StageSpec(i, "model", i, i + 1, (i % ranks,)) for i in range(count))
    layout = StageLayout(stages, tuple((i, i + 1) for i in range(count - 1)))
    graph = StageGraph(layout, microbatches)
    return compile_schedule((one_f_one_b if per_rank == 1 else interleaved_1f1b)(graph), graph)


def durations(
    program: CompiledSchedule, groups: int, kind: str, generator: bool, seed: int = SEED
) -> tuple[Float64s, Float64s]:
    """Return forward and backward times of shape (groups, stages, microbatches).

    Groups are balanced by encoder time.
    """
    rng = np.random.default_rng(seed)
    forward = np.full((groups, program.stages, program.microbatches), 1.0)
    for stage in (0, -1)[: 1 + generator]:
        sizes = SIZES[kind](rng, groups * program.microbatches)
        sizes /= sizes.mean()
        balanced = stage == 0
        at = balance_groups(sizes, groups) if balanced else np.arange(sizes.size)
        forward[:, stage] = sizes[at].reshape(groups, -1)
    return forward, 2 * forward


def orders_rows(
    kind: str, groups: int, *, generator: bool, per_rank: int, repetitions: int
) -> list[Row]:
    """Return the rows about reordering inside groups."""
    program = pipeline(RANKS, BATCH // groups, per_rank)
    costs = durations(program, groups, kind, generator)
    usual = SwapBudget.default(program)
    long = SwapBudget(50 * usual.formula, 50 * usual.exact)
    ours_ms_G, natural_ms_G, interval_ms_G, *long_ms_G = (
        makespans_ms(program, *costs, orders)
        for orders in (
            reorder_microbatches(program, *costs),
            None,
            fill_interval_orders(program, program.stack_durations(*costs)),
            *(reorder_microbatches(program, *costs, swap_budget=long, seed=s) for s in (1, 2)),
        )
    )
    best_G = np.min([ours_ms_G, *long_ms_G], axis=0)

    def above(makespan_ms_G: Float64s) -> float:
        return 100 * float((makespan_ms_G / best_G - 1).mean())

    schedule = "1F1B" if per_rank == 1 else f"interleaved x{per_rank}"
    uneven = "encoder, generator" if generator else "encoder"
    case = f"inter, {schedule}, {kind} {uneven}, {groups} x {program.microbatches}"
    natural = above(natural_ms_G)
    rule = above(interval_ms_G)
    rows = [
        Row(case, "above best known", "%", above(ours_ms_G), natural, None,
            1.0 if per_rank == 1 else None, "lower"),
        Row(case, "Algorithm 3 above best known", "%", rule, natural, better="lower"),
        Row(case, "speedup of the slowest group", "x",
            natural_ms_G.max() / ours_ms_G.max(), 1.0),
    ]  # fmt: skip
    paper, goal = (PAPER_MS[groups][1],) * 2 if per_rank == 1 else (None, None)
    spent_ms = least_ms(lambda: reorder_microbatches(program, *costs), repetitions)
    rows.append(Row(case, "time", "ms", spent_ms, None, paper, goal, "lower"))
    spent_ms = least_ms(
        lambda: fill_interval_orders(program, program.stack_durations(*costs)), repetitions
    )
    rows.append(Row(case, "Algorithm 3, time", "ms", spent_ms, None, paper, goal, "lower"))
    return rows


def brute_force_rows(cases: int) -> list[Row]:
    """Return rows that compare with all 5,040 orders of seven microbatches on four ranks."""
    program = pipeline(4, 7)
    every = np.array(list(permutations(range(7))))
    rows = []
    for generator in (False, True):
        costs = durations(program, cases, "images", generator)
        best = np.empty(cases)
        for group in range(cases):
            tried = [np.moveaxis(x[group][:, every], 1, 0) for x in costs]
            best[group] = makespans_ms(program, *tried).min()
        ours, rule, natural = (
            100 * float((makespans_ms(program, *costs, orders) / best - 1).mean())
            for orders in (
                reorder_microbatches(program, *costs),
                fill_interval_orders(program, program.stack_durations(*costs)),
                None,
            )
        )
        case = f"inter, 1F1B, images {'encoder, generator' if generator else 'encoder'}, p=4, l=7"
        rows += [
            Row(case, "above brute force", "%", ours, natural, None, 1.0, "lower"),
            Row(case, "Algorithm 3 above brute force", "%", rule, natural, better="lower"),
        ]
    return rows


def main() -> None:
    """Print the table."""
    arguments = make_parser((__doc__ or "").splitlines()[0]).parse_args()
    torch.set_num_threads(1)
    repetitions = 10 if arguments.quick else 50
    rows = groups_rows(repetitions)
    kinds = ("images",) if arguments.quick else tuple(SIZES)
    for kind in kinds:
        for generator, per_rank in ((False, 1), (True, 1), (False, 2)):
            for groups in PAPER_MS:
                rows += orders_rows(
                    kind, groups, generator=generator, per_rank=per_rank, repetitions=repetitions
                )
    rows += brute_force_rows(10 if arguments.quick else 100)
    for case in reorder_slices.CASES:
        rows += reorder_slices.step_rows(case, 2 if arguments.quick else 10)
    rows += reorder_slices.time_rows(repetitions)
    title = f"Reordering, seed {SEED}; {describe_machine(torch.device('cpu'))}"
    report(title, rows, arguments.json)


if __name__ == "__main__":
    main()
