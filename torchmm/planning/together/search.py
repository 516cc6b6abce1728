"""Plans of modules that share all ranks: sizes, schedule and recomputation, by simulation.

    candidates = search_together(recipe, 64, profile, sample, tensors=(1, 2), pipelines=(1, 2, 4))

Each family of schedules has sizes that suit it: one chain of PipeWeaver's VLM-S is fastest in a
pipeline of 16 ranks, a searched order of its segments in one of 8, with encoders in bubbles beside
an LLM on two tensor-parallel ranks. So all sizes are surveyed for each family, by one step of it
that takes little to simulate, or to promise, with everything kept, whatever memory that needs. In
this order sizes are tried as a run would plan them, with all schedules of the family, until some
were found that fit. Layers are tuned to memory where keeping everything does not fit.

Rejected: for all families the sizes of the fastest 1F1B that fits as the recipe recomputes, which
made the best plan of VLM-S one of modules apart, 1.5 times as slow as the best there is; all
schedules with all sizes, which is hours for a thousand devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import inf, prod
from typing import NamedTuple

from torchmm.balance.costs.operators import Profile
from torchmm.common.errors import ConfigError
from torchmm.common.module_names import LLM
from torchmm.planning.apart.problem import TUNED, VIRTUAL_STAGES, recompute_modes, with_recompute
from torchmm.planning.apart.search import Candidate
from torchmm.planning.forecast import Forecaster, StepSample
from torchmm.planning.together.encoder_sizes import (
    Colocated,
    choose_encoders,
    least_promise_ms,
    refined,
)
from torchmm.recipe.check import find_problems
from torchmm.recipe.parallel_section import ParallelConfig
from torchmm.recipe.recipe import Recipe
from torchmm.recipe.schedules import SCHEDULES, schedules_for
from torchmm.recipe.sizes import AXES

TRIED = 3
"""Sizes of each family that are tried and fit."""
SLACK = {"chains": 1.1, "segments": 1.3, "bubbles": 1.0}
"""By family, how many times shorter than its survey a step may be: what is surveyed to take longer
than this times the best of all that was found is not tried, once a step of the family fits. The
searched order of VLM-S takes 0.82 of its static one, encoders in bubbles no less than promised."""
SAME = ("megatron_balanced",)
"""Schedules that are others by another name."""
LEAST_USED = 1 / 2
"""Of the devices."""


class Sized(NamedTuple):
    """The recipe with sizes for all modules on the same ranks."""

    recipe: Recipe
    """One stage per rank, which leaves segments open where the recipe does."""
    devices: int
    words: str
    """tensor x data x pipeline."""


def search_together(
    recipe: Recipe,
    devices: int,
    profile: Profile,
    sample: StepSample,
    tensors: Sequence[int],
    pipelines: Sequence[int],
) -> list[Candidate]:
    """Plans of all families of schedules, in no order; those that do not fit are among them.

    Args:
        devices: of the cluster; those that a recipe's own sizes can use, or at least half of them.
        profile: of one of them.
        sample: of the recipe.
        tensors: sizes to try besides the recipe's own.
        pipelines: likewise.
    """
    sizes = list(_sizes(recipe, devices, tensors, pipelines))
    search = _Search(profile, sample, recipe.parallel.virtual_stages)
    search.run("chains", sizes, search.chain_ms, search.chains)
    piped = [sized for sized in sizes if sized.recipe.parallel.pipeline > 1]  # else all are alike
    search.run("segments", piped, search.segments_ms, search.segments)
    if any(module.kind == "encoder" for module in sample.modules):
        search.run("bubbles", piped, search.promise_ms, search.bubbles)
    return search.found


def _sizes(
    recipe: Recipe, devices: int, tensors: Sequence[int], pipelines: Sequence[int]
) -> Iterator[Sized]:
    """The recipe's own sizes and all others; of the LLM, as those of its other modules are planned.

    Other keys of [parallel] stay, unless they contradict the sizes.
    """
    table = recipe.parallel.model_dump(exclude_none=True)
    for name in recipe.parallel.modules:
        table[name] = {key: value for key, value in table[name].items() if key not in AXES}
    table |= {"placement": "interleaved", "schedule": "1f1b", "virtual_stages": 1}
    plain = recipe.model_copy(update={"parallel": ParallelConfig(**table | {"orchestrate": False})})
    others = [
        with_parallel(plain, tensor=tensor, pipeline=pipeline, replicate=1, shard=-1)
        for tensor, pipeline in product(tensors, pipelines)
    ]
    known = set()
    for number, sized in enumerate([plain, *others]):
        parallel = sized.parallel
        usable = usable_devices(sized, devices)
        if not usable or (number and usable < LEAST_USED * devices):
            continue
        simulation = sized.simulation.model_copy(update={"gpus": usable})
        own = sized.model_copy(update={"simulation": simulation})
        if parallel.tensor == 1:
            own = with_parallel(own, async_tensor_parallel=False, async_tensor_backend="auto")
        rows = parallel.tensor, usable // (parallel.tensor * parallel.pipeline), parallel.pipeline
        if rows not in known and not find_problems(own, usable):
            known.add(rows)
            yield Sized(own, usable, "x".join(map(str, rows)))


Survey = Callable[[Sized], float]
Plans = Callable[[Sized], Iterator[Candidate]]


@dataclass
class _Search:
    """What was found so far."""

    profile: Profile
    sample: StepSample
    stages: int
    """Of the LLM per rank, as the recipe says."""

    def __post_init__(self) -> None:
        self.found: list[Candidate] = []
        self.best_ms = inf

    def run(self, family: str, sizes: Sequence[Sized], survey: Survey, plans: Plans) -> None:
        """A family, until some of its sizes were tried and fit."""
        surveyed = sorted((survey(sized), index) for index, sized in enumerate(sizes))
        fitting = 0
        for survey_ms, index in surveyed:
            if survey_ms == inf or fitting == TRIED:
                return
            if fitting and survey_ms > SLACK[family] * self.best_ms:
                return
            found = list(plans(sizes[index]))
            self.found += found
            best_ms = min((candidate.step_ms for candidate in found), default=inf)
            self.best_ms = min(self.best_ms, best_ms)
            fitting += best_ms < inf

    def chain_ms(self, sized: Sized) -> float:
        """The survey of chains: 1F1B, and with two stages per rank."""
        piped = sized.recipe.parallel.pipeline > 1
        several = self._kept_ms(sized, "interleaved_1f1b", VIRTUAL_STAGES[0]) if piped else inf
        return min(self._kept_ms(sized, "1f1b"), several)

    def segments_ms(self, sized: Sized) -> float:
        """The survey of segments: their static order."""
        return self._kept_ms(sized, "separated")

    def _kept_ms(self, sized: Sized, schedule: str, stages: int = 1) -> float:
        """A step with everything kept; infinite where the modules cannot be cut for it."""
        own = with_parallel(sized.recipe, schedule=schedule, virtual_stages=stages)
        try:
            forecaster = self._forecaster(with_recompute(own, _modes(own)[0]), sized.devices)
        except ConfigError:
            return inf
        forecast = forecaster.forecast_parallel(own.parallel)
        return inf if forecast.step is None else forecast.iteration_ms

    def promise_ms(self, sized: Sized) -> float:
        """The survey of bubbles: what their scheduler promises with everything kept; infinite where
        states alone do not fit."""
        own = self._colocated(sized.recipe)
        try:
            forecaster = self._forecaster(with_recompute(own, _modes(own)[0]), sized.devices)
            return least_promise_ms(forecaster)
        except ConfigError:
            return inf

    def chains(self, sized: Sized) -> Iterator[Candidate]:
        """All modules in one chain of layers, or whole encoders before the LLM's first stage."""
        if sized.recipe.parallel.pipeline == 1:
            yield from self._plan(sized, "1f1b")
            return
        several = sorted({*VIRTUAL_STAGES, self.stages} - {1})
        for name in schedules_for("interleaved"):
            if SCHEDULES[name].cut in ("balanced", "megatron") and name not in SAME:
                # With one stage per rank, interleaved 1F1B is 1F1B.
                for stages in several if name == "interleaved_1f1b" else (1,):
                    yield from self._plan(sized, name, stages)

    def segments(self, sized: Sized) -> Iterator[Candidate]:
        """Each module in segments of its own."""
        for name in schedules_for("interleaved"):
            if SCHEDULES[name].cut == "separated":
                yield from self._plan(sized, name)

    def _plan(self, sized: Sized, schedule: str, stages: int = 1) -> Iterator[Candidate]:
        """A schedule with everything kept; tuned to memory where that does not fit, or the order
        depends on it."""
        own = with_parallel(sized.recipe, schedule=schedule, virtual_stages=stages)
        for mode in _modes(own):
            recipe = with_recompute(own, mode)
            try:
                forecaster = self._forecaster(recipe, sized.devices)
            except ConfigError:
                return
            forecast = forecaster.forecast_parallel(recipe.parallel)
            if forecast.step is None and mode != TUNED:
                return  # it cannot be cut like this
            candidate = Candidate("interleaved", recipe, sized.devices, sized.words, forecast)
            yield candidate
            if candidate.step_ms < inf and not SCHEDULES[schedule].planned:
                return

    def bubbles(self, sized: Sized) -> Iterator[Candidate]:
        """Encoders on the LLM's ranks, with those sizes there that promise most, and the best of
        them with what else can be chosen."""
        for mode in _modes(sized.recipe):
            recipe = with_recompute(self._colocated(sized.recipe), mode)
            try:
                forecaster = self._forecaster(recipe, sized.devices)
                choice = choose_encoders(forecaster)
            except ConfigError:  # nothing fits
                continue
            for tried in choice.tried:
                words = f"{sized.words}, encoders: {tried.sizes}"
                yield Candidate("colocated", tried.recipe, sized.devices, words, tried.forecast)
            first = choice.tried[0]
            start = choice.refined or Colocated(first.recipe, first.forecast)
            best = refined(forecaster, start)
            if best.words:
                words = ", ".join([f"{sized.words}, encoders: {first.sizes}", *best.words])
                yield Candidate("colocated", best.recipe, sized.devices, words, best.forecast)

    def _colocated(self, recipe: Recipe) -> Recipe:
        layers = next(len(module.layers) for module in self.sample.modules if module.name == LLM)
        stages = self.stages if self.stages * recipe.parallel.pipeline <= layers else 1
        (schedule,) = schedules_for("colocated")
        changes = {"schedule": schedule, "placement": "colocated", "virtual_stages": stages}
        return with_parallel(recipe, **changes)

    def _forecaster(self, recipe: Recipe, devices: int) -> Forecaster:
        return Forecaster(recipe, devices, self.profile, sample=self.sample)


def _modes(recipe: Recipe) -> list[str]:
    """Ways to recompute, the one that takes the least time first: of all, the two that no other is
    better than, or what trials were measured with."""
    modes = recompute_modes(recipe)
    return [mode for mode in ("none", TUNED) if mode in modes] or modes


def with_parallel(recipe: Recipe, **changes: object) -> Recipe:
    """The recipe with other keys of [parallel]."""
    return recipe.model_copy(update={"parallel": recipe.parallel.model_copy(update=changes)})


def usable_devices(recipe: Recipe, devices: int) -> int:
    """How many of these devices the recipe's [parallel] can use at most; 0: none."""
    parallel = recipe.parallel
    training = recipe.training
    sizes = {name: getattr(parallel, name) for name in AXES}
    fixed = prod(size for size in sizes.values() if size > 0)
    own = sizes["replicate"] * sizes["shard"]
    fixed_data = prod(sizes[name] for name in ("replicate", "shard") if sizes[name] > 0)
    if own > 0:
        return fixed if fixed <= devices else 0
    for count in range(devices // fixed, 0, -1):
        chunk = count * fixed_data * training.microbatch_size
        if training.global_batch_size % chunk == 0:
            return count * fixed
    return 0
