"""Pipelines with sizes as a user would try them manually, to check the planner.

Like the plans of `plain_methods`, they do not come from the planner.
"""

from __future__ import annotations

from itertools import product

from support.cases.plain_methods import SIZES, Option, recomputing, simulate_plain, with_values
from support.papers.paper_cells import in_one_chain
from torchmm.balance.costs.profiles import DeviceProfile
from torchmm.balance.recipe_simulation.step_simulator import StepSample
from torchmm.recipe.recipe import Recipe

PIPELINES = (2, 4, 8, 16)
SCHEDULES = ("megatron_balanced", "separated")


def hand_pipelines(
    recipe: Recipe, gpus: int, profile: DeviceProfile, sample: StepSample
) -> tuple[Option, str] | None:
    """Return the fastest plan that fits and its sizes in words; None if there is none.

    A balanced single pipeline and separated segments are tried with all sizes. A searched schedule
    is tried with the best sizes of the segments, and the unchanged recipe if it has a pipeline on
    shared ranks.
    """
    lean = recomputing(recipe, "auto")
    tried = {
        schedule: [
            in_one_chain(
                lean,
                schedule=schedule,
                pipeline=pipeline,
                tensor=tensor,
                virtual_stages=1,
                sequence_parallel=tensor > 1,
            )
            for pipeline, tensor in product(PIPELINES, SIZES)
            if pipeline * tensor <= gpus
        ]
        for schedule in SCHEDULES
    }
    best_options: list[Option] = []
    for recipes in tried.values():
        options = [simulate_plain(each, gpus, profile, sample) for each in recipes]
        best_options += sorted(filter(None, options), key=lambda option: option.step_ms)[:1]
    last = [
        with_values(option.recipe, "parallel", schedule="searched") for option in best_options[-1:]
    ]
    parallel = recipe.parallel
    if parallel.placement == "interleaved" and parallel.pipeline > 1:
        last.append(lean)
    best_options += filter(None, (simulate_plain(each, gpus, profile, sample) for each in last))
    best = min(best_options, key=lambda option: option.step_ms, default=None)
    if best is None or best.step_ms == float("inf"):
        return None
    parallel = best.recipe.parallel
    return best, f"pipeline {parallel.pipeline}, tensor {parallel.tensor}, {parallel.schedule}"
