"""A pipeline through train.py on real data: what the user gets beside the same numbers."""

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
    """CHANGES, with all scores of the held-out source, which has one of them as its best."""
    source = f'{{path="{data}/tuxpaint_stamps/validation", name="held", metrics={SCORES}}}'
    best = '{metric="held/word_error_rate"}'
    return {**CHANGES, "data__validation": f"[{source}]", "checkpoint__keep_best": best}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, real_data, train_server) -> dict[int, Path]:
    """The same recipe on one rank and as a pipeline of two."""
    root = tmp_path_factory.mktemp("pipeline")
    for ranks in (1, 2):
        pipeline = {"parallel__pipeline": ranks, "metrics__timeline_step": 3}
        command = arguments(root / str(ranks), real_data, **scored(real_data), **pipeline)
        codes, output = train_server.run(command, root / f"log{ranks}", ranks)
        assert codes == [0] * ranks, output
    return {ranks: root / str(ranks) for ranks in (1, 2)}


def test_losses_held_out_losses_and_texts_are_the_same(runs):
    alone, pipeline = (records(run_dir) for run_dir in runs.values())
    for one, two in zip(alone, pipeline, strict=True):
        for key in ("loss", "grad_norm", "validation_loss"):
            assert two[key] == (one[key] and pytest.approx(one[key], rel=1e-4)), key
    one, two = (json.loads((run / "samples.json").read_text()) for run in runs.values())
    assert [s["prompt"] for s in one] == [s["prompt"] for s in two]
    assert [s["truth"] for s in one] == [s["truth"] for s in two]
    assert [s["generated"] for s in one] == [s["generated"] for s in two]


def test_texts_are_scored_alike_in_every_layout(runs):
    alone, pipeline = (records(run_dir) for run_dir in runs.values())
    for one, two in zip(alone, pipeline, strict=True):
        assert one["scores"] == two["scores"]
    samples = json.loads((runs[2] / "samples.json").read_text())
    answers = [Answer(s["generated"], (s["truth"],)) for s in samples if s["step"] == 4]
    assert len(answers) == 2
    wanted = {f"held/{name}": score(name, answers) for name in SCORES}
    assert pipeline[-1]["scores"] == wanted and pipeline[0]["scores"] is None
    assert wanted["held/word_error_rate"] > 0
    assert (runs[1] / "hf-best").exists()
    manifest = json.loads((runs[2] / "checkpoints/step-4/MANIFEST.json").read_text())
    name = "held/word_error_rate"
    assert manifest["figures"] == {name: wanted[name]}


def test_an_export_is_scored_as_its_run_was(runs, tmp_path, train_server):
    """Hugging Face writes the run's own texts, from what was exported: all but the averages differ
    from what was validated."""
    found = {}
    for name in ("hf-ema", "hf"):
        file = tmp_path / f"{name}.json"
        command = [runs[2], "--export", name, "--samples", 2, "--batch-size", 2, "--json", file]
        codes, output = train_server.run(command, tmp_path / name, script=EVALUATE)
        assert codes == [0], output
        assert "word_error_rate" in output
        found[name] = json.loads(file.read_text())
    wanted = [s for s in json.loads((runs[2] / "samples.json").read_text()) if s["step"] == 4]
    texts = [{k: t[k] for k in ("index", "prompt", "truth", "generated")} for t in wanted]
    assert [{k: t[k] for k in texts[0]} for t in found["hf-ema"]["texts"]] == texts
    assert found["hf-ema"]["scores"] == records(runs[2])[-1]["scores"]
    assert found["hf-ema"]["samples"] == {"held": 2} and found["hf-ema"]["step"] == 4
    lines = (runs[2] / "evaluations.jsonl").read_text().splitlines()
    assert [json.loads(line)["export"] for line in lines] == [
        str(runs[2] / "hf-ema"),
        str(runs[2] / "hf"),
    ]


@pytest.mark.parametrize("name", ["hf", "hf-ema"])
def test_a_checkpoint_is_exported_as_its_run_did(name, runs, tmp_path):
    step = runs[2] / "checkpoints/step-4"
    export_checkpoint(step, tmp_path / "hf", averaged=name == "hf-ema")
    for file in (runs[2] / name).iterdir():
        assert (tmp_path / "hf" / file.name).read_bytes() == file.read_bytes(), file.name


def test_averaged_weights_are_exported_and_validated(runs, tmp_path, real_data, train_server):
    """A run that begins with the export and learns nothing has its held-out loss."""
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


def test_every_sample_is_counted_once(runs):
    """Rates times the time they are taken over are the counts, which do not depend on layout."""
    alone, pipeline = (records(run_dir) for run_dir in runs.values())
    for one, two in zip(alone, pipeline, strict=True):
        for key in ("tokens_per_s", "samples_per_s", "media_per_s"):
            counts = [r[key] * r["step_ms"] / 1e3 for r in (one, two)]
            assert counts[0] == pytest.approx(counts[1]), key


def test_bubbles_are_measured_only_where_there_is_a_pipeline(runs):
    assert all(r["bubble_fraction"] is None for r in records(runs[1]))
    for record in records(runs[2]):
        assert 0 < record["bubble_fraction"] < 1
        assert 0 < record["encoder_ms"] < record["step_ms"]
        assert 0 < record["llm_ms"] < record["step_ms"]


def test_timeline_of_one_step_is_saved(runs):
    assert not (runs[1] / "timeline").exists()
    directory = runs[2] / "timeline"
    assert {f.name for f in directory.iterdir()} == {
        "step-3.svg",
        "step-3.json",
        "step-3.trace.json",
    }
    drawn = ET.parse(directory / "step-3.svg")
    labels = [text.text for text in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert labels.index("predicted") < labels.index("measured")
    assert json.loads((directory / "step-3.trace.json").read_text())
    found, graph = read_records(directory / "step-3.json")
    assert {r.rank for r in found} == {0, 1}
    assert graph.sub_microbatches["vision"]
    assert analyze_timeline(found, graph.layout).bubble_fraction > 0


def test_memory_of_every_rank_stands_beside_the_prediction(runs):
    (whole,), halves = (json.loads((r / "memory.json").read_text())["ranks"] for r in runs.values())
    assert len(halves) == 2
    for rank in halves:
        assert 0 < rank["predicted_bytes"] < whole["predicted_bytes"]
        assert rank["predicted_bytes"] < rank["measured_bytes"]  # with the process's libraries


@pytest.mark.parametrize("name", ["hf", "hf-ema"])
def test_export_is_that_of_one_rank(name, runs):
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
    """The same with the encoder in bubbles: two steps on four ranks, each with all of the encoder,
    though the LLM is split tensor-parallel, and two more on two, among which it is divided."""
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


def test_colocated_encoders_change_no_number(runs, colocated):
    for one, found in zip(records(runs[1]), records(colocated), strict=True):
        for key in ("loss", "grad_norm", "validation_loss"):
            assert found[key] == (one[key] and pytest.approx(one[key], rel=1e-4)), key
        assert 0 < found["encoder_ms"] < found["step_ms"] and 0 < found["bubble_fraction"] < 1
    one, found = (json.loads((run / "samples.json").read_text()) for run in (runs[1], colocated))
    assert [s["generated"] for s in one] == [s["generated"] for s in found]
    one, found = (
        {k: v for f in (run / "hf").glob("*.safetensors") for k, v in load_file(f).items()}
        for run in (runs[1], colocated)
    )
    assert one.keys() == found.keys()
    for name, value in one.items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-4)
    first, second, *watched = records(colocated)  # planned beside training; the next two before
    assert second["planner"] == first["planner"] == "optimus coarse"
    assert second["planner_ms"] > 0 and second["speedup_over_default_order"] == 0
    assert first["predicted_step_ms"] is None
    for record in watched:  # played through with all costs of the device's profile, then measured
        assert record["planner"].startswith("optimus ") and record["planner_evaluations"] > 1
    printed = (colocated.parent / "log2" / "rank-0.log").read_text()
    assert "step 3: measured times changed since planning" in " ".join(printed.split())
    taken, graph = read_records(colocated / "timeline" / "step-3.json")
    stages = [s.stop - s.start for s in graph.layout.stages if s.module == "vision"]
    assert set(stages) == {1} and {r.rank for r in taken} == {0, 1}
