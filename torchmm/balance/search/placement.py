"""Choice of the values that a recipe leaves open, when a run starts (`torchmm.planning.choices`).

These are parallelism degrees (`parallel.auto_sizes`), "auto" for `data.reorder` and `data.balance`,
and the segments of a searched pipeline.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from math import inf

import torch
from transformers import PreTrainedTokenizerBase

from torchmm.balance.disttrain.arrangement import dealt
from torchmm.balance.forecasts.forecast import Forecaster, StepSample, choose_arrangement
from torchmm.balance.pipeweaver.segments import chosen_segments
from torchmm.balance.run_costs import run_costs, run_profile, simulated_profile
from torchmm.balance.search.recipe_plans import leaves_encoders_open
from torchmm.balance.search.result import SearchResult, find_best
from torchmm.balance.search.search import search_plans
from torchmm.common.batch import MicrobatchMeta
from torchmm.common.errors import ConfigError
from torchmm.costs.operators import Profile
from torchmm.models.multimodal import MultimodalModel
from torchmm.planning.first_step import read_first_step, with_single_sequence_microbatches
from torchmm.planning.resolved_recipe import ResolvedRecipe
from torchmm.planning.step import plan_layout
from torchmm.recipe.parallel_section import ParallelConfig
from torchmm.recipe.recipe import Recipe

EFFORT = 100_000
"""Maximum number of simulated actions while a run waits. A time limit is not possible, because all
ranks must choose the same plan."""


def orchestrated_units(recipe: Recipe, world_size: int) -> Recipe:
    """Return the recipe with parallelism degrees of disaggregated modules that use all ranks.

    Raises:
        ConfigError: The recipe has errors, no plan fits, or no plan uses all ranks.
    """
    profile = simulated_profile(recipe)
    sample = StepSample(recipe)
    methods = ("disaggregated",)

    def search(effort: float, *, exact: bool):  # type: ignore[no-untyped-def]
        return search_plans(
            recipe, world_size, profile, methods=methods, budget_s=inf, effort=effort,
            exact=exact, sample=sample,
        )  # fmt: skip

    if (best := search(EFFORT, exact=True).best) is not None:
        return best.recipe
    fewer = find_best(search(EFFORT / 10, exact=False), world_size)
    raise ConfigError(
        f"parallel.auto_sizes: no plan uses all {world_size} ranks; start {fewer.devices} "
        "ranks, or set the degrees in [parallel] and [parallel.NAME]"
    )


def orchestrated(recipe: Recipe, world_size: int) -> Recipe:
    """Return the recipe with requested parallelism degrees of colocated encoders or of all modules.

    Raises:
        ConfigError: No plan fits into memory, or the device is unknown.
    """
    if recipe.parallel.needs_orchestration:
        return orchestrated_units(recipe, world_size)
    if not leaves_encoders_open(recipe):
        return recipe
    result = search_encoder_sizes(Forecaster(recipe, world_size, simulated_profile(recipe)))
    best = find_best(result, world_size).recipe
    return best.model_copy(update={"data": recipe.data})


def search_encoder_sizes(forecaster: Forecaster) -> SearchResult:
    """Return the search for the open parallelism degrees of colocated encoders.

    It has no time limit, so all ranks find the same plan.

    Args:
        forecaster: Forecaster of the recipe.

    Raises:
        ConfigError: The parallelism degrees of the recipe do not fit together.
    """
    return search_plans(
        forecaster.recipe, forecaster.run.world_size, forecaster.profile,
        methods=("colocated",), budget_s=inf, own_sizes=True, sample=forecaster.sample,
    )  # fmt: skip


def with_arrangement(run: ResolvedRecipe, model: MultimodalModel) -> ResolvedRecipe:
    """Return a run with values for `data.reorder` = "auto" and `data.balance` = "auto".

    Args:
        run: Recipe with resolved parallelism degrees.
        model: Model of the recipe on the meta device.

    Raises:
        DataError: The samples of the first step cannot be read.
    """
    profile: Profile | None = None
    with suppress(ConfigError):  # such as a calibration file that is not on this node
        profile = simulated_profile(run.recipe)
    return choose_arrangement(run, profile, StepSample(run.recipe, model))


def with_run_segments(
    run: ResolvedRecipe,
    model: MultimodalModel,
    tokenizer: PreTrainedTokenizerBase,
    shares: Sequence[list[MicrobatchMeta]],
    device: torch.device,
) -> ParallelConfig:
    """Return [parallel] of a run with segments and sub-microbatches (`chosen_segments`).

    Args:
        run: Recipe with resolved parallelism degrees.
        model: Model of the recipe on the meta device.
        tokenizer: Tokenizer of the model.
        shares: Microbatches of the first step in their original order, by data-parallel rank.
        device: Device of the run.

    Raises:
        ConfigError: A module has fewer layers than ranks.
    """
    recipe = run.recipe
    modules = [module.describe() for module in model.modality_modules()]
    costs = run_costs(run, modules, run_profile(recipe, device))
    is_reordered = recipe.data.is_reordered
    packs = (
        read_first_step(with_single_sequence_microbatches(recipe), model, tokenizer, 1)
        if is_reordered
        else []
    )
    if packs:  # reorder for the default split of the model
        microbatches = [meta for share in shares for meta in share]
        layout = plan_layout(recipe.parallel, modules, microbatches)
        shares = dealt(run, modules, costs, layout, packs[0])
    return chosen_segments(recipe, recipe.parallel, modules, shares, costs)
