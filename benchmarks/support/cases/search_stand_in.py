"""A stand-in for `torchmm.planning.search.search_plans`: few plans of shared ranks, enumerated.

Delete this file when that module exists, and import `search_plans` and `Candidate` from it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from support.cases.plain_methods import (
    NODE,
    best_plain,
    describe,
    fits,
    recomputing,
    simulate_plain,
)
from support.papers.paper_cells import in_one_chain
from torchmm.balance.costs.profiles import Profile
from torchmm.planning.forecast import Forecast, StepSample
from torchmm.recipe.recipe import Recipe

METHODS = ("fsdp", "chain", "separated", "colocated", "disaggregated")
SCHEDULES = {"chain": ("interleaved_1f1b",), "separated": ("separated", "searched")}
PIPELINES = (4, 8, 2, 16)


@dataclass(frozen=True)
class Candidate:
    """A simulated plan."""

    method: str
    recipe: Recipe
    devices: int
    sizes: str
    forecast: Forecast

    @property
    def step_ms(self) -> float:
        """Time of a step; infinite if it does not fit into memory."""
        step = self.forecast.step
        return self.forecast.iteration_ms if step is not None and fits(step) else float("inf")


@dataclass(frozen=True)
class SearchResult:
    """The fastest plan of each method, or the reason why there is none."""

    best_by_method: Mapping[str, Candidate | str]
    complete: bool
    seconds: float

    @property
    def best(self) -> Candidate | None:
        """The fastest plan that fits; None if there is none."""
        found = [each for each in self.best_by_method.values() if isinstance(each, Candidate)]
        return min(found, key=lambda each: each.step_ms, default=None)


def search_plans(
    recipe: Recipe,
    devices: int,
    profile: Profile,
    *,
    methods: Sequence[str] = METHODS,
    budget_s: float = 20.0,
    sample: StepSample | None = None,
) -> SearchResult:
    """Return the fastest of few plans of each method; "colocated" and "disaggregated" are missing.

    Args:
        recipe: Recipe whose sizes, schedule and recomputation are chosen.
        devices: Number of devices.
        profile: Profile of one device.
        methods: Methods to search.
        budget_s: Time limit of each method in seconds.
        sample: Model and first step of the recipe.
    """
    started = time.monotonic()
    sample = StepSample(recipe) if sample is None else sample
    found: dict[str, Candidate | str] = {}
    for method in methods:
        if method == "fsdp":
            options = best_plain(recipe, devices, profile, sample).values()
            candidates = [
                Candidate(method, option.recipe, devices, describe(option.recipe), option.forecast)
                for option in options
                if option is not None
            ]
        else:
            deadline = time.monotonic() + budget_s / len(methods)
            candidates = list(_pipelines(recipe, devices, profile, sample, method, deadline))
        best = min(candidates, key=lambda each: each.step_ms, default=None)
        fine = best is not None and best.step_ms < float("inf")
        found[method] = best if best is not None and fine else "no plan was found that fits"
    return SearchResult(found, False, time.monotonic() - started)


def _pipelines(
    recipe: Recipe, devices: int, profile: Profile, sample: StepSample, method: str, deadline: float
) -> Iterator[Candidate]:
    """Yield plans of one method until the deadline has passed."""
    for schedule, pipeline, tensor in product(
        SCHEDULES.get(method, ()), PIPELINES, (1, 2, 4, NODE)
    ):
        sized = in_one_chain(
            recomputing(recipe, "tuned"),
            schedule=schedule,
            pipeline=pipeline,
            tensor=tensor,
            virtual_stages=2 if method == "chain" else 1,
            sequence_parallel=tensor > 1,
        )
        option = simulate_plain(sized, devices, profile, sample)
        if option is not None:
            sizes = f"pipeline {pipeline}, tensor {tensor}"
            yield Candidate(method, option.recipe, devices, sizes, option.forecast)
        if time.monotonic() > deadline:
            return
