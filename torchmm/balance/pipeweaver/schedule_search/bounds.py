"""Lower bound of the time of any order of a step, which shows the remaining gain of a search.

**Any step.** A rank runs all of its work. No action starts before the longest path to it has ended,
and the longest path from it to the end follows it. If actions could be preempted, the best schedule
of a rank always runs the available action with the longest remaining path. This is Jackson's
schedule of one machine with heads and tails (Carlier 1982). No order without preemption is faster.

**Equal ranks.** If all ranks take equally long in every segment, a larger bound exists. Choose a
segment x of each microbatch whose forward precedes all backward tasks of the microbatch, as in the
LLM. The action j is the first of them to start on the last of P ranks:

    rank q      ...  | j |          When j ends on rank q, rank q + 1 has completed only tasks
    rank q + 1  ...      | j |      that rank q had completed when it started j.

No backward task runs before j ends. Rank q + 1 has therefore been idle longer than rank q by the
forward time of j. The same is true for backward tasks in reversed time. A step takes at least

    busy time + (P - 1) (shortest forward of such a segment + shortest such backward).

With encoders before the LLM, the general bound uses encoder times for the second term. The
difference is 1 to 2 % of a step, which would hide that an order is optimal.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

import numpy as np

from torchmm.balance.picoseconds import PICOSECONDS_PER_MS
from torchmm.balance.pipeweaver.schedule_search.dispatcher import Dispatcher
from torchmm.balance.pipeweaver.schedule_search.order_timing import step_operators
from torchmm.balance.simulation.operator_graph import CompiledOperatorGraph
from torchmm.pipelining.plan.actions import ActionType


def lower_bound_ms(dispatcher: Dispatcher) -> float:
    """Return a lower bound of the time of all orders of the step, without memory limits."""
    bounds = [_preemptive_bound_ps(dispatcher)]
    if _ranks_are_equal(dispatcher):
        bounds.append(_equal_ranks_bound_ps(dispatcher))
    return max(bounds) / PICOSECONDS_PER_MS


def _preemptive_bound_ps(dispatcher: Dispatcher) -> int:
    """Return the bound for any step.

    It is the maximum of the longest path and, over ranks, of the earliest preemptive end of all
    actions.
    """
    durations, sources, targets = step_operators(dispatcher.tables)
    count = len(dispatcher.actions)
    heads = CompiledOperatorGraph.build(durations, sources, targets).times_ps()[0][:count]
    tails = CompiledOperatorGraph.build(durations, targets, sources).times_ps()[0][:count]
    duration = durations[:count]
    bound = int((heads + duration + tails).max(initial=0))
    ranks = dispatcher.tables.queue // 2
    for rank in np.unique(ranks):
        indices = np.flatnonzero(ranks == rank)
        columns = (values[indices].tolist() for values in (heads, duration, tails))
        bound = max(bound, _preemptive_end_ps(list(zip(*columns, strict=True))))
    return bound


def _preemptive_end_ps(paths: Sequence[tuple[int, int, int]]) -> int:
    """Return the earliest end of the actions of a rank if they can be preempted.

    Args:
        paths: Longest path to each action, its duration, and longest path from it.
    """
    unreleased = sorted(paths, reverse=True)
    available: list[tuple[int, int]] = []  # (negative path from the action, remaining duration)
    now = 0
    end = 0
    while unreleased or available:
        if not available:
            now = max(now, unreleased[-1][0])
        while unreleased and unreleased[-1][0] <= now:
            _, time, tail = unreleased.pop()
            heappush(available, (-tail, time))
        urgent, remaining = heappop(available)
        done = min(remaining, unreleased[-1][0] - now) if unreleased else remaining
        now += done
        if done < remaining:
            heappush(available, (urgent, remaining - done))
        else:
            end = max(end, now - urgent)
    return end


def _ranks_are_equal(dispatcher: Dispatcher) -> bool:
    """Return True if every segment passes all ranks in one order with equal durations."""
    ranks = dispatcher.graph.layout.rank_count
    visits: dict[int, list[int]] = {}
    times: dict[tuple[int, ActionType], set[int]] = {}
    tables = dispatcher.tables
    rows = zip(
        dispatcher.actions,
        tables.segment.tolist(),
        (tables.queue // 2).tolist(),
        tables.duration_ps.tolist(),
        strict=True,
    )
    for action, unit, rank, duration_ps in rows:  # in the order of stages within a microbatch
        times.setdefault((unit, action.type), set()).add(duration_ps)
        if action.type is ActionType.F:
            visits.setdefault(unit, []).append(rank)
    paths = {tuple(path) for path in visits.values()}
    return (
        len(paths) == 1
        and sorted(next(iter(paths))) == list(range(ranks))
        and all(len(durations) == 1 for durations in times.values())
    )


def _equal_ranks_bound_ps(dispatcher: Dispatcher) -> int:
    """Return the bound for equal ranks. Microbatches without a backward may fill its idle times."""
    actions = dispatcher.actions
    tables = dispatcher.tables
    durations = tables.duration_ps.tolist()
    ranks = (tables.queue // 2).tolist()
    pointers = tables.pointers.tolist()
    # The last rank of every segment.
    last = next(
        ranks[a]
        for a in reversed(range(len(actions)))
        if tables.segment[a] == 0 and actions[a].type is ActionType.F
    )
    by_microbatch: dict[int, list[int]] = {}
    for action in CompiledOperatorGraph.build(*step_operators(tables)).operator_at.tolist():
        if action < len(actions):
            by_microbatch.setdefault(actions[action].microbatch, []).append(action)
    forwards, backwards = [], []
    for members in by_microbatch.values():
        # Direct and indirect successors of each action, as bit sets.
        bits = {action: 1 << index for index, action in enumerate(members)}
        reached: dict[int, int] = {}
        for action in reversed(members):
            reached[action] = 0
            for target in tables.target[pointers[action] : pointers[action + 1]].tolist():
                reached[action] |= bits[target] | reached[target]
        first = [a for a in members if actions[a].type is ActionType.F]
        second = [a for a in members if actions[a].type is ActionType.B]
        all_backwards = sum(bits[a] for a in second)
        if second:
            before = [
                a for a in first if ranks[a] == last and reached[a] & all_backwards == all_backwards
            ]
            forwards.append(max((durations[a] for a in before), default=0))
        behind = [
            a for a in second if ranks[a] == last and all(reached[f] & bits[a] for f in first)
        ]
        backwards.append(max((durations[a] for a in behind), default=0))
    busy = sum(d for d, rank in zip(durations, ranks, strict=True) if rank == last)
    count = dispatcher.graph.layout.rank_count - 1
    return busy + count * (min(forwards, default=0) + min(backwards, default=0))
