"""Measure this device for the cost model, or fit a profile to recorded training steps.

The measurement takes about a minute. It covers matmuls, attention, norms, element-wise operators
and copies and, with several ranks, collectives and point-to-point messages. Measure on the number
of ranks per host that training uses, because these ranks compete for memory bandwidth.

python scripts/calibrate.py --out profile.json
torchrun --nproc-per-node 2 scripts/calibrate.py --out profile.json
python scripts/calibrate.py --profile profile.json --out learned.json --config recipe.toml \\
    --fit-from-timeline outputs/NAME/timeline/step-*.json
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torchmm.common.errors import TorchmmError
from torchmm.common.log import log_to_console, make_console, report_imports, report_progress
from torchmm.common.processes import read_launch_environment
from torchmm.recipe.changes import reject_renamed_options
from torchmm.recipe.read import load_recipe

if TYPE_CHECKING:
    import torch

    from torchmm.costs.operators import DeviceProfile


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, and return the exit code."""
    options = _parser().parse_args(arguments)
    # The replacements of these collectives are not available in the oldest supported torch.
    warnings.filterwarnings("ignore", message=".*_tensor. is deprecated")
    try:
        log_to_console(
            make_console(stderr=True), read_launch_environment().rank or None, only_progress=True
        )
        if options.fit_from_timeline:
            profile = _fit_to_steps(options)
        else:
            measured = _measure(options)
            if measured is None:
                return 0
            profile = measured
    except (ValueError, OSError, TorchmmError) as error:
        print(error, file=sys.stderr)
        return 2
    from torchmm.balance.costs.profiles import save_profile

    save_profile(options.out, profile)
    print(options.out)
    return 0


def _parser() -> argparse.ArgumentParser:
    about, _, examples = (__doc__ or "").partition("\n\npython ")
    parser = argparse.ArgumentParser(
        description=about,
        epilog="python " + examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True, help="profile to write (.json)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="data type (default: bfloat16 on CUDA, float32 on CPU)",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=30.0,
        help="time limit of the operator measurements in seconds",
    )
    parser.add_argument("--quick", action="store_true", help="measure few sizes, as a test")
    parser.add_argument("--profile", type=Path, help="with --fit-from-timeline: profile to fit")
    parser.add_argument(
        "--fit-from-timeline", type=Path, nargs="+", default=[], help="recorded steps (.json files)"
    )
    parser.add_argument(
        "--config", type=Path, help="with --fit-from-timeline: recipe of the recorded steps"
    )
    parser.add_argument(
        "--world-size",
        type=int,
        help="with --fit-from-timeline: ranks of the run (default: one pipeline)",
    )
    reject_renamed_options(parser, "calibrate")
    return parser


def _measure(options: argparse.Namespace) -> DeviceProfile | None:
    """Return the measured profile on rank 0, and None on other ranks."""
    with report_imports():
        import torch
        import torch.distributed as dist

        from torchmm.balance.costs.calibration import fit_profile
        from torchmm.balance.measurement.operators import describe_device, measure

    cuda = options.device == "cuda" or (options.device == "auto" and torch.cuda.is_available())
    if cuda and not torch.cuda.is_available():
        raise ValueError("--device cuda: no CUDA device is available; use --device cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else None
    device = device or torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if "WORLD_SIZE" in os.environ and int(os.environ["WORLD_SIZE"]) > 1:
        dist.init_process_group("cuda:nccl,cpu:gloo" if cuda else "gloo")
    name = options.dtype or ("bfloat16" if cuda else "float32")
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]
    with report_progress("measuring this device"):
        found = measure(device, dtype, options.seconds, quick=options.quick)
    location, first = describe_device(device), not dist.is_initialized() or dist.get_rank() == 0
    if dist.is_initialized():
        dist.destroy_process_group()
    if not first:
        return None
    base, known = _known_profile(device)
    profile = fit_profile(found, base, name, location, use_measured_peaks=not known)
    _print_profile(profile, name)
    return profile


def _known_profile(device: torch.device) -> tuple[DeviceProfile, bool]:
    """Return the profile of a known device, and whether its peaks are known."""
    import torch

    from torchmm.balance.costs.profiles import load_profile
    from torchmm.costs.devices import DEVICES

    if device.type == "cuda":
        device_name = torch.cuda.get_device_name(device).lower()
        for name in DEVICES:
            if name in device_name:
                return load_profile(name), True
        return load_profile("a100"), False
    return load_profile("cpu"), False


def _print_profile(profile: DeviceProfile, dtype: str) -> None:
    device = profile.device
    print(f"measured on {profile.measured_on}")
    print(
        f"peak {device.peak_flops[dtype] / 1e9:,.0f} GFLOP/s, "
        f"memory {device.memory_bytes_per_s / 1e9:,.1f} GB/s"
    )
    for kind, curve in profile.efficiency.items():
        points = ", ".join(
            f"{size:.1e}: {value:.2f}"
            for size, value in zip(curve.sizes, curve.values, strict=True)
        )
        print(f"{kind:<18} {profile.call_us.get(kind, 0.0):7.1f} us  {points}")


def _fit_to_steps(options: argparse.Namespace) -> DeviceProfile:
    """Return the profile, fitted to recorded steps."""
    if options.profile is None or options.config is None:
        raise ValueError(
            "--fit-from-timeline requires --profile and --config, the recipe of the recorded steps"
        )
    recipe = load_recipe(options.config).recipe
    with report_imports():
        from torchmm.balance.costs.calibration import (
            ActionTiming,
            RecordedStep,
            compare_action_times,
            correct_profile,
        )
        from torchmm.balance.costs.profiles import load_profile
        from torchmm.balance.run_costs import build_cost_model
        from torchmm.pipelining.view.records import read_content, read_records
        from torchmm.planning.recipe_model import recipe_model
        from torchmm.planning.resolved_recipe import resolve_recipe

    profile, model = load_profile(options.profile), recipe_model(recipe)
    modules = [m.describe() for m in model.modality_modules()]
    parallel = recipe.parallel
    if parallel.placement == "disaggregated" and options.world_size is None:
        raise ValueError("disaggregated modules: set the number of ranks with --world-size")
    ranks = options.world_size or parallel.pipeline * parallel.tensor
    costs = build_cost_model(resolve_recipe(recipe, ranks), modules, profile)
    observed: list[ActionTiming] = []
    for path in options.fit_from_timeline:
        records, graph = read_records(path)
        content = read_content(path)
        if content is None:
            raise ValueError(f"{path}: the recorded step does not describe its microbatches")
        observed += compare_action_times(RecordedStep(records, graph, content), modules, costs)
    learned = correct_profile(profile, observed)
    for module, factors in learned.factors.items():
        shown = ", ".join(f"{kind} {factor:.3f}" for kind, factor in factors.items())
        print(f"{module}: measured / predicted: {shown}")
    return learned


if __name__ == "__main__":
    sys.exit(main())
