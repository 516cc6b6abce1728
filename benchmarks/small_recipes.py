"""Train the recipes for two CPU cores, and report held-out metrics and run time.

    python benchmarks/small_recipes.py [--quick] [--json FILE] [--recipes NAME ...]

Each recipe is trained as its first lines show, and once for a single step with learning rates of
zero. The metrics of that step are those of the untrained model on the same held-out samples. The
run time includes the export. Recipes that start from another export run after it. Rows of recipes
that were not run stay in the JSON file.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from support.harness import Row, describe_machine, kept_rows, make_parser, report, write_rows

from torchmm.recipe.read import load_recipe
from torchmm.recipe.recipe import Recipe

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 600.0
QUICK_STEPS = 3
NO_WARMUP = ("--optimizer.warmup_steps", "0")
FIGURES = {
    "validation_loss": ("held-out loss", "nats"),
    "validation_loss_text": ("held-out loss of text", "nats"),
    "validation_loss_image": ("held-out generation loss", "MSE"),
    "word_error_rate": ("held-out word error rate", "fraction"),
}
"""Of metrics.jsonl: name and unit."""


@dataclass(frozen=True)
class Case:
    """Recipe and its command."""

    path: str
    """Below recipes/."""
    ranks: int = 2
    figures: tuple[str, ...] = ("validation_loss",)


WRITTEN, DRAWN = ("validation_loss", "word_error_rate"), ("validation_loss_image",)
CASES = {
    "siglip2_qwen3": Case("tiny/siglip2_qwen3.toml"),
    "internvit_qwen2_5": Case("tiny/internvit_qwen2_5.toml"),
    "smolvlm": Case("tiny/smolvlm.toml"),
    "llava_llm": Case("tiny/llava_llm.toml"),
    "llava_connector": Case("tiny/llava_connector.toml"),
    "llava": Case("tiny/llava.toml"),
    "qwen2_5_vl": Case("tiny/qwen2_5_vl.toml"),
    "qwen2_5_vl_lora": Case("tiny/qwen2_5_vl_lora.toml"),
    "siglip2_qwen3_5": Case("tiny/siglip2_qwen3_5.toml"),
    "qwen3_vl": Case("tiny/qwen3_vl.toml"),
    "qwen3_vl_context": Case("tiny/qwen3_vl_context.toml"),
    "qwen3_5": Case("tiny/qwen3_5.toml"),
    "gemma4": Case("tiny/gemma4.toml"),
    "glm4v": Case("tiny/glm4v.toml"),
    "qwen3_omni": Case("tiny/qwen3_omni.toml"),
    "wav2vec2_llama": Case("tiny/wav2vec2_llama.toml"),
    "audioflamingo3": Case("tiny/audioflamingo3.toml"),
    "quickstart": Case("quickstart.toml"),
    "quickstart_searched": Case("quickstart_searched.toml"),
    "quickstart_colocated": Case("quickstart_colocated.toml"),
    "quickstart_reading": Case("quickstart_reading.toml"),
    "quickstart_speech": Case("quickstart_speech.toml", figures=WRITTEN),
    "quickstart_omni": Case("quickstart_omni.toml", figures=WRITTEN),
    "quickstart_generation": Case("quickstart_generation.toml", figures=DRAWN),
    "quickstart_latents": Case("quickstart_latents.toml", figures=DRAWN),
    "quickstart_video": Case("quickstart_video.toml", figures=DRAWN),
    "quickstart_video_searched": Case("quickstart_video_searched.toml", figures=DRAWN),
    "quickstart_video_captions": Case("quickstart_video_captions.toml", figures=WRITTEN),
    "quickstart_video_captions_blind": Case(
        "quickstart_video_captions_blind.toml", figures=WRITTEN
    ),
    "quickstart_three_modules": Case(
        "quickstart_three_modules.toml", figures=("validation_loss_text", *DRAWN)
    ),
    "quickstart_disaggregated": Case(
        "quickstart_disaggregated.toml", 4, ("validation_loss_text", *DRAWN)
    ),
}


class RunError(Exception):
    """Failure of a recipe."""


def main() -> int:
    """Run the recipes sequentially and return 1 if one failed, else 0."""
    parser = make_parser((__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--recipes",
        nargs="+",
        choices=CASES,
        metavar="NAME",
        help="recipes to train (default: all)",
    )
    arguments = parser.parse_args()
    names = arguments.recipes or (["siglip2_qwen3"] if arguments.quick else list(CASES))
    print(f"machine: {describe_machine(torch.device('cpu'))}")
    failed = 0
    for name in names:
        try:
            rows = run(name, CASES[name], arguments.quick)
        except RunError as error:
            print(f"error: {error}", file=sys.stderr)
            failed = 1
            continue
        report(f"Recipes on two cores: {name}", rows, None)
        if arguments.json is not None:
            write_rows(kept_rows(arguments.json, [name]) + rows, arguments.json)
    return failed


def run(name: str, case: Case, quick: bool = False) -> list[Row]:
    """Return metrics of the trained and the untrained model, and the run time.

    Raises:
        RunError: A command failed.
    """
    path = ROOT / "recipes" / case.path
    recipe = load_recipe(path).recipe
    untrained, _ = train(path, case.ranks, still(recipe))
    short = ["--training.steps", str(QUICK_STEPS), *NO_WARMUP] if quick else []
    trained, duration_s = train(path, case.ranks, ["--name", recipe.name, *short])
    rows = []
    for figure in case.figures:
        what, unit = FIGURES[figure]
        before = untrained[figure]
        rows.append(Row(name, what, unit, trained[figure], before, goal=before, better="lower"))
    time_row = Row(name, "run time", "s", duration_s, goal=LIMIT_S, better="lower")
    return [*rows, time_row]


def still(recipe: Recipe) -> list[str]:
    """Return the overrides of a step that does not change the weights."""
    rates = ["lr", *(f"module_lr.{module}" for module in recipe.optimizer.module_lr)]
    zeros = [part for rate in rates for part in (f"--optimizer.{rate}", "0.0")]
    return [
        "--name", f"{recipe.name}_untrained", "--training.steps", "1", *NO_WARMUP, *zeros,
        "--checkpoint.interval", "0", "--checkpoint.export_hf", "false",
    ]  # fmt: skip


def train(path: Path, ranks: int, overrides: list[str]) -> tuple[dict[str, Any], float]:
    """Return the last record of a run and the run time of its command in seconds.

    Raises:
        RunError: The command failed.
    """
    options = [*overrides, "--checkpoint.resume", "none"]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [sys.executable, *torchrun, "train.py", "--config", str(path), *options]
    begin_s = time.perf_counter()
    found = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env=_environment(), check=False
    )
    duration_s = time.perf_counter() - begin_s
    if found.returncode:
        raise RunError(f"{' '.join(command)} failed:\n{found.stdout[-2000:]}{found.stderr[-4000:]}")
    recipe = load_recipe(path, options).recipe
    records = (ROOT / recipe.output_dir / recipe.name / "metrics.jsonl").read_text().splitlines()
    return json.loads(records[-1]), duration_s


def _environment() -> dict[str, str]:
    return {"OMP_NUM_THREADS": "1", **os.environ}


if __name__ == "__main__":
    sys.exit(main())
