"""The benchmark of small recipes: what it runs, and which rows it keeps."""

import importlib
import json
from pathlib import Path

import pytest

from torchmm.recipe.read import load_recipe

ROOT = Path(__file__).parents[3]


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("small_recipes")


def test_all_small_recipes_are_there_behind_what_they_start_from(benchmark):
    files = {f"tiny/{path.name}" for path in (ROOT / "recipes/tiny").glob("*.toml")}
    files |= {path.name for path in (ROOT / "recipes").glob("quickstart*.toml")}
    # One is no recipe; the other is for GPUs.
    files -= {"tiny/base.toml", "quickstart_gpu.toml"}
    assert files == {case.path for case in benchmark.CASES.values()}
    made = []
    for case in benchmark.CASES.values():
        recipe = load_recipe(ROOT / "recipes" / case.path).recipe
        sources = [recipe.model.source, recipe.model.llm and recipe.model.llm.source]
        needed = [s.split("/")[1] for s in sources if s and s.startswith("outputs/")]
        assert set(needed) <= set(made), case.path
        made.append(recipe.name)


def test_the_untrained_model_does_not_move(benchmark):
    recipe = load_recipe(ROOT / "recipes/quickstart_generation.toml").recipe
    overrides = benchmark.still(recipe)
    still = load_recipe(ROOT / "recipes/quickstart_generation.toml", overrides).recipe
    assert still.optimizer.lr == 0 and set(still.optimizer.module_lr.values()) == {0}
    assert (still.training.steps, still.name) == (1, "quickstart_generation_untrained")


def test_figures_stand_beside_those_of_the_untrained_model(benchmark, monkeypatch, tmp_path):
    found = [({"validation_loss": 7.0}, 1.0), ({"validation_loss": 4.0}, 90.0)]
    monkeypatch.setattr(benchmark, "train", lambda *_: found.pop(0))
    rows = benchmark.run("smolvlm", benchmark.CASES["smolvlm"])
    loss, duration = rows
    assert (loss.ours, loss.baseline, loss.met, duration.ours) == (4.0, 7.0, True, 90.0)
    file = tmp_path / "rows.json"
    file.write_text(json.dumps([{**vars(row), "met": row.met} for row in rows]))
    assert benchmark.kept_rows(file, ["llava"]) == rows
    assert benchmark.kept_rows(file, ["smolvlm"]) == benchmark.kept_rows(None, []) == []


def test_a_run_that_fails_is_told(benchmark, monkeypatch):
    monkeypatch.setattr(benchmark.sys, "executable", "false")  # ends with 1, whatever it is asked
    with pytest.raises(benchmark.RunError, match=r"train\.py"):
        benchmark.train(ROOT / "recipes/quickstart.toml", 1, [])
