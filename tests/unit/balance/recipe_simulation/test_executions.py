"""Tests of executions: runs, simulations and planners use the same execution settings."""

import ast
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from support.papers.baselines import sized_recipe
from torch import nn

from torchmm.balance.costs.profiles import load_profile
from torchmm.balance.costs.step_costs import compute_plan_costs
from torchmm.balance.disttrain.orchestration.search import UnitSizes
from torchmm.balance.recipe_simulation import step_simulator
from torchmm.balance.recipe_simulation.step_simulator import StepSimulator
from torchmm.balance.run_costs import build_cost_model
from torchmm.common.batch import ImageMeta, MicrobatchMeta, SampleMeta
from torchmm.common.dtypes import DTYPES
from torchmm.common.errors import ConfigError
from torchmm.costs.operators import DeviceProfile
from torchmm.pipelining.plan.graph import StageGraph
from torchmm.planning.executions import parameter_states
from torchmm.planning.resolved_recipe import resolve_recipe
from torchmm.planning.step import plan_layout
from torchmm.recipe import check
from torchmm.recipe.read import load_recipe
from torchmm.recipe.recipe import Recipe
from torchmm.recipe.training_section import OptimizerConfig, TrainingConfig
from torchmm.training.optim import build_optimizer

ROOT = Path(__file__).parents[4]
RECIPES = sorted(
    path
    for path in (ROOT / "recipes").rglob("*.toml")
    if path.stem != "base" and path.parent.name != "bases"
)
BUILDERS = {
    "torchmm/balance/run_costs.py",
    "torchmm/planning/executions.py",  # of the modules of a recipe
    "torchmm/balance/costs/model.py",  # default: unsharded, on one rank
    "torchmm/balance/disttrain/orchestration/unit_costs.py",  # of candidate degrees
    "torchmm/balance/measurement/layers.py",  # of profiled layers
    "torchmm/balance/measurement/operators.py",
}


SIZES = {
    "vision": UnitSizes(1, 8, 1),
    "llm": UnitSizes(2, 8, 4),
    "generator": UnitSizes(1, 8, 1),
}
"""Degrees of disaggregated modules for recipes that leave them to the planner."""


@pytest.fixture(scope="module")
def profile() -> DeviceProfile:
    return load_profile("h100")


def loaded(path: Path) -> tuple[int, Recipe]:
    """Load a recipe for its number of GPUs, or for the smallest number that its degrees allow."""
    named = load_recipe(path).recipe.simulation.gpus
    for gpus in (named, 2, 3, 4, 8):
        with suppress(ConfigError):
            return gpus, load_recipe(path, [], gpus).recipe
    try:
        return 1, load_recipe(path, [], 1).recipe
    except ConfigError as error:
        assert "no such directory" in str(error), error
        pytest.skip(str(error))


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=[pytest.mark.campaign] if path.parent.name == "zoo" else [])
        for path in RECIPES
    ],
    ids=lambda p: f"{p.parent.name}/{p.stem}",
)
def test_runs_and_simulations_use_same_executions(path, profile, monkeypatch):
    if any(name in path.read_text() for name in ("[model.generator]", "t2v", "disttrain")):
        pytest.importorskip("diffusers")
    monkeypatch.setattr(check, "_check_path", lambda *args: ())  # data is not required
    gpus, recipe = loaded(path)
    if recipe.parallel.needs_orchestration:  # planning takes a minute
        recipe = sized_recipe(recipe, SIZES)
        gpus = sum(sizes.devices for sizes in SIZES.values())
    unordered = recipe.data.model_copy(
        update={"reorder": "none"}
    )  # all sequences have the same length
    recipe = recipe.model_copy(update={"data": unordered})
    sources = [recipe.model.source, recipe.model.llm and recipe.model.llm.source]
    for source in filter(None, sources):
        if source.startswith("data/") and not (ROOT / source).is_dir():
            pytest.skip(f"{source} is not prepared here")

    def empty_microbatches(recipe, model, shares):
        training = recipe.training
        count = training.global_batch_size // (shares * training.microbatch_size)
        return [[MicrobatchMeta((), training.sequence_length)] * count] * shares

    monkeypatch.setattr(step_simulator, "first_microbatches", empty_microbatches)
    forecaster = StepSimulator(recipe, gpus, profile)
    run_model = build_cost_model(resolve_recipe(recipe, gpus), forecaster.modules, profile)
    assert set(run_model.executions) == {module.name for module in forecaster.modules}
    assert forecaster._costs(recipe.parallel).executions == run_model.executions


def test_cuda_graphs_are_in_memory_model(monkeypatch):
    monkeypatch.setattr(check, "_check_path", lambda *args: ())
    one_rank = ["--parallel.pipeline=1", "--parallel.schedule=separated"]
    images = (ImageMeta(64, 64, 16, 16),) * 5
    meta = MicrobatchMeta((SampleMeta("a", 0, 200, images, "vision"),), 256)
    monkeypatch.setattr(step_simulator, "first_microbatches", lambda *_: [[meta]])
    plan_costs_by_graphs = {}
    for graphs in (False, True):
        settings = [*one_rank, f"--compile.cuda_graphs={str(graphs).lower()}"]
        recipe = load_recipe(ROOT / "recipes/quickstart.toml", settings, 1).recipe
        forecaster = StepSimulator(recipe, 1, load_profile("h100"))
        model = forecaster._costs(recipe.parallel)
        assert {n: e.graphs for n, e in model.executions.items()} == {
            "vision": graphs,
            "llm": False,
        }
        layout = plan_layout(recipe.parallel, forecaster.modules, [meta])
        parts = {name: (1,) for name in layout.sub_microbatched}
        plan_costs_by_graphs[graphs] = compute_plan_costs(
            StageGraph(layout, 1, parts), forecaster.modules, [meta], model
        )
    vision = next(m for m in forecaster.modules if m.name == "vision")
    weight_bytes = 2 * 4 * sum(layer.parameters for layer in vision.layers)
    kept = max(plan_costs_by_graphs[False].saved_bytes.values())
    static, update = (
        plan_costs_by_graphs[True].static_bytes[0] - plan_costs_by_graphs[False].static_bytes[0],
        plan_costs_by_graphs[True].update_bytes[0] - plan_costs_by_graphs[False].update_bytes[0],
    )
    states = 4 * 6 * 16 * 128 * 4
    assert weight_bytes + states < static < weight_bytes + states + kept
    assert 0 < update - static <= kept  # input activations of the images
    assert plan_costs_by_graphs[True].saved_bytes == plan_costs_by_graphs[False].saved_bytes


def test_executions_are_built_in_few_modules():
    builders = set()
    for file in (ROOT / "torchmm").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "Execution":
                builders.add(str(file.relative_to(ROOT)))
    assert builders == BUILDERS


@pytest.mark.parametrize(
    ("optimizer", "dtype", "bytes_each"),
    [
        ({}, "float32", (4, 8, 8)),
        ({"state_dtype": "int8"}, "bfloat16", (2, 2.125, 2.125)),
        ({"name": "muon", "state_dtype": "bfloat16"}, "bfloat16", (2, 4, 2)),
        ({"name": "muon", "offload": True}, "float32", (4, 0, 0)),
    ],
)
def test_state_costs_match_optimizer(optimizer, dtype, bytes_each):
    model = nn.Linear(64, 64, bias=False, dtype=DTYPES[dtype])
    recipe = Recipe(
        optimizer=OptimizerConfig(**optimizer), training=TrainingConfig(parameter_dtype=dtype)
    )
    states = parameter_states(recipe)
    assert (states.weight, states.moments, states.layer_moments) == bytes_each
    matrices = [model.weight]
    built = build_optimizer(model, lambda _: "llm", recipe.optimizer, (), matrices)
    model.weight.grad = torch.ones_like(model.weight)
    built.step()
    state_bytes = sum(t.nbytes for k, t in built.state[model.weight].items() if k != "step")
    on_device = 0 if recipe.optimizer.offload else state_bytes
    assert on_device == states.layer_moments * model.weight.numel()
    moved = state_bytes if recipe.optimizer.offload else 0
    assert states.offloaded_moments * model.weight.numel() == moved
