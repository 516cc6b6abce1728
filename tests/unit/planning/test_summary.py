"""Tests of the memory table at the start: weights, gradients and optimizer states per rank."""

from pathlib import Path

import pytest
from installed import needs_extension

from torchmm.models.multimodal import MultimodalModel
from torchmm.planning.recipe_model import recipe_model
from torchmm.planning.resolved_recipe import resolve_recipe
from torchmm.planning.summary import StateBytes, estimate_state_bytes
from torchmm.recipe.read import load_recipe

RECIPE = Path(__file__).parents[3] / "recipes" / "zoo" / "smolvlm.toml"


@pytest.fixture(scope="module")
def model() -> MultimodalModel:
    return recipe_model(load_recipe(RECIPE).recipe)


def states(model: MultimodalModel, **parallel: object) -> StateBytes:
    options = [f"--parallel.{key}={value}" for key, value in parallel.items()]
    return estimate_state_bytes(resolve_recipe(load_recipe(RECIPE, options).recipe, 8), model)


@needs_extension("balance")
@pytest.mark.parametrize(
    ("parallel", "gathered", "gradients"),
    [
        # Two layers are unsharded at once. Gradients are unsharded until the last microbatch.
        ({"shard": 8}, None, 1.0),
        ({"shard": 8, "gradient_reduction": "microbatch"}, None, 1 / 8),
        # A pipeline all-gathers its weights once per step.
        ({"pipeline": 2, "shard": 4}, 1 / 2, 1 / 2),
        ({"pipeline": 2, "shard": 4, "gradient_reduction": "microbatch"}, 1 / 2, 1 / 2),
        ({"replicate": 4, "shard": 2}, None, 1.0),
    ],
)
def test_states_include_shards_and_gathered_weights(
    model: MultimodalModel, parallel: dict, gathered: float | None, gradients: float
) -> None:
    parameters = sum(module.describe().parameters for module in model.modality_modules())
    layers = [module.describe() for module in model.modality_modules()]
    if gathered is None:
        gathered = sum(2 * m.parameters / len(m.layers) for m in layers) / parameters
    states_ = states(model, **parallel)
    parts = parallel["shard"] * parallel.get("pipeline", 1)
    assert states_.optimizer == pytest.approx(8 * parameters / parts, rel=1e-3)
    assert states_.gradients == pytest.approx(4 * parameters * gradients, rel=1e-3)
    assert states_.weights == pytest.approx(parameters * (4 / parts + 2 * gathered), rel=1e-3)
