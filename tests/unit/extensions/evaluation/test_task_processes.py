"""The process that answers benchmarks, with a program in its place that takes no time."""

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
    """program(body): a Python that does this instead of what it is asked; `output` is its file."""

    def make(body: str) -> str:
        file = tmp_path / "python"
        head = "import json, os, sys, time\noutput = sys.argv[sys.argv.index('--output') + 1]\n"
        file.write_text(f"#!{sys.executable}\n{head}{body}\n")
        file.chmod(0o755)
        return str(file)

    return make


def started(python: str, run_dir: Path, **settings) -> BenchmarkRunner:
    config = BenchmarksConfig(tasks=["task"], python=python, **settings)
    found = BenchmarkRunner(config, run_dir, logging.getLogger("torchmm.test"))
    found.start(4, snapshot(run_dir, 4))
    return found


def snapshot(run_dir: Path, step: int) -> Path:
    folder = run_dir / f"benchmarks/step-{step}"
    (folder / "hf").mkdir(parents=True, exist_ok=True)
    return folder


def awaited(benchmarks: BenchmarkRunner):
    deadline = time.monotonic() + 60
    while (found := benchmarks.poll()) is None and time.monotonic() < deadline:
        time.sleep(0.02)
    return found


def finish(benchmarks: BenchmarkRunner):
    return benchmarks.finish(lambda: False)


WRITES = f"open(output, 'w').write({json.dumps(SCORES)!r})"


def test_scores_come_once_and_the_snapshot_goes(program, tmp_path, caplog):
    caplog.set_level("INFO")
    benchmarks = started(program(WRITES), tmp_path)
    found = awaited(benchmarks)
    assert found.scores == {"task/exact_match": 0.25} and found.step == 4
    assert benchmarks.poll() is None
    assert read_evaluations(tmp_path) == [found]
    assert "benchmarks of step 4: task/exact_match 0.2500" in caplog.text
    assert not (tmp_path / "benchmarks/step-4/hf").exists()


def test_what_fails_is_told_and_counted(program, tmp_path, caplog):
    (tmp_path / "benchmarks/step-4").mkdir(parents=True)
    (tmp_path / "benchmarks/step-4/scores.json").write_text(json.dumps(SCORES))  # stale
    benchmarks = started(program("print('no such task'); sys.exit(0)"), tmp_path)
    finish(benchmarks)
    assert benchmarks.failed == 1 and read_evaluations(tmp_path) == []
    assert "benchmarks of step 4 exited with 0 and without scores (1 failed so far)" in caplog.text
    assert "no such task" in (tmp_path / "benchmarks/step-4/log.txt").read_text()


def test_one_at_a_time_and_none_longer_than_allowed(program, tmp_path, caplog):
    benchmarks = started(program("time.sleep(600)"), tmp_path, timeout_s=0.1)
    benchmarks.start(5, snapshot(tmp_path, 5))
    assert "skipping benchmarks of step 5, because those of step 4 are still running" in caplog.text
    assert not (tmp_path / "benchmarks/step-5").exists()
    begin = time.monotonic()
    finish(benchmarks)
    assert time.monotonic() - begin < 60 and benchmarks.failed == 1


@pytest.mark.parametrize("polled", [False, True], ids=["running", "finished"])
def test_the_last_one_waits_for_the_one_before(polled, program, tmp_path):
    there = tmp_path / "go"
    slow = f"while not os.path.exists({str(there)!r}): time.sleep(0.02)"
    benchmarks = started(program(f"{slow}\n{WRITES}"), tmp_path)
    benchmarks.start(5, snapshot(tmp_path, 5), last=True)
    assert benchmarks.poll() is None and (tmp_path / "benchmarks/step-5/hf").exists()
    there.touch()
    found = [awaited(benchmarks)] if polled else []
    found += finish(benchmarks)
    assert [evaluation.step for evaluation in found] == [4, 5]
    assert read_evaluations(tmp_path) == found
    assert not list(tmp_path.glob("benchmarks/*/hf")) and benchmarks.failed == 0


def test_a_signal_ends_the_waiting(program, tmp_path):
    benchmarks = started(program("time.sleep(600)"), tmp_path)
    benchmarks.start(5, snapshot(tmp_path, 5), last=True)
    asked = []
    begin = time.monotonic()
    assert benchmarks.finish(lambda: asked.append(True) or len(asked) > 1) == []
    assert time.monotonic() - begin < 60
    assert not list(tmp_path.glob("benchmarks/*/hf"))


def test_a_run_that_ends_early_ends_them(program, tmp_path):
    benchmarks = started(program("time.sleep(600)"), tmp_path)
    benchmarks.start(5, snapshot(tmp_path, 5), last=True)
    benchmarks.close()
    finish(benchmarks)
    assert benchmarks.poll() is None and benchmarks.failed == 0
    assert not (tmp_path / "benchmarks/step-5").exists()


def test_the_process_is_no_rank_and_sees_the_gpus_it_may(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert "RANK" not in environment("") and environment("")["CUDA_VISIBLE_DEVICES"] == ""
    assert environment(None)["CUDA_VISIBLE_DEVICES"] == "0,1"
    config = BenchmarksConfig(tasks=["a", "b"], folder="more", limit=7)
    words = command(config, Path("/hf"), Path("/out.json"))
    given = ["--tasks", "a", "b", "--include", "more"]
    assert words[words.index("--tasks") :] == [*given, "--limit", "7"]
