"""Trains the model a recipe describes.

    torchrun --nproc-per-node N train.py --config recipes/quickstart.toml [--section.key value ...]

`--list-recipes` says what there is; `--print-config` shows the resolved recipe; `--dry-run` builds
the model without weights, plans and simulates the first step on `--world-size` devices, without
starting any, and draws it. Exit codes: 0 done, 2 bad recipe or layout, 3 too much bad data, 4
checkpoint unusable, 5 non-finite numbers, 6 peer lost, 75 preempted (saved).
"""

import argparse
import faulthandler
import json
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from textwrap import fill

from torchmm.common.errors import ConfigError, TorchmmError
from torchmm.common.files import replace_atomically
from torchmm.common.log import loading, log_to_console, make_console, working
from torchmm.common.processes import check_system, fork_server, launched
from torchmm.recipe.read import dump_recipe, list_recipes, load_recipe


def main() -> int:
    """Parses the command line, runs the recipe, returns the exit code."""
    faulthandler.enable()  # a rank that a signal kills tells where its threads were
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="--section.key VALUE overrides any key of the recipe.",
    )
    wanted = parser.add_mutually_exclusive_group(required=True)
    wanted.add_argument("--config", help="recipe (TOML); may also be the first argument")
    wanted.add_argument("--list-recipes", action="store_true", help="show all recipes and exit")
    parser.add_argument("--print-config", action="store_true", help="show the recipe and exit")
    parser.add_argument("--dry-run", action="store_true", help="show what would run and exit")
    parser.add_argument(
        "--assumed",
        action="store_true",
        help="with --dry-run: assume samples as [simulation] says, not those of [[data.sources]]",
    )
    parser.add_argument("--world-size", type=int, help="devices to assume with --dry-run")
    given = sys.argv[1:]
    if given and not given[0].startswith("-"):
        given.insert(0, "--config")
    arguments, overrides = parser.parse_known_args(given)
    if arguments.assumed:
        if not arguments.dry_run:
            parser.error("--assumed needs --dry-run")
        overrides += ["--data.sources", "[]"]
    try:
        return _run(arguments, overrides)
    except TorchmmError as error:
        told = f"{type(error).__name__}: {error}"
        if not error.reported:
            print(told, file=sys.stderr, flush=True)
        _tell_torchrun(told)
        return error.exit_code


def _tell_torchrun(why: str) -> None:
    """Leaves word for what it prints when all ranks have ended, which hides what they printed."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file is None:
        return
    told = {"message": {"message": why, "extraInfo": {"timestamp": int(time.time())}}}
    with suppress(OSError):
        replace_atomically(Path(file), json.dumps(told).encode())


def _run(arguments: argparse.Namespace, overrides: list[str]) -> int:
    if arguments.list_recipes:
        for file, told in list_recipes(Path(__file__).parent / "recipes"):
            print(f"{file.relative_to(Path(__file__).parent)}")
            print(fill(told, 100, initial_indent="    ", subsequent_indent="    ") + "\n")
        return 0
    if arguments.print_config:
        print(dump_recipe(load_recipe(arguments.config, overrides).recipe))
        return 0
    world_size = arguments.world_size or launched().world_size
    try:
        recipe = load_recipe(arguments.config, overrides, world_size).recipe
    except ConfigError as error:
        error.reported = os.environ.get("RANK", "0") != "0"  # all ranks find the same mistakes
        raise
    # Imported late: a mistake in the recipe should not take the seconds torch needs to load.
    if arguments.dry_run:
        log_to_console(make_console(stderr=True), only_progress=True)
        with loading():
            from torchmm.planning.dry_run import describe_run

        picture = Path(recipe.output_dir) / recipe.name / "timeline" / "plan.svg"
        command = ["--config", arguments.config, *overrides]
        with working("planning and simulating the first step"):
            told = describe_run(recipe, world_size, picture, command)
        print(told)
        return 0
    log_to_console(make_console(), launched().rank)
    check_system(recipe.data.workers)
    if recipe.data.workers:
        fork_server()  # whose imports take as long as this process's, now beside them
    with loading():
        from torchmm.training.run import train

    return train(recipe)


if __name__ == "__main__":
    sys.exit(main())
