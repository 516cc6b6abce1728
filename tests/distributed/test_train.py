"""Whole runs on real data: curves of all layouts, resuming, reading the export back."""

import json
import math
import os
import re
from pathlib import Path

import pytest
import torch
from launch import run_distributed
from ports import free_port
from tiny_recipe import records, tiny_recipe, weights

from torchmm.planning.first_step import plan_passes, training_samples
from torchmm.planning.resolved import resolve
from torchmm.recipe.recipe import Recipe
from torchmm.training.export.checkpoint import export_checkpoint
from torchmm.training.model_build import build_meta_model
from torchmm.training.run import train
from torchmm.training.shutdown import read_status

pytestmark = pytest.mark.slow
STEPS = 20
SMALL = {"training__global_batch_size": 4, "training__sequence_length": 64}
CURVE = {"training__steps": STEPS, **SMALL}
COMPARED = 4
"""Steps of the curve that each layout takes."""
SHORT = {"training__steps": COMPARED, **SMALL}
LAYOUTS = {
    "2": {
        "fsdp2": {"parallel__shard": 2},
        "tp2": {"parallel__tensor": 2, "training__microbatch_size": 2},
        "tp2-async": {
            "parallel__tensor": 2,
            "parallel__sequence_parallel": "true",
            "parallel__async_tensor_parallel": "true",
            "training__microbatch_size": 2,
        },
        "pp2": {"parallel__pipeline": 2, "parallel__vision.sub_microbatch_images": 2},
    },
    "2 more": {
        "tp2-sp": {
            "parallel__tensor": 2,
            "parallel__sequence_parallel": "true",
            "training__microbatch_size": 2,
        },
        "fsdp2-mb2": {"parallel__shard": 2, "training__microbatch_size": 2},
        "pp2-1f1b": {
            "parallel__pipeline": 2,
            "parallel__schedule": "1f1b",
            "training__microbatch_size": 2,
        },
    },
    "4": {
        "hsdp": {"parallel__replicate": 2, "parallel__shard": 2},
        "fsdp2-tp2": {
            "parallel__shard": 2,
            "parallel__tensor": 2,
            "training__microbatch_size": 2,
        },
        "pp2-fsdp2": {"parallel__pipeline": 2, "parallel__shard": 2},
    },
}


def run(ranks: int, *recipes: Recipe) -> None:
    """Runs the recipes one after the other on the same processes."""
    run_distributed(_train_all, ranks, recipes, [free_port() for _ in recipes])


def _train_all(recipes: tuple[Recipe, ...], ports: list[int]) -> None:
    for recipe, port in zip(recipes, ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)  # the last run's store may still be up
        train(recipe)


@pytest.fixture(scope="module")
def single(tmp_path_factory, real_data) -> list[dict]:
    """Records of the single-process run."""
    run_dir = tmp_path_factory.mktemp("single") / "run"
    run(1, tiny_recipe(run_dir, real_data, **CURVE))
    assert not unlisted(run_dir)
    return records(run_dir)


def unlisted(run_dir):
    """Files of the run, and keys of its records, that the reference does not list."""
    reference = Path(__file__).parents[2] / "docs" / "reference"
    files, keys = (
        set(re.findall(r"`([^`]+)`", " ".join(re.findall(r"^\| (.*?) \|", page, re.MULTILINE))))
        for page in ((reference / name).read_text() for name in ("files_of_a_run.md", "metrics.md"))
    )
    names = {path.name + "/" * path.is_dir() for path in run_dir.iterdir()}
    return (names - files) | (set(records(run_dir)[0]) - keys)


def test_what_the_reference_does_not_list_is_found(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "mood": 2}\n')
    (tmp_path / "hf").mkdir()
    (tmp_path / "notes.txt").touch()
    assert unlisted(tmp_path) == {"notes.txt", "mood"}


@pytest.mark.parametrize("layouts", LAYOUTS)
def test_layouts_give_the_single_process_curve(layouts, single, tmp_path, real_data):
    ranks = int(layouts[0])
    recipes = [
        tiny_recipe(tmp_path / name, real_data, ranks, **SHORT, **layout)
        for name, layout in LAYOUTS[layouts].items()
    ]
    run(ranks, *recipes)
    for name in LAYOUTS[layouts]:
        found = records(tmp_path / name)
        assert [r["step"] for r in found] == list(range(1, COMPARED + 1))
        assert found[0]["loss"] == pytest.approx(single[0]["loss"], rel=1e-5), name
        assert found[0]["grad_norm"] == pytest.approx(single[0]["grad_norm"], rel=1e-5), name
        for ours, reference in zip(found, single[:COMPARED], strict=True):
            assert ours["loss"] == pytest.approx(reference["loss"], rel=1e-3), name
    assert single[-1]["loss"] < 0.9 * single[0]["loss"], "the model must learn something"


NARROW = {
    "training__dtype": "bfloat16",
    "training__parameter_dtype": "bfloat16",
    "optimizer__name": "muon",
    "optimizer__state_dtype": "int8",
    "optimizer__offload": "true",
}


@pytest.mark.parametrize(
    ("layout", "workers", "changes"),
    [
        ("shard", (0, 2), {}),
        ("pipeline", (2, 0), {}),
        ("llm.context", (0, 0), {}),
        ("shard", (0, 0), NARROW),
    ],
)
def test_resume_continues_with_the_same_bits(layout, workers, changes, tmp_path, real_data):
    """6 steps at once, or 3 and 3 with another number of workers: same losses, same weights.

    The resumed run sets the passes of 6 steps as `training.epochs`.
    """
    first, then = workers
    common = SMALL | {"checkpoint__interval": 3, f"parallel__{layout}": 2, **changes}

    def recipe(name: str, steps: int, workers: int) -> Recipe:
        changes = {**common, "training__steps": steps, "data__workers": workers}
        return tiny_recipe(tmp_path / name, real_data, 2, **changes)

    whole, begun = recipe("whole", 6, first), recipe("parts", 3, first)
    samples = training_samples(whole, *build_meta_model(resolve(whole, 2)))
    assert samples is not None
    _, passes = plan_passes(samples, whole, math.inf, 6)
    length = whole.training.model_copy(update={"steps": 1, "epochs": passes})
    ended = recipe("parts", 6, then).model_copy(update={"training": length})
    run(2, whole, begun)
    run(2, ended)
    for straight, resumed in zip(
        records(tmp_path / "whole"), records(tmp_path / "parts"), strict=True
    ):
        for key in ("step", "loss", "grad_norm", "epoch", "lr"):
            assert straight[key] == resumed[key]
    one, other = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one if "rng" not in name)


def test_checkpoint_of_one_layout_continues_in_another(single, tmp_path, real_data):
    run_dir = tmp_path / "run"
    layouts: list[tuple[int, dict]] = [
        (2, {"shard": 2}),
        (2, {"tensor": 2}),
        (1, {}),
        (2, {"pipeline": 2}),
        (4, {"pipeline": 2, "llm.context": 2}),
        (2, {"shard": 2}),
    ]
    for turn, (ranks, sizes) in enumerate(layouts, 1):
        changes = CURVE | {"training__steps": 3 * turn, "checkpoint__interval": 3}
        changes |= {f"parallel__{name}": size for name, size in sizes.items()}
        run(ranks, tiny_recipe(run_dir, real_data, ranks, **changes))
    found = records(run_dir)
    assert [r["step"] for r in found] == list(range(1, 19))
    for ours, reference in zip(found, single, strict=False):
        assert ours["loss"] == pytest.approx(reference["loss"], rel=1e-3)
    assert read_status(run_dir).state == "done"


EXPERTS = {
    "model__llm.config": (
        '{model_type="qwen3_moe",num_experts=4,num_experts_per_tok=2,moe_intermediate_size=16,'
        "hidden_size=48,intermediate_size=64,num_hidden_layers=2,num_attention_heads=4,"
        "num_key_value_heads=2,vocab_size=1024,bos_token_id=1,eos_token_id=2,pad_token_id=0}"
    ),
}


def test_experts_train_over_ranks_and_continue_on_one(tmp_path, real_data):
    """3 steps with experts divided among two ranks, then 3 on a single one; and 6 on that one."""
    divided = {"parallel__shard": 2, "parallel__expert": 2, "checkpoint__export_hf": "true"}
    common = SMALL | EXPERTS | {"checkpoint__interval": 3}
    run(1, tiny_recipe(tmp_path / "one", real_data, 1, **common, training__steps=6))
    run(2, tiny_recipe(tmp_path / "parts", real_data, 2, **common, **divided, training__steps=3))
    export_checkpoint(tmp_path / "parts/checkpoints/step-3", tmp_path / "exported")
    for file in (tmp_path / "parts/hf").iterdir():
        assert (tmp_path / "exported" / file.name).read_bytes() == file.read_bytes(), file.name
    run(1, tiny_recipe(tmp_path / "parts", real_data, 1, **common, training__steps=6))
    one = records(tmp_path / "one")
    parts = records(tmp_path / "parts")
    assert [r["step"] for r in parts] == list(range(1, 7))
    for ours, reference in zip(parts, one, strict=True):
        assert ours["loss"] == pytest.approx(reference["loss"], rel=1e-5)
        assert ours["grad_norm"] == pytest.approx(reference["grad_norm"], rel=1e-4)
        assert 1.0 <= ours["max_expert_load_ratio"] <= 4.0
        assert ours["max_expert_load_ratio"] == pytest.approx(
            reference["max_expert_load_ratio"], rel=1e-2
        )


def test_the_best_checkpoints_stay_and_are_exported(tmp_path, real_data):
    """By the highest loss, which is that of the first steps; the run goes on after the fourth."""
    common = SMALL | {
        "checkpoint__interval": 1,
        "checkpoint__keep_latest": 1,
        "checkpoint__keep_best": '{metric = "loss", mode = "max", count = 2}',
        "checkpoint__export_interval": 3,
    }
    for ranks, steps in ((2, 4), (1, 6)):
        run(ranks, tiny_recipe(tmp_path / "run", real_data, ranks, **common, training__steps=steps))
    losses = {r["step"]: r["loss"] for r in records(tmp_path / "run")}
    best = sorted(losses, key=losses.__getitem__)[-2:]
    kept = {
        int(p.name.removeprefix("step-")) for p in (tmp_path / "run/checkpoints").glob("step-*")
    }
    assert kept == {*best, 6}
    assert {p.name for p in (tmp_path / "run").glob("*hf*")} == {"hf-3", "hf-6", "hf-best"}
    card = (tmp_path / "run/hf-best/README.md").read_text()
    assert f"- step {best[-1]} of 4" in card


def test_ranks_that_share_rows_write_the_records_of_one(tmp_path, real_data):
    """Losses, rates, held-out losses and texts; rows have lengths that ranks do not divide."""
    common = {
        "training__steps": 3,
        "training__global_batch_size": 2,
        "training__sequence_length": 65,
        "validation__interval": 3,
        "validation__batches": 1,
        "validation__num_samples": 2,
        "validation__max_new_tokens": 3,
    }
    shared = {"parallel__llm.context": 2}
    run(1, tiny_recipe(tmp_path / "one", real_data, 1, **common))
    run(2, tiny_recipe(tmp_path / "shared", real_data, 2, **common, **shared))
    for two, one in zip(records(tmp_path / "shared"), records(tmp_path / "one"), strict=True):
        for key in ("loss", "grad_norm", "validation_loss"):
            assert two[key] == (one[key] and pytest.approx(one[key], rel=1e-4)), key
        for key in ("tokens_per_s", "samples_per_s", "media_per_s"):
            counts = [r[key] * r["step_ms"] / 1e3 for r in (one, two)]
            assert counts[0] == pytest.approx(counts[1]), key
    texts = [
        json.loads((tmp_path / name / "samples.json").read_text()) for name in ("one", "shared")
    ]
    assert texts[0] and texts[0] == texts[1]
