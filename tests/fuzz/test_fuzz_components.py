"""Components of tests/fuzz: keys of draws, shrinking of failures, and error messages."""

import re

import pytest
from torch import Tensor, arange, ones

from fuzz.compare import BOUNDS, differences
from fuzz.composites import CLASSES, LATER_CLASSES
from fuzz.draw import Draw, Layout, draw_recipe
from fuzz.judge import Verdict
from fuzz.models import source_of
from fuzz.shrink import shrink
from fuzz.wording import generalized, names_a_key
from torchmm.balance.section import SearchConfig
from torchmm.extensions.low_precision.section import Float8Config
from torchmm.recipe.model_section import AdapterConfig
from torchmm.recipe.parallel_section import ModuleParallelConfig, ParallelConfig
from torchmm.recipe.training_section import (
    ActivationCheckpointConfig,
    CompileConfig,
)

NOT_DRAWN = {
    "parallel.timeout_s": "always 60",
    "parallel.slow_rank_threshold": "affects logs only",
    "activation_checkpoint.offload": "requires a device with separate memory",
    "adapters.NAME.source": "files, which do not affect layouts",
}
"""Keys that draws do not set, and the reason."""
DRAWN = 400


def keys(table: dict, prefix: str = "") -> set[str]:
    """Return dotted key names, in which NAME replaces module names."""
    names = set()
    for key, value in table.items():
        named = re.sub(
            r"^(parallel\.|adapters\.)(llm|vision|second|audio|generator|low)$",
            r"\1NAME",
            f"{prefix}{key}",
        )
        names |= {named} | (keys(value, f"{named}.") if isinstance(value, dict) else set())
    return names


def test_draws_cover_layout_keys():
    expected = {f"parallel.{key}" for key in ParallelConfig.model_fields}
    expected |= {f"parallel.NAME.{key}" for key in ModuleParallelConfig.model_fields}
    expected |= {f"parallel.search.{key}" for key in SearchConfig.model_fields}
    expected |= {f"activation_checkpoint.{key}" for key in ActivationCheckpointConfig.model_fields}
    expected |= {"freeze.modules", "data.reorder", "training.microbatch_size", "training.dtype"}
    expected |= {"data.balance", "data.packing"}
    optimizer_keys = ("name", "momentum", "state_dtype", "stochastic_rounding", "offload")
    expected |= {f"optimizer.{key}" for key in optimizer_keys} | {"training.parameter_dtype"}
    expected |= {"training.ema_decay", "training.label_smoothing", "training.z_loss"}
    expected |= {"model.new_tokens"}
    expected |= {f"float8.{key}" for key in Float8Config.model_fields} | {"quantization.quant_type"}
    expected |= {f"compile.{key}" for key in CompileConfig.model_fields}
    expected |= {f"adapters.NAME.{key}" for key in AdapterConfig.model_fields}
    drawn = set()
    for index in range(DRAWN):
        draw = draw_recipe(7, index)
        drawn |= keys(draw.table(draw.first))
    assert expected - drawn == NOT_DRAWN.keys()


def test_draws_cover_ropes_videos_and_composites():
    models = [draw_recipe(7, index).sections["model"] for index in range(3 * DRAWN)]
    llms = [model["llm"]["config"] for model in models if "llm" in model]
    ropes = {config.get("rope_parameters", {}).get("rope_type", "default") for config in llms}
    assert ropes >= {"linear", "yarn", "llama3", "longrope", "dynamic"}
    composites = {model["config"]["model_type"] for model in models if "config" in model}
    assert composites == {*CLASSES, *LATER_CLASSES}
    assert "videos" in map(source_of, models)


def test_failure_shrinks_to_minimal_recipe():
    def judge(draw: Draw) -> Verdict:
        parallel = draw.first.sections.get("parallel", {})
        fails = parallel.get("tensor") == 2 and "vision" in draw.sections["model"].get(
            "encoders", {}
        )
        return Verdict("failed" if fails else "equal", "different" if fails else "")

    draws = (draw_recipe(7, index) for index in range(DRAWN))
    draw = next(d for d in draws if judge(d).kind == "failed")
    small, verdict = shrink(draw, judge(draw), judge)
    assert verdict.kind == "failed"
    assert small.first == Layout(1, {"parallel": {"tensor": 2}})
    assert small.then == () and small.sections["freeze"]["modules"] == []
    assert list(small.sections["model"]["encoders"]) == ["vision"]


def rank_results(**changes: object) -> dict:
    """Return the results of a rank that match `EXPECTED`, with changes."""
    step = EXPECTED["steps"][0]
    results = {
        "losses": [step["loss"]],
        "norms": [step["norm"]],
        "gradients": dict(step["gradients"]),
        "weights": dict(step["weights"]),
        "averages": dict(step["averages"]),
        "copies": {},
    }
    return {**results, **changes}


def matrix() -> Tensor:
    return arange(12.0).view(4, 3)


EXPECTED = {
    "initial": {"a": matrix(), "frozen": ones(2)},
    "steps": [
        {
            "loss": 2.0,
            "norm": float(matrix().norm()),
            "gradients": {"a": matrix()},
            "weights": {"a": matrix() - 1, "frozen": ones(2)},
            "averages": {"a": matrix() - 0.5},
        }
    ],
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, None),
        ({"losses": [2.0001]}, "loss 2.0001"),
        ({"norms": [float("nan")]}, "grad_norm nan"),
        ({"gradients": {"a": matrix() / 2}}, "gradient of a is off by 0.5"),
        ({"gradients": {"a": matrix()[[1, 0, 2, 3]]}}, "gradient of a"),
        ({"gradients": {"a": matrix(), "frozen": ones(2)}}, "frozen has a gradient"),
        ({"gradients": {}}, "a has no gradient"),
        ({"weights": {"a": (matrix() - 1)[[0, 2, 1, 3]], "frozen": ones(2)}}, "a is off"),
        ({"weights": {"a": matrix(), "frozen": ones(2)}}, "a is off"),
        ({"weights": {"a": matrix() - 1, "frozen": ones(2) * 1.01}}, "frozen is off"),
        ({"weights": {"a": matrix() - 1}}, "no rank has frozen"),
        ({"averages": {"a": matrix() - 1}}, "average: rank 0: a is off"),
        ({"averages": {}}, "average: rank 0: a is missing"),
    ],
)
def test_differences_are_described(changes, message):
    problems = list(differences([rank_results(**changes)], EXPECTED, 0, BOUNDS["float32"]))
    if message is None:
        assert problems == []
    else:
        assert any(message in problem for problem in problems), problems


@pytest.mark.parametrize(
    ("problem", "general"),
    [
        (
            "/tmp/x/recipe.toml: parallel.vision.pipeline = 3: interleaved modules share; remove "
            "the key",
            "parallel.NAME.pipeline = N: interleaved modules share; remove the key",
        ),
        (
            "[parallel] async_tensor_parallel is not supported for the experts; set it to false",
            "[parallel] async_tensor_parallel is not supported for the experts; set it to false",
        ),
    ],
)
def test_error_messages_are_generalized(problem, general):
    assert generalized(problem) == general
    assert names_a_key(problem)
    assert not names_a_key("something is wrong")
