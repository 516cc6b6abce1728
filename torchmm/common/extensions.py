"""Entries of extensions in the tables of the core.

An extension is `torchmm/balance` or a folder in `torchmm/extensions`. Its module `extension.py` has
a constant `ENTRIES`, which maps names of tables to entries. The core finds the entries here, so
that it does not import extensions, and works without the folders of extensions that a run does not
use. `extension.py` must import quickly: targets are strings that are imported when they are used.
It may have a constant `REQUIRES` with dotted names of extensions that its entries import. If one of
them is not installed, the extension counts as not installed.

Tables (the module that reads a table describes its entries):

    sections          sections of a recipe                     `torchmm.recipe.section`
    recipe_checks     checks of a recipe                       `torchmm.recipe.check`
    hooks             hooks of the training loop               `torchmm.training.hooks.registry`
    trackers          trackers of metrics                      `torchmm.training.tracking.trackers`
    run_ends          functions that run after training        `torchmm.training.run`
    schedules         schedules that need a cost model         `torchmm.planning.step`
    planners          planners of training steps               `torchmm.training.planners.registry`
    optimizers        optimizers by name                       `torchmm.training.optimizers`
    parallel_styles   tensor-parallel styles with overlap      `torchmm.parallel.tensor.apply`
    loaded_models     functions that run after weights load    `torchmm.training.model_build`
    model_converters  replacements of parts of a model         `torchmm.planning.converters`
    recipe_choices    values that recipes leave open           `torchmm.planning.choices`
    step_arrangements sequences and images of each rank        `torchmm.training.data_build`
    plan_checks       checks of plans                          `torchmm.pipelining.checks.validate`
    action_runners    functions that run actions of a step     `torchmm.pipelining.run.runtime`
    layer_stops       hooks at which encoder layers yield      `torchmm.parallel.apply`
    file_systems      files at addresses                       `torchmm.data.files.remote_files`
    source_formats    formats of data sources                  `torchmm.data.sources.formats`
    sample_services   processes that prepare samples           `torchmm.data.samples`
    checkpoint_stores copies of checkpoints at addresses       `torchmm.training.checkpoint.store`
    generators        "module": a generator                    `torchmm.models.build`
    generators        "images": preparation of its images      `torchmm.data.target_images`
    model_fallbacks   families of models that no table lists   `torchmm.models.build`
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
    """Function that returns True if a run uses the entry. Some tables do not call it."""
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
    return tuple(name for name in names if _is_installed(name))


def _is_installed(name: str) -> bool:
    """Return True if a folder is an extension and has the extensions that it requires."""
    if find_spec(f"{name}.extension") is None:
        return False
    required = getattr(import_module(f"{name}.extension"), "REQUIRES", ())
    return all(find_spec(other) is not None for other in required)


@cache
def find_entries(table: str) -> tuple[Entry, ...]:
    """Return the entries of all installed extensions in a table."""
    result: list[Entry] = []
    for name in extension_names():
        entries: Entries = import_module(f"{name}.extension").ENTRIES
        result += entries.get(table, ())
    return tuple(result)


def find_entry(table: str, name: str) -> Entry | None:
    """Return the entry of this name in a table. None if no installed extension has one."""
    return next((entry for entry in find_entries(table) if entry.name == name), None)


def load_entry(table: str, name: str) -> Any:
    """Import and return the object of an entry.

    Checks of the recipe (`torchmm.recipe.check`) report missing entries before a run begins.

    Raises:
        LookupError: No installed extension has the entry.
    """
    entry = find_entry(table, name)
    if entry is None:
        raise LookupError(f'no installed extension has the entry "{name}" in table "{table}"')
    return entry.load()


def require_entry(table: str, name: str, extension: str, key: str) -> Entry:
    """Return the entry of this name in a table.

    Args:
        table: Table.
        name: Name of the entry.
        extension: Extension that has the entry.
        key: Key of the recipe that needs the entry, for the error message.

    Raises:
        ConfigError: The extension is not installed.
    """
    entry = find_entry(table, name)
    if entry is None:
        raise ConfigError(f"{key}: {NOT_INSTALLED.format(extension)}")
    return entry
