"""Recipes of models that people train: they can be built, at the size that they state."""

import json
import re
from pathlib import Path

import pytest

from torchmm.balance.forecasts.dry_run import describe_run
from torchmm.common.errors import ConfigError
from torchmm.planning.recipe_model import recipe_model
from torchmm.recipe.read import load_recipe

ROOT = Path(__file__).parents[4]
ZOO = ROOT / "recipes" / "zoo"
RECIPES = sorted(p for p in ZOO.glob("*.toml") if p.name != "base.toml")


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_parameters_are_those_of_the_comment(path: Path) -> None:
    recipe = load_recipe(path, []).recipe
    world_size = recipe.simulation.gpus
    recipe = load_recipe(path, [], world_size).recipe  # sizes divide
    comment = path.read_text().split("base =")[0]
    gpus = f"{world_size} GPUs" if world_size > 1 else "1 GPU"
    assert f"{gpus} of 80 GB" in comment.replace("\n# ", " ")
    model = recipe_model(recipe)
    counts = model.parameter_counts().values()
    every, trained = (sum(column) for column in zip(*counts, strict=True))
    text = comment.replace("\n# ", " ")
    stated = re.search(r"([\d.]+) B parameters(?:, ([\d.]+) ([BM]) of them trained)?", text)
    if stated is None:  # the base's model
        assert "base.toml" not in path.read_text().split("\n\n")[0]
        return
    assert every / 1e9 == pytest.approx(float(stated[1]), abs=0.06)
    if stated[2]:
        unit = {"B": 1e9, "M": 1e6}[stated[3]]
        assert trained / unit == pytest.approx(float(stated[2]), rel=0.05)


PUBLISHED = {
    # Qwen3-8B's and Qwen3-30B-A3B's model cards, whose layers Qwen3-VL and Qwen3-Omni have.
    "qwen3_vl_8b": {"llm": 8.2e9},
    "qwen3_vl_30b_a3b": {"llm": 30.5e9},
    # Qwen3-Omni's technical report; the connector is counted with the tower.
    "qwen3_omni_30b_a3b": {"llm": 30.5e9, "vision": 0.54e9, "audio": 0.65e9},
    # Their model cards; Gemma's count the LLM alone, beside "~550M" of the tower.
    "qwen3_5_9b": {"llm": 9e9},
    "qwen3_5_35b_a3b": {"": 35e9},
    "gemma4_31b": {"llm": 30.7e9},
    "gemma4_26b_a4b": {"llm": 25.2e9},
}
"""Parameters by module; "": of the whole."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_within_one_percent_of_the_published(name: str) -> None:
    recipe = load_recipe(ZOO / f"{name}.toml", []).recipe
    counts = recipe_model(recipe).parameter_counts()
    for module, published in PUBLISHED[name].items():
        found = sum(all_of for part, (all_of, _) in counts.items() if part.startswith(module))
        assert found == pytest.approx(published, rel=0.01), module


def test_a_node_is_enough_for_adapters_of_72_b_parameters() -> None:
    recipe = load_recipe(ZOO / "qwen2_5_vl_72b_lora.toml", []).recipe
    assert "peak memory" in describe_run(recipe, 8)
    all_of_it = recipe.model_copy(update={"adapters": {}})
    with pytest.raises(ConfigError, match=r"requires [\d.]+ GiB"):
        describe_run(all_of_it, 8)


def test_zoo_recipes_save_and_validate_by_default() -> None:
    for path in RECIPES:
        recipe = load_recipe(path).recipe
        assert recipe.checkpoint.interval == recipe.validation.interval == 500, path
        assert recipe.checkpoint.keep_latest == 2, path


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_zoo_recipe_has_small_version(path: Path) -> None:
    named = re.search(r"^# Small version: (recipes/\S+\.toml)\.$", path.read_text(), re.MULTILINE)
    assert named is not None
    small, recipe = (load_recipe(p).recipe for p in (ZOO.parents[1] / named[1], path))
    assert small.data.sources and small.data.validation and small.validation.interval
    ours, theirs = (
        sorted(encoder.modality for encoder in r.model.encoders.values()) for r in (small, recipe)
    )
    assert ours == theirs or small.model.source is not None  # files, made before


def test_the_tables_list_every_recipe() -> None:
    reference = ROOT / "docs" / "reference"
    table = "".join((reference / f"{n}_recipes.md").read_text() for n in ("trained", "planned"))
    every = [p for p in ZOO.parent.rglob("*.toml") if "bases" not in p.parts]
    names = [f"tiny/{p.stem}" if p.parent.name == "tiny" else p.stem for p in every]
    assert not [n for n in names if not n.endswith("base") and f"`{n}`" not in table]


def test_eight_billion_parameters_are_trained_on_one_device() -> None:
    """Weights, gradients and states, all of them, and activations, in the dry run."""

    def described(*arguments: str) -> str:
        path = ZOO / "qwen3_vl_8b_one_gpu.toml"
        return describe_run(load_recipe(path, [*arguments], 1).recipe, 1)

    assert "frozen" not in described()
    full = "--activation_checkpoint.mode=full"
    on_device = described(full, "--optimizer.offload=false")
    assert "weights 16.33, gradients 32.66, optimizer 17.35" in on_device
    with pytest.raises(ConfigError, match=r"would require [\d.]+ GiB, but h100 has 74.5"):
        described(full, "--optimizer.offload=false", "--optimizer.state_dtype=float32")
    with pytest.raises(ConfigError, match=r"would require [\d.]+ GiB, but h100 has 74.5"):
        described(full, "--optimizer.offload=false", "--training.parameter_dtype=float32")


def test_goals_have_the_hours_and_memory_of_the_forecasts() -> None:
    """The table of recipes by goal: steps of the recipe times the simulated step."""
    rows = json.loads((ROOT / "benchmarks/results/recipe_forecasts.json").read_text())
    found = {(row["case"], row["metric"]): row["ours"] for row in rows}
    table = (ROOT / "recipes" / "README.md").read_text()
    lines = re.findall(r"\| `(\w+)` \| [^|]+ \| (\d+) \| ([\d.]+) \| (\d+) GiB \|", table)
    assert len(lines) >= 12
    for name, gpus, hours, memory_gib in lines:
        recipe = load_recipe(ZOO / f"{name}.toml", []).recipe
        assert int(gpus) == recipe.simulation.gpus, name
        told = recipe.training.steps * found[name, "iteration"] / 3600
        assert float(hours) == pytest.approx(told, abs=0.051), name
        assert int(memory_gib) == round(found[name, "peak memory per GPU"]), name


def test_lora_page_matches_recipe_forecasts() -> None:
    rows = json.loads((ROOT / "benchmarks/results/recipe_forecasts.json").read_text())
    values = {(row["case"], row["metric"]): row["ours"] for row in rows}
    page = (ROOT / "docs" / "get_started" / "lora.md").read_text()
    lines = re.findall(r"\| `(\w+)` \| [^|]+ \| (\d+) \| (\d+) GiB \| ([\d.]+) s \|", page)
    assert len(lines) == 3
    for name, gpus, memory_gib, step_s in lines:
        assert int(gpus) == load_recipe(ZOO / f"{name}.toml", []).recipe.simulation.gpus, name
        assert int(memory_gib) == round(values[name, "peak memory per GPU"]), name
        assert float(step_s) == pytest.approx(values[name, "iteration"], abs=0.0051), name
