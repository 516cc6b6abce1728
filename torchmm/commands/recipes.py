"""List the included recipes, with the names that other commands accept."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from textwrap import fill

from torchmm.recipe import read
from torchmm.recipe.recipe import Recipe


def main(arguments: Sequence[str] | None = None, prog: str | None = None) -> int:
    """Run the command line, and return the exit code."""
    argparse.ArgumentParser(prog=prog, description=__doc__).parse_args(arguments)
    print_recipes()
    return 0


def print_recipes() -> None:
    """Print name and description of every recipe. Stop if the reader exits, as `head` does."""
    directory = read.recipes_directory()
    try:
        for file, text in read.list_recipes(directory):
            print(file.relative_to(directory).with_suffix(""))
            print(fill(text, 100, initial_indent="    ", subsequent_indent="    ") + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes standard output at exit again, which must not fail a second time.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def load_recipe(path: Path | str, overrides: Sequence[str] = ()) -> Recipe:
    """Return the recipe of a file, or of a name that `torchmm recipes` lists.

    Args:
        path: TOML file or name.
        overrides: Keys and values as on the command line: `["--training.steps", "20"]`.

    Raises:
        ConfigError: The recipe has problems. The error lists all of them.
    """
    return read.load_recipe(path, overrides).recipe
