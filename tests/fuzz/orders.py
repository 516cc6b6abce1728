"""Schedules in CSV files, for recipes with `schedule = "csv:PATH"`."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

from torchmm.common.batch import MicrobatchMeta
from torchmm.pipelining.plan.graph import StageGraph
from torchmm.pipelining.schedules.classic import gpipe, one_f_one_b, zero_bubble
from torchmm.pipelining.view.file_formats import write_order
from torchmm.planning.resolved_recipe import ResolvedRecipe
from torchmm.planning.step import plan_layout


def write_csv(run: ResolvedRecipe, model: Any, file: Path) -> None:
    """Write a random standard schedule for the text microbatches of the recipe.

    Args:
        run: Resolved recipe with the schedule "separated".
    """
    descriptions = [module.describe() for module in model.modality_modules()]
    recipe, training = run.recipe, run.recipe.training
    ranks = run.data_parallel_size * training.microbatch_size
    tokens = training.microbatch_size * training.sequence_length
    layout = plan_layout(recipe.parallel, descriptions, [MicrobatchMeta((), tokens)])
    graph = StageGraph(layout, training.global_batch_size // ranks, {})
    order = Random(recipe.training.seed).choice((gpipe, one_f_one_b, zero_bubble))
    write_order(file, order(graph), graph)
