"""Predict a recipe's step on devices that are not at hand: time, MFU, bubbles, memory, pictures.

Needs no GPU, no weights and, where the recipe has a [simulation] section, no data.

python scripts/simulate.py --config recipes/papers/optimus_vit22b_gpt175b.toml --gpus 3072
python scripts/simulate.py --config recipes/quickstart.toml --gpus 2 --device cpu --schedule all
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console

from torchmm.balance.profiles import load_profile
from torchmm.config import COLOCATED_SCHEDULES, SCHEDULES
from torchmm.errors import ConfigError, TorchmmError
from torchmm.forecast import Forecaster
from torchmm.forecast_report import forecast_table, write_forecasts
from torchmm.recipe import load_recipe


def main(arguments: list[str] | None = None) -> int:
    """Simulates what the command line asks for; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--config", required=True, metavar="FILE", help="recipe (TOML)")
    add("--gpus", type=int, help="number of devices (the recipe's [simulation] gpus)")
    add("--device", help="name or profile file (the recipe's [simulation] device)")
    add("--schedule", nargs="+", default=[], metavar="NAME", help="or all (the recipe's)")
    add("--out", type=Path, metavar="DIR", help="write figures, pictures and traces there")
    options, overrides = parser.parse_known_args(arguments)
    try:
        return _simulate(options, overrides)
    except TorchmmError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code


def _simulate(options: argparse.Namespace, overrides: list[str]) -> int:
    section = load_recipe(options.config, overrides).recipe.simulation
    world_size = section.gpus if options.gpus is None else options.gpus
    recipe = load_recipe(options.config, overrides, world_size).recipe
    try:
        profile = load_profile(options.device or section.device)
    except ValueError as error:
        raise ConfigError(f"--device: {error}") from error
    forecaster = Forecaster(recipe, world_size, profile)
    known = (*SCHEDULES, *COLOCATED_SCHEDULES)
    if options.schedule == ["all"]:
        forecasts = forecaster.forecast_all()
    else:
        names = options.schedule
        if unknown := [name for name in names if name not in known and ":" not in name]:
            raise ConfigError(f"--schedule {' '.join(unknown)}: known: all, {', '.join(known)}")
        forecasts = [forecaster.forecast(name) for name in names or [None]]
    Console(width=150).print(forecast_table(forecaster, forecasts))
    if options.out is not None:
        for file in write_forecasts(options.out, forecaster, forecasts):
            print(file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
