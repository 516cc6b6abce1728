"""Write docs/reference/recipes.md, the reference of all recipe keys, from their docstrings.

python scripts/recipe_reference.py
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from torchmm.recipe.recipe import Recipe
from torchmm.recipe.section import Section

TARGET = Path(__file__).parent.parent / "docs" / "reference" / "recipes.md"

INTRODUCTION = """\
# Recipe keys

<!-- Written by scripts/recipe_reference.py from torchmm/recipe/. Do not edit. -->

A recipe is a TOML file that describes a run. This page lists all keys with their defaults.
All keys are optional, except those with the default "required". Omitted keys use the default.

torchmm checks a recipe before it creates a process group. It reports all unknown keys, wrong types
and unsupported values at once, with file, key and how to fix them. The exit code is then 2.

```bash
python train.py --config recipes/quickstart.toml --world-size 2 --print-config    # resolved recipe
```

A run saves its resolved recipe as `recipe.toml` in the run directory. You can use it as a recipe.

## Inherit from a recipe

Set `base` in the first line to start from another recipe. The path is relative to the file, or the
name of a packaged recipe, such as "zoo/smolvlm". A base can have a base. Tables are merged by key.
Single values and lists replace those of the base. Inherited keys cannot be removed.

```toml
base = "quickstart.toml"

[training]
steps = 2000            # replaces the value of the base

[optimizer.module_lr]
"vision.connector" = 1e-3   # quote names with a dot
```

## Override keys

Set a key with `--section.key value` or `--section.key=value` on the command line. Command-line
values have precedence over files. Write values as in TOML. Strings need no quotes, lists and tables
need shell quotes.

```sh
torchrun --nproc-per-node 2 train.py --config recipes/quickstart.toml \\
    --training.steps 50 --parallel.shard=-1 --freeze.modules '["llm"]' \\
    --optimizer.module_lr.vision.connector 1e-3
```
"""
PAGE = re.compile(r"\bdocs/([\w/]+?)(\w+)\.md\b")
"""Matches a documentation page in a docstring."""


def main() -> None:
    """Write the page."""
    TARGET.write_text(render(), encoding="utf-8")
    print(f"wrote {TARGET}")


def render() -> str:
    """Return the page as Markdown."""
    tables: dict[type[Section], list[str]] = {}
    for heading, section in _sections("", Recipe):
        tables.setdefault(section, []).append(heading)
    parts = [INTRODUCTION]
    for section, headings in tables.items():
        title = " and ".join(f"`{h}`" for h in headings if h) or "Top level"
        parts.append(f"## {title}\n\n{_one_line(section.__doc__ or '')}\n\n{_table(section)}")
    return "\n".join(parts)


def _sections(path: str, section: type[Section]) -> Iterator[tuple[str, type[Section]]]:
    """Yield (heading, schema class) of a table and of all its nested tables."""
    yield (f"[{path}]" if path and "[" not in path else path), section
    for name, field in section.model_fields.items():
        key = f"{path}.{name}" if path else name
        inner = _strip_none(field.annotation)
        if _is_section(inner):
            yield from _sections(key, inner)
        elif get_args(inner) and _is_section(get_args(inner)[-1]):
            below = get_args(inner)[-1]
            yield from _sections(
                f"{key}.NAME" if get_origin(inner) is dict else f"[[{key}]]", below
            )
    if section.named_tables is not None:
        yield from _sections(f"{path}.NAME", section.named_tables)


def _table(section: type[Section]) -> str:
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for name, field in section.model_fields.items():
        if section is Recipe and _is_section(field.annotation):
            continue
        description = field.description or ""
        if not description and _is_section(field.annotation):  # added by an extension
            description = (field.annotation.__doc__ or "").split(". ")[0].rstrip(".") + "."
        cells = [f"`{name}`", _type(field), _default(field), _one_line(description)]
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows) + "\n"


def _type(field: FieldInfo) -> str:
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    limits = [
        f"{sign} {getattr(limit, name)}"
        for limit in field.metadata
        for name, sign in signs.items()
        if hasattr(limit, name)
    ]
    return _type_name(field.annotation) + (f" {', '.join(limits)}" if limits else "")


def _type_name(annotation: Any) -> str:
    annotation = _strip_none(annotation)
    type_names = {str: "string", int: "integer", float: "number", bool: "true or false", Any: "any"}
    if annotation in type_names:
        return type_names[annotation]
    arguments = get_args(annotation)
    if get_origin(annotation) is Literal:
        return ", ".join(json.dumps(a) for a in arguments)
    if get_origin(annotation) is list:
        plural = "" if get_origin(arguments[0]) is Literal else "s"
        return f"list of {_type_name(arguments[0])}{plural}"
    if get_origin(annotation) is dict and not _is_section(arguments[1]):
        return "table" if arguments[1] is Any else f"table: name = {_type_name(arguments[1])}"
    return "table"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    default = field.get_default(call_default_factory=True)
    if default is None:
        return "None"
    return "see below" if isinstance(default, Section) else f"`{json.dumps(default)}`"


def _strip_none(annotation: Any) -> Any:
    types = [a for a in get_args(annotation) if a is not type(None)]
    return types[0] if type(None) in get_args(annotation) else annotation


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Section)


def _one_line(text: str) -> str:
    """Return a docstring as one line, with links to the pages that it mentions."""
    return PAGE.sub(_link, " ".join(text.split()))


def _link(page: re.Match[str]) -> str:
    return f"[{page[2].replace('_', ' ')}](../{page[1]}{page[2]}.md)"


if __name__ == "__main__":
    main()
