"""A pipeline with train.py on real data: equal results, and additional files and metrics."""

import json
import tomllib
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import tomli_w
import torch
from safetensors.torch import load_file
from tiny_recipe import arguments, records

from torchmm.extensions.evaluation.scores import Answer, score
from torchmm.pipelining.view.records import read_records
from torchmm.pipelining.view.timeline import analyze_timeline
from torchmm.training.export.checkpoint import export_checkpoint

pytestmark = pytest.mark.slow
CHANGES = {
    "training__steps": 4,
    "training__global_batch_size": 4,
    "validation__interval": 2,
    "validation__batches": 1,
    "validation__num_samples": 2,
    "validation__max_new_tokens": 3,
    "checkpoint__export_hf": "true",
    "checkpoint__interval": 4,
    "training__ema_decay": 0.6,
    "validation__ema": "true",
}
EVALUATE = Path(__file__).parents[2] / "scripts" / "evaluate.py"
SCORES = ["exact_match", "vqa_accuracy", "cider", "word_error_rate"]


def scored(data: Path) -> dict[str, object]:
    """Return CHANGES with all metrics of the validation source, one of which selects the best."""
    source = f'{{path="{data}/tuxpaint_stamps/validation", name="held", metrics={SCORES}}}'
    best = '{metric="held/word_error_rate"}'
    return {**CHANGES, "data__validation": f"[{source}]", "checkpoint__keep_best": best}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, real_data, train_server) -> dict[int, Path]:
    """Run the same recipe on one rank and as a two-stage pipeline."""
    root = tmp_path_factory.mktemp("pipeline")
    for ranks in (1, 2):
        pipeline = {"parallel__pipeline": ranks, "metrics__timeline_step": 3}
        command = arguments(root / str(ranks), real_data, **scored(real_data), **pipeline)
        codes, output = train_server.run(command, root / f"log{ranks}", ranks)
        assert codes == [0] * ranks, output
    return {ranks: root / str(ranks) for ranks in (1, 2)}


def test_pipeline_losses_and_texts_are_equal(runs):
    alone, pipeline = (records(run_dir) for run_dir in runs.values())
    for one, two in zip(alone, pipeline, strict=True):
        for key in ("loss", "grad_norm", "validation_loss"):
            assert two[key] == (one[key] and pytest.approx(one[key], rel=1e-4)), key
    one, two = (json.loads((run / "samples.json").read_text()) for run in runs.values())
    assert [s["prompt"] for s in one] == [s["prompt"] for s in two]
    assert [s["truth"] for s in one] == [s["truth"] for s in two]
    assert [s["generated"] for s in one] == [s["generated"] for s in two]


def test_text_scores_are_equal_in_layouts(runs):
    alone, pipeline = (records(run_dir) for run_dir in runs.values())
    for one, two in zip(alone, pipeline, strict=True):
        assert one["scores"] == two["scores"]
    samples = json.loads((runs[2] / "samples.json").read_text())
    answers = [Answer(s["generated"], (s["truth"],)) for s in samples if s["step"] == 4]
    assert len(answers) == 2
    expected = {f"held/{name}": score(name, answers) for name in SCORES}
    assert pipeline[-1]["scores"] == expected and pipeline[0]["scores"] is None
    assert expected["held/word_error_rate"] > 0
    assert (runs[1] / "hf-best").exists()
    manifest = json.loads((runs[2] / "checkpoints/step-4/MANIFEST.json").read_text())
    name = "held/word_error_rate"
    assert manifest["figures"] == {name: expected[name]}


def test_export_has_scores_of_run(runs, tmp_path, train_server):
    """Hugging Face generates the texts of the run from the averaged weights.

    The export without averages differs, because validation used the averages.
    """
    reports = {}
    for name in ("hf-ema", "hf"):
        file = tmp_path / f"{name}.json"
        command = [runs[2], "--export", name, "--samples", 2, "--batch-size", 2, "--json", file]
        codes, output = train_server.run(command, tmp_path / name, script=EVALUATE)
        assert codes == [0], output
        assert "word_error_rate" in output
        reports[name] = json.loads(file.read_text())
    samples = [s for s in json.loads((runs[2] / "samples.json").read_text()) if s["step"] == 4]
    texts = [{k: t[k] for k in ("index", "prompt", "truth", "generated")} for t in samples]
    assert [{k: t[k] for k in texts[0]} for t in reports["hf-ema"]["texts"]] == texts
    assert reports["hf-ema"]["scores"] == records(runs[2])[-1]["scores"]
    assert reports["hf-ema"]["samples"] == {"held": 2} and reports["hf-ema"]["step"] == 4
    lines = (runs[2] / "evaluations.jsonl").read_text().splitlines()
    assert [json.loads(line)["export"] for line in lines] == [
        str(runs[2] / "hf-ema"),
        str(runs[2] / "hf"),
    ]


@pytest.mark.parametrize("name", ["hf", "hf-ema"])
def test_checkpoint_export_equals_run_export(name, runs, tmp_path):
    step = runs[2] / "checkpoints/step-4"
    export_checkpoint(step, tmp_path / "hf", averaged=name == "hf-ema")
    for file in (runs[2] / name).iterdir():
        assert (tmp_path / "hf" / file.name).read_bytes() == file.read_bytes(), file.name


def test_averaged_weights_are_exported_and_validated(runs, tmp_path, real_data, train_server):
    """A run that starts from the export with a learning rate of 0 has its validation loss."""
    measured = {}
    for name in ("hf", "hf-ema"):
        recipe = tomllib.loads((runs[1] / "recipe.toml").read_text())
        recipe |= {"name": name, "output_dir": str(tmp_path)}
        recipe["model"] = {"source": str(runs[2] / name), "tokenizer": str(runs[2] / name)}
        recipe["training"] |= {"steps": 1}
        recipe["optimizer"] |= {"lr": 0.0, "warmup_steps": 0}
        recipe["validation"] |= {"ema": False}
        file = tmp_path / f"{name}.toml"
        file.write_text(tomli_w.dumps(recipe))
        codes, output = train_server.run(["--config", str(file)], tmp_path / f"{name}-log")
        assert codes == [0], output
        measured[name] = records(tmp_path / name)[-1]["validation_loss"]
    expected = records(runs[2])[-1]["validation_loss"]
    assert measured["hf-ema"] == pytest.approx(expected, rel=1e-5)
    assert measured["hf"] != pytest.approx(expected, rel=1e-3)


def test_pipeline_counts_each_sample_once(runs):
    """Rates times step times are the counts, which are independent of the layout."""
    alone, pipeline = (records(run_dir) for run_dir in runs.values())
    for one, two in zip(alone, pipeline, strict=True):
        for key in ("tokens_per_s", "samples_per_s", "media_per_s"):
            counts = [r[key] * r["step_ms"] / 1e3 for r in (one, two)]
            assert counts[0] == pytest.approx(counts[1]), key


def test_bubbles_are_measured_only_in_pipelines(runs):
    assert all(r["bubble_fraction"] is None for r in records(runs[1]))
    for record in records(runs[2]):
        assert 0 < record["bubble_fraction"] < 1
        assert 0 < record["encoder_ms"] < record["step_ms"]
        assert 0 < record["llm_ms"] < record["step_ms"]


def test_timeline_of_step_is_saved(runs):
    assert not (runs[1] / "timeline").exists()
    directory = runs[2] / "timeline"
    assert {f.name for f in directory.iterdir()} == {
        "step-3.svg",
        "step-3.json",
        "step-3.trace.json",
    }
    plot = ET.parse(directory / "step-3.svg")
    labels = [text.text for text in plot.iter("{http://www.w3.org/2000/svg}text")]
    assert labels.index("predicted") < labels.index("measured")
    assert json.loads((directory / "step-3.trace.json").read_text())
    action_records, graph = read_records(directory / "step-3.json")
    assert {r.rank for r in action_records} == {0, 1}
    assert graph.sub_microbatches["vision"]
    assert analyze_timeline(action_records, graph.layout).bubble_fraction > 0


def test_memory_file_lists_measured_and_predicted_bytes(runs):
    (single,), stages = (
        json.loads((r / "memory.json").read_text())["ranks"] for r in runs.values()
    )
    assert len(stages) == 2
    for rank in stages:
        assert 0 < rank["predicted_bytes"] < single["predicted_bytes"]
        assert (
            rank["predicted_bytes"] < rank["measured_bytes"]
        )  # includes the libraries of the process


@pytest.mark.parametrize("name", ["hf", "hf-ema"])
def test_pipeline_export_equals_one_rank(name, runs):
    one, two = (
        {k: v for f in (run / name).glob("*.safetensors") for k, v in load_file(f).items()}
        for run in runs.values()
    )
    assert one.keys() == two.keys()
    for name, value in one.items():
        # AdamW turns the rounding of gradients that should be zero (key biases) into small steps.
        torch.testing.assert_close(two[name], value, rtol=1e-3, atol=1e-4)


@pytest.fixture(scope="module")
def colocated(tmp_path_factory, real_data, train_server) -> Path:
    """Run the recipe with the encoder in bubbles.

    Four ranks run two steps. Each has an unsharded encoder, and the LLM is tensor-parallel. Two
    ranks resume with the encoder split into two stages.
    """
    run_dir = tmp_path_factory.mktemp("colocated") / "run"
    layouts = {
        4: {
            "parallel__vision__replicate": 2,
            "parallel__bubble_granularity": "coarse",
            "parallel__tensor": 2,
            "parallel__vision__tensor": 1,
            "training__steps": 2,
        },
        2: {"parallel__vision__pipeline": 2, "parallel__replan_threshold": 0.001},
    }
    for ranks, changes in layouts.items():
        common = {
            **CHANGES,
            "parallel__pipeline": 2,
            "parallel__placement": "colocated",
            "parallel__schedule": "optimus",
            "checkpoint__interval": 2,
            "metrics__timeline_step": 3,
        }
        command = arguments(run_dir, real_data, **{**common, **changes})
        codes, output = train_server.run(command, run_dir.parent / f"log{ranks}", ranks)
        assert codes == [0] * ranks, output
    return run_dir


def test_colocated_run_equals_one_rank(runs, colocated):
    for one, actual in zip(records(runs[1]), records(colocated), strict=True):
        for key in ("loss", "grad_norm", "validation_loss"):
            assert actual[key] == (one[key] and pytest.approx(one[key], rel=1e-4)), key
        assert 0 < actual["encoder_ms"] < actual["step_ms"] and 0 < actual["bubble_fraction"] < 1
    one, actual = (json.loads((run / "samples.json").read_text()) for run in (runs[1], colocated))
    assert [s["generated"] for s in one] == [s["generated"] for s in actual]
    one, actual = (
        {k: v for f in (run / "hf").glob("*.safetensors") for k, v in load_file(f).items()}
        for run in (runs[1], colocated)
    )
    assert one.keys() == actual.keys()
    for name, value in one.items():
        torch.testing.assert_close(actual[name], value, rtol=1e-3, atol=1e-4)
    first, second, *calibrated = records(colocated)  # the last two steps use calibrated plans
    assert second["planner"] == first["planner"] == "optimus coarse"
    assert second["planner_ms"] > 0 and second["speedup_over_default_order"] == 0
    assert first["predicted_step_ms"] is None
    for record in calibrated:  # simulated with the costs of the device profile, then calibrated
        assert record["planner"].startswith("optimus ") and record["planner_evaluations"] > 1
    printed = (colocated.parent / "log2" / "rank-0.log").read_text()
    assert "step 3: measured times changed since planning" in " ".join(printed.split())
    action_records, graph = read_records(colocated / "timeline" / "step-3.json")
    stages = [s.stop - s.start for s in graph.layout.stages if s.module == "vision"]
    assert set(stages) == {1} and {r.rank for r in action_records} == {0, 1}
