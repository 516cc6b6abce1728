"""Cells of published tables compared with torchmm results.

Shared by `paper_tables.py`, which runs everything, and `paper_steps.py`, which simulates.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from rich.table import Table

from support.harness import Row
from support.papers.paper_figures import Figure
from torchmm.common.log import make_console
from torchmm.recipe.parallel_section import ParallelConfig
from torchmm.recipe.read import load_recipe
from torchmm.recipe.recipe import Recipe

RECIPES = Path(__file__).parents[3] / "recipes" / "papers"


@cache
def recipe_named(name: str) -> Recipe:
    """Return a recipe of recipes/papers."""
    return load_recipe(RECIPES / f"{name}.toml").recipe


def in_one_chain(recipe: Recipe, **changes: Any) -> Recipe:
    """Return the recipe with all modules in one pipeline, as in the baselines of the papers.

    Args:
        changes: further keys of [parallel].
    """
    table = recipe.parallel.model_dump(exclude_none=True)
    shared = {key: value for key, value in table.items() if key not in recipe.parallel.modules}
    shared |= {"placement": "interleaved", "auto_sizes": False, "schedule": "megatron_balanced"}
    return recipe.model_copy(update={"parallel": ParallelConfig(**{**shared, **changes})})


@dataclass(frozen=True)
class Comparison:
    """Published value and torchmm value of one cell."""

    figure: Figure
    ours: float
    note: str = ""
    """How the value was computed, or why the paper value does not follow from its text."""
    goal_percent: float | None = None
    """Maximum relative error in percent. For an identity, it checks our reading of the paper."""
    identity: bool = False
    """Whether the value follows from other values of the paper."""

    @property
    def error_percent(self) -> float:
        """Relative error (torchmm - paper) / paper, in percent."""
        return (self.ours / self.figure.value - 1) * 100

    @property
    def goal(self) -> float | None:
        """Goal of the relative error in percent. None for an identity."""
        return None if self.identity else self.goal_percent

    def rows(self) -> Iterator[Row]:
        """Return the row of the cell, and the row of its error if it has a goal."""
        case, unit = self.figure.source, self.figure.unit
        metric = "value, derived" if self.identity else "value"
        yield Row(case, metric, unit, self.ours, paper=self.figure.value, kind="simulated")
        if self.goal is not None:
            error = abs(self.error_percent)
            yield Row(
                case, "relative error", "%", error,
                goal=self.goal, better="lower", kind="simulated",
            )  # fmt: skip


@dataclass(frozen=True)
class Section:
    """Group of cells."""

    title: str
    cells: list[Comparison]
    text: str = ""
    """Note on all cells."""


def identities(title: str, cells: Sequence[Comparison]) -> Section:
    """Return a section of cells that follow from published values."""
    text = (
        "Identities follow from published values. They check that the recipes match the papers. "
        "They predict nothing and have no goal."
    )
    return Section(title, [replace(cell, identity=True) for cell in cells], text)


def show(section: Section) -> None:
    """Print a section."""
    table = Table(title=section.title, title_justify="left", caption=section.text or None)
    table.add_column("cell")
    for column in ("unit", "torchmm", "paper", "error", "goal"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("note")
    for cell in section.cells:
        goal = "" if cell.goal is None else f"{cell.goal:g} %"
        numbers = (_shown(cell.ours), _shown(cell.figure.value), f"{cell.error_percent:+.1f} %")
        table.add_row(cell.figure.source, cell.figure.unit, *numbers, goal, cell.note)
    make_console(width=160).print(table)


def _shown(value: float) -> str:
    return f"{value:.4g}" if abs(value) < 1e6 else f"{value:.3e}"
