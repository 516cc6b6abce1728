"""Simulate step time, MFU, bubbles and memory of a recipe on any devices.

Requires no GPU and no weights, and no data if the recipe has a [simulation] section. In a clone,
`scripts/simulate.py` accepts the same arguments.

    torchmm simulate papers/optimus_vit22b_gpt175b --gpus 3072
    torchmm simulate quickstart --gpus 2 --device cpu --schedule all
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torchmm.commands.arguments import parse_recipe_arguments, recipe_parser
from torchmm.common.log import log_to_console, make_console, report_imports


def main(arguments: Sequence[str] | None = None, prog: str | None = None) -> int:
    """Run the command line, and return the exit code."""
    parser = recipe_parser(__doc__, prog)
    add = parser.add_argument
    add("--gpus", type=int, help="number of devices (default: [simulation] gpus of the recipe)")
    add("--device", help="device name or profile file (default: [simulation] device of the recipe)")
    add(
        "--schedule",
        nargs="+",
        default=[],
        metavar="NAME",
        help="schedules, or all (default: the schedule of the recipe)",
    )
    add(
        "--assumed",
        action="store_true",
        help="use the samples described in [simulation], without data",
    )
    add("--out", type=Path, metavar="DIR", help="write plots and traces to this directory")
    options, overrides = parse_recipe_arguments(parser, arguments)
    if options.assumed:
        overrides += ["--data.sources", "[]"]
    log_to_console(make_console(stderr=True), only_progress=True)
    with report_imports():
        from torchmm.balance.recipe_simulation.command import simulate_recipe

    return simulate_recipe(options, overrides)
