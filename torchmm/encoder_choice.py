"""Which pipelines colocated encoders get where the recipe leaves it open: Optimus' model planner.

    choice = choose_encoders(Forecaster(recipe, world_size, profile))
    recipe = choice.recipe                     # with [parallel.NAME] pipeline set

Every combination of pipeline sizes that divide the LLM's (§4.1; with several encoders, §4.4) is
first held against the memory of the rank that needs most, optimizer state included
(`encoder_plans`). Of those that fit, the first step is planned and simulated, activations included;
the fastest that still fits is taken, of equally fast ones the leanest. It is a pure function of the
recipe, so every rank finds the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from torchmm.balance.encoder_plans import (
    ColocatedPlan,
    ParallelSizes,
    backbone_bytes,
    colocated_plans,
)
from torchmm.balance.profiles import load_profile
from torchmm.config import Recipe
from torchmm.encoder_pipelines import encoder_combinations, with_pipelines
from torchmm.errors import ConfigError
from torchmm.forecast import Forecast, Forecaster
from torchmm.orchestration import leaves_units_open, orchestrated_units
from torchmm.step_plan import plan_layout


class Tried(NamedTuple):
    """A combination and its step."""

    pipelines: dict[str, int]
    forecast: Forecast


@dataclass(frozen=True)
class EncoderChoice:
    """What was chosen, and from what.

    Attributes:
        recipe: with the sizes chosen.
        tried: all that were simulated, the chosen one first.
        left_out: combinations whose states alone do not fit.
    """

    recipe: Recipe
    tried: tuple[Tried, ...]
    left_out: int

    def lines(self) -> Iterator[str]:
        """One line for each combination, best first."""
        for pipelines, forecast in self.tried:
            sizes = ", ".join(f"{name} {size}" for name, size in pipelines.items())
            step = forecast.step
            if step is None:
                yield f"pipeline ranks of {sizes}: {forecast.problem}"
                continue
            peak = max(step.peak_bytes) / 2**30
            fits = "" if step.fits else ", more than there is"
            yield f"pipeline ranks of {sizes}: {step.makespan_ms:,.1f} ms, {peak:.1f} GiB{fits}"
        if self.left_out:
            yield f"{self.left_out} more whose parameters and optimizer state do not fit"


def leaves_encoders_open(recipe: Recipe) -> bool:
    """Whether a recipe asks for sizes of colocated encoders."""
    return recipe.parallel.orchestrate and recipe.parallel.placement == "colocated"


def orchestrated(recipe: Recipe, world_size: int) -> Recipe:
    """The recipe with sizes of colocated encoders, or of modules apart, chosen if it asks for that.

    Raises:
        ConfigError: nothing fits into memory, or the device is unknown.
    """
    if leaves_units_open(recipe):
        return orchestrated_units(recipe, world_size)
    if not leaves_encoders_open(recipe):
        return recipe
    try:
        profile = load_profile(recipe.simulation.device)
    except ValueError as error:
        raise ConfigError(f"simulation.device: {error}") from error
    return choose_encoders(Forecaster(recipe, world_size, profile)).recipe


def choose_encoders(forecaster: Forecaster) -> EncoderChoice:
    """Tries all pipelines of encoders whose size the recipe does not give.

    Raises:
        ConfigError: nothing fits into memory; the message says what comes nearest.
    """
    recipe = forecaster.recipe
    combinations = list(encoder_combinations(forecaster))
    fitting = _fitting(forecaster, combinations)
    tried = [
        Tried(sizes, forecaster.forecast_parallel(with_pipelines(recipe, sizes).parallel))
        for sizes in fitting
    ]

    def rank(found: Tried) -> tuple[Any, ...]:
        step = found.forecast.step
        if step is None:
            return True, True, 0.0, 0
        return False, not step.fits, round(step.makespan_ms, 6), max(step.peak_bytes)

    tried.sort(key=rank)
    choice = EncoderChoice(
        with_pipelines(recipe, tried[0].pipelines), tuple(tried), len(combinations) - len(fitting)
    )
    step = tried[0].forecast.step
    if step is None or not step.fits:
        told = "; ".join(choice.lines())
        raise ConfigError(
            f"parallel.orchestrate: no pipelines of encoders fit into memory: {told}. Use more "
            "ranks, activation_checkpoint, or encoders on ranks of their own"
        )
    return choice


def _fitting(forecaster: Forecaster, combinations: list[dict[str, int]]) -> list[dict[str, int]]:
    """Those whose states fit on the rank that needs most.

    Raises:
        ConfigError: none does.
    """
    ranks, modules = forecaster.ranks, forecaster.modules
    llm = ParallelSizes(ranks.data_parallel, ranks.pipeline, ranks.tensor)
    layout = plan_layout(forecaster.recipe.parallel, modules, forecaster.workload.microbatches)
    encoders = [module for module in modules if module.kind == "encoder"]
    limit_bytes = int(forecaster.profile.device.memory_bytes)
    compute_bytes = 2 if forecaster.recipe.training.dtype == "bfloat16" else 4
    own_bytes = backbone_bytes(layout, modules, llm, compute_bytes=compute_bytes)
    try:
        plans = colocated_plans(encoders, llm, own_bytes, limit_bytes, compute_bytes=compute_bytes)
    except ValueError as error:
        raise ConfigError(f"parallel.orchestrate: {error}") from error
    found = {_pipelines(plan) for plan in plans if _keeps_tensor(plan, ranks.tensor)}
    fitting = [sizes for sizes in combinations if tuple(sizes.values()) in found]
    if not fitting:
        raise ConfigError(
            f"parallel.orchestrate: none of {combinations} pipeline ranks of encoders fits into "
            f"{limit_bytes / 2**30:.1f} GiB; leave their sizes open, or use more ranks"
        )
    return fitting


def _pipelines(plan: ColocatedPlan) -> tuple[int, ...]:
    return tuple(own.sizes.pipeline for own in plan.encoders)


def _keeps_tensor(plan: ColocatedPlan, tensor: int) -> bool:
    """Whether encoders are split over the LLM's tensor-parallel ranks, as they are run."""
    return all(own.sizes.tensor == tensor for own in plan.encoders)
