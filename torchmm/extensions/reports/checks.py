"""Checks of the keys of reports in the recipe section `[metrics]`."""

from __future__ import annotations

import importlib.util

from torchmm.common.errors import install_command
from torchmm.extensions.reports.section import ReportKeys
from torchmm.recipe.explain import Problem, Problems
from torchmm.recipe.recipe import Recipe


def check_reports(recipe: Recipe, world_size: int | None) -> Problems:
    """Yield problems of trackers that are not installed, and of steps after the last one."""
    keys = ReportKeys.from_parent(recipe.metrics)
    steps = recipe.training.steps
    step = keys.memory_snapshot_step
    if step > steps and recipe.training.epochs is None:
        text = f"is after the last step, training.steps = {steps}; use an earlier step"
        yield Problem("metrics.memory_snapshot_step", step, text, ("training.steps",))
    if keys.tensorboard and importlib.util.find_spec("tensorboard") is None:
        text = f"TensorBoard is not installed; {install_command('tensorboard')} or set it to false"
        yield Problem("metrics.tensorboard", True, text)
    if keys.trackio and importlib.util.find_spec("trackio") is None:
        text = "Trackio is not installed; pip install trackio or set it to false"
        yield Problem("metrics.trackio", True, text)
