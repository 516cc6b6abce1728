"""Goldens: stored dry runs of all recipes and stored losses of the quickstarts.

A change that must not alter results keeps all of them equal. `record.py` rewrites the files after a
change that may, and prints the differences.

- `dry_runs.jsonl` has a line for each recipe: parallel sizes, parameter counts, stages, the order
  of actions, step time and memory. Floats have six significant digits.
- `losses.jsonl` has a line for each quickstart: loss and gradient norm of the first steps.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from tiny_recipe import ONLY_TRAINS, records
from train_server import TrainServer

from torchmm.balance.recipe_simulation import dry_run
from torchmm.balance.recipe_simulation.step_simulator import SimulatedStepReport
from torchmm.recipe.read import list_recipes, load_recipe

FOLDER = Path(__file__).parent
RECIPES = FOLDER.parents[1] / "recipes"
DRY_RUNS, LOSSES = FOLDER / "dry_runs.jsonl", FOLDER / "losses.jsonl"
DATA = {("data", "tuxpaint_stamps"), ("data", "emoji_scenes")}
"""Data sets that `scripts/test.sh` prepares. Recipes with other data are planned for the samples
that [simulation] assumes."""
NOT_PLANNED = {
    "quickstart_latents": "data/stamp_vae",
    "smollm2_vision": "data/smollm2_135m",
    "smollm2_vision_blind": "data/smollm2_135m",
    "tiny/llava": "outputs/tiny_llava_connector/hf",
    "tiny/llava_connector": "outputs/tiny_llava_llm/hf",
    "tiny/qwen2_5_vl": "data/tiny_qwen2_5_vl",
    "tiny/qwen2_5_vl_lora": "outputs/tiny_qwen2_5_vl/hf",
}
"""Recipes without a golden, and their model files, which the tests do not prepare."""
QUICKSTARTS = {
    "quickstart": 2,
    "quickstart_colocated": 2,
    "quickstart_searched": 2,
    "quickstart_generation": 2,
    "quickstart_three_modules": 2,
    "quickstart_disaggregated": 4,
}
"""Number of ranks by recipe. Their data are prepared by `scripts/test.sh`."""
NO_SAMPLES = {"validation.num_samples": 0, "validation.generated_images": 0}
SAME_ORDERS = {"parallel.search.background": "false"}
"""With a background process, the order of a step depends on the time of its search."""
STEPS = 4
COMMANDS = {"start with", "or, with Slurm", "plan"}
"""Lines of a dry run that repeat the command line."""
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")
TOLERANCE = 1e-5
"""Relative difference of numbers of a dry run between processors, after rounding to 6 digits."""

Golden = dict[str, Any]


def recipe_names() -> dict[str, Path]:
    """Return the file of every recipe that has a unique name, by its path in recipes/."""
    files = [file for file, _ in list_recipes(RECIPES)]
    return {str(file.relative_to(RECIPES).with_suffix("")): file for file in files}


def read_goldens(file: Path) -> dict[str, Golden]:
    """Return the goldens of a file by recipe."""
    lines = map(json.loads, file.read_text().splitlines()) if file.exists() else ()
    return {line.pop("recipe"): line for line in lines}


def write_goldens(file: Path, goldens: Mapping[str, Golden]) -> None:
    """Write one line of JSON for each recipe, sorted by name."""
    lines = (json.dumps({"recipe": name, **goldens[name]}) + "\n" for name in sorted(goldens))
    file.write_text("".join(lines))


def plan_recipe(path: Path) -> Golden:
    """Return the decisions and predictions of a dry run of a recipe.

    The number of devices is that of [simulation], or, for recipes with prepared data, the number of
    ranks of the command in the comment of the recipe.
    """
    recipe = load_recipe(path).recipe
    ranks = recipe.simulation.gpus
    if recipe.data.sources:
        command = re.search(r"--nproc-per-node (\d+)", path.read_text())
        ranks = int(command[1]) if command else 2
    has_data = all(Path(s.path).parts[:2] in DATA for s in recipe.data.sources)
    overrides = [] if has_data else ["--data.sources=[]", "--data.validation=[]"]
    recipe = load_recipe(path, overrides).recipe
    forecasts: list[SimulatedStepReport] = []
    keep = mock.Mock(side_effect=lambda file, name, forecast: forecasts.append(forecast))
    with mock.patch.object(dry_run, "write_timeline", keep):
        text = dry_run.describe_run(recipe, ranks, Path("plan.svg"))
    lines = dict(re.split(r"  +", line, maxsplit=1) for line in text.splitlines())
    return {
        "ranks": ranks,
        "lines": {label: value for label, value in lines.items() if label not in COMMANDS},
        **_forecast_values(forecasts[0]),
    }


def _forecast_values(forecast: SimulatedStepReport) -> Golden:
    """Return the plan and the simulated step of a forecast."""
    step = forecast.step
    assert step is not None
    plan = step.plan
    orders = [[str(action) for action in actions] for actions in plan.actions]
    tuned = sorted((str(task), modes) for task, modes in plan.recompute.items())
    values = forecast.as_dict()
    values["peak_memory_bytes"] = float(max(values["peak_memory_bytes"]))
    return {
        **round_floats(values),
        "stages": [
            f"{s.module} {s.start}:{s.stop} on {','.join(map(str, s.ranks))}"
            for s in plan.graph.layout.stages
        ],
        "actions": [len(order) for order in orders],
        "order": _digest(orders),
        "recompute": _digest(tuned),
    }


def _digest(value: Any) -> str:
    return sha256(json.dumps(value).encode()).hexdigest()[:16]


def round_floats(value: Any) -> Any:
    """Return a JSON value with six significant digits in every float."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: round_floats(item) for key, item in value.items()}
    return value


def machine() -> str:
    """Return the versions and the processor, which determine the last bits of a loss."""
    model = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    processor = model[1] if model else torch.backends.cpu.get_cpu_capability()
    return f"torch {torch.__version__}, {processor}"


def train_quickstart(name: str, server: TrainServer, folder: Path) -> Golden:
    """Return loss and gradient norm of the first steps of a quickstart, as hexadecimal floats.

    Args:
        name: recipe.
        server: runs train.py.
        folder: directory for the output of the run.
    """
    fixed = {**ONLY_TRAINS, **NO_SAMPLES, **SAME_ORDERS}
    options = {"name": "golden", "output_dir": folder, "training.steps": STEPS, **fixed}
    arguments = [f"--{key.lstrip('-')}={value}" for key, value in options.items()]
    command = ["--config", RECIPES / f"{name}.toml", *arguments]
    codes, output = server.run(command, folder / "logs", QUICKSTARTS[name])
    if any(codes):
        raise RuntimeError(f"{name}: exit codes {codes}\n{output}")
    steps = [record for record in records(folder / "golden") if "grad_norm" in record]
    return {
        "machine": machine(),
        "loss": [float(record["loss"]).hex() for record in steps],
        "grad_norm": [float(record["grad_norm"]).hex() for record in steps],
    }


def differences(stored: Any, found: Any, key: str = "") -> list[str]:
    """Return a line for each value that differs; numbers may differ by `TOLERANCE`.

    Numbers within texts may also differ by one in their last digit.
    """
    if isinstance(stored, dict) and isinstance(found, dict):
        return [
            line
            for name in {**stored, **found}
            for line in differences(stored.get(name), found.get(name), f"{key}.{name}".strip("."))
        ]
    if isinstance(stored, list) and isinstance(found, list) and len(stored) == len(found):
        pairs = enumerate(zip(stored, found, strict=True))
        return [line for i, (a, b) in pairs for line in differences(a, b, f"{key}[{i}]")]
    if stored == found or _are_close(stored, found):
        return []
    return [f"{key}: {stored} -> {found}"]


def _are_close(stored: Any, found: Any) -> bool:
    if isinstance(stored, str) and isinstance(found, str):
        if NUMBER.sub("", stored) != NUMBER.sub("", found):
            return False
        pairs = zip(NUMBER.findall(stored), NUMBER.findall(found), strict=True)
        return all(_are_close_texts(a, b) for a, b in pairs)
    numbers = isinstance(stored, float) and isinstance(found, float)
    return numbers and abs(stored - found) <= TOLERANCE * abs(stored)


def _are_close_texts(stored: str, found: str) -> bool:
    """Return True if two printed floats differ by one in the last digit at most."""
    if "." not in stored:
        return stored == found
    a, b = (float(text.replace(",", "")) for text in (stored, found))
    last_digit = 10.0 ** -len(stored.partition(".")[2])
    return abs(a - b) <= 1.01 * last_digit + TOLERANCE * abs(a)
