"""The last lines of torchrun contain the cause of a failed run."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_torchrun_prints_cause_last(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += [str(ROOT / "train.py"), "--config", str(tmp_path / "gone.toml")]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert process.returncode
    before, separator, cause = process.stderr.rpartition("Root Cause")
    assert separator and "ConfigError: " in cause and "gone.toml" in cause
    assert before.count("ConfigError: ") >= 1  # the traceback of the rank
