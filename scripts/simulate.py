"""Predict a recipe's step on devices that are not at hand: time, MFU, bubbles, memory, pictures.

Needs no GPU, no weights and, where the recipe has a [simulation] section, no data.

python scripts/simulate.py --config recipes/papers/optimus_vit22b_gpt175b.toml --gpus 3072
python scripts/simulate.py --config recipes/quickstart.toml --gpus 2 --device cpu --schedule all
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from torchmm.common.log import loading, log_to_console, make_console


def main(arguments: list[str] | None = None) -> int:
    """Simulates what the command line asks for; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="--section.key VALUE overrides any key of the recipe.",
    )
    add = parser.add_argument
    add("--config", required=True, metavar="FILE", help="recipe (TOML)")
    add("--gpus", type=int, help="number of devices (the recipe's [simulation] gpus)")
    add("--device", help="name or profile file (the recipe's [simulation] device)")
    add("--schedule", nargs="+", default=[], metavar="NAME", help="or all (the recipe's)")
    add("--assumed", action="store_true", help="assume samples as [simulation] says, without data")
    add("--out", type=Path, metavar="DIR", help="write figures, pictures and traces there")
    options, overrides = parser.parse_known_args(arguments)
    if options.assumed:
        overrides += ["--data.sources", "[]"]
    log_to_console(make_console(stderr=True), only_progress=True)
    with loading():
        from torchmm.planning.forecast_command import simulate_recipe

    return simulate_recipe(options, overrides)


if __name__ == "__main__":
    sys.exit(main())
