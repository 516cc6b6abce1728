"""Entries of extensions in the tables of the core.

An extension is `torchmm/balance` or a folder in `torchmm/extensions`. Its module `extension.py` has
a constant `ENTRIES`, which maps names of tables to entries. The core finds the entries here, so
that it does not import extensions, and works without the folders of extensions that a run does not
use. `extension.py` must import quickly: targets are strings that are imported when they are used.

Tables (the module that reads a table describes its entries):

    sections          sections of a recipe                     `torchmm.recipe.section`
    recipe_checks     checks of a recipe                       `torchmm.recipe.check`
    hooks             hooks of the training loop               `torchmm.training.hooks.table`
    planners          planners of training steps               `torchmm.training.planners.table`
    generators        "module": a generator                    `torchmm.models.registry`
    generators        "images": preparation of its images      `torchmm.data.media.generated`
    model_fallbacks   families of models that no table lists   `torchmm.models.registry`
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

from torchmm.common.errors import ConfigError

FOLDERS = ("torchmm.balance", "torchmm.extensions")


class Entry(NamedTuple):
    """An entry of an extension in a table of the core."""

    name: str
    """Name in the table, such as the value of a recipe key."""
    target: str
    """Object as "module:name". Its module is imported when the entry is used."""
    is_used: Callable[..., bool] = lambda *arguments: True
    """Function that tells whether a run uses the entry, if the table asks for it."""
    after: str = ""
    """Name of the entry that this one follows, in tables with an order. Default: the first."""

    def load(self) -> Any:
        """Import and return the object."""
        module, name = self.target.split(":")
        return getattr(import_module(module), name)


NOT_INSTALLED = 'the extension "{}" is not installed; use a complete installation of torchmm'
"""Error message for recipes that need an extension without a folder."""
Entries = Mapping[str, Sequence[Entry]]
"""Type of `ENTRIES` in an extension: entries by table."""


@cache
def extension_names() -> tuple[str, ...]:
    """Return the dotted names of the installed extensions."""
    names: list[str] = []
    for folder in FOLDERS:
        spec = find_spec(folder)
        if spec is None:
            continue
        inner = pkgutil.iter_modules(spec.submodule_search_locations, f"{folder}.")
        names += [folder, *(module.name for module in inner if module.ispkg)]
    return tuple(name for name in names if find_spec(f"{name}.extension") is not None)


@cache
def find_entries(table: str) -> tuple[Entry, ...]:
    """Return the entries of all installed extensions in a table."""
    found: list[Entry] = []
    for name in extension_names():
        entries: Entries = import_module(f"{name}.extension").ENTRIES
        found += entries.get(table, ())
    return tuple(found)


def find_entry(table: str, name: str) -> Entry | None:
    """Return the entry of this name in a table. None if no installed extension has one."""
    return next((entry for entry in find_entries(table) if entry.name == name), None)


def require_entry(table: str, name: str, extension: str, key: str) -> Entry:
    """Return the entry of this name in a table.

    Args:
        table: Table.
        name: Name of the entry.
        extension: Extension that has the entry.
        key: Key that needs the entry, for the error message.

    Raises:
        ConfigError: The extension is not installed.
    """
    entry = find_entry(table, name)
    if entry is None:
        raise ConfigError(f"{key}: {NOT_INSTALLED.format(extension)}")
    return entry
