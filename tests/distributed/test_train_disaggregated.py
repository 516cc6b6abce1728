"""Disaggregated encoder, LLM and generator with train.py on real data.

Five ranks train two steps: two encoder replicas, two LLM replicas and one generator. Four ranks
resume with a tensor-parallel LLM. One process resumes from the same checkpoint.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_train_generation import LOSSES, command
from tiny_recipe import records

from torchmm.pipelining.view.records import read_records
from torchmm.recipe.read import load_recipe
from torchmm.training.checkpoint.manifest import list_steps

pytestmark = pytest.mark.slow
DISAGGREGATED = {"parallel__placement": "disaggregated", "metrics__timeline_step": 2}
FIVE = {**DISAGGREGATED, "parallel__vision__shard": 2, "training__steps": 2}
FOUR = {**DISAGGREGATED, "parallel__tensor": 2, "parallel__schedule": "1f1b"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, real_data, train_server) -> dict[str, Path]:
    """Run all steps in one process, all steps disaggregated, and the second half in one process."""
    root = tmp_path_factory.mktemp("disaggregated")
    resumed = {"checkpoint__resume": root / "disaggregated" / "checkpoints" / "step-2"}
    jobs = [
        ("one", 1, {}),
        ("disaggregated", 5, FIVE),
        ("disaggregated", 4, FOUR),
        ("second_half", 1, resumed),
    ]
    for name, ranks, changes in jobs:
        arguments = command(root / name, real_data, **changes)
        log = root / f"log-{name}-{ranks}"
        codes, output = train_server.run(arguments, log, ranks)
        assert codes == [0] * ranks, output
    return {name: root / name for name, _, _ in jobs}


def test_disaggregated_records_equal_one_process(runs):
    one, disaggregated, second_half = (records(run_dir) for run_dir in runs.values())
    for expected, actual in [
        *zip(one, disaggregated, strict=True),
        *zip(one[2:], second_half, strict=True),
    ]:
        for key in (*LOSSES, "grad_norm"):
            assert actual[key] == (expected[key] and pytest.approx(expected[key], rel=1e-4)), key
        for key in ("tokens_per_s", "samples_per_s", "media_per_s", "generated_images_per_s"):
            counts = [record[key] * record["step_ms"] / 1e3 for record in (expected, actual)]
            assert counts[0] == pytest.approx(counts[1]), key
    texts = [json.loads((run / "samples.json").read_text()) for run in runs.values()]
    assert [s["generated"] for s in texts[0]] == [s["generated"] for s in texts[1]]


def test_all_modules_have_times(runs):
    for record in records(runs["disaggregated"]):
        for module in ("encoder_ms", "llm_ms", "generator_ms"):
            assert 0 < record[module] < record["step_ms"]
        assert 0 < record["bubble_fraction"] < 1


def test_timeline_shows_modules_on_separate_ranks(runs):
    action_records, graph = read_records(runs["disaggregated"] / "timeline" / "step-2.json")
    owners = {(r.rank, graph.layout.stages[r.action.stage].module) for r in action_records}
    assert owners == {(0, "vision"), (1, "vision"), (2, "llm"), (3, "llm"), (4, "generator")}


def test_disaggregated_checkpoints_and_exports_are_complete(runs):
    """Each rank has one module. Weights are equal to those of one process."""
    manifests = [
        json.loads((step / "MANIFEST.json").read_text())["layout"]
        for step in list_steps(runs["disaggregated"] / "checkpoints")
    ]
    assert {m["llm.tensor"] for m in manifests} == {1, 2}
    for file in sorted((runs["one"] / "hf").rglob("*.safetensors")):
        expected = load_file(file)
        actual = load_file(runs["disaggregated"] / file.relative_to(runs["one"]))
        assert expected.keys() == actual.keys()
        for name, value in expected.items():
            # AdamW turns rounding of gradients that should be zero (key biases) into small steps.
            torch.testing.assert_close(actual[name], value, rtol=1e-3, atol=2e-4)


def test_saved_recipe_has_disaggregated_settings(runs):
    recipe = load_recipe(runs["disaggregated"] / "recipe.toml", world_size=4).recipe
    assert recipe.parallel.placement == "disaggregated" and recipe.parallel.tensor == 2
