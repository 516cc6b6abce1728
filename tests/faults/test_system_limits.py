"""Errors name systems with little shared memory, few open files or a long TMPDIR."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_recipe import arguments
from train_server import TRAIN

from torchmm.training.shutdown import read_status

pytestmark = pytest.mark.slow


def run_train(arguments: list[str], before: str, **env: str) -> subprocess.CompletedProcess:
    """Run train.py after shell commands, in a separate mount namespace."""
    command = ["unshare", "-m", "sh", "-c", f'{before} && exec "$@"', "sh", sys.executable, TRAIN]
    process = subprocess.run(
        [*command, *arguments],
        capture_output=True, text=True, check=False, timeout=120, env={**os.environ, **env},
    )  # fmt: skip
    if "unshare failed" in process.stderr or "mount:" in process.stderr:
        pytest.skip("this user cannot mount")
    return process


def shared_memory(options: str) -> str:
    return f"mount -t tmpfs -o {options} tmpfs /dev/shm"


def test_small_shared_memory_warns_then_ends_run(tmp_path: Path, real_data):
    changes = {"data__workers": 2, "training__global_batch_size": 64}
    process = run_train(
        arguments(tmp_path / "run", real_data, **changes), shared_memory("size=64k")
    )
    assert process.returncode == 3, process.stderr
    assert "prefetched steps of 1 local ranks require" in process.stdout
    status = read_status(tmp_path / "run")
    assert status.exit_code == 3 and "--shm-size" in status.message
    assert "No space left on device" in status.message and "Traceback" not in process.stderr


@pytest.mark.parametrize(
    ("before", "env", "message"),
    [
        (shared_memory("ro"), {}, "data.workers = 2 requires /dev/shm, which is not writable"),
        ("ulimit -n 64", {}, "limit of open files per process is 64 (ulimit -n)"),
        ("mkdir -p $TMPDIR", {"TMPDIR": "x" * 100}, "TMPDIR = "),
    ],
)
def test_unusable_system_is_rejected_before_start(tmp_path, real_data, before, env, message):
    env = {name: f"{tmp_path}/{value}" for name, value in env.items()}
    command = arguments(tmp_path / "run", real_data, data__workers=2)
    process = run_train(command, before, **env)
    assert process.returncode == 2, process.stderr
    assert "ConfigError" in process.stderr and "Traceback" not in process.stderr
    assert message in process.stderr
    assert not (tmp_path / "run").exists()
