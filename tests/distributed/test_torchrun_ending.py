"""What torchrun prints last says why a run ended."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_last_that_torchrun_prints_has_the_reason(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += [str(ROOT / "train.py"), "--config", str(tmp_path / "gone.toml")]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode
    before, found, cause = ran.stderr.rpartition("Root Cause")
    assert found and "ConfigError: " in cause and "gone.toml" in cause
    assert before.count("ConfigError: ") >= 1  # where it happened, once
