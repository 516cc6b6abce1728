"""Search for the segment order with the shortest step within a budget (PipeWeaver §6.1).

    found = search(dispatcher, Budget(evaluations=2000), seed=0)
    order = dispatcher.dispatch(found.order).order

A candidate is a permutation of the segments of the step. The dispatcher converts it to a schedule
and times it, so every candidate that fits into memory can run. The search starts with the default
order, stores the best order, and can be stopped at any time. Its result is never worse than the
default order. With a budget of evaluations, the result depends only on the seed and the number of
workers. With a time limit, it also depends on the machine.

Workers are threads, because an evaluation runs without the GIL. They synchronize the best order
after each round. Worker processes would have to be started and stopped for searches of one second.

Candidates that run out of memory are worse than all others, and better the more actions they run. A
search can therefore start although no candidate fits. If none fits at the end,
`OrderSearchResult.fits` is False.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from torchmm.balance.numba_utils import Uint32s
from torchmm.balance.pipeweaver.schedule_search.annealing import Annealing, Evaluator, Strategy
from torchmm.balance.pipeweaver.schedule_search.dispatcher import Dispatcher

ROUND_EVALUATIONS = 64
"""Evaluations of a worker between two synchronizations."""
BOUND_TOLERANCE = 1e-9
"""Relative tolerance within which a time equals the bound."""


@dataclass(frozen=True)
class SearchBudget:
    """Limits of a search. The search stops at the first limit.

    Attributes:
        evaluations: Maximum number of evaluations of all workers together.
        seconds: Maximum time since the start of the search.

    Raises:
        ValueError: No limit is set, or a limit is not positive.
    """

    evaluations: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        limits = [value for value in (self.evaluations, self.seconds) if value is not None]
        if not limits or min(limits) <= 0:
            raise ValueError(
                f"a budget of {self.evaluations} evaluations and {self.seconds} seconds; set "
                "at least one of them above 0"
            )

    def used_fraction(self, evaluations: int, seconds: float) -> float:
        """Return the used fraction of the budget. At least 1 at the end."""
        shares = [0.0]
        if self.evaluations is not None:
            shares.append(evaluations / self.evaluations)
        if self.seconds is not None:
            shares.append(seconds / self.seconds)
        return max(shares)

    def fraction(self, share: float) -> SearchBudget:
        """Return a fraction of the budget."""
        return SearchBudget(
            None if self.evaluations is None else max(1, round(share * self.evaluations)),
            None if self.seconds is None else share * self.seconds,
        )


@dataclass(frozen=True)
class SearchSettings:
    """Settings of a search.

    Attributes:
        seed: Random seed.
        workers: Number of threads. At most half of the cores of the machine are used.
        starts: Orders of segments that are evaluated first, such as those of similar steps.
    """

    seed: int = 0
    workers: int = 1
    starts: Sequence[Uint32s] = ()


@dataclass(frozen=True)
class OrderSearchResult:
    """Result of a search.

    Attributes:
        order: Order of segments for `Dispatcher.dispatch`, highest priority first.
        makespan_ms: Step time in this order. Infinite if it does not fit into memory.
        default_order_ms: Step time in the default order. Infinite if it does not fit into memory.
        evaluations: Number of evaluations.
    """

    order: Uint32s
    makespan_ms: float
    default_order_ms: float
    evaluations: int

    @property
    def fits(self) -> bool:
        """True if an order that fits into memory was found."""
        return self.makespan_ms < float("inf")


def search_orders(
    dispatcher: Dispatcher,
    budget: SearchBudget,
    *,
    seed: int = 0,
    workers: int = 1,
    bound_ms: float = 0.0,
    starts: Sequence[Uint32s] = (),
    on_round: Callable[[OrderSearchResult], bool] | None = None,
    strategy: Callable[[Evaluator, np.random.Generator], Strategy] = Annealing,
) -> OrderSearchResult:
    """Return the best order of segments found within a budget.

    Args:
        dispatcher: Dispatcher of the step, with its costs and memory limits.
        budget: Limits of the search.
        seed: Random seed.
        workers: Number of threads. At most half of the cores of the machine are used.
        bound_ms: Lower bound of all orders (`lower_bound_ms`). The search stops when it reaches the
            bound.
        starts: Orders of segments that are evaluated first.
        on_round: Called between rounds with the result so far. The search stops if it returns
            False.
        strategy: Strategy of every worker. Benchmarks compare several.

    Raises:
        ValueError: `workers` is less than 1.
    """
    if workers < 1:
        raise ValueError(f"workers = {workers}; must be 1 or more")
    run = _SearchRun(dispatcher, budget, bound_ms)
    count = min(workers, max(1, (os.cpu_count() or 1) // 2))
    evaluators = [Evaluator(dispatcher) for _ in range(count)]
    for order in starts:
        evaluators[0].score(order)
    seeds = np.random.SeedSequence(seed).spawn(count)
    strategies: list[Strategy] = [
        strategy(evaluator, np.random.default_rng(item))
        for evaluator, item in zip(evaluators, seeds, strict=True)
    ]
    with ThreadPoolExecutor(count) as pool:
        while run.should_continue(evaluators):
            share = run.share(evaluators)
            counts = run.next_round(evaluators)
            if count == 1:
                strategies[0].advance(counts[0], share)
            else:
                list(
                    pool.map(
                        lambda item, n, share=share: item.advance(n, share), strategies, counts
                    )
                )
            best = run.best(evaluators)
            if on_round is not None and not on_round(run.result(evaluators)):
                break
            for item in strategies:
                item.adopt(best)
    return run.result(evaluators)


class _SearchRun:
    """Budget and start time of a search."""

    def __init__(self, dispatcher: Dispatcher, budget: SearchBudget, bound_ms: float) -> None:
        self.budget, self.bound_ms = budget, bound_ms
        self.begin_s = time.perf_counter()
        self.default_order_ms = dispatcher.evaluate()

    def evaluations(self, evaluators: list[Evaluator]) -> int:
        return sum(evaluator.evaluations for evaluator in evaluators)

    def share(self, evaluators: list[Evaluator]) -> float:
        seconds = time.perf_counter() - self.begin_s
        return self.budget.used_fraction(self.evaluations(evaluators), seconds)

    def should_continue(self, evaluators: list[Evaluator]) -> bool:
        exhausted = all(evaluator.exhausted for evaluator in evaluators)
        optimal = self.best(evaluators).best_score <= self.bound_ms * (1 + BOUND_TOLERANCE)
        return not exhausted and not optimal and self.share(evaluators) < 1.0

    def next_round(self, evaluators: list[Evaluator]) -> list[int]:
        """Return the number of evaluations of every worker in the next round."""
        remaining = ROUND_EVALUATIONS * len(evaluators)
        if self.budget.evaluations is not None:
            remaining = min(remaining, self.budget.evaluations - self.evaluations(evaluators))
        count = len(evaluators)
        return [remaining // count + (i < remaining % count) for i in range(count)]

    def best(self, evaluators: list[Evaluator]) -> Evaluator:
        """Return the evaluator with the best order, or the first of several."""
        return min(evaluators, key=lambda evaluator: evaluator.best_score)

    def result(self, evaluators: list[Evaluator]) -> OrderSearchResult:
        best = self.best(evaluators)
        evaluations = self.evaluations(evaluators)
        return OrderSearchResult(best.best.copy(), best.best_ms, self.default_order_ms, evaluations)
