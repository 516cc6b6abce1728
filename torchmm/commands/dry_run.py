"""Show modules, parallelism, memory and step time of a run without starting it.

    torchmm dry-run RECIPE --world-size 16

Builds the model without weights, plans and simulates the first step, and plots it. Requires no GPU.
In a clone, `python train.py --config RECIPE --dry-run` does the same.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from torchmm.commands.arguments import load_checked_recipe, parse_recipe_arguments, recipe_parser
from torchmm.common.errors import TorchmmError
from torchmm.common.log import log_to_console, make_console, report_imports, report_progress
from torchmm.common.processes import read_launch_environment


def main(arguments: Sequence[str] | None = None, prog: str | None = None) -> int:
    """Run the command line, and return the exit code."""
    parser = recipe_parser(__doc__, prog)
    add_dry_run_options(parser)
    options, overrides = parse_recipe_arguments(parser, arguments)
    try:
        print_dry_run(options, overrides, "-m torchmm train")
    except TorchmmError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def add_dry_run_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a dry run."""
    parser.add_argument(
        "--assumed",
        action="store_true",
        help="dry run: use the samples described in [simulation] instead of [[data.sources]]",
    )
    parser.add_argument("--world-size", type=int, help="dry run: number of devices to simulate")


def print_dry_run(options: argparse.Namespace, overrides: Sequence[str], program: str) -> None:
    """Print the dry run of a recipe, and write its plot into the directory of the run.

    Args:
        options: Config, assumed and world_size of the command line.
        overrides: Words that override keys of the recipe.
        program: Program in the printed torchrun command.

    Raises:
        TorchmmError: The run would fail.
    """
    argv = [*overrides, "--data.sources", "[]"] if options.assumed else [*overrides]
    world_size = options.world_size or read_launch_environment().world_size
    recipe = load_checked_recipe(options.config, argv, world_size)
    log_to_console(make_console(stderr=True), only_progress=True)
    with report_imports():
        from torchmm.balance.recipe_simulation.dry_run import describe_run

    plot_file = Path(recipe.output_dir) / recipe.name / "timeline" / "plan.svg"
    config = ["--config", options.config] if program == "train.py" else [options.config]
    with report_progress("planning and simulating the first step"):
        text = describe_run(recipe, world_size, plot_file, [*config, *argv], program)
    print(text)
