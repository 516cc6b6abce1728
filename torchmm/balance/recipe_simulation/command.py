"""Implementation of `scripts/simulate.py` after its command line is parsed.

It is separate from the script so that `--help` works without importing torch.
"""

from __future__ import annotations

import argparse
import sys

from torchmm.balance.costs.profiles import load_profile
from torchmm.balance.recipe_simulation.report import build_report_table, write_reports
from torchmm.balance.recipe_simulation.step_simulator import StepSimulator
from torchmm.balance.search.plan_search import compare_schedules
from torchmm.balance.search.plan_space import describe_choices
from torchmm.balance.search.recipe_completion import complete_sizes
from torchmm.balance.search.result import SimulatedPlan
from torchmm.balance.simulation.section import SimulationConfig
from torchmm.common.errors import ConfigError, TorchmmError
from torchmm.common.log import make_console, report_progress
from torchmm.recipe.read import load_recipe
from torchmm.recipe.schedules import SCHEDULES

SCHEDULE_BUDGET_S = 5.0
"""CPU time of the search for open parallelism degrees, for each schedule."""


def simulate_recipe(options: argparse.Namespace, overrides: list[str]) -> int:
    """Print the simulated steps of a recipe, write output files, and return the exit code.

    Args:
        options: Parsed options config, gpus, device, schedule and out.
        overrides: Further arguments: sections and keys of the recipe.
    """
    try:
        return _simulate(options, overrides)
    except TorchmmError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return error.exit_code


def _simulate(options: argparse.Namespace, overrides: list[str]) -> int:
    section = SimulationConfig.from_parent(load_recipe(options.config, overrides).recipe)
    world_size = section.gpus if options.gpus is None else options.gpus
    recipe = load_recipe(options.config, overrides, world_size).recipe
    device = options.device or section.device
    try:
        profile = load_profile(device)
    except ValueError as error:
        raise ConfigError(f"--device: {error}") from error
    simulated = SimulationConfig.from_parent(recipe).model_copy(update={"device": device})
    with report_progress("searching parallelism degrees"):
        recipe = complete_sizes(recipe.model_copy(update={"simulation": simulated}), world_size)
    with report_progress("building the model, measuring the first step"):
        simulator = StepSimulator(recipe, world_size, profile)
    names = options.schedule
    unknown = [name for name in names if name not in SCHEDULES and ":" not in name]
    if names != ["all"] and unknown:
        raise ConfigError(
            f"--schedule {' '.join(unknown)}: unknown; use all, {', '.join(SCHEDULES)}"
        )
    with report_progress("planning and simulating steps"):
        if names == ["all"]:
            plans = compare_schedules(
                simulator.recipe, world_size, profile, simulator.sample, SCHEDULE_BUDGET_S
            )
        else:
            plans = {}
        candidates = [plan for plan in plans.values() if isinstance(plan, SimulatedPlan)]
        reports = [plan.report for plan in candidates]
        if not plans:
            reports = [simulator.simulate_schedule(name) for name in names or [None]]
    notes = {plan.report.schedule: describe_choices(plan.plan, recipe) for plan in candidates}
    notes = {name: f"with {text}" for name, text in notes.items() if text}
    notes |= {name: plan for name, plan in plans.items() if isinstance(plan, str)}
    notes |= {report.schedule: report.problem for report in reports if report.step is None}
    console = make_console(width=150)
    console.print(build_report_table(simulator, reports))
    for name, note in notes.items():
        console.out(f"{name}: {note}", highlight=False)
    if simulator.run.data_parallel_size > 1:
        for key, text in simulator.run.choices.items():
            console.out(f"{key} = auto: {text}", highlight=False)
    if options.out is not None:
        for file in write_reports(options.out, simulator, reports):
            console.out(file, highlight=False)
    return 0
