"""The table of planners.

A new planner of the core is a file in this folder and an entry in `PLANNERS`. An extension adds
planners with entries of the table "planners" (`torchmm.common.extensions`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torchmm.common.extensions import Entry, find_entries
from torchmm.parallel.mesh import ParallelMesh
from torchmm.planning.planner import Planner
from torchmm.planning.resolved_recipe import ResolvedRecipe
from torchmm.training.pipeline import Pipeline

PLANNERS: Sequence[Entry] = (
    Entry(
        "single",
        "torchmm.training.planners.single:build_single_planner",
        lambda run, pipeline_size: pipeline_size == 1,
    ),
    Entry("static", "torchmm.training.planners.static:build_static_planner"),
)
"""Planners of the core. A run uses the first planner whose `is_used` returns True.

The entries of extensions precede these entries. The arguments of `is_used` are the `ResolvedRecipe`
recipe and the number of pipeline ranks, and its result is identical on all ranks. The parameters of
the target are run, pipeline, mesh and logger. Modules of unused planners are not imported.
"""


def find_planner(run: ResolvedRecipe, pipeline_size: int) -> Entry:
    """Return the planner of a run.

    Args:
        run: Resolved recipe.
        pipeline_size: Number of pipeline ranks.
    """
    entries = (*find_entries("planners"), *PLANNERS)
    return next(entry for entry in entries if entry.is_used(run, pipeline_size))


def build_planner(
    run: ResolvedRecipe, pipeline: Pipeline, mesh: ParallelMesh, logger: logging.Logger
) -> Planner:
    """Return the planner of a run. Collective over all ranks.

    Raises:
        ConfigError: The planner does not support a value of the recipe.
    """
    entry = find_planner(run, mesh.plan_size)
    planner: Planner = entry.load()(run, pipeline, mesh, logger)
    return planner
