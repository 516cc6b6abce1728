"""Extension entries of schedules, planners and recipe sections."""

from typing import Any

from torchmm.balance.section import SearchConfig
from torchmm.common.extensions import Entries, Entry


def plans_schedule(name: str) -> bool:
    """Return True if this extension plans a schedule. Other extensions can add schedules."""
    return any(entry.name == name for entry in ENTRIES["schedules"])


def _selects_layers(run: Any, pipeline_size: int) -> bool:
    return pipeline_size == 1 and bool(run.recipe.tuned_modules)


def _uses_times(run: Any, pipeline_size: int) -> bool:
    """Return True if plans use modeled or measured times.

    These are the schedules of this extension, and all schedules with `parallel.replan_threshold`.
    """
    parallel = run.recipe.parallel
    return pipeline_size > 1 and (
        plans_schedule(parallel.schedule) or parallel.replan_threshold > 0
    )


def _plans_in_background(run: Any, pipeline_size: int) -> bool:
    in_background = SearchConfig.from_parent(run.recipe.parallel).background
    return pipeline_size > 1 and (in_background or bool(run.recipe.tuned_modules))


ENTRIES: Entries = {
    "sections": [
        Entry("ParallelConfig.search", "torchmm.balance.section:SearchConfig"),
        Entry("Recipe.simulation", "torchmm.balance.simulation.section:SimulationConfig"),
    ],
    "recipe_checks": [Entry("simulation", "torchmm.balance.checks:check_simulation_section")],
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
            "torchmm.balance.pipeweaver.measuring_planner:build_measuring_planner",
            _uses_times,
        ),
        Entry(
            "background",
            "torchmm.balance.pipeweaver.planners:build_background_planner",
            _plans_in_background,
        ),
    ],
}
