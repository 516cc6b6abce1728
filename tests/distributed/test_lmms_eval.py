"""A local task of lmms-eval, answered by an export and by a snapshot of a run.

Only the installation of lmms-eval needs network access.
"""

import json
import subprocess
from pathlib import Path

import pytest
from test_evaluation import SCRIPT, write_export, write_questions
from tiny_recipe import arguments

from torchmm.training.tracking.evaluations import read_evaluations

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".lmms-eval" / "bin" / "python"
pytestmark = [pytest.mark.network, pytest.mark.campaign]
QUESTIONS = 4
"""Number of questions. The last question has no image."""
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
TASK = """
task: local_questions
dataset_path: json
dataset_kwargs:
  data_files: FILE
test_split: train
output_type: generate_until
doc_to_visual: !function utils.doc_to_visual
doc_to_text: !function utils.doc_to_text
doc_to_target: "answer"
generation_kwargs:
  max_new_tokens: 8
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
metadata:
  - version: 0.0
"""
UTILS = """
from pathlib import Path
from PIL import Image


def doc_to_visual(doc):
    names = [doc["image"]] if doc["image"] else []
    return [Image.open(Path("FOLDER") / name).convert("RGB") for name in names]


def doc_to_text(doc, lmms_eval_specific_kwargs=None):
    return doc["question"]
"""


@pytest.fixture(scope="module")
def lmms_eval() -> Path:
    """Install lmms-eval and return the path of its Python interpreter."""
    installation = subprocess.run(
        [ROOT / "scripts/lmms_eval.sh"], capture_output=True, text=True, check=False
    )
    if installation.returncode == 3:
        pytest.skip(installation.stderr.strip().splitlines()[-1])
    assert installation.returncode == 0, installation.stderr
    return PYTHON


def write_task(folder: Path, questions: Path, correct_answers: dict[int, str]) -> Path:
    """Write a task in which only `correct_answers` match the generated text."""
    folder.mkdir()
    rows = [json.loads(line) for line in questions.read_text().splitlines()][:4]
    for number, row in enumerate(rows):
        row["answer"] = correct_answers.get(number, "something else")
        del row["answers"]
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "local_questions.yaml").write_text(TASK.replace("FILE", str(data)))
    (folder / "utils.py").write_text(UTILS.replace("FOLDER", str(questions.parent)))
    return folder


def test_export_answers_task(lmms_eval, tmp_path, real_data, train_server):
    directory = write_export(tmp_path / "hf", real_data, "mlp")
    questions = write_questions(tmp_path / "questions")
    report = tmp_path / "report.json"
    command = [directory, "--data", questions, "--scores", "exact_match", "--json", report]
    command += ["--max-new-tokens", 8]
    codes, output = train_server.run(command, tmp_path / "log", script=SCRIPT)
    assert codes == [0], output
    texts = {t["index"]: t["generated"] for t in json.loads(report.read_text())["texts"]}
    task = write_task(tmp_path / "task", questions, {1: texts[1].strip()})
    command = [directory, "--tasks", "local_questions", "--task-folder", task, "--json", report]
    command += ["--task-python", lmms_eval]
    codes, output = train_server.run(command, tmp_path / "log2", script=SCRIPT, **OFFLINE)
    assert codes == [0], output
    evaluated = json.loads(report.read_text())
    assert evaluated["scores"] == {"local_questions/exact_match": 1 / 4}
    assert evaluated["samples"] == {"local_questions": QUESTIONS}


def test_run_snapshots_answer_task(lmms_eval, tmp_path, real_data, train_server):
    questions = write_questions(tmp_path / "questions")
    task = write_task(tmp_path / "task", questions, {})
    run_dir = tmp_path / "run"
    changes = {
        "training__steps": 2,
        "validation__benchmarks__tasks": '["local_questions"]',
        "validation__benchmarks__interval": 2,
        "validation__benchmarks__folder": task,
        "validation__benchmarks__python": lmms_eval,
    }
    command = arguments(run_dir, real_data, **changes)
    codes, output = train_server.run(command, tmp_path / "log", 2, **OFFLINE)
    assert codes == [0, 0], output
    (evaluation,) = read_evaluations(run_dir)
    assert evaluation.step == 2 and evaluation.samples == {"local_questions": QUESTIONS}
    assert evaluation.scores == {"local_questions/exact_match": 0.0}
    assert {p.name for p in (run_dir / "benchmarks/step-2").iterdir()} == {"scores.json", "log.txt"}
    assert (
        "benchmarks of step 2: local_questions/exact_match 0.0000"
        in (tmp_path / "log/rank-0.log").read_text()
    )
