"""SIGKILL at random times of training with uploads, on changing machines (kill_trainer.py)."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

KILLS = 10


@pytest.mark.campaign
def test_ten_kills_lose_no_step_or_upload(tmp_path):
    """The program compares every start and every upload, and exits with 1 if one differs."""
    script = Path(__file__).with_name("kill_trainer.py")
    command = [sys.executable, "-W", "ignore", str(script), str(tmp_path), str(KILLS), "1"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=350, check=False)
    *kills, end = [json.loads(line) for line in run.stdout.splitlines()]
    assert run.returncode == 0 and len(kills) == KILLS, run.stderr
    assert end["equal"] and end["end"] > 3
    # Runs resumed on the same and other machines. Some kills interrupted a save or an upload.
    assert any(kill["resumed"] for kill in kills) and any(kill["moves"] for kill in kills)
    assert any(kill["torn_here"] or kill["torn_there"] for kill in kills), kills
