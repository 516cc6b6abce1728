"""Evaluation of exports: Hugging Face (batched or not) and torchmm generate the same answers."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from launch import run_distributed
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny_recipe import arguments
from transformers import AutoTokenizer

from torchmm.common.errors import ConfigError
from torchmm.extensions.demo_data import tiny_qwen
from torchmm.extensions.evaluation.hf_generation import generate_held_out_text
from torchmm.extensions.evaluation.scores import Answer, score
from torchmm.extensions.evaluation.text.load_model import ExportedModel
from torchmm.models.build import build_model
from torchmm.models.hf.export import export_hf
from torchmm.models.initialize import init_weights
from torchmm.models.multimodal import materialize
from torchmm.recipe.data_section import DataConfig, SourceConfig
from torchmm.recipe.model_section import COMPONENTS_FILE, FreezeConfig, ModelConfig
from torchmm.recipe.training_section import TrainingConfig

SCRIPT = Path(__file__).parents[2] / "scripts" / "evaluate.py"
PEOPLE = [["two", "2", "two", "three"], ["a cat"], ["Yes."]]
ALL = sorted([(), ("many",), *map(tuple, PEOPLE)])
"""References of all samples. The chat has no references in addition to its answer."""


def write_export(directory: Path, real_data: Path, connector: str) -> Path:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    llm = {"model_type": "llama", "vocab_size": 4096, "num_attention_heads": 2, **sizes}
    vision = {"model_type": "siglip_vision_model", "image_size": 32, "patch_size": 8, **sizes}
    encoder = {"config": {**vision, "num_attention_heads": 2}, "connector": connector}
    config = {"llm": {"config": llm}, "encoders": {"vision": encoder}}
    model = build_model(ModelConfig.model_validate(config), FreezeConfig())
    materialize(model, "cpu")
    init_weights(model, seed=0)
    for parameter in model.parameters():
        parameter.data.mul_(3.0)  # generated texts differ
    export_hf(model, directory, AutoTokenizer.from_pretrained(real_data / "tokenizer"))
    return directory


def write_questions(directory: Path) -> Path:
    """Write questions of different lengths, with and without images, and a chat."""
    directory.mkdir()
    rows = []
    for number, answers in enumerate(PEOPLE):
        image = f"{number}.png"
        size = (60 + 30 * number, 90 - 20 * number)
        Image.linear_gradient("L").resize(size).convert("RGB").save(directory / image)
        question = "What is it?" + " Really?" * number
        rows.append({"image": image, "question": question, "answers": answers})
    rows.append({"question": "How many are many?", "answers": ["many"]})
    chat = [("user", "Say one."), ("assistant", "one"), ("user", "Two."), ("assistant", "two")]
    rows.append({"messages": [{"role": role, "content": text} for role, text in chat]})
    rows[-1]["messages"][0]["content"] = "<image>Say one."
    rows[-1]["images"] = ["0.png"]
    file = directory / "questions.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def write_all(directory: Path, questions: Path, index: Path) -> dict[str, list]:
    """Generate the same texts batched, unbatched and with torchmm."""
    sources = [SourceConfig(path=str(questions), metrics=["exact_match"])]
    data = DataConfig(validation=sources, index_cache_dir=str(index))
    training = TrainingConfig(sequence_length=512)
    export = ExportedModel.read(directory)
    with_torchmm = replace(export, kind=None)
    limits = {"samples": 9, "max_new_tokens": 8}
    return {
        "together": generate_held_out_text(export, data, training, **limits, batch_size=3),
        "alone": generate_held_out_text(export, data, training, **limits, batch_size=1),
        "torchmm": generate_held_out_text(with_torchmm, data, training, **limits),
    }


@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl"])
def test_hugging_face_and_torchmm_texts_are_equal(name, tmp_path, real_data):
    if name == "llava":
        directory = write_export(tmp_path / "hf", real_data, "mlp")
    else:
        (tmp_path / "data").mkdir()
        (tmp_path / "data" / "tokenizer").symlink_to(real_data / "tokenizer")
        tiny_qwen.prepare(tmp_path / "data", tmp_path, {})
        directory = tmp_path / "data" / tiny_qwen.NAME
    questions = write_questions(tmp_path / "questions")
    (written,) = run_distributed(write_all, 1, directory, questions, tmp_path / "index")
    assert written["together"] == written["alone"] == written["torchmm"]
    texts = written["torchmm"]
    assert sorted(text.references for text in texts) == ALL
    assert len({text.generated for text in texts}) > 2, "generated texts depend on the sample"
    (chat,) = [text for text in texts if not text.references]
    assert chat.truth == "one" and chat.answer.references == ("one",)


@pytest.mark.parametrize("connector", ["mlp", "pixel_shuffle_mlp"])
def test_script_scores_questions_of_file(connector, tmp_path, real_data, train_server):
    directory = write_export(tmp_path / "hf", real_data, connector)
    assert (directory / COMPONENTS_FILE).exists() == (connector == "pixel_shuffle_mlp")
    questions = write_questions(tmp_path / "questions")
    kinds = ["vqa_accuracy", "exact_match", "cider"]
    report = tmp_path / "report.json"
    command = [directory, "--data", questions, "--scores", *kinds, "--json", report]
    codes, output = train_server.run(command, tmp_path / "log", script=SCRIPT)
    assert codes == [0], output
    scored = json.loads(report.read_text())
    answers = [Answer(t["generated"], tuple(t["references"])) for t in scored["texts"]]
    answers = [a if a.references else a._replace(references=("one",)) for a in answers]
    assert sorted(a.references for a in answers) == sorted([("one",), *ALL[1:]])
    (source,) = scored["samples"]
    assert scored["samples"][source] == 5
    assert scored["scores"] == {f"{source}/{kind}": score(kind, answers) for kind in kinds}
    assert f"{scored['scores'][f'{source}/cider']:.4f}" in output


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["gone"], "gone is not an export: it has neither config.json nor torchmm.json"),
        (["run", "--export", "hf-7"], "no such export; available: hf-2"),
        (["run/hf-2"], "no evaluation data; set --data or --recipe, or evaluate a run"),
        (["run/hf-2", "--data", "here.jsonl"], "no metrics are set for the sources; set --scores"),
    ],
)
def test_invalid_evaluation_exits_with_message(
    command, message, tmp_path, train_server, monkeypatch
):
    (tmp_path / "run/hf-2").mkdir(parents=True)
    (tmp_path / "run/recipe.toml").touch()
    options = [tmp_path / command[0], *command[1:]]
    if len(command) == 1 and command[0] == "gone":
        options += ["--data", tmp_path, "--scores", "cider"]
    codes, output = train_server.run(options, tmp_path / "log", script=SCRIPT)
    assert codes == [2] and message in output and "Traceback" not in output, output


def test_directory_without_model_is_not_export(tmp_path):
    with pytest.raises(ConfigError, match="is not an export"):
        ExportedModel.read(tmp_path)


def test_last_benchmark_scores_are_recorded_at_step(tmp_path, real_data, train_server):
    """A program that replaces lmms-eval runs longer than the last step."""
    scores = {"scores": {"mine/exact_match": 0.25}, "samples": {"mine": 4}}
    program = tmp_path / "python"
    lines = ["import sys, time", "time.sleep(2)", "file = sys.argv[sys.argv.index('--output') + 1]"]
    lines += [f"open(file, 'w').write({json.dumps(scores)!r})"]
    program.write_text("\n".join([f"#!{sys.executable}", *lines, ""]))
    program.chmod(0o755)
    run_dir = tmp_path / "run"
    command = arguments(
        run_dir,
        real_data,
        training__steps=2,
        validation__benchmarks__tasks='["mine"]',
        validation__benchmarks__interval=2,
        validation__benchmarks__python=program,
        metrics__tensorboard="true",
    )
    codes, output = train_server.run(command, tmp_path / "log", 2)
    assert codes == [0, 0], output
    first, last = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    assert first["scores"] is None and last["step"] == 2
    assert last["scores"] == {"mine/exact_match": 0.25}
    events = EventAccumulator(str(run_dir / "tensorboard")).Reload()
    (shown,) = events.Scalars("validation/mine/exact_match")
    assert (shown.step, shown.value) == (2, 0.25)
    assert "waiting for the benchmarks of step 2, at most 3600 s" in output
    assert json.loads((run_dir / "STATUS.json").read_text())["state"] == "done"
