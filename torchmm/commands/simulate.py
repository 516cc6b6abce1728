"""Predict a recipe's step on devices that are not at hand: time, MFU, bubbles, memory, pictures.

Needs no GPU and no weights, and no data if the recipe has a [simulation] section. In a clone,
`scripts/simulate.py` takes the same arguments.

    torchmm simulate papers/optimus_vit22b_gpt175b --gpus 3072
    torchmm simulate quickstart --gpus 2 --device cpu --schedule all
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torchmm.commands.arguments import parse_recipe_arguments, recipe_parser
from torchmm.common.log import loading, log_to_console, make_console


def main(arguments: Sequence[str] | None = None, prog: str | None = None) -> int:
    """Run the command line, and return the exit code."""
    parser = recipe_parser(__doc__, prog)
    add = parser.add_argument
    add("--gpus", type=int, help="number of devices (the recipe's [simulation] gpus)")
    add("--device", help="name or profile file (the recipe's [simulation] device)")
    add("--schedule", nargs="+", default=[], metavar="NAME", help="or all (the recipe's)")
    add("--assumed", action="store_true", help="assume samples as [simulation] says, without data")
    add("--out", type=Path, metavar="DIR", help="write plots and traces there")
    options, overrides = parse_recipe_arguments(parser, arguments)
    if options.assumed:
        overrides += ["--data.sources", "[]"]
    log_to_console(make_console(stderr=True), only_progress=True)
    with loading():
        from torchmm.balance.forecasts.command import simulate_recipe

    return simulate_recipe(options, overrides)
