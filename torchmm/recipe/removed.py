"""Recipe keys of earlier versions.

A recipe that sets one of them raises an error that names the replacement. Runs store every key in
`recipe.toml`, so a removed key with its former default is dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

REMOVED_KEYS = {
    "data.reorder_window": "is no longer supported; delete the key: `data.reorder` arranges the "
    "sequences of each step",
    "parallel.search.strategy": "is no longer supported; delete the key: annealing is the only "
    "strategy, and parallel.search.evaluations = 1 keeps the order of microbatches",
}
"""Maps a removed key to the rest of an error message, with the replacement."""
FORMER_DEFAULTS: dict[str, Any] = {
    "data.reorder_window": 1,
    "parallel.search.strategy": "annealing",
}
"""Maps a removed key to its default."""


def without_removed_keys(
    table: Mapping[str, Any], *, only_defaults: bool = False, above: str = ""
) -> dict[str, Any]:
    """Return the tables of a recipe without removed keys.

    Args:
        table: Nested tables, which are not changed.
        only_defaults: Whether to keep removed keys whose values differ from the former default.
        above: Dotted key of `table`, with a dot at its end.
    """
    found: dict[str, Any] = {}
    for name, value in table.items():
        key = f"{above}{name}"
        if key in REMOVED_KEYS and (not only_defaults or value == FORMER_DEFAULTS[key]):
            continue
        if isinstance(value, Mapping):
            found[name] = without_removed_keys(value, only_defaults=only_defaults, above=f"{key}.")
        else:
            found[name] = value
    return found
