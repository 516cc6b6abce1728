"""Which sizes colocated encoders get where the recipe leaves them open: Optimus' model planner.

    choice = choose_encoders(Forecaster(recipe, world_size, profile))
    recipe = choice.recipe                     # with [parallel.NAME] pipeline and tensor set

Every combination of pipeline sizes that divide the LLM's, with every tensor-parallel size that does
(§4.1; with several encoders, §4.4: one tensor-parallel size for all), is first held against the
memory of the rank that needs most, optimizer state included (`bubbles.encoder_sizes`). Of those
that fit, the first step is planned and simulated, activations included; the fastest that still fits
is taken, of equally fast ones the leanest. It is a pure function of the recipe, so every rank finds
the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

from torchmm.balance.bubbles.encoder_sizes import (
    ParallelSizes,
    backbone_bytes,
    colocated_plans,
)
from torchmm.common.errors import ConfigError
from torchmm.planning.executions import parameter_states
from torchmm.planning.forecast import Forecast, Forecaster
from torchmm.planning.step import plan_layout
from torchmm.recipe.recipe import Recipe


def encoder_combinations(forecaster: Forecaster) -> Iterator[dict[str, int]]:
    """Pipeline ranks by encoder; of one whose size the recipe gives, that one."""
    parallel = forecaster.recipe.parallel
    ranks = forecaster.run.llm.pipeline
    choices = {}
    for module in forecaster.modules:
        if module.kind != "encoder":
            continue
        given = parallel.sizes_given(module.name).get("pipeline")
        slices = parallel.slices(module.name) or 1
        divisors = [n for n in range(1, ranks + 1) if ranks % n == 0]
        fine = [n for n in divisors if n * slices <= len(module.layers)]
        choices[module.name] = [given] if given else fine
    for sizes in product(*choices.values()):
        yield dict(zip(choices, sizes, strict=True))


def encoder_tensors(forecaster: Forecaster) -> list[int]:
    """Tensor-parallel sizes that all encoders can have, the LLM's first: divisors of it that divide
    their heads; if the recipe gives one to an encoder, the recipe's."""
    parallel = forecaster.recipe.parallel
    most = forecaster.run.llm.tensor
    encoders = [module for module in forecaster.modules if module.kind == "encoder"]
    if any("tensor" in parallel.sizes_given(module.name) for module in encoders):
        return [most // parallel.mirrors]
    heads = {layer.heads for module in encoders for layer in module.layers}
    divisors = [n for n in range(most, 0, -1) if most % n == 0]
    return [n for n in divisors if n == most or not any(count % n for count in heads)]


def with_pipelines(
    recipe: Recipe,
    pipelines: dict[str, int],
    sub_microbatch_images: int | None = None,
    tensor: int | None = None,
) -> Recipe:
    """The recipe with pipeline ranks of encoders.

    Args:
        sub_microbatch_images: of all of them; None: as in the recipe.
        tensor: tensor-parallel ranks of all of them; None: as in the recipe.

    Raises:
        ValidationError: the recipe has sizes that contradict these.
    """
    content = recipe.model_dump(exclude_unset=True)
    parallel = content.setdefault("parallel", {})
    for name, size in pipelines.items():
        parallel[name] = {**parallel.get(name, {}), "pipeline": size}
        if sub_microbatch_images is not None:
            parallel[name]["sub_microbatch_images"] = sub_microbatch_images
        if tensor is not None:
            parallel[name]["tensor"] = tensor
    return Recipe.model_validate(content)


class Tried(NamedTuple):
    """A combination and its step."""

    pipelines: dict[str, int]
    forecast: Forecast
    tensor: int = 1
    """Tensor-parallel ranks of all encoders."""


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
        several = len({tried.tensor for tried in self.tried}) > 1
        for pipelines, forecast, tensor in self.tried:
            sizes = ", ".join(f"{name} {size}" for name, size in pipelines.items())
            sizes += f", tensor {tensor}" if several else ""
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


def choose_encoders(forecaster: Forecaster) -> EncoderChoice:
    """Tries all sizes of encoders that the recipe does not give.

    Raises:
        ConfigError: nothing fits into memory; the message says what comes nearest.
    """
    recipe = forecaster.recipe
    tensors = encoder_tensors(forecaster)
    combinations = list(encoder_combinations(forecaster))
    fitting = _fitting(forecaster, combinations, tensors)

    def sized(sizes: dict[str, int], tensor: int) -> Recipe:
        return with_pipelines(recipe, sizes, tensor=tensor if len(tensors) > 1 else None)

    tried = [
        Tried(sizes, forecaster.forecast_parallel(sized(sizes, tensor).parallel), tensor)
        for sizes, tensor in fitting
    ]

    def rank(found: Tried) -> tuple[Any, ...]:
        step = found.forecast.step
        if step is None:
            return True, True, 0.0, 0
        return False, not step.fits, round(step.makespan_ms, 6), max(step.peak_bytes)

    tried.sort(key=rank)
    left_out = len(combinations) * len(tensors) - len(fitting)
    choice = EncoderChoice(sized(tried[0].pipelines, tried[0].tensor), tuple(tried), left_out)
    step = tried[0].forecast.step
    if step is None or not step.fits:
        choices = "; ".join(choice.lines())
        raise ConfigError(
            f"parallel.orchestrate: no pipelines of encoders fit into memory: {choices}. Use more "
            "ranks, activation_checkpoint, or encoders on ranks of their own"
        )
    return choice


def _fitting(
    forecaster: Forecaster, combinations: list[dict[str, int]], tensors: list[int]
) -> list[tuple[dict[str, int], int]]:
    """Pipelines and tensor-parallel sizes whose states fit on the rank that needs most.

    Raises:
        ConfigError: none does.
    """
    ranks = forecaster.run.llm
    modules = forecaster.modules
    llm = ParallelSizes(ranks.data_parallel, ranks.pipeline, ranks.tensor)
    whole = with_pipelines(forecaster.recipe, combinations[0], tensor=ranks.tensor).parallel
    layout = plan_layout(whole, modules, forecaster.workload.microbatches)
    encoders = [module for module in modules if module.kind == "encoder"]
    limit_bytes = int(forecaster.profile.device.memory_bytes)
    compute_bytes = 2 if forecaster.recipe.training.dtype == "bfloat16" else 4
    states = parameter_states(forecaster.recipe)
    own_bytes = backbone_bytes(layout, modules, llm, compute_bytes=compute_bytes, states=states)
    try:
        plans = colocated_plans(
            encoders, llm, own_bytes, limit_bytes, compute_bytes=compute_bytes, states=states
        )
    except ValueError as error:
        raise ConfigError(f"parallel.orchestrate: {error}") from error
    found = {
        tuple((own.sizes.pipeline, own.sizes.tensor) for own in plan.encoders) for plan in plans
    }
    fitting = [
        (sizes, tensor)
        for tensor in tensors
        for sizes in combinations
        if tuple((size, tensor) for size in sizes.values()) in found
    ]
    if not fitting:
        raise ConfigError(
            f"parallel.orchestrate: none of {combinations} pipeline ranks of encoders fits into "
            f"{limit_bytes / 2**30:.1f} GiB; leave their sizes open, or use more ranks"
        )
    return fitting
