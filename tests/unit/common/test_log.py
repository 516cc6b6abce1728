"""Tests of logging per rank, and of the JSON-lines file after kills and resumes."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys

import pytest
from rich.console import Console

from torchmm.common.log import JsonlWriter, setup_logging

WRITE_UNTIL_KILLED = """
import sys
from pathlib import Path
from torchmm.common.log import JsonlWriter
writer = JsonlWriter(Path(sys.argv[1]))
for step in range(1, 10**9):
    writer.write({"step": step, "loss": 0.5})
    if step == 1000:
        print("started", flush=True)
"""


def steps_in(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def write_steps(path, steps, last_step=0):
    writer = JsonlWriter(path, last_step)
    for step in steps:
        writer.write({"step": step})
    writer.close()


def test_resume_removes_steps_after_the_checkpoint(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, range(1, 8))
    write_steps(path, range(6, 9), last_step=5)
    assert steps_in(path) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_fresh_start_removes_all_steps(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, range(1, 4))
    write_steps(path, [1])
    assert steps_in(path) == [1]


@pytest.mark.parametrize("line", ['{"step": 3, "lo', "{}\n", "[]\n", "\x00\x00\n", '{"step": 3}'])
def test_incomplete_last_line_is_removed(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, [1, 2])
    with path.open("a") as file:
        file.write(line)
    write_steps(path, [3], last_step=10)
    assert steps_in(path) == [1, 2, 3]


def test_last_record_is_replaced(tmp_path):
    path = tmp_path / "m.jsonl"
    write_steps(path, [1, 2])
    writer = JsonlWriter(path, last_step=2)
    writer.write({"step": 3, "score": 0.5})
    writer.replace_last({"step": 3, "score": 0.5, "name": "\u00e9"})
    writer.replace_last({"step": 3})
    writer.write({"step": 4})
    writer.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == [{"step": step} for step in range(1, 5)]


def test_lines_survive_sigkill(tmp_path):
    path = tmp_path / "metrics.jsonl"
    command = [sys.executable, "-c", WRITE_UNTIL_KILLED, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        os.kill(process.pid, signal.SIGKILL)
    write_steps(path, [10**9], last_step=10**9)
    steps = steps_in(path)
    assert len(steps) > 1000
    assert steps[:-1] == list(range(1, len(steps)))


def test_non_finite_values_become_null(tmp_path):
    writer = JsonlWriter(tmp_path / "m.jsonl")
    writer.write({"step": 1, "loss": float("nan"), "grad_norm": float("inf"), "lr": 0.1})
    writer.close()
    record = json.loads((tmp_path / "m.jsonl").read_text())
    assert record == {"step": 1, "loss": None, "grad_norm": None, "lr": 0.1}


def test_warnings_are_logged_by_every_rank(tmp_path):
    printed = {}
    for rank in (0, 3):
        text = io.StringIO()
        log = setup_logging(tmp_path, rank, Console(file=text))
        log.info("info of %d", rank)
        log.warning("warning of %d", rank)
        printed[rank] = text.getvalue()
    assert "[rank 0] INFO info of 0" in printed[0]
    assert printed[3] == ""
    for rank in (0, 3):
        written = (tmp_path / "logs" / f"rank-{rank}.log").read_text()
        assert f"rank {rank} WARNING warning of {rank}" in written
        assert "info of" not in written


def test_repeated_setup_does_not_duplicate_messages(tmp_path):
    text = io.StringIO()
    console = Console(file=text)
    setup_logging(tmp_path, 0, console)
    setup_logging(tmp_path, 0, console).info("once")
    assert text.getvalue().count("once") == 1
