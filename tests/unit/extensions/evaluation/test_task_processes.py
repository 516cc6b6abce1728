"""Benchmark processes, with a substitute for the benchmark program."""

import json
import logging
import sys
import time
from pathlib import Path

import pytest

from torchmm.extensions.evaluation.benchmarks import BenchmarkRunner, command, environment
from torchmm.extensions.evaluation.section import BenchmarksConfig
from torchmm.training.tracking.evaluations import read_evaluations

SCORES = {
    "scores": {"task/exact_match": 0.25, "task/of_nothing": float("nan")},
    "samples": {"task": 4},
}


@pytest.fixture
def program(tmp_path):
    """Return a function that writes a Python program with a body.

    `output` is the path of its results.
    """

    def make(body: str) -> str:
        file = tmp_path / "python"
        head = "import json, os, sys, time\noutput = sys.argv[sys.argv.index('--output') + 1]\n"
        file.write_text(f"#!{sys.executable}\n{head}{body}\n")
        file.chmod(0o755)
        return str(file)

    return make


def start_benchmarks(python: str, run_dir: Path, **settings) -> BenchmarkRunner:
    config = BenchmarksConfig(tasks=["task"], python=python, **settings)
    results = BenchmarkRunner(config, run_dir, logging.getLogger("torchmm.test"))
    results.start(4, snapshot(run_dir, 4))
    return results


def snapshot(run_dir: Path, step: int) -> Path:
    folder = run_dir / f"benchmarks/step-{step}"
    (folder / "hf").mkdir(parents=True, exist_ok=True)
    return folder


def wait_for_result(benchmarks: BenchmarkRunner):
    deadline = time.monotonic() + 60
    while (results := benchmarks.poll()) is None and time.monotonic() < deadline:
        time.sleep(0.02)
    return results


def finish(benchmarks: BenchmarkRunner):
    return benchmarks.finish(lambda: False)


WRITES = f"open(output, 'w').write({json.dumps(SCORES)!r})"


def test_scores_are_returned_once_without_snapshot(program, tmp_path, caplog):
    caplog.set_level("INFO")
    benchmarks = start_benchmarks(program(WRITES), tmp_path)
    actual = wait_for_result(benchmarks)
    assert actual.scores == {"task/exact_match": 0.25} and actual.step == 4
    assert benchmarks.poll() is None
    assert read_evaluations(tmp_path) == [actual]
    assert "benchmarks of step 4: task/exact_match 0.2500" in caplog.text
    assert not (tmp_path / "benchmarks/step-4/hf").exists()


def test_failed_benchmark_is_logged_and_counted(program, tmp_path, caplog):
    (tmp_path / "benchmarks/step-4").mkdir(parents=True)
    (tmp_path / "benchmarks/step-4/scores.json").write_text(json.dumps(SCORES))  # stale
    benchmarks = start_benchmarks(program("print('no such task'); sys.exit(0)"), tmp_path)
    finish(benchmarks)
    assert benchmarks.failed == 1 and read_evaluations(tmp_path) == []
    assert "benchmarks of step 4 exited with 0 and without scores (1 failed so far)" in caplog.text
    assert "no such task" in (tmp_path / "benchmarks/step-4/log.txt").read_text()


def test_benchmarks_are_sequential_and_time_limited(program, tmp_path, caplog):
    benchmarks = start_benchmarks(program("time.sleep(600)"), tmp_path, timeout_s=0.1)
    benchmarks.start(5, snapshot(tmp_path, 5))
    assert "skipping benchmarks of step 5, because those of step 4 are still running" in caplog.text
    assert not (tmp_path / "benchmarks/step-5").exists()
    begin = time.monotonic()
    finish(benchmarks)
    assert time.monotonic() - begin < 60 and benchmarks.failed == 1


@pytest.mark.parametrize("polled", [False, True], ids=["running", "finished"])
def test_last_benchmark_waits_for_previous_one(polled, program, tmp_path):
    signal_file = tmp_path / "go"
    slow = f"while not os.path.exists({str(signal_file)!r}): time.sleep(0.02)"
    benchmarks = start_benchmarks(program(f"{slow}\n{WRITES}"), tmp_path)
    benchmarks.start(5, snapshot(tmp_path, 5), last=True)
    assert benchmarks.poll() is None and (tmp_path / "benchmarks/step-5/hf").exists()
    signal_file.touch()
    actual = [wait_for_result(benchmarks)] if polled else []
    actual += finish(benchmarks)
    assert [evaluation.step for evaluation in actual] == [4, 5]
    assert read_evaluations(tmp_path) == actual
    assert not list(tmp_path.glob("benchmarks/*/hf")) and benchmarks.failed == 0


def test_stop_signal_ends_waiting(program, tmp_path):
    benchmarks = start_benchmarks(program("time.sleep(600)"), tmp_path)
    benchmarks.start(5, snapshot(tmp_path, 5), last=True)
    polls = []
    begin = time.monotonic()
    assert benchmarks.finish(lambda: polls.append(True) or len(polls) > 1) == []
    assert time.monotonic() - begin < 60
    assert not list(tmp_path.glob("benchmarks/*/hf"))


def test_early_exit_terminates_benchmarks(program, tmp_path):
    benchmarks = start_benchmarks(program("time.sleep(600)"), tmp_path)
    benchmarks.start(5, snapshot(tmp_path, 5), last=True)
    benchmarks.close()
    finish(benchmarks)
    assert benchmarks.poll() is None and benchmarks.failed == 0
    assert not (tmp_path / "benchmarks/step-5").exists()


def test_benchmark_environment_has_no_rank(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert "RANK" not in environment("") and environment("")["CUDA_VISIBLE_DEVICES"] == ""
    assert environment(None)["CUDA_VISIBLE_DEVICES"] == "0,1"
    config = BenchmarksConfig(tasks=["a", "b"], folder="more", limit=7)
    arguments = command(config, Path("/hf"), Path("/out.json"))
    expected = ["--tasks", "a", "b", "--include", "more"]
    assert arguments[arguments.index("--tasks") :] == [*expected, "--limit", "7"]
