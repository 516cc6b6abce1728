"""Entries of this extension in the tables of the core."""

from typing import Any

from torchmm.balance.section import SearchConfig
from torchmm.common.extensions import Entries, Entry
from torchmm.recipe.schedules import find_schedule


def _selects_layers(run: Any, pipeline_size: int) -> bool:
    return pipeline_size == 1 and bool(run.recipe.tuned_modules)


def _uses_times(run: Any, pipeline_size: int) -> bool:
    """Return True for schedules with a cost model, and for all with `parallel.replan_drift`."""
    schedule = find_schedule(run.recipe.parallel.schedule)
    is_planned = schedule is not None and schedule.planned
    return pipeline_size > 1 and (is_planned or run.recipe.parallel.replan_drift > 0)


def _plans_in_background(run: Any, pipeline_size: int) -> bool:
    in_background = SearchConfig.of(run.recipe.parallel).background
    return pipeline_size > 1 and (in_background or bool(run.recipe.tuned_modules))


ENTRIES: Entries = {
    "sections": [
        Entry("ParallelConfig.search", "torchmm.balance.section:SearchConfig"),
        Entry("Recipe.simulation", "torchmm.balance.simulation.section:SimulationConfig"),
    ],
    "recipe_checks": [Entry("simulation", "torchmm.balance.checks:check_simulation")],
    "schedules": [
        Entry("searched", "torchmm.balance.schedules:SEARCHED_SCHEDULE"),
        Entry("optimus", "torchmm.balance.schedules:OPTIMUS_SCHEDULE"),
    ],
    "planners": [
        Entry(
            "tuned",
            "torchmm.balance.pipeweaver.planners:build_tuned_planner",
            _selects_layers,
        ),
        Entry(
            "measuring",
            "torchmm.balance.pipeweaver.measuring:build_measuring_planner",
            _uses_times,
        ),
        Entry(
            "background",
            "torchmm.balance.pipeweaver.planners:build_background_planner",
            _plans_in_background,
        ),
    ],
}
