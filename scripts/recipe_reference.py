"""Write docs/reference/recipes.md, the reference of all recipe keys, from the docstrings.

python scripts/recipe_reference.py
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from torchmm.recipe.recipe import Recipe
from torchmm.recipe.section import Section

TARGET = Path(__file__).parent.parent / "docs" / "reference" / "recipes.md"

INTRODUCTION = """\
# Recipe reference

<!-- Written by scripts/recipe_reference.py from torchmm/recipe/; do not edit by hand. -->

A recipe is a TOML file that describes a whole run. Every key below may be left out; its default
then holds. Unknown keys, values of the wrong type and sizes that do not fit are reported all at
once, with file, key and a remedy, before any process is connected; the exit code is then 2.

## Inheritance

`base = "other.toml"` as the first line starts from another recipe; the path is relative to the
file it stands in, and a base may have a base. Tables merge key by key; single values and lists
replace those of the base. Inherited keys cannot be removed, so keep bases small.

```toml
base = "quickstart.toml"

[training]
steps = 2000            # replaces the base's steps, leaves its other training keys

[optimizer.module_lr]
"vision.connector" = 1e-3   # a name with a dot needs quotes
```

## Overrides

`--section.key value` or `--section.key=value` on the command line wins over all files. Values are
written as in TOML; a string needs no quotes. Lists and tables need the shell's quotes:

```sh
torchrun --nproc-per-node 2 train.py --config recipes/quickstart.toml \\
    --training.steps 50 --parallel.shard=-1 --freeze.modules '["llm"]' \\
    --optimizer.module_lr.vision.connector 1e-3
```

`--print-config` shows the resolved recipe; a run saves it as `recipe.toml` in its directory, from
where it can be used again.
"""


def main() -> None:
    """Writes the file."""
    TARGET.write_text(render(), encoding="utf-8")
    print(f"wrote {TARGET}")


def render() -> str:
    """The whole reference as Markdown."""
    tables: dict[type[Section], list[str]] = {}
    for heading, section in _sections("", Recipe):
        tables.setdefault(section, []).append(heading)
    parts = [INTRODUCTION]
    for section, headings in tables.items():
        title = " and ".join(f"`{h}`" for h in headings if h) or "Top level"
        parts.append(f"## {title}\n\n{_one_line(section.__doc__ or '')}\n\n{_table(section)}")
    return "\n".join(parts)


def _sections(path: str, section: type[Section]) -> Iterator[tuple[str, type[Section]]]:
    """(heading, schema class) of a table and all tables below it."""
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
    plain = {str: "string", int: "integer", float: "number", bool: "true or false", Any: "any"}
    if annotation in plain:
        return plain[annotation]
    arguments = get_args(annotation)
    if get_origin(annotation) is Literal:
        return ", ".join(json.dumps(a) for a in arguments)
    if get_origin(annotation) is list:
        return f"list of {_type_name(arguments[0])}s"
    if get_origin(annotation) is dict and not _is_section(arguments[1]):
        return "table" if arguments[1] is Any else f"table: name = {_type_name(arguments[1])}"
    return "table"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    default = field.get_default(call_default_factory=True)
    if default is None:
        return "none"
    return "see below" if isinstance(default, Section) else f"`{json.dumps(default)}`"


def _strip_none(annotation: Any) -> Any:
    rest = [a for a in get_args(annotation) if a is not type(None)]
    return rest[0] if type(None) in get_args(annotation) else annotation


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Section)


def _one_line(text: str) -> str:
    return " ".join(text.split())


if __name__ == "__main__":
    main()
