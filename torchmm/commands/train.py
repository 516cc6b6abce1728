"""Train the model of a recipe.

    torchmm train RECIPE [--section.key value ...]
    torchrun --nproc-per-node N -m torchmm train RECIPE [--section.key value ...]

RECIPE is a TOML file or a name from `torchmm recipes`. In a clone, `train.py` accepts the same
arguments. Exit codes: 0 complete, 2 invalid recipe or parallelism, 3 corrupt data, 4 checkpoint
error, 5 non-finite loss or gradient, 6 lost rank, 75 preempted (checkpoint saved).
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from torchmm.commands.arguments import load_checked_recipe, parse_recipe_arguments, recipe_parser
from torchmm.commands.dry_run import add_dry_run_options, print_dry_run
from torchmm.commands.recipes import print_recipes
from torchmm.common.errors import ConfigError, TorchmmError
from torchmm.common.files import replace_atomically
from torchmm.common.log import log_to_console, make_console, report_imports
from torchmm.common.processes import check_system, read_launch_environment, start_fork_server
from torchmm.recipe.read import check_recipe, dump_recipe, load_recipe
from torchmm.recipe.recipe import Recipe


def main(arguments: Sequence[str] | None = None, prog: str | None = None) -> int:
    """Run the command line, and return the exit code."""
    if sys.__stderr__ is not None:
        faulthandler.enable(sys.__stderr__)  # shows the threads of a rank that a signal kills
    parser = recipe_parser(__doc__, prog, required=False)
    parser.add_argument("--list-recipes", action="store_true", help="show all recipes and exit")
    parser.add_argument("--print-config", action="store_true", help="show the recipe and exit")
    parser.add_argument(
        "--dry-run", action="store_true", help="show the settings of the run and exit"
    )
    add_dry_run_options(parser)
    options, overrides = parse_recipe_arguments(parser, arguments)
    if options.config is None and not options.list_recipes:
        parser.error("no recipe; use RECIPE or --config RECIPE")
    if options.assumed and not options.dry_run:
        parser.error("--assumed requires --dry-run")
    try:
        if options.list_recipes:
            print_recipes()
        elif options.print_config:
            print(dump_recipe(load_recipe(options.config, overrides).recipe))
        elif options.dry_run:
            print_dry_run(options, overrides, "train.py" if prog is None else "-m torchmm train")
        else:
            return _start(
                load_checked_recipe(options.config, overrides, read_launch_environment().world_size)
            )
    except TorchmmError as error:
        message = f"{type(error).__name__}: {error}"
        if not error.reported:
            print(message, file=sys.stderr, flush=True)
        _report_to_torchrun(message)
        return error.exit_code
    return 0


def train(recipe: Recipe) -> Path:
    """Train a recipe on this rank, and return the directory of the run.

    Under torchrun, call it on every rank. Start one run per process. The script needs
    `if __name__ == "__main__":`, because data workers import it.

    Raises:
        TorchmmError: The recipe is invalid, or the run stopped early.
    """
    if problems := check_recipe(recipe, read_launch_environment().world_size):
        raise ConfigError(problems)
    _start(recipe)
    return Path(recipe.output_dir) / recipe.name


def _start(recipe: Recipe) -> int:
    log_to_console(make_console(), read_launch_environment().rank)
    check_system(recipe.data.workers)
    if recipe.data.workers:
        start_fork_server()  # it imports torch at the same time as this process
    with report_imports():
        from torchmm.training.run import train as run

    return run(recipe)


def _report_to_torchrun(message: str) -> None:
    """Write the error file of torchrun, which prints the message after all ranks have exited."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file is None:
        return
    content = {"message": {"message": message, "extraInfo": {"timestamp": int(time.time())}}}
    with suppress(OSError):
        replace_atomically(Path(file), json.dumps(content).encode())
