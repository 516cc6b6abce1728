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
    all_keys, from_recipes, examples = recipe_keys()
    return {
        "lines in torchmm/": f"{sum(lines.values()):,}",
        "lines of the core": f"{core:,}",
        "modules that trainer.py reaches": (
            f"{len(transitive_imports(graph, trainer))} of {len(graph)}"
        ),
        "lines of trainer.py": f"{_count_lines(ROOT / 'torchmm/training/trainer.py')}",
        "modules that build.py imports": f"{len(graph['torchmm.training.build'])}",
        "longest import chain, file by file": f"{longest_import_chain(graph)}",
        "record types among all classes": f"{len(records)} of {len(classes)}",
        "recipe keys": f"{len(all_keys)}",
        "recipe keys that no recipe sets": f"{len(all_keys - from_recipes)}",
        "recipe keys without any example": f"{len(all_keys - from_recipes - examples)}",
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
    imports: set[str] = set()
    for node in ast.walk(_parse(file)):
        if isinstance(node, ast.Import):
            imports |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            imports |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return imports


def transitive_imports(graph: Graph, start: str) -> set[str]:
    """Return all modules that importing `start` may import, without `start`."""
    reachable: set[str] = set()
    remaining = {start}
    while remaining:
        imported = graph[remaining.pop()] - reachable
        reachable |= imported
        remaining |= imported
    return reachable - {start}


def longest_import_chain(graph: Graph) -> int:
    """Return the number of modules in the longest chain of imports."""

    @cache
    def depth(name: str) -> int:
        return 1 + max((depth(dependency) for dependency in graph[name]), default=0)

    return max(map(depth, graph))


def _classes() -> Iterator[ast.ClassDef]:
    for file in modules():
        yield from (node for node in ast.walk(_parse(file)) if isinstance(node, ast.ClassDef))


def find_records(classes: list[ast.ClassDef]) -> set[str]:
    """Return the names of dataclasses, named tuples and pydantic models, also of subclasses."""
    records = {
        node.name
        for node in classes
        if any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)
    }
    bases = set(RECORD_BASES)
    found_more = True
    while found_more:
        record_names = {
            node.name
            for node in classes
            if {ast.unparse(base).split(".")[-1].split("[")[0] for base in node.bases} & bases
        }
        found_more = not record_names <= bases
        bases |= record_names
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


def defining_key(section: type[Section], name: str) -> str:
    """Return the class that defines a key, and the key. Tables with the same keys share them."""
    owner = next(c for c in reversed(section.__mro__) if name in getattr(c, "model_fields", ()))
    return f"{owner.__name__}.{name}"


def section_below(annotation: Any) -> type[Section] | None:
    """Return the section of a field that is a table, several named tables or a list of tables."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return next((section for a in get_args(annotation) if (section := section_below(a))), None)


def schema_keys(section: type[Section]) -> Iterator[str]:
    """Yield all keys of a section and of the sections below it."""
    for name, field in section.model_fields.items():
        below = section_below(field.annotation)
        if below is None:
            yield defining_key(section, name)
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
            yield defining_key(section, name)


def shown_keys(text: str) -> Iterator[str]:
    """Yield the keys that a page shows with a value; a name alone counts if it is unique."""
    for block in (*FENCED.findall(text), *INDENTED.findall(text)):
        try:
            yield from set_keys(tomli.loads(dedent(block)), Recipe)
        except tomli.TOMLDecodeError:
            continue
    all_keys = set(schema_keys(Recipe))
    names = Counter(key.partition(".")[2] for key in all_keys)
    for key in (*ASSIGNED.findall(text), *OPTION.findall(text)):
        *sections, name = key.split(".")
        table: Any = {name: 0}
        for section in reversed(sections):
            table = {section: table}
        yield from set_keys(table, Recipe)
        if not sections and names[name] == 1:
            yield next(full_key for full_key in all_keys if full_key.endswith(f".{name}"))


if __name__ == "__main__":
    sys.exit(main())
