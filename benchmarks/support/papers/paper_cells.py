"""A cell of a published table next to ours: what it is, how far off, how it is shown.

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
    """A recipe of recipes/papers."""
    return load_recipe(RECIPES / f"{name}.toml").recipe


def in_one_chain(recipe: Recipe, **changes: Any) -> Recipe:
    """The recipe with all modules on all ranks, cut as one chain of layers, as papers' baselines.

    Args:
        changes: further keys of [parallel].
    """
    table = recipe.parallel.model_dump(exclude_none=True)
    shared = {key: value for key, value in table.items() if key not in recipe.parallel.modules}
    shared |= {"placement": "interleaved", "auto_sizes": False, "schedule": "megatron_balanced"}
    return recipe.model_copy(update={"parallel": ParallelConfig(**{**shared, **changes})})


@dataclass(frozen=True)
class Comparison:
    """One cell."""

    figure: Figure
    ours: float
    note: str = ""
    """How the value was computed, or why the paper value does not follow from its text."""
    goal_percent: float | None = None
    """Relative error to be reached; of an identity: that our reading is right to."""
    identity: bool = False
    """Whether the value follows from other values of the paper."""

    @property
    def error_percent(self) -> float:
        """(torchmm - paper) / paper, in percent."""
        return (self.ours / self.figure.value - 1) * 100

    @property
    def goal(self) -> float | None:
        """Of the relative error, in per cent; an identity has none to meet."""
        return None if self.identity else self.goal_percent

    def rows(self) -> Iterator[Row]:
        """The cell, and its error if there is a goal."""
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
    """Cells that belong together."""

    title: str
    cells: list[Comparison]
    text: str = ""
    """What holds for all of them."""


def identities(title: str, cells: Sequence[Comparison]) -> Section:
    """Cells that predict nothing."""
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
