"""Results of the search for parallelism degrees."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

from torchmm.balance.recipe_simulation.step_simulator import SimulatedStepReport
from torchmm.balance.search.plan_space import CandidatePlan
from torchmm.balance.simulation.simulator import SimulatedStep
from torchmm.common.errors import ConfigError
from torchmm.costs.devices import USABLE_MEMORY_FRACTION
from torchmm.recipe.recipe import Recipe


def fits(step: SimulatedStep) -> bool:
    """Return True if every rank uses at most `USABLE_MEMORY_FRACTION` of its memory."""
    limit = step.costs.memory_limit_bytes
    return limit is None or max(step.peak_bytes) <= USABLE_MEMORY_FRACTION * limit


@dataclass(frozen=True)
class SimulatedPlan:
    """Simulated plan.

    Attributes:
        method: One of `METHODS`.
        recipe: Recipe of the plan.
        devices: Number of devices that it uses.
        sizes: Description of the parallelism degrees.
        report: Simulated first step.
        is_short_search: Whether the schedule was searched for a shorter time than in a run or dry
            run.
        plan: Changes of the recipe.
    """

    method: str
    recipe: Recipe
    devices: int
    sizes: str
    report: SimulatedStepReport
    is_short_search: bool
    plan: CandidatePlan

    @property
    def step_ms(self) -> float:
        """Time of the first step with its update. Infinite if the plan does not fit."""
        step = self.report.step
        is_fitting = step is not None and fits(step)
        return self.report.iteration_ms if is_fitting else inf


@dataclass(frozen=True)
class PlanSearchResult:
    """Results of a search.

    Attributes:
        best_by_method: Fastest plan of each method, or the reason why there is none.
        simulated: Number of simulated plans by method.
        considered: Number of plans in the search space by method.
        bound_ms: Lower bound of the steps of all plans that were considered.
        complete: Whether every considered plan was simulated or excluded by its bound, its memory
            or the bubble scheduler. If False, the time or effort limit stopped the search.
        seconds: CPU time of the search.
    """

    best_by_method: Mapping[str, SimulatedPlan | str]
    simulated: Mapping[str, int]
    considered: Mapping[str, int]
    bound_ms: float
    complete: bool
    seconds: float

    @property
    def best(self) -> SimulatedPlan | None:
        """Fastest plan that fits. None if there is none."""
        return self.ranked[0] if self.ranked else None

    @property
    def ranked(self) -> list[SimulatedPlan]:
        """Fastest plan of each method, sorted by step time."""
        candidates = [
            candidate
            for candidate in self.best_by_method.values()
            if isinstance(candidate, SimulatedPlan)
        ]
        return sorted(candidates, key=lambda candidate: candidate.step_ms)


def find_best(result: PlanSearchResult, devices: int) -> SimulatedPlan:
    """Return the best plan of a search.

    Args:
        result: Result of the search.
        devices: Number of devices in the cluster.

    Raises:
        ConfigError: No plan fits, or none was found before the search reached its limit.
    """
    if result.best is not None:
        return result.best
    reasons = "; ".join(f"{name}: {why}" for name, why in result.best_by_method.items())
    if not result.complete:
        raise ConfigError(
            f"the search found no plan for {devices} devices within its time limit "
            f"({reasons}); use more devices or shorter sequences, or a higher --budget-s of "
            "torchmm plan"
        )
    raise ConfigError(
        f"no plan fits on {devices} devices ({reasons}); use more devices, shorter sequences, or "
        "freeze modules"
    )
