"""The notebook: its code cells run in order on a CPU, and its training reduces the loss."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
NOTEBOOK = ROOT / "docs" / "get_started" / "finetune_on_your_images.ipynb"
CELLS = json.loads(NOTEBOOK.read_text())["cells"]
CODE = ["".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "code"]


def execute(cells: list[str], directory: Path) -> subprocess.CompletedProcess[str]:
    """Run the cells in one process without GPUs and network."""
    program = directory / "cells.py"
    program.write_text("\n\n".join(cells))
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, program.name],
        cwd=directory,
        env={
            **os.environ, "PYTHONPATH": paths, "MPLBACKEND": "agg", "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=880,
    )  # fmt: skip


def test_notebook_has_no_outputs_and_no_shell_lines():
    assert len(CODE) >= 8
    for cell in CELLS:
        assert not cell.get("outputs") and cell.get("execution_count") is None
    assert not [line for text in CODE for line in text.splitlines() if line.startswith(("!", "%"))]


@pytest.mark.slow
@pytest.mark.timeout(900)  # seven programs, each of which imports transformers
def test_notebook_runs_and_reduces_loss(tmp_path, real_data):
    data = tmp_path / "data"
    data.mkdir()
    shutil.copy(real_data / "MANIFEST.json", data)
    for name in ("tuxpaint_stamps", "tokenizer", ".packages"):
        (data / name).symlink_to((real_data / name).resolve())
    result = execute(CODE, tmp_path)
    assert result.returncode == 0, (result.stdout + result.stderr)[-4000:]
    run = tmp_path / "outputs" / "my_model"
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in metrics]
    assert len(losses) == 20
    assert losses[-1] < 0.7 * losses[0]
    assert any(line["validation_loss"] is not None for line in metrics)
    assert (run / "hf" / "model.safetensors").exists()
    assert "my_images/2.png" in result.stdout


def test_failing_cell_is_reported(tmp_path):
    result = execute([CODE[0], 'run("dry-run", "no_such_recipe")', "print('next')"], tmp_path)
    assert result.returncode != 0
    assert "no_such_recipe" in result.stdout and "next" not in result.stdout
