"""The orchestrator: the plan whose simulated step is fastest, and how far from the best it may be.

    judged = search_plans(recipe, devices=1296, profile=load_profile("a800"))
    judged.best.recipe, judged.best.forecast, judged.bound_s

Branch and bound over sizes of all units, schedules, stages of the LLM per rank and recomputation.
What runs is what ranks: every plan that is considered is planned as a run plans it, its messages
and reordering included, and simulated (`Forecaster`); the formula of DistTrain §5 says in which
order plans are tried, and a bound that no simulation falls below (`balance.orchestration.bounds`)
when to stop. So time and memory of what is chosen are those that a dry run of the written recipe
shows, and nothing else answers what fits.

The order: first, with a part of the effort, plans that use all devices (for DistTrain's 15B on
1,296 a short search among all plans finds one that takes 1.3 times as long), then all; of each, the
formula's best plans, then the best guesses. Where one turns out to be the fastest under its
schedule so far, its sizes are tried next under other schedules, and with layers tuned to memory.
Effort is counted in actions, not in seconds, so that every rank that plans for itself finds the
same. If it ends early, no plan is faster than the least bound of those that were not tried.

Rejected: the formula's order alone, which is several per cent off the simulator in time and more in
memory; deadlines by the clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from math import inf

from torchmm.balance.costs.devices import MEMORY_SHARE
from torchmm.balance.costs.operators import Profile
from torchmm.balance.orchestration.search import UnitSizes, orchestrate
from torchmm.balance.orchestration.space import Band, PlanGuess, PlanSpace, Variant
from torchmm.balance.simulation.simulator import SimulatedStep
from torchmm.common.errors import ConfigError
from torchmm.planning.apart.problem import TUNED, plan_variants, sized_recipe
from torchmm.planning.forecast import Forecast, Forecaster, StepSample
from torchmm.recipe.check import find_problems
from torchmm.recipe.recipe import Recipe

EFFORT = 1_000_000
"""Actions to simulate, at most, and what plans cost besides."""
EFFORT_AT_START = 100_000
"""The same where a run that has been started waits for it."""
EXACT_SHARE = 1 / 4
"""Of the effort, for plans that use all devices, before others."""
EFFORT_OF_A_PLAN = 2_000
TUNING_EFFORT = 2
"""Times as much as without, where layers are tuned."""
WIDER = 1.15
"""Bands of bounds: the next one's limit over the last one's."""
LAYOUTS = 400
"""Of the LLM, in a band at most."""


NEXT, LIKELY, LATER, UNLIKELY = range(4)
"""Of plans to try."""
NEAR = 1.05
"""Estimates that are tried before the next band is looked at, over the best step."""
NEIGHBOURS = 4
FAVOURITES = 2
"""Of the formula, besides its best, for each way to recompute."""


@dataclass(frozen=True)
class Candidate:
    """One way of placing modules, simulated on the recipe's first step.

    Attributes:
        placement: as in recipes.
        recipe: that says so.
        devices: that it uses.
        sizes: tensor x data x pipeline, in words.
    """

    placement: str
    recipe: Recipe
    devices: int
    sizes: str
    forecast: Forecast

    @property
    def step_ms(self) -> float:
        """Time of the first step with its update; infinite where none fits."""
        step = self.forecast.step
        return inf if step is None or not fits(step) else self.forecast.iteration_ms


def fits(step: SimulatedStep) -> bool:
    """Whether every rank keeps to `MEMORY_SHARE` of its memory."""
    limit = step.costs.memory_limit_bytes
    return limit is None or max(step.peak_bytes) <= MEMORY_SHARE * limit


@dataclass(frozen=True)
class JudgedPlans:
    """What was found.

    Attributes:
        candidates: all that were simulated, the fastest that fits first.
        bound_s: no plan's step is shorter, simulated or not; infinite where there is no plan.
        left: whether plans were left that might have been faster.
    """

    candidates: tuple[Candidate, ...]
    bound_s: float
    left: bool

    @property
    def best(self) -> Candidate | None:
        """The fastest that fits; None: none does."""
        first = self.candidates[0] if self.candidates else None
        return first if first is not None and first.step_ms < inf else None

    @property
    def within(self) -> float:
        """By which share of it the best may be slower than some other plan, at most."""
        best = self.best
        return inf if best is None else max(0.0, best.step_ms / 1e3 / self.bound_s - 1)


def search_plans(
    recipe: Recipe,
    devices: int,
    profile: Profile,
    *,
    exact: bool = False,
    effort: float = EFFORT,
    limits: Mapping[str, int] | None = None,
    sample: StepSample | None = None,
    variants: Sequence[Variant] | None = None,
) -> JudgedPlans:
    """The fastest plan for a recipe's modules on devices of their own.

    Args:
        devices: of the cluster.
        profile: of one of them.
        exact: whether none of them may stay idle.
        effort: actions to simulate, at most.
        limits: devices that units may have at most, by name.
        sample: of the recipe, if it has been made before.
        variants: likewise.

    Raises:
        ConfigError: as `orchestration_problem`; no plan can be run.
    """
    sample = StepSample(recipe) if sample is None else sample
    if variants is None:
        variants = plan_variants(recipe, devices, profile, sample)
    first_effort = 0.0 if exact else EXACT_SHARE * effort
    space = PlanSpace(variants, exact=exact, limits=limits)
    search = _Search(recipe, profile, sample, variants, space, effort - first_effort, limits)
    if not exact:
        # A small part of all plans, and seldom worse: an effort that is soon spent goes far in it.
        whole = PlanSpace(variants, exact=True, limits=limits)
        first = _Search(recipe, profile, sample, variants, whole, first_effort, limits)
        first.run()
        search.go_on_from(first)
    search.run()
    search.compare_as_sampled()
    return search.result()


PlanKey = tuple[int, tuple[UnitSizes, ...]]
"""Variant and sizes."""


@dataclass
class _Search:
    """State of one search."""

    recipe: Recipe
    profile: Profile
    sample: StepSample
    variants: Sequence[Variant]
    space: PlanSpace
    effort: float
    limits: Mapping[str, int] | None
    found: list[Candidate] = field(default_factory=list)
    best_ms: float = inf
    best_of: dict[tuple[str, int], float] = field(default_factory=dict)
    """By schedule and stages, whether it fits or not."""
    queue: list[tuple[int, float, int, PlanGuess]] = field(default_factory=list)
    """By priority and guess."""
    pushed: int = 0
    layouts: dict[tuple[int, UnitSizes], list[PlanGuess]] = field(default_factory=dict)
    """Plans listed by variant and layout of the LLM."""
    waiting: dict[PlanKey, PlanGuess] = field(default_factory=dict)
    """Of the plans listed, those that are still to be simulated."""
    tried: set[PlanKey] = field(default_factory=set)
    passed_s: float = inf
    """The least bound of plans that were not listed."""

    def go_on_from(self, first: _Search) -> None:
        """Knows the plans that another search with the same variants has simulated, and has what
        it left of its effort."""
        self.effort += first.effort
        self.found = list(first.found)
        self.tried = set(first.tried)
        self.best_ms = first.best_ms
        self.best_of = dict(first.best_of)

    def run(self) -> None:
        """Band after band, until no bound is below the best step, or the effort is spent."""
        self._favourites()
        limit_s = rest_s = self.space.least_s
        while rest_s < inf and 1e3 * rest_s < self.best_ms and self.effort > 0:
            limit_s = max(limit_s * WIDER, rest_s * (1 + 1e-9))
            band = self.space.band(limit_s, LAYOUTS)
            self._list(band)
            rest_s = band.beyond_s
            self._simulate(NEAR)
        self._simulate(inf)
        self.passed_s = min(self.passed_s, rest_s)

    def _favourites(self) -> None:
        """The formula's best plans, of different layouts of the LLM, before all others: bands take
        long to come to what it finds at once where there are a thousand devices."""
        for index, variant in enumerate(self.variants):
            if variant.recompute == TUNED or (variant.schedule, variant.stages) != ("1f1b", 1):
                continue
            try:
                found = orchestrate(variant.problem, alternatives=FAVOURITES, limits=self.limits)
            except ValueError:  # nothing fits with this recomputation
                continue
            for plan in (found.best, *found.alternatives):
                guess = self.space.plan(index, tuple(unit.sizes for unit in plan.units))
                if guess is not None:
                    self._push(guess, NEXT)
        self._simulate(NEAR)

    def compare_as_sampled(self) -> None:
        """The best plan once more, with batches as they are sampled: orders are found for a chain,
        and may be worse than none for what runs."""
        best = min(self.found, key=lambda each: each.step_ms, default=None)
        if best is None or best.step_ms == inf:
            return
        data = best.recipe.data.model_copy(update={"reorder": "none"})
        own = best.recipe.model_copy(update={"data": data})
        forecaster = Forecaster(own, best.devices, self.profile, sample=self.sample)
        forecast = forecaster.forecast_parallel(own.parallel)
        self.found.append(replace(best, recipe=own, forecast=forecast))
        self.best_ms = min(self.best_ms, self.found[-1].step_ms)

    def _list(self, band: Band) -> None:
        self.passed_s = min(self.passed_s, band.open_s)
        for plan in band.plans:
            if (plan.variant, plan.sizes) not in self.tried:
                self.waiting[plan.variant, plan.sizes] = plan
                of_layout = self.layouts.setdefault(self._layout(plan), [])
                of_layout.append(plan)
                likely = LIKELY if plan.place == 0 else LATER
                self._push(plan, likely if plan.likely else UNLIKELY)

    def _layout(self, plan: PlanGuess) -> tuple[int, UnitSizes]:
        return plan.variant, plan.sizes[self.variants[plan.variant].problem.llm]

    def _push(self, plan: PlanGuess, priority: int) -> None:
        guess = plan.bound_s if priority == UNLIKELY else plan.estimate_s
        self.pushed += 1
        heappush(self.queue, (priority, guess, self.pushed, plan))

    def _simulate(self, near: float) -> None:
        """Plans in their order; with a finite limit, those whose estimates are at most so many
        times the best step."""
        while self.queue and self.effort > 0:
            priority, guess, _, plan = self.queue[0]
            later = priority >= LATER or (priority == LIKELY and 1e3 * guess > near * self.best_ms)
            if later and near < inf:
                return
            heappop(self.queue)
            key = plan.variant, plan.sizes
            if key in self.tried or 1e3 * plan.bound_s >= self.best_ms:
                continue
            self.waiting.pop(key, None)
            self.tried.add(key)
            candidate = self._judge(plan)
            if candidate is None:
                continue
            self.found.append(candidate)
            self.best_ms = min(self.best_ms, candidate.step_ms)
            own = self.variants[plan.variant]
            of_schedule = own.schedule, own.stages
            if candidate.forecast.iteration_ms < self.best_of.get(of_schedule, inf):
                self.best_of[of_schedule] = candidate.forecast.iteration_ms
                self._try_next(plan, tuned=candidate.step_ms == inf or own.recompute != "none")

    def _try_next(self, plan: PlanGuess, *, tuned: bool) -> None:
        """The plan's sizes under other schedules, and with layers tuned to memory; the LLM's layout
        with other sizes of the others."""
        own = self.variants[plan.variant]
        for other in self.layouts.get(self._layout(plan), [])[:NEIGHBOURS]:
            self._push(other, NEXT)
        for index, variant in enumerate(self.variants):
            alike = variant.schedule == own.schedule and variant.stages == own.stages
            if (tuned or not alike) and variant.recompute == (TUNED if alike else own.recompute):
                sibling = self.space.plan(index, plan.sizes)
                if sibling is not None:
                    self._push(sibling, NEXT)

    def _judge(self, plan: PlanGuess) -> Candidate | None:
        """The plan, simulated; None: it cannot be run."""
        variant = self.variants[plan.variant]
        names = [unit.name for unit in variant.problem.units]
        self.effort -= EFFORT_OF_A_PLAN
        candidate = judge(
            self.recipe,
            dict(zip(names, plan.sizes, strict=True)),
            self.profile,
            self.sample,
            schedule=variant.schedule,
            stages=variant.stages,
            recompute=variant.recompute,
        )
        step = None if candidate is None else candidate.forecast.step
        if step is not None:
            factor = TUNING_EFFORT if variant.recompute == TUNED else 1
            self.effort -= factor * len(step.records)
        return candidate

    def result(self) -> JudgedPlans:
        """What has been found."""
        best_s = self.best_ms / 1e3
        unknown = [self.passed_s, *(plan.bound_s for plan in self.waiting.values())]
        bound_s = min(best_s, *unknown)
        found = sorted(self.found, key=lambda each: (each.step_ms, each.forecast.iteration_ms))
        return JudgedPlans(tuple(found), bound_s, bound_s < best_s)


def judge(
    recipe: Recipe,
    sizes: Mapping[str, UnitSizes],
    profile: Profile,
    sample: StepSample,
    **variant: str | int | None,
) -> Candidate | None:
    """One plan, as a run would plan it, simulated; None: it cannot be run.

    Args:
        sizes: by module.
        variant: of `sized_recipe`.
    """
    own = sized_recipe(recipe, sizes, **variant)  # type: ignore[arg-type]
    closed = own.parallel.model_copy(update={"orchestrate": False})
    own = own.model_copy(update={"parallel": closed})
    devices = sum(size.devices for size in sizes.values())
    words = ", ".join(f"{n} {s.tensor}x{s.data}x{s.pipeline}" for n, s in sizes.items())
    if find_problems(own, devices):
        return None
    try:
        forecast = Forecaster(own, devices, profile, sample=sample).forecast_parallel(own.parallel)
    except ConfigError:
        return None
    return Candidate("disaggregated", own, devices, words, forecast)
