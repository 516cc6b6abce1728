"""Training without a pipeline, as a user would set it manually: FSDP2, and HSDP within nodes.

These plans are listed here and not taken from the planner, so that they check the planner: its
answer must not be slower. Sizes: tensor-parallel 1 to 8, context-parallel 1 to 8 for long
sequences, expert-parallel 8 for models with experts, microbatches of 1, 2, 4 ... sequences.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

from support.papers.paper_cells import in_one_chain
from torchmm.balance.costs.profiles import DeviceProfile
from torchmm.balance.recipe_simulation.step_simulator import (
    SimulatedStepReport,
    StepSample,
    StepSimulator,
)
from torchmm.balance.search.result import fits
from torchmm.common.errors import ConfigError
from torchmm.common.module_names import LLM
from torchmm.recipe.read import check_recipe
from torchmm.recipe.recipe import Recipe

FSDP2, HSDP, REORDERED = "FSDP2", "HSDP", "FSDP2 or HSDP, reordered"
PLANNED = "FSDP2 or HSDP, planner"
"""The plan of the planner, which also balances images over ranks."""
NODE = 8
SIZES = (1, 2, 4, 8)
LONG_TOKENS = 8192
"""Sequences of at least this length are also divided by context parallelism."""
MODES = ("none", "selective", "full")
"""Recomputation modes tried for the best sizes besides "auto"."""
REFINED = 2
"""Number of sizes that are tried with further recomputation modes and with reordering."""
REDUCTIONS = ("step", "microbatch")


class Option(NamedTuple):
    """A recipe without a pipeline and its forecast."""

    recipe: Recipe
    report: SimulatedStepReport

    @property
    def step_ms(self) -> float:
        """Time of a step; infinite if it does not fit into memory."""
        step = self.report.step
        return self.report.iteration_ms if step is not None and fits(step) else float("inf")


def with_values(recipe: Recipe, section: str, **values: Any) -> Recipe:
    """Return the recipe with other values of one section."""
    table = getattr(recipe, section)
    return recipe.model_copy(update={section: table.model_copy(update=values)})


def recomputing(recipe: Recipe, mode: str) -> Recipe:
    """Return the recipe with one recomputation mode for all modules."""
    return with_values(recipe, "activation_checkpoint", mode=mode, modules={})


def describe(recipe: Recipe) -> str:
    """Return the sizes of a recipe without a pipeline, in words."""
    parallel = recipe.parallel
    words = [f"microbatch {recipe.training.microbatch_size}"]
    words += [f"replicate {parallel.replicate}"] if parallel.replicate > 1 else []
    words += [f"tensor {parallel.tensor}"] if parallel.tensor > 1 else []
    words += [f"context {parallel.context}"] if parallel.context > 1 else []
    words += [f"expert {parallel.expert}"] if parallel.expert > 1 else []
    words += [f"gradients per {parallel.gradient_reduction}"]
    return ", ".join([*words, f"recomputation {recipe.activation_checkpoint.mode}"])


def plain_sizes(recipe: Recipe, gpus: int, method: str, sample: StepSample) -> Iterator[Recipe]:
    """Yield the recipe without a pipeline with all sizes, except those of microbatches."""
    has_experts = any(layer.experts for module in sample.modules for layer in module.layers)
    experts = (1, NODE) if has_experts else (1,)
    contexts = SIZES if recipe.training.sequence_length >= LONG_TOKENS else (1,)
    recipe = with_values(recipe, "data", reorder="none", balance="none")
    for tensor, context in product(SIZES, contexts):
        if gpus % tensor:
            continue
        ranks = gpus // tensor
        shards = [ranks]
        if method == HSDP:
            shards = sorted({NODE // tensor, NODE, 4 * NODE} - {ranks})
        for shard, expert, reduction in product(shards, experts, REDUCTIONS):
            if ranks % shard or shard % context or shard % expert:
                continue
            yield in_one_chain(
                recipe,
                schedule="1f1b",
                pipeline=1,
                virtual_stages=1,
                tensor=tensor,
                sequence_parallel=tensor > 1,
                shard=shard,
                replicate=ranks // shard,
                expert=expert,
                gradient_reduction=reduction,
                **({LLM: {"context": context}} if context > 1 else {}),
            )


def simulate_plain(
    recipe: Recipe, gpus: int, profile: DeviceProfile, sample: StepSample
) -> Option | None:
    """Return the forecast of a recipe; None if the recipe is not valid or has no plan."""
    if check_recipe(recipe, gpus):
        return None
    try:
        forecast = StepSimulator(recipe, gpus, profile, sample=sample).simulate_parallel(
            recipe.parallel
        )
    except ConfigError:
        return None
    return None if forecast.step is None else Option(recipe, forecast)


def plain_options(
    recipe: Recipe,
    gpus: int,
    profile: DeviceProfile,
    sample: StepSample,
    method: str,
    sharded: Sequence[Option] | None = None,
) -> list[Option]:
    """Return plans without a pipeline, the fastest first.

    Larger microbatches are tried as long as they are faster. Layers are tuned to memory. The best
    sizes are tried with fixed recomputation modes, too.

    Args:
        method: `FSDP2` or `HSDP`.
        sharded: Plans of FSDP2. HSDP shards less, so only their tensor-parallel sizes can fit.
    """
    options = []
    fitting = None if sharded is None else {each.recipe.parallel.tensor for each in sharded}
    for sized in plain_sizes(recomputing(recipe, "auto"), gpus, method, sample):
        if fitting is not None and sized.parallel.tensor not in fitting:
            continue
        best_ms = float("inf")
        for size in SIZES:
            tried = with_values(sized, "training", microbatch_size=size)
            option = simulate_plain(tried, gpus, profile, sample)
            if option is None or option.step_ms >= best_ms:
                break
            best_ms = option.step_ms
            options.append(option)
    options.sort(key=lambda option: option.step_ms)
    refined = [
        simulate_plain(recomputing(option.recipe, mode), gpus, profile, sample)
        for option in options[:REFINED]
        for mode in MODES
    ]
    options += [option for option in refined if option is not None]
    return sorted(options, key=lambda option: option.step_ms)


def reordered_option(
    options: Sequence[Option], gpus: int, profile: DeviceProfile, sample: StepSample
) -> Option | None:
    """Return the fastest of the best plans with sequences reordered over ranks; None: no plan."""
    tried = [
        simulate_plain(with_values(option.recipe, "data", reorder="intra"), gpus, profile, sample)
        for option in sorted(options, key=lambda option: option.step_ms)[: 2 * REFINED]
    ]
    return min(
        (option for option in tried if option is not None),
        key=lambda option: option.step_ms,
        default=None,
    )


def best_plain(
    recipe: Recipe, gpus: int, profile: DeviceProfile, sample: StepSample
) -> dict[str, Option | None]:
    """Return the fastest plan of FSDP2, of HSDP, and of either with reordered sequences."""
    by_method = {FSDP2: plain_options(recipe, gpus, profile, sample, FSDP2)}
    sharded = by_method[FSDP2]
    by_method[HSDP] = plain_options(recipe, gpus, profile, sample, HSDP, sharded)
    all_options = [option for options in by_method.values() for option in options]
    best: dict[str, Option | None] = {
        method: options[0] if options and options[0].step_ms < float("inf") else None
        for method, options in by_method.items()
    }
    return best | {REORDERED: reordered_option(all_options, gpus, profile, sample)}
