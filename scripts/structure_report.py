"""Print measures of the structure of `torchmm/`: lines, imports, record types and recipe keys.

    python scripts/structure_report.py

The script reads source files and counts all imports, also those under TYPE_CHECKING and inside
functions. Lines include comments and blank lines. Record types are dataclasses, named tuples,
typed dicts and pydantic models.
"""

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from textwrap import dedent
from typing import Any, get_args

import tomli

from torchmm.recipe.recipe import Recipe
from torchmm.recipe.section import Section

ROOT = Path(__file__).parents[1]
CORE = (
    "common", "recipe", "models", "data", "parallel", "pipelining", "costs", "planning", "training",
)  # fmt: skip
PAGES = [
    page
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), ROOT / "recipes/README.md")
    if page != ROOT / "docs/reference/recipes.md"
]
"""Pages whose examples of recipe keys are counted, without the reference of all keys."""
FENCED = re.compile(r"^ *```\w*\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"(?:^(?: {4}.*)?\n)+", re.MULTILINE)
ASSIGNED = re.compile(r"([a-z_]\w*(?:\.[\w-]+)*)(?: = |=)[\[{\"'\d.$a-z-]")
"""Matches `section.key = value` or `--section.key=value`."""
OPTION = re.compile(r"--([a-z_]\w*(?:\.[\w-]+)+) [^\s-]")
"""Matches `--section.key value`."""
RECORD_BASES = {"NamedTuple", "BaseModel", "Section", "TypedDict"}
Graph = Mapping[str, frozenset[str]]
"""Maps each module to the modules of `torchmm` that it imports."""


def main() -> int:
    """Print the table of measures and the lines of each folder."""
    for name, value in measures().items():
        print(f"{name:<66} {value:>10}")
    print()
    for name, count in folder_lines().items():
        print(f"{name:<66} {count:>10,}")
    return 0


def measures() -> dict[str, str]:
    """Return the measures with their names."""
    graph = import_graph()
    lines = folder_lines()
    classes = list(_classes())
    records = find_records(classes)
    core = sum(lines[f"torchmm/{name}"] for name in CORE)
    trainer = "torchmm.training.trainer"
    every, from_recipes, examples = recipe_keys()
    return {
        "lines in torchmm/": f"{sum(lines.values()):,}",
        "lines of the core": f"{core:,}",
        "modules that trainer.py reaches": f"{len(reached(graph, trainer))} of {len(graph)}",
        "lines of trainer.py": f"{_count_lines(ROOT / 'torchmm/training/trainer.py')}",
        "modules that build.py imports": f"{len(graph['torchmm.training.build'])}",
        "longest import chain, file by file": f"{longest_chain(graph)}",
        "record types among all classes": f"{len(records)} of {len(classes)}",
        "recipe keys": f"{len(every)}",
        "recipe keys that no recipe sets": f"{len(every - from_recipes)}",
        "recipe keys without any example": f"{len(every - from_recipes - examples)}",
    }


def folder_lines() -> dict[str, int]:
    """Return lines by folder of the core, of commands, and by extension."""
    lines: Counter[str] = Counter()
    for file in modules():
        parts = file.relative_to(ROOT).parts
        depth = 3 if parts[1] == "extensions" and len(parts) > 3 else 2
        lines["/".join(parts[:depth]) if len(parts) > 2 else "torchmm"] += _count_lines(file)
    return dict(sorted(lines.items()))


@cache
def modules() -> tuple[Path, ...]:
    """Return the Python files of the package."""
    return tuple(sorted((ROOT / "torchmm").rglob("*.py")))


def _count_lines(file: Path) -> int:
    return len(file.read_text().splitlines())


@cache
def _parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text(), str(file))


def import_graph() -> Graph:
    """Return the imports among all modules other than `__init__`, which have only a docstring."""
    names = {
        ".".join(file.relative_to(ROOT).with_suffix("").parts): file
        for file in modules()
        if file.name != "__init__.py"
    }
    return {
        name: frozenset(_imported(file) & names.keys() - {name}) for name, file in names.items()
    }


def _imported(file: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(_parse(file)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def reached(graph: Graph, start: str) -> set[str]:
    """Return all modules that importing `start` may import, without `start`."""
    found: set[str] = set()
    remaining = {start}
    while remaining:
        imported = graph[remaining.pop()] - found
        found |= imported
        remaining |= imported
    return found - {start}


def longest_chain(graph: Graph) -> int:
    """Return the number of modules in the longest chain of imports."""

    @cache
    def depth(name: str) -> int:
        return 1 + max((depth(other) for other in graph[name]), default=0)

    return max(map(depth, graph))


def _classes() -> Iterator[ast.ClassDef]:
    for file in modules():
        yield from (node for node in ast.walk(_parse(file)) if isinstance(node, ast.ClassDef))


def find_records(classes: list[ast.ClassDef]) -> set[str]:
    """Return the names of dataclasses, named tuples and pydantic models, also of subclasses."""
    records = {
        node.name
        for node in classes
        if any("dataclass" in ast.unparse(each) for each in node.decorator_list)
    }
    bases = set(RECORD_BASES)
    found_more = True
    while found_more:
        found = {
            node.name
            for node in classes
            if {ast.unparse(base).split(".")[-1].split("[")[0] for base in node.bases} & bases
        }
        found_more = not found <= bases
        bases |= found
    return records | {node.name for node in classes if node.name in bases}


def recipe_keys() -> tuple[set[str], set[str], set[str]]:
    """Return all recipe keys, those that recipes set, and those that pages show with a value."""
    set_by_recipes: set[str] = set()
    for file in (ROOT / "recipes").rglob("*.toml"):
        set_by_recipes |= set(set_keys(tomli.loads(file.read_text()), Recipe))
    shown: set[str] = set()
    for page in PAGES:
        shown |= set(shown_keys(page.read_text()))
    return set(schema_keys(Recipe)), set_by_recipes, shown


def owned(section: type[Section], name: str) -> str:
    """Return the class that defines a key, and the key. Tables with the same keys share them."""
    owner = next(c for c in reversed(section.__mro__) if name in getattr(c, "model_fields", ()))
    return f"{owner.__name__}.{name}"


def section_below(annotation: Any) -> type[Section] | None:
    """Return the section of a field that is a table, several named tables or a list of tables."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return next((found for a in get_args(annotation) if (found := section_below(a))), None)


def schema_keys(section: type[Section]) -> Iterator[str]:
    """Yield all keys of a section and of the sections below it."""
    for name, field in section.model_fields.items():
        below = section_below(field.annotation)
        if below is None:
            yield owned(section, name)
        else:
            yield from schema_keys(below)
    if section.named_tables is not None:
        yield from schema_keys(section.named_tables)


def set_keys(value: Any, section: type[Section]) -> Iterator[str]:
    """Yield the keys that tables set, for any names and number of tables."""
    if isinstance(value, list):
        for table in value:
            yield from set_keys(table, section)
        return
    for name, inner in value.items() if isinstance(value, dict) else ():
        field = section.model_fields.get(name)
        if field is None:  # a free name
            yield from set_keys(inner, section.named_tables or section)
        elif (below := section_below(field.annotation)) is not None:
            yield from set_keys(inner, below)
        else:
            yield owned(section, name)


def shown_keys(text: str) -> Iterator[str]:
    """Yield the keys that a page shows with a value; a name alone counts if it is unique."""
    for block in (*FENCED.findall(text), *INDENTED.findall(text)):
        try:
            yield from set_keys(tomli.loads(dedent(block)), Recipe)
        except tomli.TOMLDecodeError:
            continue
    every = set(schema_keys(Recipe))
    names = Counter(key.partition(".")[2] for key in every)
    for key in (*ASSIGNED.findall(text), *OPTION.findall(text)):
        *sections, name = key.split(".")
        table: Any = {name: 0}
        for section in reversed(sections):
            table = {section: table}
        yield from set_keys(table, Recipe)
        if not sections and names[name] == 1:
            yield next(own for own in every if own.endswith(f".{name}"))


if __name__ == "__main__":
    sys.exit(main())
