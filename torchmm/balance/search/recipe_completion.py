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

from torchmm.balance.disttrain.arrangement import reorder_first_step
from torchmm.balance.pipeweaver.segment_search import choose_segments
from torchmm.balance.recipe_simulation.step_simulator import (
    StepSample,
    StepSimulator,
    choose_reordering,
)
from torchmm.balance.run_costs import build_cost_model, load_run_profile, load_simulated_profile
from torchmm.balance.search.plan_search import search_plans
from torchmm.balance.search.recipe_plans import needs_encoder_sizes
from torchmm.balance.search.result import PlanSearchResult, find_best
from torchmm.common.batch import MicrobatchMeta
from torchmm.common.errors import ConfigError
from torchmm.costs.operators import DeviceProfile
from torchmm.models.multimodal import MultimodalModel
from torchmm.planning.first_step import read_first_step, with_single_sequence_microbatches
from torchmm.planning.resolved_recipe import ResolvedRecipe
from torchmm.planning.step import plan_layout
from torchmm.recipe.parallel_section import ParallelConfig
from torchmm.recipe.recipe import Recipe

MAX_ACTIONS = 100_000
"""Maximum number of simulated actions while a run waits. A time limit is not possible, because all
ranks must choose the same plan."""


def complete_unit_sizes(recipe: Recipe, world_size: int) -> Recipe:
    """Return the recipe with parallelism degrees of disaggregated modules that use all ranks.

    Raises:
        ConfigError: The recipe has errors, no plan fits, or no plan uses all ranks.
    """
    profile = load_simulated_profile(recipe)
    sample = StepSample(recipe)
    methods = ("disaggregated",)

    def search(max_actions: float, *, exact: bool):  # type: ignore[no-untyped-def]
        return search_plans(
            recipe, world_size, profile, methods=methods, budget_s=inf, max_actions=max_actions,
            exact=exact, sample=sample,
        )  # fmt: skip

    if (best := search(MAX_ACTIONS, exact=True).best) is not None:
        return best.recipe
    fewer = find_best(search(MAX_ACTIONS / 10, exact=False), world_size)
    raise ConfigError(
        f"parallel.auto_sizes: no plan uses all {world_size} ranks; start {fewer.devices} "
        "ranks, or set the degrees in [parallel] and [parallel.NAME]"
    )


def complete_sizes(recipe: Recipe, world_size: int) -> Recipe:
    """Return the recipe with requested parallelism degrees of colocated encoders or of all modules.

    Raises:
        ConfigError: No plan fits into memory, or the device is unknown.
    """
    if recipe.parallel.needs_orchestration:
        return complete_unit_sizes(recipe, world_size)
    if not needs_encoder_sizes(recipe):
        return recipe
    result = search_encoder_sizes(StepSimulator(recipe, world_size, load_simulated_profile(recipe)))
    best = find_best(result, world_size).recipe
    return best.model_copy(update={"data": recipe.data})


def search_encoder_sizes(simulator: StepSimulator) -> PlanSearchResult:
    """Return the search for the open parallelism degrees of colocated encoders.

    It has no time limit, so all ranks find the same plan.

    Args:
        simulator: Simulator of the recipe.

    Raises:
        ConfigError: The parallelism degrees of the recipe do not fit together.
    """
    return search_plans(
        simulator.recipe, simulator.run.world_size, simulator.profile,
        methods=("colocated",), budget_s=inf, keep_sizes=True, sample=simulator.sample,
    )  # fmt: skip


def complete_reordering(run: ResolvedRecipe, model: MultimodalModel) -> ResolvedRecipe:
    """Return a run with values for `data.reorder` = "auto" and `data.balance` = "auto".

    Args:
        run: Recipe with resolved parallelism degrees.
        model: Model of the recipe on the meta device.

    Raises:
        DataError: The samples of the first step cannot be read.
    """
    profile: DeviceProfile | None = None
    with suppress(ConfigError):  # such as a calibration file that is not on this node
        profile = load_simulated_profile(run.recipe)
    return choose_reordering(run, profile, StepSample(run.recipe, model))


def complete_segments(
    run: ResolvedRecipe,
    model: MultimodalModel,
    tokenizer: PreTrainedTokenizerBase,
    shares: Sequence[list[MicrobatchMeta]],
    device: torch.device,
) -> ParallelConfig:
    """Return [parallel] of a run with segments and sub-microbatches (`choose_segments`).

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
    costs = build_cost_model(run, modules, load_run_profile(recipe, device))
    is_reordered = recipe.data.is_reordered
    packs = (
        read_first_step(with_single_sequence_microbatches(recipe), model, tokenizer, 1)
        if is_reordered
        else []
    )
    if packs:  # reorder for the default split of the model
        microbatches = [meta for share in shares for meta in share]
        layout = plan_layout(recipe.parallel, modules, microbatches)
        shares = reorder_first_step(run, modules, costs, layout, packs[0])
    return choose_segments(recipe, recipe.parallel, modules, shares, costs)
