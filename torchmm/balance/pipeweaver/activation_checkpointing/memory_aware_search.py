"""Joint search for a schedule and its recomputation (PipeWeaver, sections 6.1 and 6.3).

    step = MemoryAwareSearch(graph, costs, tuner)
    result = step.search(Budget(evaluations=2000))

The number of microbatches in flight depends on their saved bytes. The bytes that they can save
depend on the microbatches in flight. Schedule and recomputation therefore have to be selected
jointly. The paper scores every rollout of the search by the time after memory tuning. Tuning takes
100 to 1,000 times the time of an evaluation of the dispatcher. torchmm approximates tuned steps by
a few levels:

    level     0                 1, 2, ...                        LEVELS
    price     0                 one price per byte for all       infinite
    layers    save everything   cheapest mode at this price      recompute everything

1. Each level is searched with a fraction of the budget, with the times and bytes of its modes.
2. The best schedule of each level is tuned exactly.
3. The `REFINED_LEVELS` fastest levels are searched with the remaining budget.
4. The result is the fastest of all tuned schedules.

Two alternatives are worse. If the search uses the costs of saving everything, few microbatches run
ahead, and steps that require recomputation are not searched (VLM-L of PipeWeaver: 21.6 s simulated,
20.3 s with full recomputation). If a second search uses the costs of the tuned plan, hardly any
other schedule fits, because its memory is full.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from math import inf

import numpy as np

from torchmm.balance.numba_utils import Float64s
from torchmm.balance.pipeweaver.activation_checkpointing.recompute_costs import (
    Modes,
    add_recompute_costs,
)
from torchmm.balance.pipeweaver.activation_checkpointing.tuning import LayerTuner
from torchmm.balance.pipeweaver.schedule_search.dispatcher import Dispatcher
from torchmm.balance.pipeweaver.schedule_search.order_timing import time_order
from torchmm.balance.pipeweaver.schedule_search.search import SearchBudget, SearchSettings
from torchmm.balance.pipeweaver.schedule_search.step_search import (
    SearchCallback,
    SearchedOrder,
    StepSearch,
)
from torchmm.balance.plan_costs import PlanCosts
from torchmm.balance.simulation.simulator import memory_changes
from torchmm.common.errors import PlanError
from torchmm.pipelining.checks.rules import PlanRules
from torchmm.pipelining.plan.graph import StageGraph, Task
from torchmm.pipelining.plan.lowering import lower_plan
from torchmm.pipelining.plan.plan import ComputeOrder
from torchmm.pipelining.schedules.separated import separated

LEVELS = 8
"""Number of levels. Level i saves at least i / LEVELS of the bytes of full recomputation.

Several levels can be equal."""
FEW_LEVELS = 3
"""Number of levels for comparing layouts."""
FIRST_ROUND_FRACTION = 0.5
"""Fraction of the budget that all levels share equally. The rest is for the fastest levels."""
REFINED_LEVELS = 2
"""Number of levels that are searched with the rest of the budget."""


class MemoryAwareSearch:
    """Search for schedules of one step with memory tuning. Same interface as `StepSearch`.

    Args:
        graph: Task graph of a training step.
        costs: Costs of saving all activations, optionally corrected by measurements.
        tuner: Tuner of the step.
        min_gain: Minimum gain over static schedules, see `StepSearch`.

    Raises:
        SimulationError: A cost is missing or is not a number.
    """

    def __init__(
        self, graph: StageGraph, costs: PlanCosts, tuner: LayerTuner, min_gain: float = 0.0
    ) -> None:
        self._graph, self._tuner, self._min_gain = graph, tuner, min_gain
        limit_bytes = tuner.tuning.memory_limit_bytes
        self._costs = replace(costs, memory_limit_bytes=limit_bytes)
        self._choices = tuner.scaled_choices(costs)
        self._tuned: dict[ComputeOrder, SearchedOrder | None] = {}
        self._book: PlanRules | None = None

    @cached_property
    def _steps(self) -> list[StepSearch]:
        """Searches of the levels at which a schedule fits into memory."""
        steps = [StepSearch(self._graph, costs) for costs in self._levels(LEVELS)]
        return [step for step in steps if step.fits]

    @cached_property
    def _static(self) -> SearchedOrder | None:
        return self._best_tuned([step.best() for step in self._steps])

    @property
    def dispatcher(self) -> Dispatcher:
        """Dispatcher of the fastest level. All levels have the same segments."""
        return self._steps[0].dispatcher

    @property
    def fits(self) -> bool:
        """True if a schedule fits into memory after tuning."""
        return self._static is not None

    def best(self) -> SearchedOrder:
        """Return the fastest static or default schedule.

        Raises:
            ValueError: No schedule fits into memory.
        """
        if self._static is None:
            raise ValueError("no order fits in memory, even with full recomputation of all layers")
        return self._static

    def search(
        self, budget: SearchBudget, settings: SearchSettings, seen: SearchCallback | None = None
    ) -> SearchedOrder:
        """Return the fastest tuned order, see `StepSearch.search`."""
        static = best = self.best()
        evaluations, ended = 0, False

        def goes_on(_ms: float, _make: Callable[[], SearchedOrder]) -> bool:
            """Call `seen` with tuned orders only."""
            nonlocal ended
            shown = best
            ended = seen is not None and not seen(shown.predicted_ms, lambda: shown)
            return not ended

        def search_level(
            step: StepSearch, part: float, level_settings: SearchSettings
        ) -> SearchedOrder | None:
            """Return the best order of a level after tuning, if it fits into memory."""
            nonlocal best, evaluations
            if ended:
                return None
            order = step.search(budget.fraction(part), level_settings, goes_on)
            evaluations += order.evaluations
            tuned = self._tune(order)
            if tuned is not None and tuned.predicted_ms < best.predicted_ms:
                best = tuned
            return tuned

        first: list[tuple[SearchedOrder, StepSearch]] = []
        for step in self._steps:
            tuned = search_level(step, FIRST_ROUND_FRACTION / len(self._steps), settings)
            if tuned is not None:
                first.append((tuned, step))
        first.sort(key=lambda entry: entry[0].predicted_ms)
        refined = first[:REFINED_LEVELS]
        for order, step in refined:
            again = replace(settings, seed=settings.seed + 1, starts=[*settings.starts])
            if order.segments is not None:
                again = replace(again, starts=[*settings.starts, order.segments])
            search_level(step, (1 - FIRST_ROUND_FRACTION) / len(refined), again)
        if best.predicted_ms * (1 + self._min_gain) > static.predicted_ms:
            best = static
        return replace(
            best,
            default_order_ms=static.default_order_ms,
            static_ms=static.static_ms,
            evaluations=evaluations,
        )

    def estimate_ms(self, budget: SearchBudget, settings: SearchSettings) -> float:
        """Return an estimate of the step time in ms for comparing layouts.

        Only `FEW_LEVELS` levels are searched. The estimate is infinite if none of them fits.
        """
        steps = [StepSearch(self._graph, costs) for costs in self._levels(FEW_LEVELS)]
        share = budget.fraction(1 / len(steps))
        results = [step.search(share, settings) for step in steps if step.fits]
        if not results:
            return inf
        tuned = self._tune(min(results, key=lambda each: each.predicted_ms))
        return inf if tuned is None else tuned.predicted_ms

    def _levels(self, count: int) -> list[PlanCosts]:
        """Return the distinct costs of the levels, from the fastest to the lowest memory."""
        by_saving: dict[float, PlanCosts] = {}
        max_saving = self._choose_at_multiplier(inf)[1]
        for level in range(count + 1):
            recompute, saved = self._choose_for_saving(max_saving * level / count)
            if saved in by_saving:
                continue
            costs = add_recompute_costs(self._costs, recompute, self._choices)
            unmodeled = self._unmodeled_bytes(costs)
            # The dispatcher counts neither messages nor temporary tensors.
            static = costs.static_bytes or (0,) * len(unmodeled)
            in_use = [a + b for a, b in zip(static, unmodeled, strict=True)]
            by_saving[saved] = replace(costs, static_bytes=tuple(in_use))
            if level == 0:
                for task in self._graph.tasks():
                    in_use[self._graph.rank(task)] += costs.saved_bytes.get(task, 0)
                limit_bytes = costs.memory_limit_bytes
                if limit_bytes is None or max(in_use) <= limit_bytes:
                    break  # Everything fits without recomputation.
        return list(by_saving.values())

    def _unmodeled_bytes(self, costs: PlanCosts) -> list[int]:
        """Return the bytes of messages plus the largest temporaries of an action, by rank."""
        temporary = [0] * self._graph.layout.rank_count
        for action, nbytes in costs.temporary_bytes.items():
            rank = self._graph.rank(action.task)
            temporary[rank] = max(temporary[rank], nbytes)
        return [a + b for a, b in zip(temporary, self._message_bytes, strict=True)]

    @cached_property
    def _message_bytes(self) -> list[int]:
        """Maximum bytes of messages at any time in the separated schedule, by rank."""
        if not self._tuner.specs:
            return [0] * self._graph.layout.rank_count
        order = separated(self._graph, self._costs.compute_ms.__getitem__)
        plan = lower_plan(order, self._graph, self._tuner.specs)
        return [int(np.cumsum(of_rank).max()) for of_rank in memory_changes(plan, PlanCosts({}))]

    def _choose_for_saving(self, nbytes: float) -> tuple[dict[Task, Modes], float]:
        """Return modes and saved bytes at the lowest price that saves at least `nbytes`."""
        low, high = 1e-15, 1e9  # milliseconds per byte
        while high / low > 1.001:
            middle = (low * high) ** 0.5
            if self._choose_at_multiplier(middle)[1] >= nbytes:
                high = middle
            else:
                low = middle
        return self._choose_at_multiplier(high)

    def _choose_at_multiplier(self, multiplier: float) -> tuple[dict[Task, Modes], float]:
        """Return the modes at a memory price in ms per byte, and the saved bytes."""
        recompute: dict[Task, Modes] = {}
        saved = 0.0
        for stage, (extra_ms_C, saved_bytes_C) in self._candidate_sums.items():
            candidate = int(np.argmax(saved_bytes_C))
            if multiplier < inf:
                candidate = int(np.argmin(extra_ms_C - multiplier * saved_bytes_C))
            saved += saved_bytes_C[candidate]
            modes = self._tuner.candidate_tables.stage_candidates[stage][candidate]
            recompute |= dict.fromkeys(self._choices[stage].tasks, modes)
        return recompute, saved

    @cached_property
    def _candidate_sums(self) -> dict[int, tuple[Float64s, Float64s]]:
        """Added time and saved bytes of each candidate by stage, summed over tasks."""
        sums = {}
        for stage, of_stage in self._choices.items():
            modes = self._tuner.candidate_tables.stage_candidates[stage]
            extra_ms_C = np.array([of_stage.extra_ms_N(m).sum() for m in modes])
            saved_bytes_C = np.array([of_stage.saved_bytes_N(m).sum() for m in modes])
            sums[stage] = extra_ms_C, saved_bytes_C
        return sums

    def _best_tuned(self, orders: Sequence[SearchedOrder]) -> SearchedOrder | None:
        """Return the fastest schedule after tuning, or None if no schedule fits."""
        tuned = [order for order in map(self._tune, orders) if order is not None]
        if not tuned:
            return None
        best = min(tuned, key=lambda order: order.predicted_ms)
        default_ms = [order.predicted_ms for order in tuned if not _is_static(order)]
        static_ms = [order.predicted_ms for order in tuned if _is_static(order)]
        times_ms = min(default_ms, default=best.predicted_ms), min(static_ms, default=inf)
        return replace(best, default_order_ms=times_ms[0], static_ms=times_ms[1])

    def _tune(self, result: SearchedOrder) -> SearchedOrder | None:
        """Return an order with its time and memory after tuning, or None if it does not fit."""
        key = result.order
        if key in self._tuned:
            return self._tuned[key]
        plan = lower_plan(result.order, self._graph, self._tuner.specs)
        if self._book is None:
            self._book = PlanRules(plan)  # All orders have the same rules.
        try:
            tuned = self._tuner.tune(plan, self._book)
        except PlanError:
            self._tuned[key] = None
            return None
        assert tuned.plan.recompute is not None
        costs = add_recompute_costs(self._costs, tuned.plan.recompute, self._choices)
        free = Dispatcher(self._graph, replace(costs, memory_limit_bytes=None))
        makespan_ms = time_order(free, result.order).makespan_ms
        retimed = replace(result, predicted_ms=makespan_ms, peak_bytes=tuned.peak_bytes)
        self._tuned[key] = retimed
        return retimed


def _is_static(result: SearchedOrder) -> bool:
    """Return True for a static schedule, which has no segments."""
    return result.segments is None
