"""SIGKILL at random times of a save never leaves an incomplete checkpoint that loads."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

KILLS = 30


@pytest.mark.slow
def test_thirty_kills_leave_complete_checkpoints(tmp_path):
    script = Path(__file__).with_name("kill_saver.py")
    command = [sys.executable, "-W", "ignore", str(script), str(tmp_path), str(KILLS)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    outcomes = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(outcomes) == KILLS, run.stderr
    assert all(outcome["equal"] for outcome in outcomes), outcomes
    newest = 2  # two undisturbed saves come first
    for outcome in outcomes:
        assert outcome["resumed"] in (newest, outcome["killed_at"]), outcome
        newest = outcome["resumed"]
    # Enough kills interrupted a save.
    assert sum(outcome["torn"] for outcome in outcomes) >= KILLS // 4, outcomes
