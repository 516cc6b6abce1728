"""The benchmark of small recipes: cases, and rows that are retained."""

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


def test_all_small_recipes_are_ordered_by_dependency(benchmark):
    files = {f"tiny/{path.name}" for path in (ROOT / "recipes/tiny").glob("*.toml")}
    files |= {path.name for path in (ROOT / "recipes").glob("quickstart*.toml")}
    # One file is not a recipe, and the other recipe requires GPUs.
    files -= {"tiny/base.toml", "quickstart_gpu.toml"}
    assert files == {case.path for case in benchmark.CASES.values()}
    names = []
    for case in benchmark.CASES.values():
        recipe = load_recipe(ROOT / "recipes" / case.path).recipe
        sources = [recipe.model.source, recipe.model.llm and recipe.model.llm.source]
        needed = [s.split("/")[1] for s in sources if s and s.startswith("outputs/")]
        assert set(needed) <= set(names), case.path
        names.append(recipe.name)


def test_untrained_model_does_not_change(benchmark):
    recipe = load_recipe(ROOT / "recipes/quickstart_generation.toml").recipe
    overrides = benchmark.still(recipe)
    still = load_recipe(ROOT / "recipes/quickstart_generation.toml", overrides).recipe
    assert still.optimizer.lr == 0 and set(still.optimizer.module_lr.values()) == {0}
    assert (still.training.steps, still.name) == (1, "quickstart_generation_untrained")


def test_results_are_compared_with_untrained_model(benchmark, monkeypatch, tmp_path):
    actual = [({"validation_loss": 7.0}, 1.0), ({"validation_loss": 4.0}, 90.0)]
    monkeypatch.setattr(benchmark, "train", lambda *_: actual.pop(0))
    rows = benchmark.run("smolvlm", benchmark.CASES["smolvlm"])
    loss, duration = rows
    assert (loss.ours, loss.baseline, loss.met, duration.ours) == (4.0, 7.0, True, 90.0)
    file = tmp_path / "rows.json"
    file.write_text(json.dumps([{**vars(row), "met": row.met} for row in rows]))
    assert benchmark.kept_rows(file, ["llava"]) == rows
    assert benchmark.kept_rows(file, ["smolvlm"]) == benchmark.kept_rows(None, []) == []


def test_failed_run_is_reported(benchmark, monkeypatch):
    monkeypatch.setattr(benchmark.sys, "executable", "false")  # exits with code 1
    with pytest.raises(benchmark.RunError, match=r"train\.py"):
        benchmark.train(ROOT / "recipes/quickstart.toml", 1, [])
