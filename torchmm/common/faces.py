"""A folder's public names, importable from the folder itself without importing all of it.

A folder's `__init__.py` lists what others may take from it. Importing all of that at once would
make `train.py --print-config` load torch and a data worker load the models, so each name is looked
up when it is first asked for (PEP 562). Inside torchmm, modules import each other directly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def public(
    folder: str, names: Mapping[str, tuple[str, ...]]
) -> tuple[list[str], Callable[[str], Any]]:
    """`__all__` and `__getattr__` of a folder.

    Args:
        folder: its dotted name.
        names: public names by module in it.
    """
    home = {name: module for module, given in names.items() for name in given}

    def find(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"{folder} has no public name {name!r}; known: {sorted(home)}")
        return getattr(import_module(f"{folder}.{home[name]}"), name)

    return sorted(home), find
