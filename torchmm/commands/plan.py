"""Find the fastest parallelism degrees for a run on a cluster.

Simulates plans without a pipeline (FSDP2, HSDP, tensor, context and expert parallelism) and with
one, prints the best plan of each method and why it is slower, and writes the best one as a recipe.
Requires no GPU and no weights. In a clone, `scripts/plan.py` accepts the same arguments.

    torchmm plan zoo/siglip2_qwen3_8b --gpus 64 --out planned.toml
    torchmm plan my.toml --gpus 64 --device h100 --placement fsdp chain
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from torchmm.commands.arguments import parse_recipe_arguments, recipe_parser
from torchmm.common.errors import ConfigError, TorchmmError
from torchmm.common.files import replace_atomically
from torchmm.common.log import log_to_console, make_console, report_imports, report_progress
from torchmm.recipe.read import load_recipe
from torchmm.recipe.recipe import Recipe

if TYPE_CHECKING:
    from torchmm.balance.search.result import PlanSearchResult, SimulatedPlan

PLACEMENTS = {
    "auto": ("fsdp", "chain", "separated", "colocated", "disaggregated"),
    "interleaved": ("fsdp", "chain", "separated"),
}
"""Maps a value of --placement to its methods. Other values name one method."""


def main(arguments: Sequence[str] | None = None, prog: str | None = None) -> int:
    """Run the command line, and return the exit code."""
    parser = recipe_parser(__doc__, prog)
    add = parser.add_argument
    add("--gpus", type=int, help="number of devices (default: [simulation] gpus of the recipe)")
    add("--device", help="device name or profile file (default: [simulation] device of the recipe)")
    add(
        "--global-batch-size",
        type=int,
        metavar="N",
        help="sequences per step (default: the value of the recipe)",
    )
    names = (*PLACEMENTS, *PLACEMENTS["auto"])
    add(
        "--placement",
        nargs="+",
        default=["auto"],
        metavar="NAME",
        choices=names,
        help=f"methods to search: {', '.join(names)} (default: auto)",
    )
    add(
        "--budget-s",
        type=float,
        metavar="S",
        help="CPU time of the search in seconds (default: 12 for up to 64 GPUs, at most "
        "100); 0 simulates only the recipe",
    )
    add(
        "--assumed",
        action="store_true",
        help="use the samples described in [simulation], without data",
    )
    add("--out", type=Path, metavar="FILE", help="write the best plan as a recipe to this file")
    options, overrides = parse_recipe_arguments(parser, arguments)
    try:
        program = "torchmm dry-run" if prog else "python train.py --dry-run --config"
        return _plan(options, overrides, program)
    except TorchmmError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code


def _plan(options: argparse.Namespace, overrides: list[str], program: str) -> int:
    if options.global_batch_size is not None:
        overrides += ["--training.global_batch_size", str(options.global_batch_size)]
    if options.assumed:
        overrides += ["--data.sources", "[]"]
    recipe = load_recipe(options.config, overrides).recipe
    log_to_console(make_console(stderr=True), only_progress=True)
    result, cluster = _search(
        recipe, options.gpus, options.device, options.placement, options.budget_s
    )
    from torchmm.balance.recipe_simulation.first_microbatches import describe_samples
    from torchmm.balance.search.report import describe_optimality, result_tables
    from torchmm.balance.search.result import find_best

    best = find_best(result, cluster.devices)
    console = make_console(width=170)
    batch = recipe.training.global_batch_size
    title = f"{cluster.devices} x {cluster.device}, global batch {batch}"
    for table in result_tables(result, title):
        console.print(table)
    console.print(describe_optimality(result), soft_wrap=True)
    print(f"samples: {describe_samples(cluster.recipe)}")
    if options.out is not None:
        _write_plan_recipe(options, best, cluster.device, program)
    return 0


def plan(
    recipe: Recipe,
    gpus: int | None = None,
    device: str | None = None,
    *,
    placement: Sequence[str] = ("auto",),
    budget_s: float | None = None,
) -> SimulatedPlan:
    """Return the fastest plan of a recipe on a cluster.

    `step_ms`, `sizes` and `devices` of the result describe the plan, and `recipe` trains it.

    Args:
        recipe: Recipe to plan.
        gpus: Number of devices. If None, use `simulation.gpus` of the recipe.
        device: Name or profile file of a device. If None, use `simulation.device` of the recipe.
        placement: Methods to search, as in `torchmm plan --placement`.
        budget_s: CPU time of the search in seconds. If None, use 12 s for up to 64 devices and up
            to 100 s for more.

    Raises:
        ConfigError: An argument is invalid, or no plan fits into memory.
    """
    result, cluster = _search(recipe, gpus, device, placement, budget_s)
    from torchmm.balance.search.result import find_best

    return find_best(result, cluster.devices)


class Cluster(NamedTuple):
    """The cluster of a search.

    Attributes:
        recipe: Recipe with the device.
        devices: Number of devices.
        device: Name of the device.
    """

    recipe: Recipe
    devices: int
    device: str


def _search(
    recipe: Recipe,
    gpus: int | None,
    device: str | None,
    placement: Sequence[str],
    budget_s: float | None,
) -> tuple[PlanSearchResult, Cluster]:
    from torchmm.balance.simulation.section import SimulationConfig

    devices = SimulationConfig.from_parent(recipe).gpus if gpus is None else gpus
    if devices < 1:
        raise ConfigError(f"--gpus = {devices} is not positive; use 1 or more")
    budget_s = default_budget_s(devices) if budget_s is None else budget_s
    if budget_s < 0:
        raise ConfigError(f"--budget-s = {budget_s} is negative; use 0 or more")
    with report_imports():
        from torchmm.balance.costs.profiles import load_profile
        from torchmm.balance.search.plan_search import search_plans

    device = device or SimulationConfig.from_parent(recipe).device
    try:
        profile = load_profile(device)
    except ValueError as error:
        raise ConfigError(f"--device: {error}") from error
    simulation = SimulationConfig.from_parent(recipe).model_copy(update={"device": device})
    recipe = recipe.model_copy(update={"simulation": simulation})
    methods = [method for name in placement for method in PLACEMENTS.get(name, (name,))]
    name = f"planning {devices} devices"
    with report_progress(name) as work:
        result = search_plans(
            recipe,
            devices,
            profile,
            methods=methods,
            budget_s=budget_s,
            report=lambda text: work.set_operation(f"{name}, {text}"),
        )
    return result, Cluster(recipe, devices, profile.device.name)


def default_budget_s(devices: int) -> float:
    """Return the CPU time of a search: 12 s for up to 64 devices, 100 s for 1,296."""
    return min(100.0, max(12.0, 12.0 + (devices - 64) * 88 / 1232))


def _write_plan_recipe(
    options: argparse.Namespace, best: SimulatedPlan, device: str, program: str
) -> None:
    """Write the recipe of the best plan."""
    from torchmm.balance.search.report import recipe_text

    text = recipe_text(best, str(options.config), device)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    replace_atomically(options.out, text.encode())
    command = f"{program} {options.out} --world-size {best.devices}"
    print(f"wrote {options.out} for {best.devices} ranks; check it with\n{command}")
