"""The table of planners. A new planner is a file in this folder and an entry in `PLANNERS`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from importlib import import_module
from types import MappingProxyType
from typing import NamedTuple

from torchmm.parallel.mesh import ParallelMesh
from torchmm.planning.planner import Planner
from torchmm.planning.resolved import Resolved
from torchmm.recipe.parallel_section import ParallelConfig
from torchmm.recipe.schedules import find_schedule
from torchmm.training.pipeline import Pipeline


class PlannerEntry(NamedTuple):
    """A planner in the table."""

    factory: str
    """Function as "module:name". Parameters: run, pipeline, mesh, logger."""
    is_used: Callable[[ParallelConfig, int], bool]
    """Function of the recipe section and the number of pipeline ranks. Equal on all ranks."""


def _uses_times(config: ParallelConfig, pipeline_size: int) -> bool:
    schedule = find_schedule(config.schedule)
    return config.replan_drift > 0 or (schedule is not None and schedule.planned)


PLANNERS: Mapping[str, PlannerEntry] = MappingProxyType(
    {
        "single": PlannerEntry(
            "torchmm.training.planners.single:build_single_planner",
            lambda config, pipeline_size: pipeline_size == 1,
        ),
        "measuring": PlannerEntry(
            "torchmm.balance.pipeweaver.measuring:build_measuring_planner", _uses_times
        ),
        "static": PlannerEntry(
            "torchmm.training.planners.static:build_static_planner",
            lambda config, pipeline_size: True,
        ),
    }
)
"""Planners by name. A run uses the first planner whose `is_used` returns True.

Modules of unused planners are not imported. "measuring" is for schedules that are searched with a
cost model (`Schedule.planned`), and for all schedules with `parallel.replan_drift`.
"""


def find_planner(config: ParallelConfig, pipeline_size: int) -> str:
    """Return the name of the planner of a run."""
    return next(name for name, entry in PLANNERS.items() if entry.is_used(config, pipeline_size))


def build_planner(
    run: Resolved, pipeline: Pipeline, mesh: ParallelMesh, logger: logging.Logger
) -> Planner:
    """Return the planner of a run. Collective over all ranks.

    Raises:
        ConfigError: `simulation.device` is unknown.
    """
    name = find_planner(run.recipe.parallel, mesh.pipeline_size)
    module, factory = PLANNERS[name].factory.split(":")
    planner: Planner = getattr(import_module(module), factory)(run, pipeline, mesh, logger)
    return planner
