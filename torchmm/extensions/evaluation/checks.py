"""Checks of the recipe section `[validation.benchmarks]`."""

from __future__ import annotations

from pathlib import Path

from torchmm.extensions.evaluation.section import BenchmarksConfig
from torchmm.recipe.explain import Problem, Problems
from torchmm.recipe.recipe import Recipe


def check_benchmarks(recipe: Recipe, world_size: int | None) -> Problems:
    """Yield problems of `[validation.benchmarks]`."""
    benchmarks = BenchmarksConfig.from_parent(recipe.validation)
    if benchmarks.interval and not benchmarks.tasks:
        text = "has no tasks; set validation.benchmarks.tasks"
        yield Problem("validation.benchmarks.interval", benchmarks.interval, text)
    if benchmarks.interval and not Path(benchmarks.python).is_file():
        text = (
            "no such program; run scripts/lmms_eval.sh, or set the path of a Python interpreter "
            "with lmms-eval"
        )
        yield Problem("validation.benchmarks.python", benchmarks.python, text)
