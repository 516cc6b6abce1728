"""What no order of a step can be faster than: it shows a schedule search how much is left to gain.

For any step: a rank does all of its work, no action before the longest way to it, and after each
there still is the longest way from it to the end. If actions might be interrupted, the best a rank
can do is to work on what is there and has the longest way to go (Jackson's schedule of one machine
with heads and tails; Carlier 1982); no order of whole actions is faster. Where all ranks take
equally long in every segment, more can be proven. Let x be a segment of each microbatch whose
forward comes before all of its backwards, as the LLM's do, and j the first of them to start on the
last of P ranks. Before j ends there is no backward, so what rank q+1 has done when j ends on rank
q, rank q had done when it began j: rank q+1 has been idle longer than rank q by the forward of j.
Mirrored in time the same holds for backwards. So a step takes at least

    busy time + (P - 1) (shortest forward of such a segment + shortest such backward).

With encoders before the LLM the general bound has the encoder's times here, 1 to 2 % less of a
step, which hides that an order is the best one.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

import numpy as np

from torchmm.balance.picoseconds import PICOSECONDS_PER_MS
from torchmm.balance.pipeweaver.order_search.dispatcher import Dispatcher
from torchmm.balance.pipeweaver.order_search.order_times import step_operators
from torchmm.balance.simulation.operator_graph import CompiledGraph
from torchmm.pipelining.plan.actions import ActionType


def lower_bound_ms(dispatcher: Dispatcher) -> float:
    """Return a time that no order of the step's F and B undercuts, whatever the memory."""
    bounds = [_any_ranks(dispatcher)]
    if _ranks_are_equal(dispatcher):
        bounds.append(_equal_ranks(dispatcher))
    return max(bounds) / PICOSECONDS_PER_MS


def _any_ranks(dispatcher: Dispatcher) -> int:
    """Return the maximum of the longest path and, over ranks, of the earliest end of all actions of
    the rank between the longest paths to and from each of them."""
    durations, sources, targets = step_operators(dispatcher.tables)
    count = len(dispatcher.actions)
    before = CompiledGraph.build(durations, sources, targets).times_ps()[0][:count]
    behind = CompiledGraph.build(durations, targets, sources).times_ps()[0][:count]
    own = durations[:count]
    bound = int((before + own + behind).max(initial=0))
    ranks = dispatcher.tables.queue // 2
    for rank in np.unique(ranks):
        at = np.flatnonzero(ranks == rank)
        columns = (values[at].tolist() for values in (before, own, behind))
        bound = max(bound, _one_rank(list(zip(*columns, strict=True))))
    return bound


def _one_rank(own: Sequence[tuple[int, int, int]]) -> int:
    """The earliest end of a rank's actions if they may be interrupted.

    Args:
        own: by action: the way to it, its time, the way from it.
    """
    coming = sorted(own, reverse=True)
    waiting: list[tuple[int, int]] = []  # (less the way from it, time that is left)
    now = 0
    end = 0
    while coming or waiting:
        if not waiting:
            now = max(now, coming[-1][0])
        while coming and coming[-1][0] <= now:
            _, time, behind = coming.pop()
            heappush(waiting, (-behind, time))
        urgent, left = heappop(waiting)
        done = min(left, coming[-1][0] - now) if coming else left
        now += done
        if done < left:
            heappush(waiting, (urgent, left - done))
        else:
            end = max(end, now - urgent)
    return end


def _ranks_are_equal(dispatcher: Dispatcher) -> bool:
    """Whether every segment visits all ranks in one order and takes equally long on each."""
    ranks = dispatcher.graph.layout.rank_count
    visits: dict[int, list[int]] = {}
    times: dict[tuple[int, ActionType], set[int]] = {}
    tables = dispatcher.tables
    rows = zip(
        dispatcher.actions,
        tables.unit.tolist(),
        (tables.queue // 2).tolist(),
        tables.duration_ps.tolist(),
        strict=True,
    )
    for action, unit, rank, duration_ps in rows:  # in the order of stages within a microbatch
        times.setdefault((unit, action.type), set()).add(duration_ps)
        if action.type is ActionType.F:
            visits.setdefault(unit, []).append(rank)
    ways = {tuple(way) for way in visits.values()}
    return (
        len(ways) == 1
        and sorted(next(iter(ways))) == list(range(ranks))
        and all(len(found) == 1 for found in times.values())
    )


def _equal_ranks(dispatcher: Dispatcher) -> int:
    """Return the bound for equal ranks. Microbatches without a backward may fill its idle times."""
    actions = dispatcher.actions
    tables = dispatcher.tables
    durations = tables.duration_ps.tolist()
    ranks = (tables.queue // 2).tolist()
    pointers = tables.pointers.tolist()
    # The rank that every segment visits last.
    last = next(
        ranks[a]
        for a in reversed(range(len(actions)))
        if tables.unit[a] == 0 and actions[a].type is ActionType.F
    )
    by_microbatch: dict[int, list[int]] = {}
    for action in CompiledGraph.build(*step_operators(tables)).node_at.tolist():
        if action < len(actions):
            by_microbatch.setdefault(actions[action].microbatch, []).append(action)
    forwards, backwards = [], []
    for own in by_microbatch.values():
        # All actions that wait for an action, directly or not, as a sum of bits.
        bits = {action: 1 << index for index, action in enumerate(own)}
        reached: dict[int, int] = {}
        for action in reversed(own):
            reached[action] = 0
            for target in tables.target[pointers[action] : pointers[action + 1]].tolist():
                reached[action] |= bits[target] | reached[target]
        first = [a for a in own if actions[a].type is ActionType.F]
        second = [a for a in own if actions[a].type is ActionType.B]
        everything = sum(bits[a] for a in second)
        if second:
            before = [
                a for a in first if ranks[a] == last and reached[a] & everything == everything
            ]
            forwards.append(max((durations[a] for a in before), default=0))
        behind = [
            a for a in second if ranks[a] == last and all(reached[f] & bits[a] for f in first)
        ]
        backwards.append(max((durations[a] for a in behind), default=0))
    busy = sum(d for d, rank in zip(durations, ranks, strict=True) if rank == last)
    count = dispatcher.graph.layout.rank_count - 1
    return busy + count * (min(forwards, default=0) + min(backwards, default=0))
