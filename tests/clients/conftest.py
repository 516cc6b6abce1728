"""The environment of other programs, the exports that they open, and their answers."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from client_cases import CASES, Case, make_case

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
Answers = dict[str, Any]
SETTINGS = {
    **dict.fromkeys(("OMP_NUM_THREADS", "HF_HUB_OFFLINE"), "1"),
    **dict.fromkeys(("VLLM_CPU_KVCACHE_SPACE", "VLLM_NO_USAGE_STATS"), "1"),
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
"""Environment variables: one thread, no network access, 1 GiB for keys and values."""
NOT_INHERITED = {"PYTHONPATH", "RANK", "LOCAL_RANK", "WORLD_SIZE"}
"""Environment variables of the tests. The last three are of the process group of a test."""


@pytest.fixture(scope="session")
def clients_python() -> Path:
    """Return the Python of the environment with other programs; create it if necessary."""
    process = subprocess.run(
        ["bash", str(HERE / "environment.sh")], capture_output=True, text=True, check=False
    )
    if process.returncode:
        lines = process.stderr.strip().splitlines() or ["no reason"]
        pytest.skip(f"no environment of other programs: {lines[-1]}")
    return ROOT / ".clients" / "bin" / "python"


@pytest.fixture(scope="session")
def cases(tmp_path_factory, real_data) -> dict[str, Case]:
    """Return exports by family."""
    root = tmp_path_factory.mktemp("exports")
    return {name: make_case(name, root / name.replace(" ", "_"), real_data) for name in CASES}


@pytest.fixture(scope="session")
def ask(clients_python, tmp_path_factory) -> Callable[..., Answers]:
    """Return a function that runs one of `programs/` on cases and returns answers and versions."""

    def run(program: str, cases: list[Case], *uses: str) -> Answers:
        directory = tmp_path_factory.mktemp(program)
        jobs, answers = directory / "jobs.json", directory / "answers.json"
        jobs.write_text(json.dumps([case.job() for case in cases]))
        command = [clients_python, HERE / "programs" / f"{program}.py", jobs, answers, *uses]
        environment = {k: v for k, v in os.environ.items() if k not in NOT_INHERITED}
        process = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            timeout=360,
            env={**environment, **SETTINGS},
        )
        assert answers.exists(), process.stderr[-3000:]
        return json.loads(answers.read_text())

    return run


@pytest.fixture
def note(request) -> Callable[[str, str, str, str], None]:
    """Return a function that records the result of a program, for `scripts/client_table.py`."""
    file = request.config.getoption("--clients")

    def write(family: str, client: str, version: str, what: str) -> None:
        if file is not None:
            line = {"family": family, "client": client, "version": version, "what": what}
            with file.open("a") as out:
                out.write(json.dumps(line) + "\n")

    return write
