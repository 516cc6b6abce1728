"""Every recipe key has an example: a recipe sets it, or a page shows it with a value."""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any, get_args

import tomli

from torchmm.recipe.recipe import Recipe
from torchmm.recipe.section import Section

ROOT = Path(__file__).parents[3]
PAGES = [
    page
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), ROOT / "recipes/README.md")
    if page != ROOT / "docs/reference/recipes.md"
]
FENCED = re.compile(r"^ *```\w*\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"(?:^(?: {4}.*)?\n)+", re.MULTILINE)
ASSIGNED = re.compile(r"([a-z_]\w*(?:\.[\w-]+)*)(?: = |=)[\[{\"'\d.$a-z-]")
"""`section.key = value` or `--section.key=value`."""
OPTION = re.compile(r"--([a-z_]\w*(?:\.[\w-]+)+) [^\s-]")
"""`--section.key value`."""


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
    """Yield the keys that tables set, whatever their names and number."""
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


def test_every_key_has_an_example() -> None:
    found = set()
    for file in (ROOT / "recipes").rglob("*.toml"):
        found |= set(set_keys(tomli.loads(file.read_text()), Recipe))
    for page in PAGES:
        found |= set(shown_keys(page.read_text()))
    keys = set(schema_keys(Recipe))
    assert found <= keys
    assert sorted(keys - found) == [], "show these keys in a recipe or on a page of docs/"
