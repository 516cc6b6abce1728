"""Automatic values of a recipe, chosen before the process group starts.

All ranks choose the same values, from the recipe, the number of ranks and the first step of the
data. Each choice is an entry of the table "recipe_choices" (`torchmm.common.extensions`):

    sizes          (recipe, world_size) -> Recipe                    `parallel.auto_sizes`
    arrangement    (run, model) -> Resolved                          "auto" in [data]
    segments       (run, model, tokenizer, shares, device) -> ParallelConfig
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from transformers import PreTrainedTokenizerBase

from torchmm.common.batch import MicrobatchMeta
from torchmm.common.extensions import find_entry, load_entry
from torchmm.models.multimodal import MultimodalModel
from torchmm.planning.resolved_recipe import ResolvedRecipe
from torchmm.recipe.parallel_section import ParallelConfig
from torchmm.recipe.recipe import Recipe


def choose_sizes(recipe: Recipe, world_size: int) -> Recipe:
    """Return the recipe with parallelism degrees for `parallel.auto_sizes`.

    Raises:
        ConfigError: No degrees are valid for the number of ranks and the memory of the devices.
    """
    if not recipe.parallel.auto_sizes:
        return recipe
    chosen: Recipe = load_entry("recipe_choices", "sizes")(recipe, world_size)
    return chosen


def choose_data_balancing(run: ResolvedRecipe, model: MultimodalModel) -> ResolvedRecipe:
    """Return the run with values for `data.reorder` = "auto" and `data.balance` = "auto".

    The value is "none" if no installed extension chooses.

    Args:
        run: Recipe with resolved parallelism degrees.
        model: Model of the recipe on the meta device.

    Raises:
        DataError: The samples of the first step cannot be read.
    """
    data = run.recipe.data
    keys = [key for key in ("reorder", "balance") if getattr(data, key) == "auto"]
    if not keys:
        return run
    if (entry := find_entry("recipe_choices", "arrangement")) is not None:
        chosen: ResolvedRecipe = entry.load()(run, model)
        return chosen
    disabled = data.model_copy(update=dict.fromkeys(keys, "none"))
    reasons = {f"data.{key}": 'none (the extension "balance" is not installed)' for key in keys}
    run = run.with_recipe(run.recipe.model_copy(update={"data": disabled}))
    return replace(run, choices={**run.choices, **reasons})


def choose_segments(
    run: ResolvedRecipe,
    model: MultimodalModel,
    tokenizer: PreTrainedTokenizerBase,
    metas: Sequence[list[MicrobatchMeta]],
    device: torch.device,
) -> ParallelConfig:
    """Return [parallel] with stages per module for a schedule that chooses them.

    Args:
        run: Recipe with resolved parallelism degrees.
        model: Model of the recipe on the meta device.
        tokenizer: Tokenizer of the model.
        metas: Microbatches of the first step, by share of the global batch.
        device: Device of the run.

    Raises:
        ConfigError: A module has fewer layers than ranks.
    """
    parallel = run.recipe.parallel
    entry = find_entry("recipe_choices", "segments")
    if entry is None or not entry.is_used(parallel):
        return parallel
    chosen: ParallelConfig = entry.load()(run, model, tokenizer, metas, device)
    return chosen
