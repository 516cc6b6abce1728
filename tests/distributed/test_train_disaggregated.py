"""Encoder, LLM and generator on ranks of their own through train.py, on real data.

Five ranks train two steps: two encoder replicas, two LLM replicas, one generator. Four go on from
there: the LLM in tensor-parallel halves. One process goes on from the same place.
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
APART = {"parallel__placement": "disaggregated", "metrics__timeline_step": 2}
FIVE = {**APART, "parallel__vision__shard": 2, "training__steps": 2}
FOUR = {**APART, "parallel__tensor": 2, "parallel__schedule": "1f1b"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, real_data, train_server) -> dict[str, Path]:
    """All steps in one process; apart; the second half in one process."""
    root = tmp_path_factory.mktemp("disaggregated")
    rest = {"checkpoint__resume": root / "apart" / "checkpoints" / "step-2"}
    jobs = [("one", 1, {}), ("apart", 5, FIVE), ("apart", 4, FOUR), ("rest", 1, rest)]
    for name, ranks, changes in jobs:
        given = command(root / name, real_data, **changes)
        log = root / f"log-{name}-{ranks}"
        codes, output = train_server.run(given, log, ranks)
        assert codes == [0] * ranks, output
    return {name: root / name for name, _, _ in jobs}


def test_every_number_is_that_of_one_process(runs):
    one, apart, rest = (records(run_dir) for run_dir in runs.values())
    for wanted, found in [*zip(one, apart, strict=True), *zip(one[2:], rest, strict=True)]:
        for key in (*LOSSES, "grad_norm"):
            assert found[key] == (wanted[key] and pytest.approx(wanted[key], rel=1e-4)), key
        for key in ("tokens_per_s", "samples_per_s", "media_per_s", "generated_images_per_s"):
            counts = [record[key] * record["step_ms"] / 1e3 for record in (wanted, found)]
            assert counts[0] == pytest.approx(counts[1]), key
    texts = [json.loads((run / "samples.json").read_text()) for run in runs.values()]
    assert [s["generated"] for s in texts[0]] == [s["generated"] for s in texts[1]]


def test_every_module_is_timed(runs):
    for record in records(runs["apart"]):
        for module in ("encoder_ms", "llm_ms", "generator_ms"):
            assert 0 < record[module] < record["step_ms"]
        assert 0 < record["bubble_fraction"] < 1


def test_the_timeline_shows_all_modules_side_by_side(runs):
    found, graph = read_records(runs["apart"] / "timeline" / "step-2.json")
    owners = {(r.rank, graph.layout.stages[r.action.stage].module) for r in found}
    assert owners == {(0, "vision"), (1, "vision"), (2, "llm"), (3, "llm"), (4, "generator")}


def test_checkpoints_and_exports_are_whole(runs):
    """Of ranks that have a module each; weights start alike and stay so."""
    manifests = [
        json.loads((step / "MANIFEST.json").read_text())["layout"]
        for step in list_steps(runs["apart"] / "checkpoints")
    ]
    assert {m["llm.tensor"] for m in manifests} == {1, 2}
    for file in sorted((runs["one"] / "hf").rglob("*.safetensors")):
        wanted = load_file(file)
        found = load_file(runs["apart"] / file.relative_to(runs["one"]))
        assert wanted.keys() == found.keys()
        for name, value in wanted.items():
            # AdamW turns rounding of gradients that should be zero (key biases) into small steps.
            torch.testing.assert_close(found[name], value, rtol=1e-3, atol=2e-4)


def test_the_saved_recipe_is_that_of_the_run(runs):
    recipe = load_recipe(runs["apart"] / "recipe.toml", world_size=4).recipe
    assert recipe.parallel.placement == "disaggregated" and recipe.parallel.tensor == 2
