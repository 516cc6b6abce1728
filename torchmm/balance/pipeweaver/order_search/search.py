"""Searches the order of segments under which a step is shortest, within a budget: PipeWeaver §6.1.

    found = search(dispatcher, Budget(evaluations=2000), seed=0)
    order = dispatcher.dispatch(found.order).order

A candidate is a permutation of the step's segments; the dispatcher makes a schedule of it and times
it, so every candidate that fits into memory can be run. The search starts with
the natural order, keeps the best order, and may be stopped at any time: nothing that `search`
returns is worse than the natural order. With a budget of evaluations the result depends on
the seed and the number of workers alone; with one of seconds, on the machine too.

Workers are threads: an evaluation runs without Python's lock. They work in rounds, after each of
which all know the best order so far. Rejected: worker processes, which have to be started, fed and
ended for searches of a second.

Candidates that run out of memory are worse than any that does not, and the better the further they
come, so a search may begin where nothing fits. If nothing does in the end, `SearchResult.fits` is
False.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from torchmm.balance.compiled import Uint32s
from torchmm.balance.pipeweaver.order_search.annealing import Annealing, Evaluator, Strategy
from torchmm.balance.pipeweaver.order_search.dispatcher import Dispatcher

ROUND = 64
"""Evaluations of a worker between two exchanges."""
NEAR = 1e-9
"""Relative: as good as the bound."""


@dataclass(frozen=True)
class Budget:
    """When a search ends: as soon as either is spent.

    Attributes:
        evaluations: of all workers together.
        seconds: since the search began.

    Raises:
        ValueError: neither is given, or one is not positive.
    """

    evaluations: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        given = [value for value in (self.evaluations, self.seconds) if value is not None]
        if not given or min(given) <= 0:
            raise ValueError(
                f"a budget of {self.evaluations} evaluations and {self.seconds} seconds; set "
                "at least one of them above 0"
            )

    def spent_share(self, evaluations: int, seconds: float) -> float:
        """How much of it is used up, 1 and more at the end."""
        shares = [0.0]
        if self.evaluations is not None:
            shares.append(evaluations / self.evaluations)
        if self.seconds is not None:
            shares.append(seconds / self.seconds)
        return max(shares)

    def part(self, share: float) -> Budget:
        """A share of it."""
        return Budget(
            None if self.evaluations is None else max(1, round(share * self.evaluations)),
            None if self.seconds is None else share * self.seconds,
        )


@dataclass(frozen=True)
class Settings:
    """How to search.

    Attributes:
        seed: of all that is random.
        workers: threads; at most half of the machine's cores are used.
        starts: orders of segments that are tried first, such as what was good in steps like this.
    """

    seed: int = 0
    workers: int = 1
    starts: Sequence[Uint32s] = ()


@dataclass(frozen=True)
class SearchResult:
    """What a search came to.

    Attributes:
        order: of the segments, those with the highest priority first; for `Dispatcher.dispatch`.
        makespan_ms: of the step in this order; infinite if it does not fit into memory.
        natural_ms: in natural order; infinite if that does not fit.
        evaluations: that were made.
    """

    order: Uint32s
    makespan_ms: float
    natural_ms: float
    evaluations: int

    @property
    def fits(self) -> bool:
        """Whether any order was found with which the step can be finished within memory."""
        return self.makespan_ms < float("inf")


def search(
    dispatcher: Dispatcher,
    budget: Budget,
    *,
    seed: int = 0,
    workers: int = 1,
    bound_ms: float = 0.0,
    starts: Sequence[Uint32s] = (),
    on_round: Callable[[SearchResult], bool] | None = None,
    strategy: Callable[[Evaluator, np.random.Generator], Strategy] = Annealing,
) -> SearchResult:
    """Return the best order of segments found within a budget.

    Args:
        dispatcher: of the step, with its costs and memory limits.
        budget: when to stop.
        seed: of all that is random.
        workers: threads; at most half of the machine's cores are used.
        bound_ms: a time that no order undercuts (`lower_bound_ms`): the search ends there.
        starts: orders of segments that are tried first.
        on_round: called between rounds with what was found so far; the search ends if it returns
            False.
        strategy: of every worker; benchmarks compare others.

    Raises:
        ValueError: workers is less than 1.
    """
    if workers < 1:
        raise ValueError(f"workers = {workers}; must be 1 or more")
    run = _Run(dispatcher, budget, bound_ms)
    count = min(workers, max(1, (os.cpu_count() or 1) // 2))
    evaluators = [Evaluator(dispatcher) for _ in range(count)]
    for order in starts:
        evaluators[0].score(order)
    seeds = np.random.SeedSequence(seed).spawn(count)
    made: list[Strategy] = [
        strategy(evaluator, np.random.default_rng(own))
        for evaluator, own in zip(evaluators, seeds, strict=True)
    ]
    with ThreadPoolExecutor(count) as pool:
        while run.goes_on(evaluators):
            share = run.share(evaluators)
            each = run.next_round(evaluators)
            if count == 1:
                made[0].advance(each[0], share)
            else:
                list(pool.map(lambda own, n, share=share: own.advance(n, share), made, each))
            best = run.best(evaluators)
            if on_round is not None and not on_round(run.found(evaluators)):
                break
            for own in made:
                own.adopt(best)
    return run.found(evaluators)


class _Run:
    """Budget and begin of one search."""

    def __init__(self, dispatcher: Dispatcher, budget: Budget, bound_ms: float) -> None:
        self.budget, self.bound_ms = budget, bound_ms
        self.begin_s = time.perf_counter()
        self.natural_ms = dispatcher.evaluate()

    def evaluations(self, evaluators: list[Evaluator]) -> int:
        return sum(evaluator.evaluations for evaluator in evaluators)

    def share(self, evaluators: list[Evaluator]) -> float:
        seconds = time.perf_counter() - self.begin_s
        return self.budget.spent_share(self.evaluations(evaluators), seconds)

    def goes_on(self, evaluators: list[Evaluator]) -> bool:
        exhausted = all(evaluator.exhausted for evaluator in evaluators)
        optimal = self.best(evaluators).best_score <= self.bound_ms * (1 + NEAR)
        return not exhausted and not optimal and self.share(evaluators) < 1.0

    def next_round(self, evaluators: list[Evaluator]) -> list[int]:
        """Evaluations of every worker."""
        left = ROUND * len(evaluators)
        if self.budget.evaluations is not None:
            left = min(left, self.budget.evaluations - self.evaluations(evaluators))
        count = len(evaluators)
        return [left // count + (i < left % count) for i in range(count)]

    def best(self, evaluators: list[Evaluator]) -> Evaluator:
        """The evaluator with the best order; the first of several."""
        return min(evaluators, key=lambda evaluator: evaluator.best_score)

    def found(self, evaluators: list[Evaluator]) -> SearchResult:
        best = self.best(evaluators)
        evaluations = self.evaluations(evaluators)
        return SearchResult(best.best.copy(), best.best_ms, self.natural_ms, evaluations)
