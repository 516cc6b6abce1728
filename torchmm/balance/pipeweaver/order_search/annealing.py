"""Simulated annealing of the order of a step.

The best of a few dozen constructed orders is changed step by step, first groups of segments, then
single segments. PipeWeaver (§6.1) uses Monte Carlo tree search: `benchmarks/schedule_search.py`
compares both, and random and depth-first search.

Some orders of groups are worth trying first. Where encoders run in front of the LLM, three things
decide most of a step's time: which microbatches come first and last (few images there shorten
warm-up and cool-down), how far encoders run ahead, and whether the LLM or the encoders have
priority. A few dozen combinations cost milliseconds, and the best of them often is within a few
tenths of a percent of the lower bound, where the natural order misses it by several percent.
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
"""Microbatches by which other modules run ahead of the trunk."""


def constructed_orders(dispatcher: Dispatcher) -> list[np.ndarray]:
    """Orders of groups, each once; the natural one is not among them unless by chance."""
    members = _groups_by_microbatch(dispatcher)
    others = np.array([sum(cost for _, cost in other) for _, other in members])
    natural = np.arange(len(members))
    rising = np.argsort(others, kind="stable")
    hill = np.concatenate([rising[::2], rising[1::2][::-1]])
    found: dict[bytes, np.ndarray] = {}
    for microbatches in (natural, rising[::-1], hill, rising):
        chosen = [members[index] for index in microbatches]
        trunk = [group for own, _ in chosen for group in own]
        rest = [group for _, other in chosen for group, _ in other]
        candidates = [trunk + rest, rest + trunk, *(_leading(chosen, lead) for lead in LEADS)]
        for groups in candidates:
            order = np.array(groups)
            found.setdefault(order.tobytes(), order)
    return list(found.values())


_Members = tuple[list[int], list[tuple[int, int]]]
"""A microbatch's groups of the trunk, and (group, cost) of other modules."""


def _groups_by_microbatch(dispatcher: Dispatcher) -> list[_Members]:
    """The trunk is the module that all microbatches go through, with whole microbatches."""
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
    """Other modules of a microbatch in front of the trunk of the one `lead` before."""
    order = []
    for index in range(len(chosen) + lead):
        if index < len(chosen):
            order += [group for group, _ in chosen[index][1]]
        if index >= lead:
            order += chosen[index - lead][0]
    return order


HOT, COLD = 1e-4, 1e-5
"""Temperatures at begin and end, as shares of the step's time."""
GROUPS_SHARE = 0.6
"""Share of the budget; the rest is for single segments."""
REACH = 24
"""Places that a change moves something by, on average."""


class Evaluator:
    """Evaluations of one worker, and the best of them. The natural order is the first."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self.dispatcher = dispatcher
        self.evaluations = 0
        self.exhausted = False
        """Nothing is left to be tried."""
        tables = dispatcher.tables
        self._sequence = np.empty(len(dispatcher.actions), np.uint32)
        self._peak, self._used = (np.empty(len(tables.limit_bytes), np.int64) for _ in range(2))
        self._horizon_ms = float(tables.duration_ps.sum() + tables.wire_ps.sum()) / (
            PICOSECONDS_PER_MS
        )
        """No order takes longer that fits into memory."""
        self.best = dispatcher.natural_order
        self.best_score = inf
        self.score(self.best)

    @property
    def best_ms(self) -> float:
        """Time of the best order; infinite if none fits into memory."""
        return self.best_score if self.best_score <= self._horizon_ms else inf

    def score(self, order: Uint32s) -> float:
        """Time of a step in milliseconds; more than any, if it does not fit into memory."""
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
    """Interface of a search strategy. This class tries no order but the natural one."""

    def __init__(self, evaluator: Evaluator, rng: np.random.Generator) -> None:
        self.evaluator, self.rng = evaluator, rng
        self.dispatcher = evaluator.dispatcher

    def advance(self, evaluations: int, share: float) -> None:
        """Makes a number of evaluations.

        Args:
            share: of the budget that was spent before.
        """
        self.evaluator.exhausted = True

    def adopt(self, best: Evaluator) -> None:
        """What another worker has found."""


class Annealing(Strategy):
    """Simulated annealing from the best of many constructed orders."""

    def __init__(self, evaluator: Evaluator, rng: np.random.Generator) -> None:
        super().__init__(evaluator, rng)
        self.starts = constructed_orders(self.dispatcher)
        self.by_segment = False
        self.current = np.arange(len(self.dispatcher.groups))
        self.score = evaluator.best_score
        if evaluator.evaluations > 1:  # orders were given to begin with
            place = np.argsort(evaluator.best)
            means = [place[list(group)].mean() for group in self.dispatcher.groups]
            self.current = np.argsort(means, kind="stable")
            self.score = evaluator.score(self.dispatcher.order_of_groups(self.current.tolist()))

    def advance(self, evaluations: int, share: float) -> None:
        """See `Strategy`."""
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
        """Goes on with a candidate if it is better, or by chance.

        Args:
            temperature: infinite: only if it is better.
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
        """Moves one element elsewhere, or exchanges two."""
        count = len(self.current)
        first = int(self.rng.integers(count))
        way = int(self.rng.geometric(1 / REACH))
        second = first + (way if self.rng.random() < 0.5 else -way)
        second = min(max(second, 0), count - 1)
        new = self.current.copy()
        if self.rng.random() < 0.5:
            new[first], new[second] = self.current[second], self.current[first]
        elif first < second:
            new[first:second] = self.current[first + 1 : second + 1]
            new[second] = self.current[first]
        else:
            new[second + 1 : first + 1] = self.current[second:first]
            new[second] = self.current[first]
        return new

    def adopt(self, best: Evaluator) -> None:
        """Single segments are changed from the best order of all workers on."""
        if self.by_segment and best is not self.evaluator and best.best_score < self.score:
            self._begin_with(best.best, best.best_score)
