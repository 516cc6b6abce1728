"""The searched schedule of a step: the best of what search, natural order and static planners give.

PipeWeaver's pipeline schedule for one batch (§6.1, §6.2), on modality-separated stages. Static
planners that work on the same stages are GPipe, the separated schedule with a bound on the
microbatches in flight and, where stages form a chain (Megatron-LM's placement), interleaved 1F1B;
whatever the search comes to, the result is not slower than any of them that fits into memory.

Bounding the microbatches in flight is also what never runs out of memory half-way: a microbatch
that has begun can always be finished. So there is a plan whenever one microbatch at a time fits,
even if no priorities do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf

import numpy as np

from torchmm.balance.compiled import Uint32s
from torchmm.balance.pipeweaver.order_search.bounds import lower_bound_ms
from torchmm.balance.pipeweaver.order_search.dispatcher import Dispatcher
from torchmm.balance.pipeweaver.order_search.order_times import OrderTime, time_order
from torchmm.balance.pipeweaver.order_search.search import Budget, SearchResult, Settings, search
from torchmm.balance.step_costs import PlanCosts
from torchmm.costs.devices import MEMORY_SHARE
from torchmm.pipelining.plan.graph import StageGraph
from torchmm.pipelining.plan.plan import ComputeOrder, Durations
from torchmm.pipelining.schedules.classic import gpipe, interleaved_1f1b
from torchmm.pipelining.schedules.separated import separated

LEAST_GAIN = 0.01
"""A searched order is taken if it promises at least this much more than the best natural or static
one, as long as nobody knows how exact predictions are (`balance.rates.Spread`)."""
SEPARATED = "separated"
"""How names of the natural order with a bound on microbatches in flight begin."""


@dataclass(frozen=True)
class SearchedOrder:
    """A step's schedule.

    Attributes:
        order: F and B of every rank.
        predicted_ms: of the step, without gathers and reductions of parameters.
        natural_ms: in natural order; where priorities alone do not keep that within memory, with a
            bound on the microbatches in flight; infinite if nothing does.
        static_ms: of the fastest static planner that fits; infinite if none does.
        planner: "search", "natural", or the static planner that the order comes from.
        peak_bytes: by rank.
        evaluations: of the search.
        segments: priorities that the order comes from; None for that of a static planner.
    """

    order: ComputeOrder
    predicted_ms: float
    natural_ms: float
    static_ms: float
    planner: str
    peak_bytes: tuple[int, ...]
    evaluations: int
    segments: Uint32s | None = field(default=None, compare=False)

    @property
    def speedup_over_default_order(self) -> float | None:
        """Natural order's time / this one's, less 1; None if there is no natural order."""
        if self.natural_ms == inf or self.predicted_ms == 0:
            return None
        return self.natural_ms / self.predicted_ms - 1


Seen = Callable[[float, Callable[[], SearchedOrder]], bool]
"""Is told between rounds of a search how long the best order so far takes, and how to make it;
whether to go on."""


class StepSearch:
    """One step's static orders, and what a search finds in addition.

    Args:
        graph: of a training step.
        costs: of the graph, with the memory limit.
        least_gain: share by which a searched order has to be faster than the natural and static
            ones to be taken.

    Raises:
        SimulationError: a cost is missing or no number.
    """

    def __init__(self, graph: StageGraph, costs: PlanCosts, least_gain: float = 0.0) -> None:
        self.dispatcher = Dispatcher(graph, costs)
        self.least_gain = least_gain
        self._bound_ms = lower_bound_ms(self.dispatcher)
        fitting = _fitting_static(self.dispatcher)
        self._static = min(fitting, key=lambda each: each[2].makespan_ms, default=None)
        bounded = (each[2].makespan_ms for each in fitting if each[0].startswith(SEPARATED))
        self._bounded_ms = min(bounded, default=inf)

    @property
    def fits(self) -> bool:
        """Whether anything fits into memory."""
        return self._static is not None or self.dispatcher.evaluate() < inf

    def search(self, budget: Budget, settings: Settings, seen: Seen | None = None) -> SearchedOrder:
        """The best order that is found within a budget, which is the search's alone.

        Args:
            seen: may end the search.

        Raises:
            ValueError: nothing fits into memory.
        """

        def on_round(found: SearchResult) -> bool:
            return seen is None or seen(found.makespan_ms, partial(self.best, found))

        found = search(
            self.dispatcher,
            budget,
            seed=settings.seed,
            workers=settings.workers,
            bound_ms=self._bound_ms,
            starts=settings.starts,
            on_round=on_round,
        )
        return self.best(found)

    def best(self, found: SearchResult | None = None) -> SearchedOrder:
        """The best of static orders, the natural one and what a search has found so far.

        Raises:
            ValueError: nothing fits into memory.
        """
        dispatcher = self.dispatcher
        natural_ms = dispatcher.evaluate() if found is None else found.natural_ms
        makespan_ms = natural_ms if found is None else found.makespan_ms
        evaluations = 1 if found is None else found.evaluations
        name, segments = ("natural", None) if found is None else ("search", found.order)
        static_ms = self._static[2].makespan_ms if self._static else inf
        if makespan_ms * (1 + self.least_gain) > min(natural_ms, static_ms):
            name, segments, makespan_ms = "natural", None, natural_ms
        if makespan_ms <= static_ms and makespan_ms < inf:
            best = dispatcher.dispatch(segments)
            order = best.order
            peak_bytes = best.peak_bytes
            segments = dispatcher.natural_order if segments is None else segments
        elif self._static is not None:
            name, order, (makespan_ms, peak_bytes, _) = self._static
            segments = None
        else:
            blocked = "; ".join(dispatcher.dispatch(segments).blocked)
            raise ValueError(
                "no schedule of the step fits in memory, even with one microbatch in flight: "
                + blocked
            )
        if natural_ms == inf:
            natural_ms = self._bounded_ms
        return SearchedOrder(
            order, makespan_ms, natural_ms, static_ms, name, peak_bytes, evaluations, segments
        )


def search_within_memory(
    graph: StageGraph, costs: PlanCosts, least_gain: float = LEAST_GAIN
) -> StepSearch:
    """A step to be searched within a share of the device's memory; where no order fits into that,
    ranks may use what the separated schedule would.

    Args:
        costs: with the device's memory as the limit; None: only the separated schedule's counts.
    """
    if costs.memory_limit_bytes is not None:
        limit = round(MEMORY_SHARE * costs.memory_limit_bytes)
        step = StepSearch(graph, replace(costs, memory_limit_bytes=limit), least_gain)
        if step.fits:
            return step
    return StepSearch(graph, limited_like_separated(graph, costs), least_gain)


def _fitting_static(dispatcher: Dispatcher) -> list[tuple[str, ComputeOrder, OrderTime]]:
    """Static orders that fit; if needed, with fewer and fewer microbatches in flight."""
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
    yield from bounded_orders(graph, durations)


def _is_chain(graph: StageGraph) -> bool:
    """Whether stages were made for schedules that go along a chain of them."""
    return all(s.virtual_stage >= 0 and len(s.ranks) == 1 for s in graph.layout.stages)


def bounded_orders(graph: StageGraph, durations: Durations) -> Iterator[tuple[str, ComputeOrder]]:
    """Separated schedules with ever fewer microbatches in flight, and what to call them.

    The last has one: no order of whole microbatches needs less memory.
    """
    for bound in range(min(2 * graph.layout.rank_count, graph.microbatches + 1) - 1, 0, -1):
        order = separated(graph, durations, bound)
        yield f"{SEPARATED}, at most {bound} microbatches in flight", order


def limited_like_separated(graph: StageGraph, costs: PlanCosts) -> PlanCosts:
    """The same costs where every rank has the memory that the separated schedule uses, or
    interleaved 1F1B where stages form a chain.

    For runs that state no limit: a searched schedule then needs no more memory than a static one.
    """
    unlimited = Dispatcher(graph, replace(costs, memory_limit_bytes=None))
    orders = [separated(graph, costs.compute_ms.__getitem__)]
    if _is_chain(graph):
        orders.append(interleaved_1f1b(graph))
    peaks = np.max([time_order(unlimited, order).peak_bytes for order in orders], axis=0)
    static = np.array(costs.static_bytes or (0,) * len(peaks))
    # One limit holds for all ranks: those that need less have more static bytes.
    raised = static + (peaks.max() - peaks)
    return replace(costs, static_bytes=tuple(raised.tolist()), memory_limit_bytes=int(peaks.max()))
