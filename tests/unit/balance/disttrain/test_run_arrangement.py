"""Tests of the reordering of a run: equal to simulation, and unsupported recipe keys."""

from pathlib import Path

import pytest
import tomli_w
import torch
from fuzz.data import make_data
from fuzz.draw import merged
from fuzz.recipes import complete
from recipe_problems import problems_of
from small_parts import LLM, VISION

from torchmm.balance.disttrain.arrangement import apply_reorder
from torchmm.balance.image_balancing import ImageBalancer
from torchmm.balance.recipe_simulation.first_microbatches import first_microbatches
from torchmm.balance.recipe_simulation.step_simulator import StepSimulator
from torchmm.balance.run_costs import load_simulated_profile
from torchmm.planning.resolved_recipe import resolve_recipe
from torchmm.recipe.read import load_recipe
from torchmm.training.data_build import build_arrangements
from torchmm.training.model_build import build_meta_model, choose_model_stages

MODEL = {
    "llm": {"config": LLM | {"num_hidden_layers": 6}},
    "encoders": {"vision": {"config": VISION, "connector": "mlp"}},
}
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("data")
    make_data(directory)
    return directory


def read(data: Path, folder: Path, parallel: dict, data_options: dict):
    content = {"model": MODEL, "training": {"sequence_length": 64, "global_batch_size": 12}}
    content |= {"parallel": parallel, "simulation": {"device": "cpu"}}
    content = merged(complete(content, "images", data, folder, steps=1), {"data": data_options})
    (folder / "recipe.toml").write_text(tomli_w.dumps(content))
    return load_recipe(folder / "recipe.toml", [], 4).recipe


def test_run_and_simulation_reorder_identically(data, tmp_path):
    """Use a searched LLM partition and replicas with different samples."""
    parallel = {"pipeline": 2, "schedule": "searched", "search": {"evaluations": 50}}
    recipe = read(data, tmp_path, parallel, {"reorder": "intra"})
    run = resolve_recipe(recipe, 4)
    model, tokenizer = build_meta_model(run)
    stage_cut = choose_model_stages(run, model, tokenizer, CPU)
    modules = [module.describe() for module in model.modality_modules()]
    reorder, balance = build_arrangements(run, modules, stage_cut, CPU)
    assert balance is None

    forecaster = StepSimulator(recipe, 4, load_simulated_profile(recipe))
    assert forecaster.simulate_schedule().step.plan.graph.layout == stage_cut.layout
    arranged = apply_reorder(reorder, forecaster.sample.packs)
    assert forecaster.workload.microbatches in arranged
    # Check that sequences have moved.
    natural = first_microbatches(recipe, forecaster.model, run.data_parallel_size)
    assert arranged != natural and len(arranged) == 2


def test_run_balances_images_by_recipe(data, tmp_path):
    recipe = read(data, tmp_path, {}, {"reorder": "none", "balance": "images"})
    run = resolve_recipe(recipe, 4)
    model, tokenizer = build_meta_model(run)
    stage_cut = choose_model_stages(run, model, tokenizer, CPU)
    modules = [module.describe() for module in model.modality_modules()]
    reorder, balance = build_arrangements(run, modules, stage_cut, CPU)
    assert reorder is None and isinstance(balance, ImageBalancer)
    assert balance.names == ["vision"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("--parallel.pipeline 2", "parallel.pipeline = 2 is not supported"),
        (
            "--parallel.placement colocated --parallel.schedule optimus",
            'use "interleaved"',
        ),
        ("--parallel.llm.context 2", "parallel.llm.context = 2 is not supported"),
        (
            "--data.producers.addresses ['localhost:7411']",
            "not supported with data.producers",
        ),
    ],
)
def test_image_balancing_rejects_recipe_keys(data, tmp_path, arguments, text):
    read(data, tmp_path, {}, {})
    file = tmp_path / "recipe.toml"
    options = ["--data.balance", "images", *arguments.split()]
    problems = problems_of(file, *options, world_size=4)
    assert [p for p in problems if "data.balance" in p and text in p], problems
