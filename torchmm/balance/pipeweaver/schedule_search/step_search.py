"""Searched schedule of a step: the best of search, default order and static planners.

PipeWeaver pipeline schedule for one batch (§6.1, §6.2) on modality-separated stages. Three static
planners work on the same stages: GPipe, the separated schedule with a limit on the microbatches in
flight, and, if stages form a chain (Megatron-LM placement), interleaved 1F1B. The result is never
slower than any of them that fits into memory:

    static planners ---+
    default order -----+--> fastest order that fits
    search ------------+    (search only if its gain exceeds `min_gain`)

A limit on microbatches in flight also avoids memory deadlocks, because a started microbatch can
always be finished. A plan therefore exists whenever one microbatch at a time fits, even if no
priorities fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf

import numpy as np

from torchmm.balance.numba_utils import Uint32s
from torchmm.balance.pipeweaver.schedule_search.bounds import lower_bound_ms
from torchmm.balance.pipeweaver.schedule_search.dispatcher import Dispatcher
from torchmm.balance.pipeweaver.schedule_search.order_timing import OrderTime, time_order
from torchmm.balance.pipeweaver.schedule_search.search import (
    OrderSearchResult,
    SearchBudget,
    SearchSettings,
    search_orders,
)
from torchmm.balance.plan_costs import PlanCosts
from torchmm.costs.devices import USABLE_MEMORY_FRACTION
from torchmm.pipelining.plan.graph import StageGraph
from torchmm.pipelining.plan.plan import ComputeOrder, Durations
from torchmm.pipelining.schedules.classic import gpipe, interleaved_1f1b
from torchmm.pipelining.schedules.separated import separated

MIN_GAIN = 0.01
"""Minimum predicted gain of a searched order over the best default or static order. Used until the
accuracy of predictions is known (`balance.online_calibration.PredictionSpread`)."""
SEPARATED = "separated"
"""Prefix of the names of the default order with a limit on microbatches in flight."""


@dataclass(frozen=True)
class SearchedOrder:
    """Schedule of a step.

    Attributes:
        order: F and B actions of every rank.
        predicted_ms: Step time without all-gathers and reductions of parameters.
        default_order_ms: Step time in the default order. If priorities alone exceed the memory,
            with a limit on microbatches in flight. Infinite if no limit fits.
        static_ms: Step time of the fastest static planner that fits. Infinite if none fits.
        planner: "search", "natural", or the name of the static planner.
        peak_bytes: Maximum memory of each rank.
        evaluations: Number of evaluations of the search.
        segments: Priorities of the order. None for the order of a static planner.
    """

    order: ComputeOrder
    predicted_ms: float
    default_order_ms: float
    static_ms: float
    planner: str
    peak_bytes: tuple[int, ...]
    evaluations: int
    segments: Uint32s | None = field(default=None, compare=False)

    @property
    def speedup_over_default_order(self) -> float | None:
        """Relative speedup over the default order. None without a default order."""
        if self.default_order_ms == inf or self.predicted_ms == 0:
            return None
        return self.default_order_ms / self.predicted_ms - 1


SearchCallback = Callable[[float, Callable[[], SearchedOrder]], bool]
"""Callback between rounds of a search: best time so far, and a function that builds its order.

The search continues if it returns True.
"""


class StepSearch:
    """Static orders of a step, and the search for a better order.

    Args:
        graph: Tasks of a training step.
        costs: Costs of the graph, with the memory limit.
        min_gain: Minimum relative gain of a searched order over default and static orders.

    Raises:
        SimulationError: A cost is missing or not a number.
    """

    def __init__(self, graph: StageGraph, costs: PlanCosts, min_gain: float = 0.0) -> None:
        self.dispatcher = Dispatcher(graph, costs)
        self.min_gain = min_gain
        self._bound_ms = lower_bound_ms(self.dispatcher)
        fitting = _fitting_static(self.dispatcher)
        self._static = min(fitting, key=lambda entry: entry[2].makespan_ms, default=None)
        bounded = (entry[2].makespan_ms for entry in fitting if entry[0].startswith(SEPARATED))
        self._bounded_ms = min(bounded, default=inf)

    @property
    def fits(self) -> bool:
        """True if any order fits into memory."""
        return self._static is not None or self.dispatcher.evaluate() < inf

    def search(
        self, budget: SearchBudget, settings: SearchSettings, seen: SearchCallback | None = None
    ) -> SearchedOrder:
        """Return the best order within a budget. The budget limits only the search.

        Args:
            budget: Limits of the search.
            settings: Settings of the search.
            seen: Callback that can stop the search.

        Raises:
            ValueError: No order fits into memory.
        """

        def on_round(result: OrderSearchResult) -> bool:
            return seen is None or seen(result.makespan_ms, partial(self.best, result))

        result = search_orders(
            self.dispatcher,
            budget,
            seed=settings.seed,
            workers=settings.workers,
            bound_ms=self._bound_ms,
            starts=settings.starts,
            on_round=on_round,
        )
        return self.best(result)

    def best(self, result: OrderSearchResult | None = None) -> SearchedOrder:
        """Return the best of static orders, the default order and the search result.

        Args:
            result: Search result so far. None without a search.

        Raises:
            ValueError: No order fits into memory.
        """
        dispatcher = self.dispatcher
        default_order_ms = dispatcher.evaluate() if result is None else result.default_order_ms
        makespan_ms = default_order_ms if result is None else result.makespan_ms
        evaluations = 1 if result is None else result.evaluations
        name, segments = ("natural", None) if result is None else ("search", result.order)
        static_ms = self._static[2].makespan_ms if self._static else inf
        if makespan_ms * (1 + self.min_gain) > min(default_order_ms, static_ms):
            name, segments, makespan_ms = "natural", None, default_order_ms
        if makespan_ms <= static_ms and makespan_ms < inf:
            best = dispatcher.dispatch(segments)
            order = best.order
            peak_bytes = best.peak_bytes
            segments = dispatcher.default_order if segments is None else segments
        elif self._static is not None:
            name, order, (makespan_ms, peak_bytes, _) = self._static
            segments = None
        else:
            blocked = "; ".join(dispatcher.dispatch(segments).blocked)
            raise ValueError(
                "no schedule of the step fits in memory, even with one microbatch in flight: "
                + blocked
            )
        if default_order_ms == inf:
            default_order_ms = self._bounded_ms
        return SearchedOrder(
            order, makespan_ms, default_order_ms, static_ms, name, peak_bytes, evaluations, segments
        )


def build_limited_search(
    graph: StageGraph, costs: PlanCosts, min_gain: float = MIN_GAIN
) -> StepSearch:
    """Return the search of a step within `USABLE_MEMORY_FRACTION` of the device memory.

    If no order fits, ranks may use as much memory as the separated schedule.

    Args:
        graph: Tasks of the step.
        costs: Costs with the device memory as the limit. Without a limit, the memory of the
            separated schedule is used.
        min_gain: Minimum relative gain of a searched order.
    """
    if costs.memory_limit_bytes is not None:
        limit = round(USABLE_MEMORY_FRACTION * costs.memory_limit_bytes)
        step = StepSearch(graph, replace(costs, memory_limit_bytes=limit), min_gain)
        if step.fits:
            return step
    return StepSearch(graph, with_separated_memory_limit(graph, costs), min_gain)


def _fitting_static(dispatcher: Dispatcher) -> list[tuple[str, ComputeOrder, OrderTime]]:
    """Return the static orders that fit, if needed with fewer microbatches in flight."""
    fitting: list[tuple[str, ComputeOrder, OrderTime]] = []
    for name, order in _static_orders(dispatcher):
        timed = time_order(dispatcher, order)
        if timed.fits:
            fitting.append((name, order, timed))
            if name.startswith(SEPARATED):
                break
    return fitting


def _static_orders(dispatcher: Dispatcher) -> Iterator[tuple[str, ComputeOrder]]:
    graph = dispatcher.graph
    durations = dispatcher.costs.compute_ms.__getitem__
    yield "gpipe", gpipe(graph)
    if _is_chain(graph):
        yield "interleaved_1f1b", interleaved_1f1b(graph)
    yield SEPARATED, separated(graph, durations)
    yield from inflight_limited_orders(graph, durations)


def _is_chain(graph: StageGraph) -> bool:
    """Return True if stages belong to schedules for a chain of stages."""
    return all(s.virtual_stage >= 0 and len(s.ranks) == 1 for s in graph.layout.stages)


def inflight_limited_orders(
    graph: StageGraph, durations: Durations
) -> Iterator[tuple[str, ComputeOrder]]:
    """Yield separated schedules and their names, with decreasing limits on microbatches in flight.

    The last has a limit of one. No order of complete microbatches needs less memory.
    """
    for bound in range(min(2 * graph.layout.rank_count, graph.microbatches + 1) - 1, 0, -1):
        order = separated(graph, durations, bound)
        yield f"{SEPARATED}, at most {bound} microbatches in flight", order


def with_separated_memory_limit(graph: StageGraph, costs: PlanCosts) -> PlanCosts:
    """Return the costs with the memory that the separated schedule uses as the limit of every rank.

    If stages form a chain, interleaved 1F1B is included in the maximum. Runs without a memory limit
    use this limit, so a searched schedule needs no more memory than a static one.
    """
    unlimited = Dispatcher(graph, replace(costs, memory_limit_bytes=None))
    orders = [separated(graph, costs.compute_ms.__getitem__)]
    if _is_chain(graph):
        orders.append(interleaved_1f1b(graph))
    peaks = np.max([time_order(unlimited, order).peak_bytes for order in orders], axis=0)
    static = np.array(costs.static_bytes or (0,) * len(peaks))
    # All ranks have one limit, so ranks that need less memory get more static bytes.
    raised = static + (peaks.max() - peaks)
    return replace(costs, static_bytes=tuple(raised.tolist()), memory_limit_bytes=int(peaks.max()))
