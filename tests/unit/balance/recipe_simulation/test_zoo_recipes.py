"""Tests of recipes in `recipes/zoo`: parameters, memory, documentation and small versions."""

import json
import re
from pathlib import Path

import pytest

from torchmm.balance.recipe_simulation.dry_run import describe_run
from torchmm.common.errors import ConfigError
from torchmm.planning.recipe_model import recipe_model
from torchmm.recipe.read import load_recipe

ROOT = Path(__file__).parents[4]
ZOO = ROOT / "recipes" / "zoo"
RECIPES = sorted(p for p in ZOO.glob("*.toml") if p.name != "base.toml")


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_zoo_parameters_match_comment(path: Path) -> None:
    recipe = load_recipe(path, []).recipe
    world_size = recipe.simulation.gpus
    recipe = load_recipe(path, [], world_size).recipe  # parallelism degrees divide
    comment = path.read_text().split("base =")[0]
    gpus = f"{world_size} GPUs" if world_size > 1 else "1 GPU"
    assert f"{gpus} of 80 GB" in comment.replace("\n# ", " ")
    model = recipe_model(recipe)
    counts = model.parameter_counts().values()
    total, trained = (sum(column) for column in zip(*counts, strict=True))
    text = comment.replace("\n# ", " ")
    stated = re.search(r"([\d.]+) B parameters(?:, ([\d.]+) ([BM]) of them trained)?", text)
    if stated is None:  # the model of the base recipe
        assert "base.toml" not in path.read_text().split("\n\n")[0]
        return
    assert total / 1e9 == pytest.approx(float(stated[1]), abs=0.06)
    if stated[2]:
        unit = {"B": 1e9, "M": 1e6}[stated[3]]
        assert trained / unit == pytest.approx(float(stated[2]), rel=0.05)


PUBLISHED = {
    # Model cards of Qwen3-8B, 30B-A3B and 32B. Qwen3-VL and Qwen3-Omni have the same layers.
    "qwen3_vl_8b": {"llm": 8.2e9},
    "qwen3_vl_30b_a3b": {"llm": 30.5e9},
    "qwen3_vl_32b_qlora": {"llm": 32.8e9},
    # Technical report of Qwen3-Omni. The connector is included in the encoder.
    "qwen3_omni_30b_a3b": {"llm": 30.5e9, "vision": 0.54e9, "audio": 0.65e9},
    # Model cards. The Gemma cards count the LLM only, in addition to about 550 M for the encoder.
    "qwen3_5_9b": {"llm": 9e9},
    "qwen3_5_35b_a3b": {"": 35e9},
    "gemma4_31b": {"llm": 30.7e9},
    "gemma4_26b_a4b": {"llm": 25.2e9},
}
"""Parameters by module. The empty name denotes the complete model."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_zoo_parameters_match_published_counts(name: str) -> None:
    recipe = load_recipe(ZOO / f"{name}.toml", []).recipe
    counts = recipe_model(recipe).parameter_counts()
    for module, published in PUBLISHED[name].items():
        count = sum(total for part, (total, _) in counts.items() if part.startswith(module))
        assert count == pytest.approx(published, rel=0.01), module


def test_lora_of_72b_model_fits_one_node() -> None:
    recipe = load_recipe(ZOO / "qwen2_5_vl_72b_lora.toml", []).recipe
    assert "peak memory" in describe_run(recipe, 8)
    full_recipe = recipe.model_copy(update={"adapters": {}})
    with pytest.raises(ConfigError, match=r"requires [\d.]+ GiB"):
        describe_run(full_recipe, 8)


def test_quantized_weights_of_32b_model_fit_one_gpu() -> None:
    path = ZOO / "qwen3_vl_32b_qlora.toml"
    full = ["--activation_checkpoint.mode=full"]
    peaks, weights = [], []
    for changes in ([], ["--quantization.quant_type=none"]):
        text = describe_run(load_recipe(path, [*full, *changes], 1).recipe, 1)
        peaks += [float(gib) for gib in re.findall(r"peak memory +([\d.]+) GiB", text)]
        weights += [float(gib) for gib in re.findall(r"weights ([\d.]+)", text)]
    layers = 64 * (2 * 64 * 128 * 5120 + 2 * 8 * 128 * 5120 + 3 * 5120 * 25600)
    assert weights[1] - weights[0] == pytest.approx(layers * (2 - 36 / 64) / 2**30, abs=0.011)
    assert peaks[0] < 30 < 65 < peaks[1]


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
    small_modalities, modalities = (
        sorted(encoder.modality for encoder in r.model.encoders.values()) for r in (small, recipe)
    )
    assert (
        small_modalities == modalities or small.model.source is not None
    )  # the small version converts files


def test_recipe_tables_list_every_recipe() -> None:
    reference = ROOT / "docs" / "reference"
    table = "".join((reference / f"{n}_recipes.md").read_text() for n in ("trained", "planned"))
    paths = [p for p in ZOO.parent.rglob("*.toml") if "bases" not in p.parts]
    names = [f"tiny/{p.stem}" if p.parent.name == "tiny" else p.stem for p in paths]
    assert not [n for n in names if not n.endswith("base") and f"`{n}`" not in table]


def test_8b_model_trains_on_one_gpu() -> None:
    """Check weights, gradients, optimizer states and activations in dry runs."""

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


def test_recipe_goals_match_simulated_time_and_memory() -> None:
    """Compare hours in the table of recipe goals with the number of steps times the step time."""
    rows = json.loads((ROOT / "benchmarks/results/recipe_forecasts.json").read_text())
    values = {(row["case"], row["metric"]): row["ours"] for row in rows}
    table = (ROOT / "recipes" / "README.md").read_text()
    lines = re.findall(r"\| `(\w+)` \| [^|]+ \| (\d+) \| ([\d.]+) \| (\d+) GiB \|", table)
    assert len(lines) >= 12
    for name, gpus, hours, memory_gib in lines:
        recipe = load_recipe(ZOO / f"{name}.toml", []).recipe
        assert int(gpus) == recipe.simulation.gpus, name
        expected_hours = recipe.training.steps * values[name, "iteration"] / 3600
        assert float(hours) == pytest.approx(expected_hours, abs=0.051), name
        assert int(memory_gib) == round(values[name, "peak memory per GPU"]), name


def test_lora_page_matches_recipe_simulation() -> None:
    rows = json.loads((ROOT / "benchmarks/results/recipe_forecasts.json").read_text())
    values = {(row["case"], row["metric"]): row["ours"] for row in rows}
    page = (ROOT / "docs" / "get_started" / "lora.md").read_text()
    lines = re.findall(r"\| `(\w+)` \| [^|]+ \| (\d+) \| (\d+) GiB \| ([\d.]+) s \|", page)
    assert len(lines) == 4
    for name, gpus, memory_gib, step_s in lines:
        assert int(gpus) == load_recipe(ZOO / f"{name}.toml", []).recipe.simulation.gpus, name
        assert int(memory_gib) == round(values[name, "peak memory per GPU"]), name
        assert float(step_s) == pytest.approx(values[name, "iteration"], abs=0.0051), name
