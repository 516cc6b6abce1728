"""Runs of earlier versions with former names of keys, metrics and folders."""

import json
from pathlib import Path

import pytest
import tomli
import tomli_w

from torchmm.commands import compare_runs, show_run
from torchmm.extensions.reports.page.run_contents import read_run
from torchmm.recipe.changes import RENAMED_METRICS, with_current_names
from torchmm.recipe.read import changed_values

RECIPE = """
name = "former"
[checkpoint]
keep_latest = 3
async_save = false
[activation_checkpoint]
mode = "tuned"
[validation]
num_samples = 4
"""


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Return a run directory of an earlier version."""
    record = {name: number for number, name in enumerate(RENAMED_METRICS, 1)}
    lines = [json.dumps({"step": step, "loss": 2.0, **record}) for step in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "recipe.toml").write_text(RECIPE)
    (tmp_path / "generated_images").mkdir()
    (tmp_path / "generated_images" / "step-1.png").touch()
    return tmp_path


def test_former_records_have_current_metrics(run_dir: Path) -> None:
    run = read_run(run_dir)
    assert run.records[0].keys() - RENAMED_METRICS.values() == {"step", "loss"}
    values = [run.last(now) for now in RENAMED_METRICS.values()]
    assert values == list(range(1, len(values) + 1))
    assert run.generated_images() == [run_dir / "generated_images" / "step-1.png"]


def test_former_recipe_has_current_keys(run_dir: Path) -> None:
    run = read_run(run_dir)
    assert run.recipe == with_current_names(tomli.loads(RECIPE))
    assert changed_values(run.recipe) == {
        "name": "former",
        "checkpoint.keep_latest": 3,
        "checkpoint.async_save": False,
        "activation_checkpoint.mode": "auto",
        "validation.num_samples": 4,
    }


def test_commands_show_former_run(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert show_run.main([str(run_dir)]) == 0
    assert show_run.main([str(run_dir), "--page"]) == 0
    now = tmp_path / "now"
    now.mkdir()
    (now / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 2.0}) + "\n")
    (now / "recipe.toml").write_text(tomli_w.dumps(with_current_names(tomli.loads(RECIPE))))
    page = tmp_path / "compared.html"
    assert compare_runs.main([str(run_dir), str(now), "--output", str(page)]) == 0
    printed = capsys.readouterr().out
    assert "Recipes" not in printed and "checkpoint.keep_latest" not in printed
