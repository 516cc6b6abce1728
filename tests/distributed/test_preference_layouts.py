"""Preference tuning has equal losses, rewards and gradients in all layouts and after a resume."""

import io
import json

import numpy as np
import pytest
from PIL import Image
from tiny_recipe import arguments, records

pytestmark = pytest.mark.slow
LAYOUTS = {
    "replicate": {"parallel__replicate": 2},
    "shard": {"parallel__shard": 2},
    "pipeline": {"parallel__pipeline": 2},
    "zero bubble": {"parallel__pipeline": 2, "parallel__schedule": "zero_bubble"},
    "tensor": {"parallel__tensor": 2, "parallel__shard": 1},
    "context": {"parallel__llm__context": 2},
    "dynamic context": {"parallel__llm__context": 2, "parallel__llm__dynamic_context": "true"},
    "balanced images": {"parallel__replicate": 2, "data__balance": "images"},
    "compiled": {"compile__enabled": "true"},
    "disaggregated": {
        "parallel__placement": "disaggregated",
        "parallel__vision__pipeline": 1,
        "parallel__llm__pipeline": 1,
    },
}
EXPERTS = {
    f"model__llm__config__{key}": value
    for key, value in {
        "model_type": "qwen3_moe",
        "head_dim": 12,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
    }.items()
}
LORA = {"adapters__mine__modules": '["llm", "vision"]', "adapters__mine__rank": 4}
METRICS = ("loss", "grad_norm", "validation_loss")
WORDS = ("a", "red", "green", "blue", "dog", "cat", "in", "the", "sun", "two", "small", "large")


@pytest.fixture(scope="module")
def changes(tmp_path_factory):
    """Return a recipe with pairs about images in the format of TRL."""
    folder = tmp_path_factory.mktemp("pairs")
    rng = np.random.default_rng(0)
    rows = []
    for number in range(120):
        image = Image.fromarray(rng.integers(0, 255, (32, 32, 3), dtype=np.uint8))
        stream = io.BytesIO()
        image.save(stream, "PNG")
        (folder / f"{number}.png").write_bytes(stream.getvalue())
        answers = [" ".join(rng.choice(WORDS, rng.integers(2, 9))) for _ in range(2)]
        rows.append(
            {
                "images": [f"{number}.png"],
                "prompt": "<image>what is it? ",
                "chosen": answers[0],
                "rejected": answers[1],
            }
        )
    for name, part in (("train", rows[:100]), ("validation", rows[100:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in part))
    return {
        "data__sources": f'[{{path="{folder}/train.jsonl"}}]',
        "data__validation": f'[{{path="{folder}/validation.jsonl"}}]',
        "training__loss": "preference",
        "training__steps": 3,
        "training__global_batch_size": 4,
        "optimizer__lr": 3e-3,
        "optimizer__warmup_steps": 0,
        "preference__beta": 0.5,
        "validation__interval": 3,
        "validation__batches": 1,
        "validation__num_samples": 0,
    }


@pytest.fixture(scope="module")
def train(tmp_path_factory, real_data, train_server, changes):
    """Return a function that trains and returns the records of the steps."""

    def run(name, ranks=1, run_dir=None, **more):
        run_dir = run_dir or tmp_path_factory.mktemp(name) / "run"
        command = arguments(run_dir, real_data, **changes | more)
        codes, output = train_server.run(command, run_dir.parent / f"log-{name}", ranks)
        assert codes == [0] * ranks, output
        return records(run_dir)

    return run


@pytest.fixture(scope="module")
def single(train):
    return train("single")


@pytest.fixture(scope="module")
def single_lora(train):
    return train("single_lora", **LORA)


def assert_equal(found, expected):
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        for metric in METRICS:
            assert ours[metric] == (
                None if theirs[metric] is None else pytest.approx(theirs[metric], rel=1e-5)
            ), metric
        assert ours["preference"] == pytest.approx(theirs["preference"], rel=1e-4, abs=1e-5)


def test_first_loss_is_that_of_the_reference(single, single_lora):
    for steps in (single, single_lora):
        first, last = steps[0], steps[-1]
        assert first["loss"] == pytest.approx(np.log(2), abs=1e-6)
        assert first["preference"]["rewards/chosen"] == pytest.approx(0, abs=1e-5)
        assert first["grad_norm"] > 0
        assert abs(last["loss"] - np.log(2)) > 1e-3
        rewards = last["preference"]
        assert rewards["rewards/margins"] == pytest.approx(
            rewards["rewards/chosen"] - rewards["rewards/rejected"]
        )
        assert last["validation_loss"] is not None and last["loss_by_source"] is None


@pytest.mark.parametrize("layout", LAYOUTS)
def test_preference_metrics_are_equal_in_layouts(train, single, layout):
    assert_equal(train(layout, 2, **LAYOUTS[layout]), single)


def test_virtual_stages_have_the_loss_of_pairs(train):
    layers = {"model__llm__config__num_hidden_layers": 4}
    stages = {"parallel__pipeline": 2, "parallel__virtual_stages": 2}
    assert_equal(train("virtual", 2, **layers, **stages), train("layers", **layers))


@pytest.mark.parametrize("layout", ["shard", "pipeline", "tensor"])
def test_preference_tuning_of_adapters_is_equal_in_layouts(train, single_lora, layout):
    assert_equal(train(f"{layout}_lora", 2, **LAYOUTS[layout], **LORA), single_lora)


def test_streamed_pairs_start_from_loss_of_reference(train, changes):
    sources = changes["data__sources"].replace("}]", ", streaming=true}]")
    (record,) = train("stream", 2, data__sources=sources, training__steps=1, **LAYOUTS["replicate"])
    assert record["loss"] == pytest.approx(np.log(2), abs=1e-6)
    assert record["grad_norm"] > 0


def test_experts_have_equal_metrics_on_two_ranks(train):
    assert_equal(train("experts2", 2, **EXPERTS, parallel__expert=2), train("experts", **EXPERTS))


def test_losses_without_reference_differ(train, single):
    free = train("free", preference__reference_free="true")
    assert abs(free[0]["loss"] - single[0]["loss"]) > 1e-3


def test_resumed_run_has_initial_reference(train, single, tmp_path):
    """A reference of the resumed parameters would have a loss of log 2."""
    run_dir = tmp_path / "run"
    short = {"training__steps": 2, "checkpoint__interval": 2, "run_dir": run_dir}
    train("first", **short)
    resumed = train("second", 2, **short | {"training__steps": 3}, **LAYOUTS["shard"])
    assert_equal(resumed[-1:], single[-1:])


def test_simpo_is_equal_in_pipeline(train):
    simpo = {"preference__loss_type": "simpo", "preference__beta": 2.0}
    assert_equal(train("simpo2", 2, **simpo, **LAYOUTS["pipeline"]), train("simpo", **simpo))
