"""The program `torchmm`, also `python -m torchmm`: run one of its commands.

A command parses its arguments and reads the recipe before it imports torch, so that mistakes are
reported at once.
"""

from __future__ import annotations

import argparse
import sys
from importlib import import_module

from torchmm import __version__
from torchmm.common.errors import ConfigError
from torchmm.common.extensions import FOLDERS

COMMANDS = {
    "train": ("train", "train the model of a recipe"),
    "dry-run": ("dry_run", "show the settings of a run, and simulate its first step"),
    "inspect": ("inspect_data", "read the data of a recipe, and write a report with samples"),
    "plan": ("plan", "search for the fastest parallelism degrees on a cluster"),
    "simulate": ("simulate", "simulate step time, MFU and memory"),
    "generate": ("generate", "generate text or images with a trained model"),
    "evaluate": ("evaluate", "score the text that an export generates"),
    "export": ("export", "export a checkpoint as a Hugging Face directory"),
    "show": ("show_run", "show losses, times and generated text of a run"),
    "compare": ("compare_runs", "compare recipes, curves and times of runs"),
    "recipes": ("recipes", "list the recipes that are included in torchmm"),
    "prepare-data": ("prepare_data", "prepare the data sets of the quickstarts"),
}
"""Module in this folder and help text of each command."""


def main() -> int:
    """Run the command in the first argument, and return its exit code."""
    width = max(map(len, COMMANDS))
    listed = "\n".join(f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="torchmm",
        description=f"Train multimodal LLMs.\n\ncommands:\n{listed}",
        epilog="Run torchmm COMMAND --help for the arguments of a command. To train on N "
        "GPUs of one node:\n  torchrun --nproc-per-node N -m torchmm train RECIPE",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"torchmm {__version__}")
    parser.add_argument(
        "command", metavar="COMMAND", choices=COMMANDS, help="one of the commands above"
    )
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the command")
    options = parser.parse_args(sys.argv[1:] or ["--help"])
    module, _ = COMMANDS[options.command]
    try:
        command = import_module(f"torchmm.commands.{module}")
        return int(command.main(options.arguments, f"torchmm {options.command}"))
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if not missing.startswith(FOLDERS):
            raise
        extension = missing.removeprefix("torchmm.extensions.").removeprefix("torchmm.")
        name = extension.partition(".")[0]
        print(
            f'torchmm {options.command}: the extension "{name}" is not installed; use a complete '
            "installation of torchmm",
            file=sys.stderr,
        )
        return ConfigError.exit_code
