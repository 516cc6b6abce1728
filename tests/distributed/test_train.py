"""Complete runs on real data: losses of all layouts, resuming, and reading the export."""

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
from torchmm.planning.resolved_recipe import resolve_recipe
from torchmm.recipe.recipe import Recipe
from torchmm.training.export.checkpoint import export_checkpoint
from torchmm.training.model_build import build_meta_model
from torchmm.training.run import train
from torchmm.training.shutdown import read_status

pytestmark = pytest.mark.slow
STEPS = 20
SMALL = {"training__global_batch_size": 4, "training__sequence_length": 64}
FULL_RUN = {"training__steps": STEPS, **SMALL}
COMPARED = 4
"""Number of steps of each layout."""
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
    """Run the recipes sequentially on the same processes."""
    run_distributed(_train_all, ranks, recipes, [free_port() for _ in recipes])


def _train_all(recipes: tuple[Recipe, ...], ports: list[int]) -> None:
    for recipe, port in zip(recipes, ports, strict=True):
        os.environ["MASTER_PORT"] = str(
            port
        )  # the store of the previous run can still use its port
        train(recipe)


@pytest.fixture(scope="module")
def single(tmp_path_factory, real_data) -> list[dict]:
    """Return the records of the single-process run."""
    run_dir = tmp_path_factory.mktemp("single") / "run"
    run(1, tiny_recipe(run_dir, real_data, **FULL_RUN))
    assert not undocumented(run_dir)
    return records(run_dir)


def undocumented(run_dir):
    """Return files of the run and keys of its records that the reference does not document."""
    reference = Path(__file__).parents[2] / "docs" / "reference"
    files, keys = (
        set(re.findall(r"`([^`]+)`", " ".join(re.findall(r"^\| (.*?) \|", page, re.MULTILINE))))
        for page in ((reference / name).read_text() for name in ("files_of_a_run.md", "metrics.md"))
    )
    names = {path.name + "/" * path.is_dir() for path in run_dir.iterdir()}
    return (names - files) | (set(records(run_dir)[0]) - keys)


def test_undocumented_files_and_metrics_are_detected(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "unknown_metric": 2}\n')
    (tmp_path / "hf").mkdir()
    (tmp_path / "notes.txt").touch()
    assert undocumented(tmp_path) == {"notes.txt", "unknown_metric"}


@pytest.mark.parametrize("layouts", LAYOUTS)
def test_layouts_give_single_process_losses(layouts, single, tmp_path, real_data):
    ranks = int(layouts[0])
    recipes = [
        tiny_recipe(tmp_path / name, real_data, ranks, **SHORT, **layout)
        for name, layout in LAYOUTS[layouts].items()
    ]
    run(ranks, *recipes)
    for name in LAYOUTS[layouts]:
        layout_records = records(tmp_path / name)
        assert [r["step"] for r in layout_records] == list(range(1, COMPARED + 1))
        assert layout_records[0]["loss"] == pytest.approx(single[0]["loss"], rel=1e-5), name
        assert layout_records[0]["grad_norm"] == pytest.approx(single[0]["grad_norm"], rel=1e-5), (
            name
        )
        for record, reference in zip(layout_records, single[:COMPARED], strict=True):
            assert record["loss"] == pytest.approx(reference["loss"], rel=1e-3), name
    assert single[-1]["loss"] < 0.9 * single[0]["loss"], "the loss must decrease"


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
def test_resume_is_bitwise_equal(layout, workers, changes, tmp_path, real_data):
    """Compare 6 steps with 3 + 3 steps and a different number of workers.

    The resumed run sets the passes of 6 steps as `training.epochs`. Losses and weights are equal.
    """
    first_workers, second_workers = workers
    common = SMALL | {"checkpoint__interval": 3, f"parallel__{layout}": 2, **changes}

    def recipe(name: str, steps: int, workers: int) -> Recipe:
        changes = {**common, "training__steps": steps, "data__workers": workers}
        return tiny_recipe(tmp_path / name, real_data, 2, **changes)

    uninterrupted, first_half = recipe("whole", 6, first_workers), recipe("parts", 3, first_workers)
    samples = training_samples(uninterrupted, *build_meta_model(resolve_recipe(uninterrupted, 2)))
    assert samples is not None
    _, passes = plan_passes(samples, uninterrupted, math.inf, 6)
    length = uninterrupted.training.model_copy(update={"steps": 1, "epochs": passes})
    second_half = recipe("parts", 6, second_workers).model_copy(update={"training": length})
    run(2, uninterrupted, first_half)
    run(2, second_half)
    for straight, resumed in zip(
        records(tmp_path / "whole"), records(tmp_path / "parts"), strict=True
    ):
        for key in ("step", "loss", "grad_norm", "epoch", "lr"):
            assert straight[key] == resumed[key]
    expected, actual = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert expected.keys() == actual.keys()
    assert all(torch.equal(expected[name], actual[name]) for name in expected if "rng" not in name)


def test_checkpoint_resumes_in_other_layouts(single, tmp_path, real_data):
    run_dir = tmp_path / "run"
    layouts: list[tuple[int, dict]] = [
        (2, {"shard": 2}),
        (2, {"tensor": 2}),
        (1, {}),
        (2, {"pipeline": 2}),
        (4, {"pipeline": 2, "llm.context": 2}),
        (2, {"shard": 2}),
    ]
    for index, (ranks, sizes) in enumerate(layouts, 1):
        changes = FULL_RUN | {"training__steps": 3 * index, "checkpoint__interval": 3}
        changes |= {f"parallel__{name}": size for name, size in sizes.items()}
        run(ranks, tiny_recipe(run_dir, real_data, ranks, **changes))
    run_records = records(run_dir)
    assert [r["step"] for r in run_records] == list(range(1, 19))
    for record, reference in zip(run_records, single, strict=False):
        assert record["loss"] == pytest.approx(reference["loss"], rel=1e-3)
    assert read_status(run_dir).state == "done"


EXPERTS = {
    "model__llm.config": (
        '{model_type="qwen3_moe",num_experts=4,num_experts_per_tok=2,moe_intermediate_size=16,'
        "hidden_size=48,intermediate_size=64,num_hidden_layers=2,num_attention_heads=4,"
        "num_key_value_heads=2,vocab_size=1024,bos_token_id=1,eos_token_id=2,pad_token_id=0}"
    ),
}


def test_expert_parallel_checkpoint_resumes_on_one_rank(tmp_path, real_data):
    """Train 3 steps with experts on two ranks, then 3 steps on one rank."""
    divided = {"parallel__shard": 2, "parallel__expert": 2, "checkpoint__export_hf": "true"}
    common = SMALL | EXPERTS | {"checkpoint__interval": 3}
    run(1, tiny_recipe(tmp_path / "one", real_data, 1, **common, training__steps=6))
    run(2, tiny_recipe(tmp_path / "parts", real_data, 2, **common, **divided, training__steps=3))
    export_checkpoint(tmp_path / "parts/checkpoints/step-3", tmp_path / "exported")
    for file in (tmp_path / "parts/hf").iterdir():
        assert (tmp_path / "exported" / file.name).read_bytes() == file.read_bytes(), file.name
    run(1, tiny_recipe(tmp_path / "parts", real_data, 1, **common, training__steps=6))
    one = records(tmp_path / "one")
    two_parts = records(tmp_path / "parts")
    assert [r["step"] for r in two_parts] == list(range(1, 7))
    for record, reference in zip(two_parts, one, strict=True):
        assert record["loss"] == pytest.approx(reference["loss"], rel=1e-5)
        assert record["grad_norm"] == pytest.approx(reference["grad_norm"], rel=1e-4)
        assert 1.0 <= record["max_expert_load_ratio"] <= 4.0
        assert record["max_expert_load_ratio"] == pytest.approx(
            reference["max_expert_load_ratio"], rel=1e-2
        )


def test_best_checkpoints_are_kept_and_exported(tmp_path, real_data):
    """Keep the checkpoints with the highest loss, which are the first ones.

    The run continues after the fourth step.
    """
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


def test_context_parallel_records_equal_single_process(tmp_path, real_data):
    """Compare losses, rates, validation losses and texts.

    The ranks do not divide the sequence lengths.
    """
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
