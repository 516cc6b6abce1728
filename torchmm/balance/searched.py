"""The searched schedule of a step: the best of what search, natural order and static planners give.

PipeWeaver's pipeline schedule for one batch (§6.1, §6.2), on modality-separated stages. Static
planners that work on the same stages are GPipe and the separated schedule with a bound on the
microbatches in flight; whatever the search comes to, the result is not slower than any of them that
fits into memory.

Bounding the microbatches in flight is also what never runs out of memory half-way: a microbatch
that has begun can always be finished. So there is a plan whenever one microbatch at a time fits,
even if no priorities do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from torchmm.balance.compiled import Uint32s
from torchmm.balance.dispatch import Dispatcher
from torchmm.balance.order_times import OrderTime, time_order
from torchmm.balance.plan_costs import PlanCosts
from torchmm.balance.search import Budget, Found, Improvement, search
from torchmm.pipelining.classic import gpipe
from torchmm.pipelining.graph import StageGraph
from torchmm.pipelining.plan import ComputeOrder
from torchmm.pipelining.separated import separated


@dataclass(frozen=True)
class SearchedOrder:
    """A step's schedule.

    Attributes:
        order: F and B of every rank.
        predicted_ms: of the step, without gathers and reductions of parameters.
        natural_ms: in natural order; infinite if that does not fit into memory.
        static_ms: of the fastest static planner that fits; infinite if none does.
        planner: "search", or the static planner that the order comes from.
        peak_bytes: by rank.
        found: what the search came to.
    """

    order: ComputeOrder
    predicted_ms: float
    natural_ms: float
    static_ms: float
    planner: str
    peak_bytes: tuple[int, ...]
    found: Found

    @property
    def gain_over_natural(self) -> float | None:
        """Natural order's time / this one's, less 1; None if the natural order does not fit."""
        if self.natural_ms == float("inf") or self.predicted_ms == 0:
            return None
        return self.natural_ms / self.predicted_ms - 1


def plan_searched(
    graph: StageGraph,
    costs: PlanCosts,
    budget: Budget,
    *,
    strategy: str = "annealing",
    seed: int = 0,
    workers: int = 1,
    on_round: Callable[[Uint32s, Improvement], bool] | None = None,
) -> SearchedOrder:
    """The best order that is found within a budget, which is the search's alone.

    Args:
        graph: of a training step.
        costs: of the graph, with the memory limit.
        strategy, seed, workers, on_round: see `search`.

    Raises:
        ValueError: not even one microbatch at a time fits into memory.
        SimulationError: a cost is missing or no number.
    """
    dispatcher = Dispatcher(graph, costs)
    found = search(
        dispatcher, budget, strategy=strategy, seed=seed, workers=workers, on_round=on_round
    )
    return finish(dispatcher, found)


def finish(dispatcher: Dispatcher, found: Found) -> SearchedOrder:
    """The better of a search's order and the static ones.

    Raises:
        ValueError: nothing fits into memory.
    """
    static = _fastest_static(dispatcher)
    static_ms = static[2].makespan_ms if static else float("inf")
    if found.makespan_ms <= static_ms and found.fits:
        best = dispatcher.dispatch(found.order)
        name, order, peak_bytes, predicted_ms = (
            "search", best.order, best.peak_bytes, best.makespan_ms,
        )  # fmt: skip
    elif static is not None:
        name, order, (predicted_ms, peak_bytes, _) = static
    else:
        blocked = dispatcher.dispatch(found.order).blocked
        raise ValueError(
            "no order of the step fits into memory, not even one microbatch at a time: "
            + "; ".join(blocked)
        )
    return SearchedOrder(order, predicted_ms, found.natural_ms, static_ms, name, peak_bytes, found)


def _fastest_static(dispatcher: Dispatcher) -> tuple[str, ComputeOrder, OrderTime] | None:
    """Of those that fit; where none does, of fewer and fewer microbatches in flight."""
    fitting: list[tuple[str, ComputeOrder, OrderTime]] = []
    for name, order in _static_orders(dispatcher):
        if fitting and name.startswith("separated, at most"):
            break
        timed = time_order(dispatcher, order)
        if timed.fits:
            fitting.append((name, order, timed))
    return min(fitting, key=lambda each: each[2].makespan_ms, default=None)


def _static_orders(dispatcher: Dispatcher) -> Iterator[tuple[str, ComputeOrder]]:
    graph = dispatcher.graph
    durations = dispatcher.costs.compute_ms
    yield "gpipe", gpipe(graph)
    yield "separated", separated(graph, durations.__getitem__)
    for bound in range(min(2 * graph.layout.rank_count, graph.microbatches + 1) - 1, 0, -1):
        order = separated(graph, durations.__getitem__, bound)
        yield f"separated, at most {bound} microbatches in flight", order


def limited_like_separated(graph: StageGraph, costs: PlanCosts) -> PlanCosts:
    """The same costs where every rank has the memory that the separated schedule uses.

    For runs that state no limit: a searched schedule then needs no more memory than a static one.
    """
    unlimited = Dispatcher(graph, replace(costs, memory_limit_bytes=None))
    order = separated(graph, costs.compute_ms.__getitem__)
    peaks = np.array(time_order(unlimited, order).peak_bytes)
    static = np.array(costs.static_bytes or (0,) * len(peaks))
    # One limit holds for all ranks: those that need less have more static bytes.
    raised = static + (peaks.max() - peaks)
    return replace(costs, static_bytes=tuple(raised.tolist()), memory_limit_bytes=int(peaks.max()))
