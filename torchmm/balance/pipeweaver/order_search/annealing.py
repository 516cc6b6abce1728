"""Simulated annealing of the order of a step.

Annealing starts from the best of a few dozen constructed orders. It first moves groups of segments,
then single segments. PipeWeaver (§6.1) uses Monte Carlo tree search.
`benchmarks/schedule_search.py` compares both, and random and depth-first search.

If encoders run before the LLM, three choices determine most of the step time: the first and last
microbatches (few images shorten warm-up and cool-down), the number of microbatches by which
encoders run ahead, and the priority of LLM and encoders. A few dozen combinations take
milliseconds. The best of them is often within a few tenths of a percent of the lower bound, while
the natural order is several percent above it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, inf

import numpy as np

from torchmm.balance.compiled import Uint32s
from torchmm.balance.picoseconds import PICOSECONDS_PER_MS
from torchmm.balance.pipeweaver.order_search.dispatcher import Dispatcher
from torchmm.balance.pipeweaver.order_search.dispatcher_kernel import play

LEADS = (0, 1, 2, 4, 8)
"""Numbers of microbatches by which other modules run ahead of the trunk."""


def constructed_orders(dispatcher: Dispatcher) -> list[np.ndarray]:
    """Return distinct constructed orders of groups."""
    members = _groups_by_microbatch(dispatcher)
    others = np.array([sum(cost for _, cost in other) for _, other in members])
    natural = np.arange(len(members))
    rising = np.argsort(others, kind="stable")
    hill = np.concatenate([rising[::2], rising[1::2][::-1]])
    orders: dict[bytes, np.ndarray] = {}
    for microbatches in (natural, rising[::-1], hill, rising):
        chosen = [members[index] for index in microbatches]
        trunk = [group for own, _ in chosen for group in own]
        rest = [group for _, other in chosen for group, _ in other]
        candidates = [trunk + rest, rest + trunk, *(_leading(chosen, lead) for lead in LEADS)]
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
    cost = np.bincount(tables.unit, weights=tables.duration_ps, minlength=len(dispatcher.segments))
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


def _leading(chosen: Sequence[_Members], lead: int) -> list[int]:
    """Return an order in which other modules run `lead` microbatches ahead of the trunk."""
    order = []
    for index in range(len(chosen) + lead):
        if index < len(chosen):
            order += [group for group, _ in chosen[index][1]]
        if index >= lead:
            order += chosen[index - lead][0]
    return order


HOT, COLD = 1e-4, 1e-5
"""Initial and final temperature as fractions of the step time."""
GROUPS_SHARE = 0.6
"""Fraction of the budget for groups. The rest is for single segments."""
REACH = 24
"""Mean number of positions by which a change moves an element."""


class Evaluator:
    """Evaluations of one worker, and the best order. The natural order is evaluated first."""

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
        self.best = dispatcher.natural_order
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
        makespan_ps, done = play(
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
    """Interface of a search strategy. This class evaluates only the natural order."""

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
        self.starts = constructed_orders(self.dispatcher)
        self.by_segment = False
        self.current = np.arange(len(self.dispatcher.groups))
        self.score = evaluator.best_score
        if evaluator.evaluations > 1:  # the search has initial orders
            place = np.argsort(evaluator.best)
            means = [place[list(group)].mean() for group in self.dispatcher.groups]
            self.current = np.argsort(means, kind="stable")
            self.score = evaluator.score(self.dispatcher.order_of_groups(self.current.tolist()))

    def advance(self, evaluations: int, share: float) -> None:
        """Run a number of evaluations. See `Strategy`."""
        for _ in range(min(evaluations, len(self.starts))):
            self._keep(self.starts.pop(0), inf)
            evaluations -= 1
        temperature = self.evaluator.best_score * HOT * (COLD / HOT) ** min(share, 1.0)
        if share >= GROUPS_SHARE and not self.by_segment:
            self.by_segment = True
            self._begin_with(self.evaluator.best, self.evaluator.best_score)
        for _ in range(evaluations):
            self._keep(self._changed(), temperature)

    def _begin_with(self, order: np.ndarray, score: float) -> None:
        self.current = order.copy()
        self.score = score

    def _keep(self, candidate: np.ndarray, temperature: float) -> None:
        """Accept a candidate if it is better, or by chance.

        Args:
            candidate: Order of groups or segments.
            temperature: Temperature. Infinite to accept only better candidates.
        """
        order = (
            candidate if self.by_segment else self.dispatcher.order_of_groups(candidate.tolist())
        )
        score = self.evaluator.score(order)
        worse = score - self.score
        if worse <= 0 or (
            temperature < inf and self.rng.random() < exp(-min(worse / temperature, 700.0))
        ):
            self.current, self.score = candidate, score

    def _changed(self) -> np.ndarray:
        """Return the current order with one element moved, or with two elements swapped."""
        count = len(self.current)
        first = int(self.rng.integers(count))
        distance = int(self.rng.geometric(1 / REACH))
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
        if self.by_segment and best is not self.evaluator and best.best_score < self.score:
            self._begin_with(best.best, best.best_score)
