"""Orders of a step, each as fast as it is once its layers are tuned: PipeWeaver §6.1 and §6.3.

    step = TunedSearch(graph, costs, tuner)
    found = step.search(Budget(evaluations=2000))

How far microbatches may run ahead depends on what they keep, what they may keep on which others are
in memory, so an order and what its tasks recompute have to be chosen together. The paper scores
every rollout of its search by the time after layer tuning. That takes 100 to 1,000 times as long
as an evaluation of the dispatcher; here the search sees tuned steps as a few *levels*: at one
price of memory for the whole step every stage runs its layers in the cheapest way, which
gives times and bytes that the dispatcher counts with. From "keep everything" to "recompute
everything" there are at most `LEVELS`. Each is searched for a part of the budget; its best order is
tuned for real; the most promising levels are searched for the rest, and of all tuned orders the
fastest stays.

Rejected: searching with the costs of keeping everything and tuning what comes out: little then runs
ahead, and steps that fit only recomputed are not searched at all (PipeWeaver's VLM-L took 21.6 s
in simulation, recomputing everything 20.3 s). Rejected: searching again with the times and bytes
of the tuned plan: its memory is full, so hardly any other order fits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from math import inf

import numpy as np

from torchmm.balance.compiled import Float64s
from torchmm.balance.pipeweaver.order_search.best_order import SearchedOrder, Seen, StepSearch
from torchmm.balance.pipeweaver.order_search.dispatcher import Dispatcher
from torchmm.balance.pipeweaver.order_search.order_times import time_order
from torchmm.balance.pipeweaver.order_search.search import Budget, Settings
from torchmm.balance.pipeweaver.recomputation.costs import Modes, charged
from torchmm.balance.pipeweaver.recomputation.tuning import Tuner
from torchmm.balance.simulation.simulator import memory_changes
from torchmm.balance.step_costs import PlanCosts
from torchmm.common.errors import PlanError
from torchmm.pipelining.checks.rules import RuleBook
from torchmm.pipelining.plan.graph import StageGraph, Task
from torchmm.pipelining.plan.lowering import lower_plan
from torchmm.pipelining.plan.plan import ComputeOrder
from torchmm.pipelining.schedules.separated import separated

LEVELS = 8
"""Shares of what recomputing everything would save: 1/8, 2/8, ... Some are the same."""
FEW_LEVELS = 3
"""The same where layouts are compared."""
FIRST_SHARE = 0.5
"""Of the budget, for all levels alike; the rest is for the best."""
KEPT_LEVELS = 2


class TunedSearch:
    """One step whose layers are tuned; the same interface as `StepSearch`.

    Args:
        graph: of a training step.
        costs: of keeping everything, perhaps corrected by what was measured.
        tuner: of the step.
        least_gain: see `StepSearch`.

    Raises:
        SimulationError: a cost is missing or no number.
    """

    def __init__(
        self, graph: StageGraph, costs: PlanCosts, tuner: Tuner, least_gain: float = 0.0
    ) -> None:
        self._graph, self._tuner, self._least_gain = graph, tuner, least_gain
        limit_bytes = tuner.tuning.memory_limit_bytes
        self._costs = replace(costs, memory_limit_bytes=limit_bytes)
        self._choices = tuner.choices_at(costs)
        self._tuned: dict[ComputeOrder, SearchedOrder | None] = {}
        self._book: RuleBook | None = None

    @cached_property
    def _steps(self) -> list[StepSearch]:
        """Searches with the costs of levels at which anything fits."""
        steps = [StepSearch(self._graph, costs) for costs in self._levels(LEVELS)]
        return [step for step in steps if step.fits]

    @cached_property
    def _static(self) -> SearchedOrder | None:
        return self._best_of([step.best() for step in self._steps])

    @property
    def dispatcher(self) -> Dispatcher:
        """Of the fastest level, whose segments are those of all."""
        return self._steps[0].dispatcher

    @property
    def fits(self) -> bool:
        """Whether any order was found that stays within memory when it is tuned."""
        return self._static is not None

    def best(self) -> SearchedOrder:
        """The best of static and natural orders.

        Raises:
            ValueError: none fits.
        """
        if self._static is None:
            raise ValueError("no order fits in memory, even with full recomputation of all layers")
        return self._static

    def search(self, budget: Budget, settings: Settings, seen: Seen | None = None) -> SearchedOrder:
        """Return the fastest tuned order, see `StepSearch.search`."""
        static = best = self.best()
        evaluations, ended = 0, False

        def goes_on(_ms: float, _make: Callable[[], SearchedOrder]) -> bool:
            """Call `seen` with tuned orders only."""
            nonlocal ended
            shown = best
            ended = seen is not None and not seen(shown.predicted_ms, lambda: shown)
            return not ended

        def search_level(step: StepSearch, part: float, own: Settings) -> SearchedOrder | None:
            """Return the best order of a level after tuning, if it fits into memory."""
            nonlocal best, evaluations
            if ended:
                return None
            found = step.search(budget.part(part), own, goes_on)
            evaluations += found.evaluations
            tuned = self._tune(found)
            if tuned is not None and tuned.predicted_ms < best.predicted_ms:
                best = tuned
            return tuned

        first: list[tuple[SearchedOrder, StepSearch]] = []
        for step in self._steps:
            tuned = search_level(step, FIRST_SHARE / len(self._steps), settings)
            if tuned is not None:
                first.append((tuned, step))
        first.sort(key=lambda each: each[0].predicted_ms)
        kept = first[:KEPT_LEVELS]
        for found, step in kept:
            again = replace(settings, seed=settings.seed + 1, starts=[*settings.starts])
            if found.segments is not None:
                again = replace(again, starts=[*settings.starts, found.segments])
            search_level(step, (1 - FIRST_SHARE) / len(kept), again)
        if best.predicted_ms * (1 + self._least_gain) > static.predicted_ms:
            best = static
        return replace(
            best,
            natural_ms=static.natural_ms,
            static_ms=static.static_ms,
            evaluations=evaluations,
        )

    def estimate_ms(self, budget: Budget, settings: Settings) -> float:
        """About how long the step takes, from the best of few levels; infinite if it does not fit
        there. To compare layouts of a step."""
        steps = [StepSearch(self._graph, costs) for costs in self._levels(FEW_LEVELS)]
        share = budget.part(1 / len(steps))
        found = [step.search(share, settings) for step in steps if step.fits]
        if not found:
            return inf
        tuned = self._tune(min(found, key=lambda each: each.predicted_ms))
        return inf if tuned is None else tuned.predicted_ms

    def _levels(self, count: int) -> list[PlanCosts]:
        """Return different costs at some prices of memory, from the fastest to the leanest."""
        found: dict[float, PlanCosts] = {}
        everything = self._at_price(inf)[1]
        for level in range(count + 1):
            recompute, saved = self._saving(everything * level / count)
            if saved in found:
                continue
            costs = charged(self._costs, recompute, self._choices)
            room = self._room(costs)
            # The dispatcher counts neither messages nor temporary tensors.
            static = costs.static_bytes or (0,) * len(room)
            in_use = [a + b for a, b in zip(static, room, strict=True)]
            found[saved] = replace(costs, static_bytes=tuple(in_use))
            if level == 0:
                for task in self._graph.tasks():
                    in_use[self._graph.rank(task)] += costs.kept_bytes.get(task, 0)
                limit_bytes = costs.memory_limit_bytes
                if limit_bytes is None or max(in_use) <= limit_bytes:
                    break  # Everything fits without recomputation.
        return list(found.values())

    def _room(self, costs: PlanCosts) -> list[int]:
        """By rank: what messages take, and the most that any one action needs while it runs."""
        room = [0] * self._graph.layout.rank_count
        for action, nbytes in costs.temporary_bytes.items():
            rank = self._graph.rank(action.task)
            room[rank] = max(room[rank], nbytes)
        return [a + b for a, b in zip(room, self._message_bytes, strict=True)]

    @cached_property
    def _message_bytes(self) -> list[int]:
        """By rank: the most that messages take at any time, in the separated schedule."""
        if not self._tuner.specs:
            return [0] * self._graph.layout.rank_count
        order = separated(self._graph, self._costs.compute_ms.__getitem__)
        plan = lower_plan(order, self._graph, self._tuner.specs)
        return [int(np.cumsum(own).max()) for own in memory_changes(plan, PlanCosts({}))]

    def _saving(self, nbytes: float) -> tuple[dict[Task, Modes], float]:
        """What to recompute at the lowest price at which so much is saved."""
        low, high = 1e-15, 1e9  # milliseconds per byte
        while high / low > 1.001:
            middle = (low * high) ** 0.5
            if self._at_price(middle)[1] >= nbytes:
                high = middle
            else:
                low = middle
        return self._at_price(high)

    def _at_price(self, price: float) -> tuple[dict[Task, Modes], float]:
        """What to recompute if memory costs so much per byte, and what that saves."""
        recompute: dict[Task, Modes] = {}
        saved = 0.0
        for stage, (extra_ms_C, saved_bytes_C) in self._sums.items():
            chosen = int(np.argmax(saved_bytes_C))
            if price < inf:
                chosen = int(np.argmin(extra_ms_C - price * saved_bytes_C))
            saved += saved_bytes_C[chosen]
            modes = self._tuner.rows.stage_candidates[stage][chosen]
            recompute |= dict.fromkeys(self._choices[stage].tasks, modes)
        return recompute, saved

    @cached_property
    def _sums(self) -> dict[int, tuple[Float64s, Float64s]]:
        """By stage, over all of its tasks: time that each candidate adds, and bytes it saves."""
        found = {}
        for stage, own in self._choices.items():
            modes = self._tuner.rows.stage_candidates[stage]
            extra_ms_C = np.array([own.extra_ms_N(m).sum() for m in modes])
            saved_bytes_C = np.array([own.saved_bytes_N(m).sum() for m in modes])
            found[stage] = extra_ms_C, saved_bytes_C
        return found

    def _best_of(self, orders: Sequence[SearchedOrder]) -> SearchedOrder | None:
        """The fastest of some orders when they are tuned; None if none fits then."""
        tuned = [each for each in map(self._tune, orders) if each is not None]
        if not tuned:
            return None
        best = min(tuned, key=lambda each: each.predicted_ms)
        natural = [each.predicted_ms for each in tuned if not _is_static(each)]
        static = [each.predicted_ms for each in tuned if _is_static(each)]
        times_ms = min(natural, default=best.predicted_ms), min(static, default=inf)
        return replace(best, natural_ms=times_ms[0], static_ms=times_ms[1])

    def _tune(self, found: SearchedOrder) -> SearchedOrder | None:
        """Return an order with its time and memory after tuning, or None if it does not fit."""
        key = found.order
        if key in self._tuned:
            return self._tuned[key]
        plan = lower_plan(found.order, self._graph, self._tuner.specs)
        if self._book is None:
            self._book = RuleBook(plan)  # All orders have the same rules.
        try:
            tuned = self._tuner.tune(plan, self._book)
        except PlanError:
            self._tuned[key] = None
            return None
        assert tuned.plan.recompute is not None
        costs = charged(self._costs, tuned.plan.recompute, self._choices)
        free = Dispatcher(self._graph, replace(costs, memory_limit_bytes=None))
        makespan_ms = time_order(free, found.order).makespan_ms
        retimed = replace(found, predicted_ms=makespan_ms, peak_bytes=tuned.peak_bytes)
        self._tuned[key] = retimed
        return retimed


def _is_static(found: SearchedOrder) -> bool:
    return found.segments is None
