"""The benchmark of recipes that are only simulated: cases, results and tables."""

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TABLE = """| recipe | model | step | MFU | memory per GPU |
|---|---|---:|---:|---:|
| `small` | one | | | |
| `other` | two | 3.00 s | 9.0 % | 7 GiB |

| goal | recipe | hours |
|---|---|---:|
| try it | `small` | |
"""
RECIPE = """
[model.llm.config]
model_type = "llama"
vocab_size = 64
hidden_size = 32
intermediate_size = 48
num_hidden_layers = 2
num_attention_heads = 4

[training]
steps = 1
global_batch_size = 4
sequence_length = 64

[simulation]
gpus = 2

[[simulation.sequences]]
"""


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("recipe_forecasts")


def test_results_of_dry_run_are_written_to_table(benchmark, tmp_path):
    path = tmp_path / "small.toml"
    path.write_text('name = "small"' + RECIPE)
    rows = benchmark.forecast(path)
    assert [row.metric for row in rows] == ["exit code", "iteration", "MFU", "peak memory per GPU"]
    assert rows[0].met and rows[1].ours > 0 and {row.kind for row in rows[1:]} == {"simulated"}
    lines = benchmark.with_figures(TABLE, rows).split("\n")
    seconds, share, gib = (row.ours for row in rows[1:])
    assert lines[2] == f"| `small` | one | {seconds:.2f} s | {share:.1f} % | {gib:.0f} GiB |"
    assert lines[7] == f"| try it | `small` | {seconds * 5000 / 3600:.1f} |"
    same = (0, 1, 3, 4, 5, 6)
    assert [lines[i] for i in same] == [TABLE.split("\n")[i] for i in same]


def test_candidates_are_compared_with_recipe(benchmark, tmp_path, monkeypatch):
    path = tmp_path / "small.toml"
    path.write_text('name = "small"' + RECIPE)
    settings = {
        "two": ("--training.microbatch_size=2",),
        "never": ("--parallel.tensor=3",),
    }
    monkeypatch.setattr(benchmark, "CANDIDATES", settings)
    as_is = benchmark.forecast(path)
    rows = benchmark.candidate_rows(path, as_is)
    assert [row.metric for row in rows] == ["iteration, two", "peak memory per GPU, two"]
    assert [row.baseline for row in rows] == [as_is[1].ours, as_is[3].ours]
    assert rows[0].ours != as_is[1].ours


def test_failed_plan_has_exit_code_only(benchmark, tmp_path):
    path = tmp_path / "small.toml"
    path.write_text('name = "small"' + RECIPE + "\n[parallel]\npipeline = 3\n")
    (row,) = benchmark.forecast(path)
    assert (row.ours, row.met) == (2, False)


def test_every_recipe_has_table_row(benchmark):
    table = (ROOT / "docs" / "reference" / "planned_recipes.md").read_text()
    rows = [
        benchmark.Row(name, metric, "", 1.0)
        for name in benchmark.RECIPES
        for metric, *_ in benchmark.COLUMNS.values()
    ]
    filled = benchmark.with_figures(table, rows)
    assert filled.count("| 1.00 s | 1.0 % | 1 GiB |") == len(benchmark.RECIPES)


def test_training_hours_use_steps_of_recipes(benchmark):
    steps = {
        benchmark.load_recipe(path).recipe.training.steps
        for path in benchmark.RECIPES.values()
        if path.parent.name == "zoo"
    }
    assert steps == {benchmark.TRAINING_STEPS}


def test_tables_have_values_of_results(benchmark):
    rows = benchmark.kept_rows(ROOT / "benchmarks" / "results" / "recipe_forecasts.json", [])
    for page in (ROOT / "recipes" / "README.md", ROOT / "docs/reference/planned_recipes.md"):
        table = page.read_text()
        assert benchmark.with_figures(table, rows) == table, page
