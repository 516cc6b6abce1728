"""Programs log long operations from start to exit, so that no silence is long.

Functions that are slow for large models, data and clusters are slowed in real processes. Each of
them must be logged while it runs. This does not depend on the speed of the machine: the functions
sleep, and progress is logged twenty times as often as by default.
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
"""Duration of a slowed function."""
LATE_S = 0.3
"""Maximum delay between writing and reading a line."""
MAX_GAP_S = 15.0
"""Maximum time between two lines on a machine under load. It is 5 s on an idle machine."""
BEFORE_STEPS = (
    "torchmm.training.run:resolve_recipe",
    "torchmm.training.model_build:recipe_model",
    "torchmm.training.model_build:plan_layout",
    "torch.distributed:init_process_group",
    "torchmm.training.rank_setup:check_ranks",
    "torchmm.training.data_build:find_samples",
    "torchmm.training.model_build:init_weights",
    "torchmm.training.tracking.recorder:start_trackers",
)
STEPS = (
    "torchmm.data.nodes:TimedCall.get",
    "torchmm.training.step:TrainStep.run",
    "torchmm.training.optim:OptimizerUpdate.apply",
    "torchmm.training.validation:held_out_losses",
    "torchmm.extensions.evaluation.text.generate:generate_tokens",
    "torchmm.training.checkpoint.storage:_write_chunks",
)
FINAL_STEPS = (
    "torchmm.models.hf.export:_save",
    "torchmm.training.tracking.recorder:plot_loss",
    "torchmm.extensions.reports.page.html_pages:try_write_page",
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
    "torchmm.extensions.reports.inspection.html_report:write_data_report",
)
PLAN = (
    "torchmm.balance.search.plan_search:StepSample",
    "torchmm.balance.search.recipe_plans:StepSimulator",
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
"""Arguments of the programs whose imports take seconds."""
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


class ProgramOutput(NamedTuple):
    """Output of a program.

    Attributes:
        lines: Lines with the `time.time()` at which they were read.
        notes: Name, start and end of each slow function.
    """

    lines: list[tuple[float, str]]
    notes: list[tuple[str, float, float]]

    def silent(self) -> list[str]:
        """Return the slow functions that were not logged while they ran.

        Lines that are read within `LATE_S` of the start were written before it.
        """
        return [
            name
            for name, begin, end in self.notes
            if not any(begin + LATE_S < read_s <= end for read_s, _ in self.lines)
        ]

    def gaps(self) -> list[tuple[float, str]]:
        """Return the seconds between consecutive lines and the second line, longest first."""
        return sorted(((b[0] - a[0], b[1]) for a, b in pairwise(self.lines)), reverse=True)


def run_slowed(
    notes: Path, functions: Sequence[str], command: Sequence[str | Path]
) -> ProgramOutput:
    """Run a program whose functions are slow."""
    slowed = ROOT / "tests" / "helpers" / "slowed.py"
    arguments = [sys.executable, slowed, notes, SECONDS, *functions, "--", *command]
    with subprocess.Popen(
        [str(word) for word in arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
    ) as process:
        assert process.stdout is not None
        lines = [(time.time(), line.rstrip()) for line in process.stdout]
    text = "\n".join(line for _, line in lines)
    assert process.returncode == 0, text
    output = ProgramOutput(lines, [json.loads(line) for line in notes.read_text().splitlines()])
    assert {name for name, *_ in output.notes} == {*functions, SILENT}, text
    assert SILENT in output.silent(), "a function without logs was not detected"
    return output


@pytest.mark.parametrize(
    "function",
    [*BEFORE_STEPS, *STEPS, *FINAL_STEPS, *EXPORT, *GENERATE, *EVALUATE, *INSPECT, *PLAN],
)
def test_slow_functions_exist(function):
    """Check the names in every test run, because the programs run in campaigns only."""
    owner, name = owner_of(function)
    assert callable(getattr(owner, name))


@pytest.mark.slow
def test_run_and_export_log_slow_functions(tmp_path, real_data):
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
    output = run_slowed(
        tmp_path / "notes.jsonl",
        [*BEFORE_STEPS, *STEPS, *FINAL_STEPS],
        [ROOT / "train.py", *recipe],
    )
    assert output.silent() == [SILENT]
    assert output.gaps()[0][0] < MAX_GAP_S, output.gaps()[:3]

    output = run_slowed(
        tmp_path / "exporting.jsonl", EXPORT, [ROOT / "scripts/export.py", tmp_path / "run"]
    )
    assert output.silent() == [SILENT]
    assert output.gaps()[0][0] < MAX_GAP_S, output.gaps()[:3]

    options = [tmp_path / "run", "--prompt", "A", "--max-new-tokens", "2"]
    output = run_slowed(
        tmp_path / "generating.jsonl", GENERATE, [ROOT / "scripts/generate.py", *options]
    )
    assert output.silent() == [SILENT]

    options = [
        tmp_path / "run",
        "--samples",
        "2",
        "--max-new-tokens",
        "2",
        "--scores",
        "exact_match",
    ]
    output = run_slowed(
        tmp_path / "evaluating.jsonl", EVALUATE, [ROOT / "scripts/evaluate.py", *options]
    )
    assert output.silent() == [SILENT]

    options = ["--config", tmp_path / "run/recipe.toml", "--samples", "2", "--limit", "10"]
    options += ["--out", tmp_path / "page"]
    output = run_slowed(
        tmp_path / "inspecting.jsonl", INSPECT, [ROOT / "scripts/inspect_data.py", *options]
    )
    assert output.silent() == [SILENT]


@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_log_imports_at_once(program, tmp_path):
    """Imports are logged at once, and --help does not need them."""
    options = [word.format(folder=tmp_path) for word in PROGRAMS[program]]
    output = run_slowed(tmp_path / "notes.jsonl", [IMPORTS], [ROOT / program, *options])
    assert output.silent() == [SILENT]
    (_, begin, _), _ = output.notes
    assert output.lines[0][0] < begin + LATE_S, output

    command = [sys.executable, "-X", "importtime", str(ROOT / program), "--help"]
    helped = subprocess.run(command, capture_output=True, text=True, check=True)
    imported = {line.rpartition("|")[2].strip() for line in helped.stderr.splitlines()}
    assert "argparse" in imported and not imported & set(HEAVY)


def test_programs_with_slow_imports_are_listed():
    programs = {
        str(file.relative_to(ROOT))
        for file in [ROOT / "train.py", *(ROOT / "scripts").glob("*.py")]
        if "with report_imports():" in command_of(file).read_text()
    }
    assert programs == set(PROGRAMS)


def command_of(program: Path) -> Path:
    """Return the module in torchmm/commands that a program runs, or the program itself."""
    command = ROOT / "torchmm" / "commands" / program.name
    return command if command.exists() else program


@pytest.mark.slow
def test_cluster_planning_logs_slow_functions(tmp_path):
    (tmp_path / "small.toml").write_text(SIZES)
    command = [ROOT / "scripts/plan.py", "--config", tmp_path / "small.toml"]
    command += ["--placement", "auto", "--budget-s", "0"]
    output = run_slowed(tmp_path / "notes.jsonl", PLAN, command)
    assert output.silent() == [SILENT]
    assert output.gaps()[0][0] < MAX_GAP_S, output.gaps()[:3]
