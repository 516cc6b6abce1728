"""Simulate every large recipe with `train.py --dry-run`.

    python benchmarks/recipe_forecasts.py [--quick] [--json FILE] [--recipes NAME ...]
        [--table FILE] [--candidates]

Each recipe of recipes/zoo and recipes/papers is built without weights. Its first step is planned
for the GPUs that it names, and simulated. The rows are exit code, step time, MFU and memory. Only
the exit code is measured. `--table` writes the values into the tables of a Markdown file that have
a line for each recipe. `--candidates` also plans recipes of recipes/zoo for several GPUs with other
settings, such as HSDP instead of a pipeline. The baseline of these rows is the unchanged recipe.
"""

from __future__ import annotations

import io
import re
import sys
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
from support.harness import Row, describe_machine, kept_rows, make_parser, report, write_rows

from torchmm.recipe.read import load_recipe

ROOT = Path(__file__).resolve().parents[1]
RECIPES = {
    path.stem: path
    for directory in ("zoo", "papers")
    for path in sorted((ROOT / "recipes" / directory).glob("*.toml"))
    if path.stem != "base"
}
EXIT_CODE, STEP, MFU, MEMORY = "exit code", "iteration", "MFU", "peak memory per GPU"
TRAINING_STEPS = 5000
"""Of all recipes of recipes/zoo."""
COLUMNS = {
    "step": (STEP, "{:.2f} s", 1.0),
    "hours": (STEP, "{:.1f}", TRAINING_STEPS / 3600),
    "MFU": (MFU, "{:.1f} %", 1.0),
    "memory": (MEMORY, "{:.0f} GiB", 1.0),
}
"""Of tables: metric, form, and what a unit of the metric is there."""
NO_PIPELINE = ("--parallel.pipeline=1", "--parallel.schedule=separated")
TUNED = ("--activation_checkpoint.mode=auto", "--activation_checkpoint.modules={}")
HSDP = (*NO_PIPELINE, "--parallel.shard=8", "--parallel.replicate=-1")
CANDIDATES = {
    "tuned": TUNED,
    "FSDP2": NO_PIPELINE,
    "FSDP2, tuned": (*NO_PIPELINE, *TUNED),
    "HSDP": HSDP,
    "HSDP, tuned": (*HSDP, *TUNED),
    "HSDP, 2 sequences, tuned": (*HSDP, *TUNED, "--training.microbatch_size=2"),
}
"""Options by setting. FSDP2 shards over all GPUs that are not used otherwise."""
FIRST_STEP = re.compile(r"^first step +([\d,.]+) ms on .*MFU ([\d.]+) %", re.MULTILINE)
PEAK = re.compile(r"^peak memory +([\d.]+) GiB", re.MULTILINE)


def main() -> int:
    """Plan the recipes sequentially and return 0."""
    parser = make_parser((__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--recipes",
        nargs="+",
        choices=RECIPES,
        metavar="NAME",
        help="recipes to simulate (default: all)",
    )
    parser.add_argument(
        "--table", type=Path, metavar="FILE", help="Markdown page whose table is updated"
    )
    parser.add_argument("--candidates", action="store_true", help="also plan other settings")
    arguments = parser.parse_args()
    names = arguments.recipes or (["smolvlm"] if arguments.quick else list(RECIPES))
    print(f"machine: {describe_machine(torch.device('cpu'))}")
    found: list[Row] = []
    for name in names:
        rows = forecast(RECIPES[name])
        if arguments.candidates and RECIPES[name].parent.name == "zoo":
            rows += candidate_rows(RECIPES[name], rows)
        report(f"{name}, simulated", rows, None)
        found += rows
        if arguments.json is not None:
            write_rows(kept_rows(arguments.json, [name]) + rows, arguments.json)
    if arguments.table is not None:
        arguments.table.write_text(with_figures(arguments.table.read_text(), found))
    return 0


def candidate_rows(path: Path, recipe_rows: Sequence[Row]) -> list[Row]:
    """Return time and memory of other settings; settings that cannot be planned are omitted.

    Args:
        path: Recipe.
        recipe_rows: Rows of the recipe as it is.
    """
    if load_recipe(path).recipe.simulation.gpus == 1:
        return []
    as_is = {row.metric: row.ours for row in recipe_rows}
    rows = []
    for setting, options in CANDIDATES.items():
        for row in forecast(path, options):
            if row.metric in (STEP, MEMORY):
                own = replace(row, metric=f"{row.metric}, {setting}")
                rows.append(replace(own, baseline=as_is.get(row.metric)))
    return rows


def forecast(path: Path, changes: Sequence[str] = ()) -> list[Row]:
    """Return the rows of one recipe on the GPUs that it names, or the exit code if it has no plan.

    Args:
        path: Recipe.
        changes: Options for `train.py` that change the recipe.
    """
    gpus = load_recipe(path).recipe.simulation.gpus
    name, shown = path.stem, io.StringIO()
    with tempfile.TemporaryDirectory() as directory:
        options = ["--dry-run", "--world-size", str(gpus), "--output_dir", directory]
        with mock.patch.object(sys, "path", [str(ROOT), *sys.path]), redirect_stdout(shown):
            code = dry_run(["train.py", "--config", str(path), *options, *changes])
    rows = [Row(name, EXIT_CODE, "", code, goal=0, better="lower")]
    step, peak = FIRST_STEP.search(shown.getvalue()), PEAK.search(shown.getvalue())
    if code == 0 and step and peak:
        seconds = float(step[1].replace(",", "")) / 1e3
        rows += [
            Row(name, STEP, "s", seconds, better="lower", kind="simulated"),
            Row(name, MFU, "%", float(step[2]), kind="simulated"),
            Row(name, MEMORY, "GiB", float(peak[1]), better="lower", kind="simulated"),
        ]
    return rows


def dry_run(command: list[str]) -> int:
    """Run `train.py` in this process, without new imports, and return its exit code."""
    import train  # noqa: PLC0415 - next to this directory

    with mock.patch.object(sys, "argv", command):
        return train.main()


def with_figures(text: str, rows: Sequence[Row]) -> str:
    """Return `text` with the values of these rows in its tables."""
    figures = {(row.case, row.metric): row.ours for row in rows}
    lines, columns = text.split("\n"), []
    for number, line in enumerate(lines):
        cells = line.split("|")
        if "| recipe |" in line:
            columns = [cell.strip().split(" ")[0] for cell in cells]
        elif not line.startswith("|"):  # the table's end
            columns = []
        elif len(cells) == len(columns):
            name = cells[columns.index("recipe")].strip(" `")
            for at, column in enumerate(columns):
                metric, form, scale = COLUMNS.get(column, ("", "", 1.0))
                if (name, metric) in figures:
                    cells[at] = f" {form.format(scale * figures[name, metric])} "
            lines[number] = "|".join(cells)
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
