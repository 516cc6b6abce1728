"""Explain validation errors of recipes: the type of a key, and how to fix a value.

Pydantic errors become lines with the problem and a fix, such as a similar name, the correct section
of a key, or the allowed values.
"""

from __future__ import annotations

import difflib
import json
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

from torchmm.recipe.changes import renamed_key, renamed_value, with_current_names
from torchmm.recipe.recipe import Recipe
from torchmm.recipe.section import Section

NO_VALUE = object()
"""Value of a problem that applies to a table or a missing key."""

Loc = tuple[int | str, ...]

_MUST_BE = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "a string in quotes",
    "dict_type": "a table",
    "model_type": "a table ([section] with keys below it)",
}


class Problem(NamedTuple):
    """Problem with the value of a key.

    Attributes:
        key: Dotted key.
        value: Value of the key, or `NO_VALUE`.
        text: Description of the problem, and its fix.
        depends_on: Other keys that can cause the problem.
    """

    key: str
    value: Any
    text: str
    depends_on: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.value is NO_VALUE:
            return f"{self.key}: {self.text}"
        return f"{self.key} = {shorten(self.value)}: {self.text}"

    def touches(self, key: str) -> bool:
        """Return True if an error at `key` can be the cause of the problem."""
        return any(
            (other_key + ".").startswith(key + ".") or (key + ".").startswith(other_key + ".")
            for other_key in (without_indices(k) for k in (self.key, *self.depends_on))
        )


Problems = Iterator[Problem]
"""Problems that a check yields."""


REMOVED_KEYS = {
    "data.reorder_window": "is no longer supported; delete the key. `data.reorder` reorders "
    "the sequences of each step",
    "model.generator.connector": "is no longer supported; delete the key. The connector is "
    "always an MLP with two linear layers",
    "parallel.search.strategy": "is no longer supported; delete the key. Annealing is the "
    "only strategy. parallel.search.evaluations = 1 keeps the "
    "order of microbatches",
    "parallel.bubble_pieces": "is no longer supported; delete the key. "
    "`parallel.tp_comm_fraction` > 0 makes encoder layers run during "
    "communication of the LLM",
    "parallel.search.seed": (
        "is no longer supported; delete the key. The search always uses seed 0"
    ),
    "simulation.trials": "is no longer supported; delete the key and set simulation.device "
    "to a device profile that scripts/calibrate.py writes",
}
"""Maps a removed key to the rest of an error message, with the replacement."""
FORMER_DEFAULTS: dict[str, Any] = {
    "data.reorder_window": 1,
    "model.generator.connector": "mlp",
    "parallel.search.strategy": "annealing",
    "parallel.search.seed": 0,
    "simulation.trials": "",
}
"""Maps a removed key to its default. Runs store every key in recipe.toml: a removed key with this
value is dropped when a recipe is read. Without an entry, only recipes in directories of runs may
have the key."""


def without_removed_keys(
    table: Mapping[str, Any], *, only_defaults: bool = False, above: str = ""
) -> dict[str, Any]:
    """Return the tables of a recipe without removed keys.

    Args:
        table: Nested tables, which are not changed.
        only_defaults: Whether to retain removed keys whose values differ from the former default.
        above: Dotted key of `table`, with a dot at its end.
    """
    remaining: dict[str, Any] = {}
    for name, value in table.items():
        key = f"{above}{name}"
        is_default = key in FORMER_DEFAULTS and value == FORMER_DEFAULTS[key]
        if key in REMOVED_KEYS and (is_default or not only_defaults):
            continue
        if isinstance(value, Mapping):
            remaining[name] = without_removed_keys(
                value, only_defaults=only_defaults, above=f"{key}."
            )
        else:
            remaining[name] = value
    if above == "parallel." and table.get("bubble_pieces") is False and not only_defaults:
        remaining["tp_comm_fraction"] = 0.0  # layers that do not run in pieces may be compiled
    return remaining


def upgrade_recipe(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the recipe of a run or checkpoint of an earlier version to the keys of this version.

    Args:
        tables: Nested tables, which are not changed.
    """
    return without_removed_keys(with_current_names(tables))


def explain_error(item: Any) -> Problem:
    """Return the problem and its fix for an entry of `ValidationError.errors()`."""
    loc, kind, value, context = item["loc"], item["type"], item["input"], item.get("ctx", {})
    key = dotted(loc)
    if kind == "extra_forbidden" or (
        kind == "model_type"
        and not _is_declared(loc)
        and is_section(_strip_none(type_at(loc[:-1])))
    ):
        return _explain_unknown(loc, value)
    if kind == "missing":
        return Problem(key, NO_VALUE, "is missing; add it")
    if kind == "literal_error":
        return Problem(key, value, _choice_fix(loc, value))
    if kind in _MUST_BE or kind == "list_type":
        lists = kind == "list_type"
        expectation = _example_of_list(key, type_at(loc), value) if lists else _MUST_BE[kind]
        return Problem(key, value, f"must be {expectation}{_type_fix(value, kind)}")
    for limit, sign in (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<")):
        if limit in context:
            return Problem(key, value, f"must be {sign} {context[limit]}")
    return Problem(key, value, item["msg"])


def _choice_fix(loc: Loc, value: Any) -> str:
    """Return the fix for a value that is not an allowed value."""
    if (now := renamed_value(without_indices(dotted(loc)), value)) is not None:
        return f'was renamed to "{now}"'
    choices = [str(c) for c in get_args(_strip_none(type_at(loc)))]
    return f"must be one of {', '.join(choices)}{suggest(value, choices)}"


def _example_of_list(key: str, annotation: Any, value: Any) -> str:
    """Return an example value of a key that requires a list."""
    element = type_below(annotation, 0)
    if is_section(_strip_none(element)):
        return f"a list of tables; write each as [[{key}]] with its keys below it"
    if requires_string(element):
        return f"a list such as [{json.dumps(value if isinstance(value, str) else 'a')}]"
    return "a list such as [1, 2]"


def type_at(loc: Iterable[int | str]) -> Any:
    """Return the annotation at a key path, or None if the schema has no such key or type."""
    annotation: Any = Recipe
    for part in loc:
        annotation = type_below(annotation, part)
    return annotation


def type_below(annotation: Any, part: int | str) -> Any:
    """Return the annotation of the entry `part` of a section, a dict or a list."""
    annotation = _strip_none(annotation)
    if is_section(annotation):
        field = annotation.model_fields.get(part)
        return field.annotation if field else annotation.named_tables
    if get_origin(annotation) in (dict, list):
        return get_args(annotation)[-1]
    return None


def is_section(annotation: Any) -> bool:
    """Return True if the annotation is a section of the recipe."""
    return isinstance(annotation, type) and issubclass(annotation, Section)


def is_name_keyed(annotation: Any) -> bool:
    """Return True if the keys below are free names for plain values (`optimizer.module_lr`)."""
    annotation = _strip_none(annotation)
    if get_origin(annotation) is not dict:
        return False
    value = get_args(annotation)[1]
    return value is not Any and not is_section(value)


def requires_string(annotation: Any) -> bool:
    """Return True if all values of the key are strings."""
    annotation = _strip_none(annotation)
    if get_origin(annotation) is Literal:
        return all(isinstance(value, str) for value in get_args(annotation))
    return annotation is str


def dotted(loc: Iterable[int | str]) -> str:
    """Return a key path as a dotted key: ("data", "sources", 0, "path") is data.sources[0].path."""
    key = ""
    for part in loc:
        key += f"[{part}]" if isinstance(part, int) else f".{part}" if key else part
    return key


def without_indices(key: str) -> str:
    """Remove the indices of a dotted key: data.sources[0].path is data.sources.path."""
    return ".".join(part.partition("[")[0] for part in key.split("."))


def shorten(value: Any) -> str:
    """Return a value as JSON, truncated to 60 characters."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


def suggest(name: object, known: Iterable[str]) -> str:
    """Return `; did you mean "..."?`, or "" if no known name is similar."""
    guess = difflib.get_close_matches(str(name), list(known), 1)
    return f'; did you mean "{guess[0]}"?' if guess else ""


def _strip_none(annotation: Any) -> Any:
    if get_origin(annotation) in (Union, types.UnionType):
        return next(a for a in get_args(annotation) if a is not type(None))
    return annotation


def _type_fix(value: Any, kind: str) -> str:
    if isinstance(value, dict) and kind in ("float_type", "string_type"):
        return '; a name with a dot needs quotes, as in "vision.connector" = 1e-4'
    if isinstance(value, str) and kind in ("int_type", "float_type", "bool_type"):
        return "; remove the quotes" if _is_plain_value(value) else ""
    return ""


def _is_plain_value(text: str) -> bool:
    try:
        return isinstance(json.loads(text), int | float | bool)
    except ValueError:
        return False


def _is_declared(loc: Loc) -> bool:
    """Return True if the schema has the key itself, not only a free name."""
    section = _strip_none(type_at(loc[:-1]))
    return is_section(section) and loc[-1] in section.model_fields


def _explain_unknown(loc: Loc, value: Any) -> Problem:
    key = dotted(loc)
    if (text := REMOVED_KEYS.get(without_indices(key))) is not None:
        return Problem(key, value, text)
    if (now := renamed_key(without_indices(key))) is not None:
        return Problem(key, value, f"was renamed to {now}", (now,))
    parent = dotted(loc[:-1])
    name = str(loc[-1])
    siblings = list(_strip_none(type_at(loc[:-1])).model_fields)
    guess = difflib.get_close_matches(name, siblings, 1)
    elsewhere = [t for t in Recipe.model_fields if _is_declared((t, name))]
    if guess:
        better = f"{parent}.{guess[0]}" if parent else guess[0]
    elif elsewhere:
        better = f"{elsewhere[0]}.{name}"
    else:
        better = ""
    hint = f"did you mean {better}?" if better else f"valid names: {', '.join(siblings)}"
    if isinstance(value, dict):
        return Problem(key, NO_VALUE, f"unknown section; {hint}", (better or key,))
    return Problem(key, value, f"unknown key; {hint}", (better or key,))
