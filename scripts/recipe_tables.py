"""Write docs/reference/trained_recipes.md and planned_recipes.md from recipes and their results.

python scripts/recipe_tables.py
"""

from __future__ import annotations

import json
import re
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from torchmm.balance.simulation.section import SimulationConfig
from torchmm.recipe.placement_sizes import resolve_sizes
from torchmm.recipe.read import list_recipes, load_recipe
from torchmm.recipe.recipe import Recipe

ROOT = Path(__file__).parent.parent
RECIPES = ROOT / "recipes"
RESULTS = ROOT / "benchmarks" / "results"
TARGET = ROOT / "docs" / "reference"
NOTICE = "<!-- Written by scripts/recipe_tables.py. Do not edit. -->"
MISSING = "-"


class Result(NamedTuple):
    """A held-out metric before and after training."""

    metric: str
    untrained: float | None
    trained: float
    time_s: float | None = None


METRICS = {
    "generation loss": ("image error", "{:.2f}", 1.0),
    "loss": ("loss", "{:.2f}", 1.0),
    "word error": ("word error rate", "{:.0f} %", 100.0),
}
"""Maps the metric of a result to name, format and factor in the table."""
RESULT_FILES = ("small_recipes_cpu.json", "single_runs_cpu.json")
"""Results of benchmarks/small_recipes.py and of other runs.

Times of other runs are omitted if other programs ran at the same time.
"""

TRAINED = f"""\
# Recipes for two CPU cores

{NOTICE}

These recipes train in minutes on two CPU cores, with real data. The command is in the first lines
of each recipe:

```bash
python train.py --list-recipes
```

The table shows held-out metrics before and after training, of one run each. Image error is the mean
squared error of the velocity that a generator predicts. Time is the time of the complete command on
two cores of an AMD EPYC. "{MISSING}" means not measured.
[Measurements](../../benchmarks/results/small_recipes_cpu.md) lists all values and conditions.
Most runs used an earlier sample order. Expect differences as between two seeds.

"""
TRAINED_NOTES = """
Notes:

- The three LLaVA recipes run in the order `llava_llm`, `llava_connector`, `llava`. Each of them
  starts from the export of the preceding recipe. The encoder has random weights, so the connector
  alone does not reach the loss of `llava_llm`.
- `tiny/qwen2_5_vl_lora` starts from the export of `tiny/qwen2_5_vl` and uses the same images.
- `quickstart_reading` reads 198 of 200 held-out times exactly. Times have four digits in large
  print.
- `quickstart_latents` learns colors and positions of held-out captions, but no shapes.
- `quickstart_speech` learns the language and frequent phrases, but does not transcribe sentences.
  After 100 of 400 steps, its loss is 4.03 and its word error rate is 100 %.
- `quickstart_video_captions` distinguishes most films, but not the direction of motion. The
  baseline `quickstart_video_captions_blind` has black frames.
- `quickstart` is described in the [README](../../README.md). `quickstart_searched`,
  `quickstart_colocated` and `quickstart_disaggregated` train the same models with other schedules
  or placements.
- `quickstart_gpu` was not trained to the end on a GPU.
"""
PLANNED = f"""\
# Recipes for GPU clusters

{NOTICE}

These recipes have the shapes of published models. Simulate one of them without GPUs:

```bash
python train.py --config recipes/zoo/qwen3_vl_8b.toml --dry-run --world-size 16
```

All step times, MFU and memory values on this page are **simulated** with assumed device
efficiencies ([cost model](../concepts/cost_model.md)). None of them was measured on GPUs. The
section `[simulation]` of a recipe has the assumed data.

## Models to train

The recipes are in `recipes/zoo/` and are simulated for H100. `scripts/plan.py` chose the
parallelism, or found no configuration that is more than 2 % faster. See
[choose a placement](../guides/choose_placement.md).

"""
PAPERS = """
## Models of papers

The recipes are in [recipes/papers/](../../recipes/papers/README.md). Shapes and parallelism are
those of the papers, if printed. All models fit into GPU memory in the simulation, five of them with
more recomputation than in the paper. [Results](../../benchmarks/results/paper_tables.md) compares
the values with those of the papers. Small versions are `quickstart_colocated` (Optimus),
`quickstart_searched` and `quickstart_video` (PipeWeaver), and `quickstart_disaggregated`
(DistTrain).

"""


def main() -> None:
    """Write both pages."""
    for name, text in pages().items():
        (TARGET / name).write_text(text, encoding="utf-8")
        print(f"wrote {TARGET / name}")


def pages() -> dict[str, str]:
    """Return the text of each page by file name."""
    trained, planned = trained_page(), planned_page()
    return {"trained_recipes.md": trained, "planned_recipes.md": planned}


def trained_page() -> str:
    """Return the page of recipes that train on two CPU cores."""
    results = trained_results()
    rows = [
        "| recipe | trains | metric | untrained | trained | time |",
        "|---|---|---|---:|---:|---:|",
    ]
    for path, description in list_recipes(RECIPES):
        folder = path.parent.name
        if folder in ("zoo", "papers"):
            continue
        name = f"tiny/{path.stem}" if folder == "tiny" else path.stem
        results_of_recipe = results.get(name, [])
        cells = [f"`{name}`", summary(description)]
        if not results_of_recipe:
            rows.append(row(*cells, MISSING, MISSING, MISSING, MISSING))
        for result in results_of_recipe:
            rows.append(row(*cells, *result_cells(result)))
            cells = ["", ""]
    return TRAINED + "\n".join(rows) + "\n" + TRAINED_NOTES


def trained_results() -> dict[str, list[Result]]:
    """Return the results of each recipe by its name below recipes/."""
    by_recipe: dict[str, list[Result]] = {}
    times: dict[str, float] = {}
    for entry in chain(*(json.loads((RESULTS / file).read_text()) for file in RESULT_FILES)):
        case = entry["case"]
        name = case if (RECIPES / f"{case}.toml").exists() else f"tiny/{case}"
        if entry["metric"] == "run time":
            times[name] = entry["ours"]
            continue
        result = Result(entry["metric"], entry["baseline"], entry["ours"])
        by_recipe[name] = [*by_recipe.get(name, []), result]
    return {
        name: [results[0]._replace(time_s=times.get(name, results[0].time_s)), *results[1:]]
        for name, results in by_recipe.items()
    }


def result_cells(result: Result) -> list[str]:
    """Return the cells of a result."""
    name, form, factor = next(METRICS[word] for word in METRICS if word in result.metric)
    untrained = MISSING if result.untrained is None else form.format(factor * result.untrained)
    trained = form.format(factor * result.trained) if result.trained > 0.005 else "< 0.005"
    return [name, untrained, trained, duration(result.time_s)]


def duration(time_s: float | None) -> str:
    """Return a time as text."""
    if time_s is None:
        return MISSING
    return f"{time_s:.0f} s" if time_s < 200 else f"{time_s / 60:.1f} min"


def planned_page() -> str:
    """Return the page of recipes that are simulated."""
    return PLANNED + planned_table("zoo") + PAPERS + planned_table("papers")


def planned_table(folder: str) -> str:
    """Return the table of the recipes in a folder of recipes/."""
    entries = json.loads((RESULTS / "recipe_forecasts.json").read_text())
    values = {(entry["case"], entry["metric"]): entry["ours"] for entry in entries}
    heads = ["recipe", "model and data", "GPUs", "parallelism", "step", "MFU", "memory per GPU"]
    dashes = ["---", "---", "---:", "---", "---:", "---:", "---:"]
    has_small = folder == "zoo"
    rows = [row(*heads, *["small version"] * has_small), row(*dashes, *["---"] * has_small)]
    for path, description in list_recipes(RECIPES / folder):
        recipe, name = load_recipe(path).recipe, path.stem
        device = (
            ""
            if has_small
            else f" {SimulationConfig.from_parent(recipe).device.partition('_')[0].upper()}"
        )
        cells = [
            f"`{name}`",
            summary(description),
            f"{SimulationConfig.from_parent(recipe).gpus}{device}",
            parallelism(recipe),
            f"{values[name, 'iteration']:.2f} s",
            f"{values[name, 'MFU']:.1f} %",
            f"{values[name, 'peak memory per GPU']:.0f} GiB",
        ]
        rows.append(row(*cells, *[small_version(path)] * has_small))
    return "\n".join(rows) + "\n"


def parallelism(recipe: Recipe) -> str:
    """Return the parallelism degrees above 1, and the schedule of a pipeline."""
    parallel = recipe.parallel
    if parallel.placement == "disaggregated":
        return "disaggregated"
    sizes = resolve_sizes(parallel, SimulationConfig.from_parent(recipe).gpus)
    shard = sizes.shard // parallel.context
    degrees = {
        "PP": sizes.pipeline,
        "TP": sizes.tensor,
        "CP": parallel.context,
        "EP": parallel.expert,
        "DP": sizes.replicate,
        "FSDP": shard,
    }
    shown = " x ".join(f"{name} {size}" for name, size in degrees.items() if size > 1)
    schedule = f", {parallel.schedule}" if sizes.pipeline > 1 else ""
    return (shown or "1 rank") + schedule


def small_version(path: Path) -> str:
    """Return the recipe for two CPU cores that the comment of a recipe names."""
    match = re.search(r"^# Small version: recipes/(\S+)\.toml\.$", path.read_text(), re.MULTILINE)
    return f"`{match[1]}`" if match else MISSING


def summary(description: str) -> str:
    """Return the object of the first sentence of a description, without its verb."""
    sentence = re.split(r"\. (?=[A-Z0-9`])", description)[0].rstrip(".")
    text = re.sub(r"^(Train|Simulate|Continue training) ", "", sentence)
    return text[0].upper() + text[1:]


def row(*cells: str) -> str:
    """Return a line of a table."""
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    main()
