"""Time real layers of every module of a recipe on this machine's devices, for scripts/plan.py.

Modules run alone, forward and backward, at sizes that the recipe's data have, with every
tensor-parallel size that divides the number of ranks. Times between two sizes are interpolated;
the table says how far that is off from sizes measured in between.

python scripts/profile_modules.py --config my.toml --out trials.json
torchrun --nproc-per-node 8 scripts/profile_modules.py --config my.toml --out trials.json
python scripts/plan.py --config my.toml --gpus 64 --device h100 --trials trials.json
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from torchmm.common.errors import TorchmmError
from torchmm.common.log import loading, log_to_console, make_console, working
from torchmm.common.processes import launched
from torchmm.recipe.read import load_recipe

if TYPE_CHECKING:
    from torchmm.balance.disttrain.orchestration.trials import ModuleTrials


def main(arguments: list[str] | None = None) -> int:
    """Measures and writes; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="--section.key VALUE overrides any key of the recipe.",
    )
    add = parser.add_argument
    add("--config", required=True, metavar="FILE", help="recipe (TOML)")
    add("--out", required=True, type=Path, metavar="FILE", help="trials to write (.json)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--layers", type=int, default=4, metavar="N",
        help="layers of a module that are run, at most; the others' times follow (4)")  # fmt: skip
    add("--rounds", type=int, default=5, metavar="N", help="how often all is timed (5)")
    options, overrides = parser.parse_known_args(arguments)
    # The replacements of these collectives do not exist in the oldest supported torch.
    warnings.filterwarnings("ignore", message=".*_tensor. is deprecated")
    try:
        log_to_console(make_console(stderr=True), launched().rank or None, only_progress=True)
        recipe = load_recipe(options.config, overrides).recipe
        with loading():
            import torch
            import torch.distributed as dist

            from torchmm.balance.disttrain.orchestration.trials import save_trials
            from torchmm.balance.measure.trials import make_trials
            from torchmm.parallel.mesh import select_device

        device = select_device(options.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            dist.init_process_group("cuda:nccl,cpu:gloo" if device.type == "cuda" else "gloo")
        with working("timing layers of modules"):
            trials = make_trials(recipe, device, rounds=options.rounds, layers=options.layers)
    except TorchmmError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code
    first = not dist.is_initialized() or dist.get_rank() == 0
    if dist.is_initialized():
        dist.destroy_process_group()
    if first:
        save_trials(options.out, trials)
        make_console(width=120).print(trials_table(trials))
        print(options.out)
    return 0


def trials_table(trials: ModuleTrials) -> Table:
    """Times at the smallest, middle and largest input, and the error in between."""
    from torchmm.balance.measure.trials import interpolation_errors

    table = Table(title=f"Trials of modules, measured on {trials.measured_on}")
    for column in ("module", "tensor", "inputs", "forward + backward, ms", "interpolation off by"):
        table.add_column(column)
    errors = interpolation_errors(trials)
    for name, rows in trials.rows.items():
        for size, row in rows.items():
            last = len(row.units) - 1
            shown = sorted({0, last // 2, last})
            units = ", ".join(f"{row.units[i]:.0f}" for i in shown)
            times = ", ".join(
                f"{1e3 * row.forward_s[i]:.2f} + {1e3 * row.backward_s[i]:.2f}" for i in shown
            )
            found = errors.get(name, {}).get(size)
            off = "all inputs alike"
            if len(row.units) > 1:
                off = "no sizes in between"
            if found is not None:
                off = f"{found[0]:.1%} (median of {len(row.checked_error)}), at most {found[1]:.1%}"
            table.add_row(name, str(size), units, times, off)
    return table


if __name__ == "__main__":
    sys.exit(main())
