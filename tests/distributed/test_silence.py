"""Nothing is silent for long: whatever takes its time says so, from a program's start to its end.

Functions that take long for large models, data and clusters are made to, in real processes, and
every one of them has to be told while it runs. That does not depend on how fast a machine is: the
functions sleep, and are told twenty times as often as there is need to.
"""

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest
from slowed import HEAVY, IMPORTS, SILENT, owner_of
from tiny_recipe import arguments

ROOT = Path(__file__).parents[2]
SECONDS = 1.0
"""That a function takes."""
LATE_S = 0.3
"""That a line may be read behind its being written."""
MOST_S = 15.0
"""Between two lines, on a machine that does other things as well; 5 on one that does not."""
BEFORE_STEPS = (
    "torchmm.training.run:resolve",
    "torchmm.training.model_build:recipe_model",
    "torchmm.training.model_build:plan_layout",
    "torch.distributed:init_process_group",
    "torchmm.training.rank_setup:check_ranks",
    "torchmm.training.data_build:find_samples",
    "torchmm.training.model_build:init_weights",
    "torchmm.training.tracking.recorder:start_trackers",
)
STEPS = (
    "torchmm.data.nodes:Waiting.get",
    "torchmm.training.step:TrainStep.run",
    "torchmm.training.optim:OptimizerUpdate.apply",
    "torchmm.training.validation:held_out_losses",
    "torchmm.extensions.evaluation.text.generate:generate_tokens",
    "torchmm.training.checkpoint.storage:_write_chunks",
)
AT_THE_END = (
    "torchmm.models.hf.export:_save",
    "torchmm.training.tracking.recorder:plot_loss",
    "torchmm.extensions.reports.page.pages:try_write_page",
)
EXPORT = (
    "torchmm.training.export.checkpoint:read_checkpoint_recipe",
    "torchmm.models.hf.export:_save",
)
GENERATE = (
    "torchmm.extensions.evaluation.text.load_model:load_text_generator",
    "torchmm.extensions.evaluation.text.load_model:read_prompts",
    "torchmm.training.pipeline:Pipeline.plan",
)
EVALUATE = ("torchmm.extensions.evaluation.hf_generation:generate_held_out_text",)
INSPECT = (
    "torchmm.extensions.reports.inspection.findings:recipe_model",
    "torchmm.extensions.reports.inspection.findings:Inspector.inspect",
    "torchmm.extensions.reports.inspection.page:write_page",
)
PLAN = (
    "torchmm.balance.search.search:StepSample",
    "torchmm.balance.search.recipe_plans:Forecaster",
)
QUICKSTART = ("--config", "recipes/quickstart.toml")
PROGRAMS: dict[str, tuple[str, ...]] = {
    "train.py": (*QUICKSTART, "--parallel.pipeline", "1"),
    "scripts/calibrate.py": ("--out", "profile.json"),
    "scripts/evaluate.py": ("exports/mine", "--data", "questions.jsonl", "--scores", "exact_match"),
    "scripts/export.py": ("outputs/mine",),
    "scripts/generate.py": ("outputs/mine", "--prompt", "A"),
    "scripts/gpu_check.py": ("--attention",),
    "scripts/index_data.py": QUICKSTART,
    "scripts/inspect_data.py": (*QUICKSTART, "--out", "{folder}"),
    "scripts/plan.py": (*QUICKSTART, "--gpus", "2"),
    "scripts/prepare_data.py": ("emoji_scenes",),
    "scripts/simulate.py": QUICKSTART,
    "scripts/text_baseline.py": ("outputs/mine",),
}
"""What takes seconds to import, with what it is asked."""
SIZES = """
name = "small"
[model.llm.config]
model_type = "llama"
vocab_size = 512
hidden_size = 64
intermediate_size = 128
num_hidden_layers = 2
num_attention_heads = 2
[model.encoders.vision.config]
model_type = "siglip_vision_model"
image_size = 32
patch_size = 16
hidden_size = 64
intermediate_size = 128
num_hidden_layers = 2
num_attention_heads = 2
[training]
sequence_length = 256
global_batch_size = 4
[simulation]
device = "a800"
gpus = 2
[simulation.images.vision]
patches = 4
tokens = 4
[[simulation.sequences]]
images = [0, 8]
"""


class Told(NamedTuple):
    """What a program wrote.

    Attributes:
        lines: with when they came, as `time.time()`.
        notes: name, begin and end of what took long.
    """

    lines: list[tuple[float, str]]
    notes: list[tuple[str, float, float]]

    def silent(self) -> list[str]:
        """What took long and was not told meanwhile; what is read late was said before."""
        return [
            name
            for name, begin, end in self.notes
            if not any(begin + LATE_S < came <= end for came, _ in self.lines)
        ]

    def gaps(self) -> list[tuple[float, str]]:
        """Seconds between two lines, and the second one, longest first."""
        return sorted(((b[0] - a[0], b[1]) for a, b in pairwise(self.lines)), reverse=True)


def tell(notes: Path, functions: Sequence[str], command: Sequence[str | Path]) -> Told:
    """Runs a program whose functions take long."""
    slowed = ROOT / "tests" / "helpers" / "slowed.py"
    words = [sys.executable, slowed, notes, SECONDS, *functions, "--", *command]
    with subprocess.Popen(
        [str(word) for word in words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
    ) as process:
        assert process.stdout is not None
        lines = [(time.time(), line.rstrip()) for line in process.stdout]
    text = "\n".join(line for _, line in lines)
    assert process.returncode == 0, text
    found = Told(lines, [json.loads(line) for line in notes.read_text().splitlines()])
    assert {name for name, *_ in found.notes} == {*functions, SILENT}, text
    assert SILENT in found.silent(), "what nobody tells was not found"
    return found


@pytest.mark.parametrize(
    "function", [*BEFORE_STEPS, *STEPS, *AT_THE_END, *EXPORT, *GENERATE, *EVALUATE, *INSPECT, *PLAN]
)
def test_what_takes_long_exists(function):
    """Seen in every run of the tests; the programs run in campaigns only."""
    owner, name = owner_of(function)
    assert callable(getattr(owner, name))


@pytest.mark.slow
def test_a_whole_run_and_an_export_say_what_takes_long(tmp_path, real_data):
    recipe = arguments(
        tmp_path / "run",
        real_data,
        training__steps=2,
        validation__interval=2,
        validation__num_samples=2,
        validation__max_new_tokens=3,
        checkpoint__interval=2,
        checkpoint__export_hf="true",
        metrics__log_interval=100,
    )
    told = tell(
        tmp_path / "notes.jsonl",
        [*BEFORE_STEPS, *STEPS, *AT_THE_END],
        [ROOT / "train.py", *recipe],
    )
    assert told.silent() == [SILENT]
    assert told.gaps()[0][0] < MOST_S, told.gaps()[:3]

    told = tell(
        tmp_path / "exporting.jsonl", EXPORT, [ROOT / "scripts/export.py", tmp_path / "run"]
    )
    assert told.silent() == [SILENT]
    assert told.gaps()[0][0] < MOST_S, told.gaps()[:3]

    asked = [tmp_path / "run", "--prompt", "A", "--max-new-tokens", "2"]
    told = tell(tmp_path / "generating.jsonl", GENERATE, [ROOT / "scripts/generate.py", *asked])
    assert told.silent() == [SILENT]

    asked = [tmp_path / "run", "--samples", "2", "--max-new-tokens", "2", "--scores", "exact_match"]
    told = tell(tmp_path / "evaluating.jsonl", EVALUATE, [ROOT / "scripts/evaluate.py", *asked])
    assert told.silent() == [SILENT]

    asked = ["--config", tmp_path / "run/recipe.toml", "--samples", "2", "--limit", "10"]
    asked += ["--out", tmp_path / "page"]
    told = tell(tmp_path / "inspecting.jsonl", INSPECT, [ROOT / "scripts/inspect_data.py", *asked])
    assert told.silent() == [SILENT]


@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_say_at_once_that_they_import(program, tmp_path):
    """And answer --help without."""
    asked = [word.format(folder=tmp_path) for word in PROGRAMS[program]]
    told = tell(tmp_path / "notes.jsonl", [IMPORTS], [ROOT / program, *asked])
    assert told.silent() == [SILENT]
    (_, begin, _), _ = told.notes
    assert told.lines[0][0] < begin + LATE_S, told

    command = [sys.executable, "-X", "importtime", str(ROOT / program), "--help"]
    helped = subprocess.run(command, capture_output=True, text=True, check=True)
    imported = {line.rpartition("|")[2].strip() for line in helped.stderr.splitlines()}
    assert "argparse" in imported and not imported & set(HEAVY)


def test_all_programs_that_import_for_long_are_known():
    found = {
        str(file.relative_to(ROOT))
        for file in [ROOT / "train.py", *(ROOT / "scripts").glob("*.py")]
        if "with loading():" in command_of(file).read_text()
    }
    assert found == set(PROGRAMS)


def command_of(program: Path) -> Path:
    """Return the module in torchmm/commands that a program runs, or the program itself."""
    command = ROOT / "torchmm" / "commands" / program.name
    return command if command.exists() else program


@pytest.mark.slow
def test_planning_a_cluster_says_what_takes_long(tmp_path):
    (tmp_path / "small.toml").write_text(SIZES)
    command = [ROOT / "scripts/plan.py", "--config", tmp_path / "small.toml"]
    command += ["--placement", "auto", "--budget-s", "0"]
    told = tell(tmp_path / "notes.jsonl", PLAN, command)
    assert told.silent() == [SILENT]
    assert told.gaps()[0][0] < MOST_S, told.gaps()[:3]
