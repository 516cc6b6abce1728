"""Plan a run on a cluster: devices and parallel sizes of every module, before anything is started.

Prints the best plan of modules on devices of their own, its simulated step, how far from the best
of all plans it may be at most, the next-best plans and those of simpler rules, and why they lose.
Needs no GPU and no weights.

python scripts/plan.py --config recipes/papers/disttrain_mllm_72b.toml --gpus 1296 \\
    --device a800_disttrain
python scripts/plan.py --config my.toml --gpus 64 --device h100 --placement auto --out planned.toml
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
    from torchmm.planning.apart.search import Candidate


def main(arguments: list[str] | None = None) -> int:
    """Plans what the command line asks for; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--config", required=True, metavar="FILE", help="recipe (TOML)")
    add("--gpus", type=int, help="devices of the cluster (the recipe's [simulation] gpus)")
    add("--device", help="name or profile file (the recipe's [simulation] device)")
    add(
        "--trials",
        metavar="FILE",
        help="measured times of modules, from scripts/profile_modules.py (simulation.trials)",
    )
    add("--global-batch-size", type=int, metavar="N", help="sequences per step (the recipe's)")
    add("--placement", choices=("disaggregated", "auto"), default="disaggregated",
        help="auto: simulate all placements and take the fastest")  # fmt: skip
    add("--alternatives", type=int, default=5, metavar="N", help="next-best plans to print (5)")
    add("--effort", type=float, default=1.0, metavar="N",
        help="millions of actions to simulate at most (1, minutes on one core)")  # fmt: skip
    add("--out", type=Path, metavar="FILE", help="write the planned recipe there")
    options, overrides = parser.parse_known_args(arguments)
    try:
        return _plan(options, overrides)
    except TorchmmError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code


def _plan(options: argparse.Namespace, overrides: list[str]) -> int:
    if options.global_batch_size is not None:
        overrides += ["--training.global_batch_size", str(options.global_batch_size)]
    if options.trials is not None:
        overrides += ["--simulation.trials", options.trials]
    recipe = load_recipe(options.config, overrides).recipe
    devices = recipe.simulation.gpus if options.gpus is None else options.gpus
    numbers = ("--gpus", devices), ("--alternatives", options.alternatives)
    for name, value in (*numbers, ("--effort", options.effort)):
        if value < (name == "--gpus"):
            raise ConfigError(f"{name} {value}: must be a positive number")
    device = options.device or recipe.simulation.device
    log_to_console(make_console(stderr=True), only_progress=True)
    with loading():
        from torchmm.balance.costs.profiles import load_profile
        from torchmm.planning import placement_report as tables
        from torchmm.planning.placement import choose_placement, plan_recipe

    try:
        profile = load_profile(device)
    except ValueError as error:
        raise ConfigError(f"--device: {error}") from error
    recipe = recipe.model_copy(
        update={"simulation": recipe.simulation.model_copy(update={"device": device})}
    )
    with working(f"planning {devices} devices"):
        planned = plan_recipe(recipe, devices, profile, effort=1e6 * options.effort)
    console = make_console(width=170)
    console.print(tables.unit_table(planned, profile.device.name))
    console.print(tables.certificate(planned.judged), soft_wrap=True)
    if options.placement == "auto":
        with working("simulating other placements"):
            candidates = choose_placement(recipe, planned, profile)
    else:
        candidates = list(planned.judged.candidates)
    shown = candidates[: 1 + options.alternatives]
    console.print(tables.placement_table(shown, tuple(planned.baselines.items())))
    return _write(options, candidates[0], profile.device.name)


def _write(options: argparse.Namespace, chosen: Candidate, device: str) -> int:
    """Writes the recipe, if one is wanted and its step can be run."""
    from torchmm.planning.apart.search import fits
    from torchmm.planning.placement_report import recipe_text

    step = chosen.forecast.step
    if step is None or not fits(step):
        problem = chosen.forecast.problem or "its first step does not fit into memory"
        raise ConfigError(f"the best plan cannot be run: {problem}")
    if options.out is not None:
        text = recipe_text(chosen, str(options.config), device)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        replace_atomically(options.out, text.encode())
        shown = f"--config {options.out} --dry-run --world-size {chosen.devices}"
        print(f"{options.out}, for {chosen.devices} ranks; look at it:\npython train.py {shown}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
