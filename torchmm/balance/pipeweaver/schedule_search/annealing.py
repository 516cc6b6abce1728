"""Simulated annealing of the order of a step.

Annealing starts from the best of a few dozen constructed orders. It first moves groups of segments,
then single segments. PipeWeaver (§6.1) uses Monte Carlo tree search.
`benchmarks/schedule_search.py` compares both, and random and depth-first search.

If encoders run before the LLM, three choices determine most of the step time: the first and last
microbatches (few images shorten warm-up and cool-down), the number of microbatches by which
encoders run ahead, and the priority of LLM and encoders. A few dozen combinations take
milliseconds. The best of them is often within a few tenths of a percent of the lower bound, while
the default order is several percent above it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, inf

import numpy as np

from torchmm.balance.numba_utils import Uint32s
from torchmm.balance.picoseconds import PICOSECONDS_PER_MS
from torchmm.balance.pipeweaver.schedule_search.dispatcher import Dispatcher
from torchmm.balance.pipeweaver.schedule_search.dispatcher_kernel import simulate_dispatch

LEADS = (0, 1, 2, 4, 8)
"""Numbers of microbatches by which other modules run ahead of the trunk."""


def construct_orders(dispatcher: Dispatcher) -> list[np.ndarray]:
    """Return distinct constructed orders of groups."""
    members = _groups_by_microbatch(dispatcher)
    other_costs = np.array([sum(cost for _, cost in other_members) for _, other_members in members])
    default = np.arange(len(members))
    ascending = np.argsort(other_costs, kind="stable")
    small_at_ends = np.concatenate([ascending[::2], ascending[1::2][::-1]])
    orders: dict[bytes, np.ndarray] = {}
    for microbatches in (default, ascending[::-1], small_at_ends, ascending):
        sequence = [members[index] for index in microbatches]
        trunk = [group for trunk_groups, _ in sequence for group in trunk_groups]
        other_groups = [group for _, other_members in sequence for group, _ in other_members]
        candidates = [
            trunk + other_groups,
            other_groups + trunk,
            *(_order_with_lead(sequence, lead) for lead in LEADS),
        ]
        for groups in candidates:
            order = np.array(groups)
            orders.setdefault(order.tobytes(), order)
    return list(orders.values())


_Members = tuple[list[int], list[tuple[int, int]]]
"""Trunk groups of a microbatch, and (group, cost) of other modules."""


def _groups_by_microbatch(dispatcher: Dispatcher) -> list[_Members]:
    """Return the groups of each microbatch, divided into the trunk and other modules.

    The trunk is the module without sub-microbatches, which all microbatches pass.
    """
    tables = dispatcher.tables
    cost = np.bincount(
        tables.segment, weights=tables.duration_ps, minlength=len(dispatcher.segments)
    )
    parts = dispatcher.graph.layout.sub_microbatched
    members: dict[int, _Members] = {}
    for index, group in enumerate(dispatcher.groups):
        first = dispatcher.segments[group[0]]
        trunk, other = members.setdefault(first.microbatch, ([], []))
        if first.module in parts:
            other.append((index, int(cost[list(group)].sum())))
        else:
            trunk.append(index)
    return [members[microbatch] for microbatch in sorted(members)]


def _order_with_lead(sequence: Sequence[_Members], lead: int) -> list[int]:
    """Return an order in which other modules run `lead` microbatches ahead of the trunk."""
    order = []
    for index in range(len(sequence) + lead):
        if index < len(sequence):
            order += [group for group, _ in sequence[index][1]]
        if index >= lead:
            order += sequence[index - lead][0]
    return order


INITIAL_TEMPERATURE, FINAL_TEMPERATURE = 1e-4, 1e-5
"""Initial and final temperature as fractions of the step time."""
GROUP_BUDGET_FRACTION = 0.6
"""Fraction of the budget for groups. The rest is for single segments."""
MEAN_MOVE_DISTANCE = 24
"""Mean number of positions by which a change moves an element."""


class Evaluator:
    """Evaluations of one worker, and the best order. The default order is evaluated first."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self.dispatcher = dispatcher
        self.evaluations = 0
        self.exhausted = False
        """Whether no orders are left to evaluate."""
        tables = dispatcher.tables
        self._sequence = np.empty(len(dispatcher.actions), np.uint32)
        self._peak, self._used = (np.empty(len(tables.limit_bytes), np.int64) for _ in range(2))
        self._horizon_ms = float(tables.duration_ps.sum() + tables.wire_ps.sum()) / (
            PICOSECONDS_PER_MS
        )
        """Upper bound of the time of any order that fits into memory."""
        self.best = dispatcher.default_order
        self.best_score = inf
        self.score(self.best)

    @property
    def best_ms(self) -> float:
        """Time of the best order. Infinite if none fits into memory."""
        return self.best_score if self.best_score <= self._horizon_ms else inf

    def score(self, order: Uint32s) -> float:
        """Return the step time in milliseconds.

        Orders that do not fit into memory have higher scores than all others.
        """
        self.evaluations += 1
        makespan_ps, done = simulate_dispatch(
            order, self.dispatcher.tables, self._sequence, self._peak, self._used
        )
        score = makespan_ps / PICOSECONDS_PER_MS
        if done < len(self._sequence):
            score = self._horizon_ms * (2.0 - done / len(self._sequence)) + 1.0
        if score < self.best_score:
            self.best = order.copy()
            self.best_score = score
        return score


class Strategy:
    """Interface of a search strategy. This class evaluates only the default order."""

    def __init__(self, evaluator: Evaluator, rng: np.random.Generator) -> None:
        self.evaluator, self.rng = evaluator, rng
        self.dispatcher = evaluator.dispatcher

    def advance(self, evaluations: int, share: float) -> None:
        """Run a number of evaluations.

        Args:
            evaluations: Number of evaluations.
            share: Fraction of the budget that was used before.
        """
        self.evaluator.exhausted = True

    def adopt(self, best: Evaluator) -> None:
        """Receive the best result of all workers."""


class Annealing(Strategy):
    """Simulated annealing from the best of many constructed orders."""

    def __init__(self, evaluator: Evaluator, rng: np.random.Generator) -> None:
        super().__init__(evaluator, rng)
        self.starts = construct_orders(self.dispatcher)
        self.orders_segments = False
        self.current = np.arange(len(self.dispatcher.groups))
        self.score = evaluator.best_score
        if evaluator.evaluations > 1:  # the search has initial orders
            position = np.argsort(evaluator.best)
            means = [position[list(group)].mean() for group in self.dispatcher.groups]
            self.current = np.argsort(means, kind="stable")
            self.score = evaluator.score(self.dispatcher.order_of_groups(self.current.tolist()))

    def advance(self, evaluations: int, share: float) -> None:
        """Run a number of evaluations. See `Strategy`."""
        for _ in range(min(evaluations, len(self.starts))):
            self._accept(self.starts.pop(0), inf)
            evaluations -= 1
        temperature = (
            self.evaluator.best_score
            * INITIAL_TEMPERATURE
            * (FINAL_TEMPERATURE / INITIAL_TEMPERATURE) ** min(share, 1.0)
        )
        if share >= GROUP_BUDGET_FRACTION and not self.orders_segments:
            self.orders_segments = True
            self._restart_from(self.evaluator.best, self.evaluator.best_score)
        for _ in range(evaluations):
            self._accept(self._mutate(), temperature)

    def _restart_from(self, order: np.ndarray, score: float) -> None:
        self.current = order.copy()
        self.score = score

    def _accept(self, candidate: np.ndarray, temperature: float) -> None:
        """Accept a candidate if it is better, or by chance.

        Args:
            candidate: Order of groups or segments.
            temperature: Temperature. Infinite to accept only better candidates.
        """
        order = (
            candidate
            if self.orders_segments
            else self.dispatcher.order_of_groups(candidate.tolist())
        )
        score = self.evaluator.score(order)
        worse = score - self.score
        if worse <= 0 or (
            temperature < inf and self.rng.random() < exp(-min(worse / temperature, 700.0))
        ):
            self.current, self.score = candidate, score

    def _mutate(self) -> np.ndarray:
        """Return the current order with one element moved, or with two elements swapped."""
        count = len(self.current)
        first = int(self.rng.integers(count))
        distance = int(self.rng.geometric(1 / MEAN_MOVE_DISTANCE))
        second = first + (distance if self.rng.random() < 0.5 else -distance)
        second = min(max(second, 0), count - 1)
        changed = self.current.copy()
        if self.rng.random() < 0.5:
            changed[first], changed[second] = self.current[second], self.current[first]
        elif first < second:
            changed[first:second] = self.current[first + 1 : second + 1]
            changed[second] = self.current[first]
        else:
            changed[second + 1 : first + 1] = self.current[second:first]
            changed[second] = self.current[first]
        return changed

    def adopt(self, best: Evaluator) -> None:
        """Update the current order from the best worker when single segments are changed."""
        if self.orders_segments and best is not self.evaluator and best.best_score < self.score:
            self._restart_from(best.best, best.best_score)
