"""Plan a run on a cluster: find the fastest parallel sizes before anything is started.

Simulates plans without a pipeline (FSDP2, HSDP, tensor, context and expert parallelism) and with
one, prints the best plan of each method and why it is slower, and writes the best one as a recipe.
Needs no GPU and no weights.

python scripts/plan.py --config recipes/zoo/siglip2_qwen3_8b.toml --gpus 64 --out planned.toml
python scripts/plan.py --config my.toml --gpus 64 --device h100 --placement fsdp chain
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from torchmm.common.errors import ConfigError, TorchmmError
from torchmm.common.files import replace_atomically
from torchmm.common.log import loading, log_to_console, make_console, working
from torchmm.recipe.read import load_recipe

if TYPE_CHECKING:
    from torchmm.planning.search.result import Candidate

PLACEMENTS = {
    "auto": ("fsdp", "chain", "separated", "colocated", "disaggregated"),
    "interleaved": ("fsdp", "chain", "separated"),
}
"""Methods that a name of --placement stands for, besides the method of that name."""


def main(arguments: list[str] | None = None) -> int:
    """Plan the run of the command line and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="--section.key VALUE overrides any key of the recipe.",
    )
    add = parser.add_argument
    add("--config", required=True, metavar="FILE", help="recipe (TOML)")
    add("--gpus", type=int, help="number of devices (default: the recipe's [simulation] gpus)")
    add("--device", help="name or profile file (default: the recipe's [simulation] device)")
    add(
        "--trials",
        metavar="FILE",
        help="measured times of modules, from scripts/profile_modules.py (simulation.trials)",
    )
    add("--global-batch-size", type=int, metavar="N", help="sequences per step (the recipe's)")
    names = (*PLACEMENTS, *PLACEMENTS["auto"])
    add(
        "--placement",
        nargs="+",
        default=["auto"],
        metavar="NAME",
        choices=names,
        help=f"methods to search: {', '.join(names)} (auto)",
    )
    add(
        "--budget-s",
        type=float,
        metavar="S",
        help="processor time of the search in seconds (10 for up to 64 GPUs, up to 100)",
    )
    add("--assumed", action="store_true", help="assume samples as [simulation] says, without data")
    add("--out", type=Path, metavar="FILE", help="write the best plan as a recipe")
    options, overrides = parser.parse_known_args(arguments)
    try:
        return _plan(options, overrides)
    except TorchmmError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code


def _plan(options: argparse.Namespace, overrides: list[str]) -> int:
    if options.global_batch_size is not None:
        overrides += ["--training.global_batch_size", str(options.global_batch_size)]
    if options.assumed:
        overrides += ["--data.sources", "[]"]
    if options.trials is not None:
        overrides += ["--simulation.trials", options.trials]
    recipe = load_recipe(options.config, overrides).recipe
    devices = recipe.simulation.gpus if options.gpus is None else options.gpus
    if devices < 1:
        raise ConfigError(f"--gpus = {devices} is not positive; use 1 or more")
    budget_s = default_budget_s(devices) if options.budget_s is None else options.budget_s
    if budget_s < 0:
        raise ConfigError(f"--budget-s = {budget_s} is negative; use 0 or more")
    device = options.device or recipe.simulation.device
    log_to_console(make_console(stderr=True), only_progress=True)
    with loading():
        from torchmm.balance.costs.profiles import load_profile
        from torchmm.planning.first_step import describe_samples
        from torchmm.planning.search.report import certificate, result_tables
        from torchmm.planning.search.result import find_best
        from torchmm.planning.search.search import search_plans

    try:
        profile = load_profile(device)
    except ValueError as error:
        raise ConfigError(f"--device: {error}") from error
    simulation = recipe.simulation.model_copy(update={"device": device})
    recipe = recipe.model_copy(update={"simulation": simulation})
    methods = [name for given in options.placement for name in PLACEMENTS.get(given, (given,))]
    name = f"planning {devices} devices"
    with working(name) as work:
        result = search_plans(
            recipe,
            devices,
            profile,
            methods=methods,
            budget_s=budget_s,
            report=lambda text: work.now(f"{name}, {text}"),
        )
    best = find_best(result, devices)
    console = make_console(width=170)
    batch = recipe.training.global_batch_size
    title = f"{devices} x {profile.device.name}, global batch {batch}"
    for table in result_tables(result, title):
        console.print(table)
    console.print(certificate(result), soft_wrap=True)
    print(f"samples: {describe_samples(recipe)}")
    return _write(options, best, profile.device.name)


def default_budget_s(devices: int) -> float:
    """Return the processor time of a search: 10 s for up to 64 devices, 100 s for 1,296."""
    return min(100.0, max(10.0, 10.0 + (devices - 64) * 90 / 1232))


def _write(options: argparse.Namespace, best: Candidate, device: str) -> int:
    """Write the recipe of the best plan, if a file is given."""
    from torchmm.planning.search.report import recipe_text

    if options.out is not None:
        text = recipe_text(best, str(options.config), device)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        replace_atomically(options.out, text.encode())
        command = f"python train.py --config {options.out} --dry-run --world-size {best.devices}"
        print(f"wrote {options.out} for {best.devices} ranks; check it with\n{command}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
