"""A run, its forecast and everything that decides for them price modules as they are executed."""

import ast
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from support.papers.baselines import sized_recipe
from torch import nn

from torchmm.balance.costs.profiles import load_profile
from torchmm.balance.costs.step_costs import plan_costs
from torchmm.balance.disttrain.orchestration.search import UnitSizes
from torchmm.balance.forecasts import forecast
from torchmm.balance.forecasts.forecast import Forecaster
from torchmm.balance.run_costs import run_costs
from torchmm.common.batch import ImageMeta, MicrobatchMeta, SampleMeta
from torchmm.common.dtypes import DTYPES
from torchmm.common.errors import ConfigError
from torchmm.costs.operators import Profile
from torchmm.pipelining.plan.graph import StageGraph
from torchmm.planning.executions import parameter_states
from torchmm.planning.resolved import resolve
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
    "torchmm/planning/executions.py",  # of the recipe's modules
    "torchmm/balance/costs/model.py",  # where none is given: whole, on one rank
    "torchmm/balance/disttrain/orchestration/unit_costs.py",  # of sizes that are only tried
    "torchmm/balance/measure/layers.py",  # of layers that are timed
    "torchmm/balance/measure/operators.py",
}


SIZES = {
    "vision": UnitSizes(1, 8, 1),
    "llm": UnitSizes(2, 8, 4),
    "generator": UnitSizes(1, 8, 1),
}
"""Of modules apart whose sizes a recipe leaves to its planner."""


@pytest.fixture(scope="module")
def profile() -> Profile:
    return load_profile("h100")


def loaded(path: Path) -> tuple[int, Recipe]:
    """For the GPUs that it names, or the fewest that its sizes allow."""
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
def test_runs_and_forecasts_price_the_same_executions(path, profile, monkeypatch):
    if any(name in path.read_text() for name in ("[model.generator]", "t2v", "disttrain")):
        pytest.importorskip("diffusers")
    monkeypatch.setattr(check, "_check_path", lambda *args: ())  # data need not be here
    gpus, recipe = loaded(path)
    if recipe.parallel.needs_orchestration:  # which takes a minute to plan
        recipe = sized_recipe(recipe, SIZES)
        gpus = sum(sizes.devices for sizes in SIZES.values())
    unordered = recipe.data.model_copy(update={"reorder": "none"})  # sequences are equal
    recipe = recipe.model_copy(update={"data": unordered})
    sources = [recipe.model.source, recipe.model.llm and recipe.model.llm.source]
    for source in filter(None, sources):
        if source.startswith("data/") and not (ROOT / source).is_dir():
            pytest.skip(f"{source} is not prepared here")

    def empty_microbatches(recipe, model, shares):
        training = recipe.training
        count = training.global_batch_size // (shares * training.microbatch_size)
        return [[MicrobatchMeta((), training.sequence_length)] * count] * shares

    monkeypatch.setattr(forecast, "first_microbatches", empty_microbatches)
    forecaster = Forecaster(recipe, gpus, profile)
    of_run = run_costs(resolve(recipe, gpus), forecaster.modules, profile)
    assert set(of_run.executions) == {module.name for module in forecaster.modules}
    assert forecaster._costs(recipe.parallel).executions == of_run.executions


def test_cuda_graphs_are_in_the_memory_model(monkeypatch):
    monkeypatch.setattr(check, "_check_path", lambda *args: ())
    one_rank = ["--parallel.pipeline=1", "--parallel.schedule=separated"]
    images = (ImageMeta(64, 64, 16, 16),) * 5
    meta = MicrobatchMeta((SampleMeta("a", 0, 200, images, "vision"),), 256)
    monkeypatch.setattr(forecast, "first_microbatches", lambda *_: [[meta]])
    found = {}
    for graphs in (False, True):
        settings = [*one_rank, f"--compile.cuda_graphs={str(graphs).lower()}"]
        recipe = load_recipe(ROOT / "recipes/quickstart.toml", settings, 1).recipe
        forecaster = Forecaster(recipe, 1, load_profile("h100"))
        model = forecaster._costs(recipe.parallel)
        assert {n: e.graphs for n, e in model.executions.items()} == {
            "vision": graphs,
            "llm": False,
        }
        layout = plan_layout(recipe.parallel, forecaster.modules, [meta])
        parts = {name: (1,) for name in layout.sub_microbatched}
        found[graphs] = plan_costs(StageGraph(layout, 1, parts), forecaster.modules, [meta], model)
    vision = next(m for m in forecaster.modules if m.name == "vision")
    of_weights = 2 * 4 * sum(layer.parameters for layer in vision.layers)
    kept = max(found[False].kept_bytes.values())
    static, update = (
        found[True].static_bytes[0] - found[False].static_bytes[0],
        found[True].update_bytes[0] - found[False].update_bytes[0],
    )
    states = 4 * 6 * 16 * 128 * 4
    assert of_weights + states < static < of_weights + states + kept
    assert 0 < update - static <= kept  # activations of the images themselves
    assert found[True].kept_bytes == found[False].kept_bytes


def test_executions_are_built_in_one_place():
    found = set()
    for file in (ROOT / "torchmm").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "Execution":
                found.add(str(file.relative_to(ROOT)))
    assert found == BUILDERS


@pytest.mark.parametrize(
    ("optimizer", "dtype", "bytes_each"),
    [
        ({}, "float32", (4, 8, 8)),
        ({"state_dtype": "int8"}, "bfloat16", (2, 2.125, 2.125)),
        ({"name": "muon", "state_dtype": "bfloat16"}, "bfloat16", (2, 4, 2)),
        ({"name": "muon", "offload": True}, "float32", (4, 0, 0)),
    ],
)
def test_states_are_priced_as_the_optimizer_makes_them(optimizer, dtype, bytes_each):
    model = nn.Linear(64, 64, bias=False, dtype=DTYPES[dtype])
    recipe = Recipe(
        optimizer=OptimizerConfig(**optimizer), training=TrainingConfig(parameter_dtype=dtype)
    )
    found = parameter_states(recipe)
    assert (found.weight, found.moments, found.layer_moments) == bytes_each
    matrices = [model.weight]
    made = build_optimizer(model, lambda _: "llm", recipe.optimizer, (), matrices)
    model.weight.grad = torch.ones_like(model.weight)
    made.step()
    held = sum(t.nbytes for k, t in made.state[model.weight].items() if k != "step")
    on_device = 0 if recipe.optimizer.offload else held
    assert on_device == found.layer_moments * model.weight.numel()
    moved = held if recipe.optimizer.offload else 0
    assert found.visiting * model.weight.numel() == moved
