"""Command-line parsers of commands that read a recipe."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from torchmm.common.errors import ConfigError
from torchmm.recipe.read import load_recipe
from torchmm.recipe.recipe import Recipe


def recipe_parser(
    description: str | None, prog: str | None, *, required: bool = True
) -> argparse.ArgumentParser:
    """Return a parser with the option `--config`.

    Args:
        description: Docstring of the command.
        prog: Name in the usage line. If None, use the name of the script.
        required: Whether a recipe is required.
    """
    parser = argparse.ArgumentParser(
        prog=prog,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Use --section.key VALUE to override any key of the recipe.",
    )
    parser.add_argument(
        "--config",
        required=required,
        metavar="RECIPE",
        help="recipe: a TOML file or a name from `torchmm recipes`; may also be the first "
        "argument, without --config",
    )
    return parser


def parse_recipe_arguments(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None
) -> tuple[argparse.Namespace, list[str]]:
    """Return the options of a command line, and the words that override keys of the recipe.

    Args:
        parser: Parser with the option `--config`.
        arguments: Words after the command. If None, use those of this process.
    """
    argv = list(sys.argv[1:] if arguments is None else arguments)
    if argv and not argv[0].startswith("-"):
        argv.insert(0, "--config")
    return parser.parse_known_args(argv)


def load_checked_recipe(config: str, overrides: Sequence[str], world_size: int) -> Recipe:
    """Return the recipe of a command line, checked for a number of ranks.

    Raises:
        ConfigError: The recipe has problems. The error lists all of them, and only rank 0 prints
            it.
    """
    try:
        return load_recipe(config, overrides, world_size).recipe
    except ConfigError as error:
        error.reported = os.environ.get("RANK", "0") != "0"
        raise
