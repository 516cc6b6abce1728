"""Run lmms-eval tasks in a separate process, during or after training.

The process has a separate Python (`scripts/lmms_eval.sh`), because lmms-eval requires other package
versions than training. It reads an exported snapshot and writes a file with scores. A task that
fails, hangs or is slow therefore does not affect training.
"""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from torchmm.common.errors import ConfigError
from torchmm.common.log import report_progress
from torchmm.extensions.evaluation.section import BenchmarksConfig
from torchmm.training.tracking.evaluations import Evaluation, append_evaluation

PROGRAM = "torchmm.extensions.evaluation.lmms_tasks"
FOLDER = "benchmarks"
WAIT_S = 0.2
"""Interval in seconds at which a wait checks for stop signals."""


def command(config: BenchmarksConfig, export: Path, output: Path) -> list[str]:
    """Return the command that evaluates the tasks of `config` and writes scores to `output`."""
    arguments = [
        config.python,
        "-m",
        PROGRAM,
        str(export.resolve()),
        "--output",
        str(output.resolve()),
    ]
    arguments += ["--batch-size", str(config.batch_size), "--tasks", *config.tasks]
    arguments += [] if config.folder is None else ["--include", config.folder]
    return arguments + ([] if config.limit is None else ["--limit", str(config.limit)])


def environment(devices: str | None) -> dict[str, str]:
    """Return the environment of the process, without the variables of ranks.

    Args:
        devices: Indices of its visible GPUs. If None, those of this process.
    """
    ranks = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    inherited = {name: value for name, value in os.environ.items() if name not in ranks}
    repository = str(Path(__file__).parents[3])
    paths = [repository, *filter(None, [inherited.get("PYTHONPATH")])]
    inherited["PYTHONPATH"] = os.pathsep.join(paths)
    return inherited if devices is None else inherited | {"CUDA_VISIBLE_DEVICES": devices}


def run_in_foreground(
    config: BenchmarksConfig, export: Path, output: Path, step: int | None
) -> Evaluation:
    """Evaluate the tasks in the foreground and show the output of lmms-eval.

    Raises:
        ConfigError: Lmms-eval failed.
    """
    code = subprocess.run(
        command(config, export, output), env=environment(None), check=False, stdout=sys.stderr
    ).returncode
    if code or not output.exists():
        raise ConfigError(f"lmms-eval exited with code {code} and without scores; see above")
    return _scores(output, export, step)


class BenchmarkRunner:
    """Evaluations of the snapshots of one run, on rank 0.

    Args:
        config: Recipe section `[validation.benchmarks]`.
        run_dir: Run directory. Snapshots and logs are in `benchmarks/step-N`.
        logger: Logger of the run.
    """

    def __init__(self, config: BenchmarksConfig, run_dir: Path, logger: logging.Logger) -> None:
        self._config, self._run_dir, self._logger = config, run_dir, logger
        self._process: subprocess.Popen[bytes] | None = None
        self._step = 0
        """Step of the snapshot that the process evaluates."""
        self._folder = run_dir
        """Folder of that snapshot."""
        self._last: tuple[int, Path] | None = None
        """Step and folder of the last snapshot, while an earlier snapshot is evaluated."""
        self.failed = 0

    def start(self, step: int, folder: Path, last: bool = False) -> None:
        """Start the evaluation of the export in `folder`/hf, which is removed afterwards.

        If an evaluation is running, the snapshot is removed instead.

        Args:
            step: Training step of the snapshot.
            folder: Folder of the snapshot.
            last: Whether it is the last snapshot of the run, which `finish` always evaluates.
        """
        if self._process is not None and last:
            self._last = step, folder
            return
        if self._process is not None:
            self._logger.warning(
                "skipping benchmarks of step %d, because those of step %d are still running; "
                "raise validation.benchmarks.interval",
                step,
                self._step,
            )
            shutil.rmtree(folder)
            return
        # A run that was later resumed before this step may have written scores.
        (folder / "scores.json").unlink(missing_ok=True)
        arguments = command(self._config, folder / "hf", folder / "scores.json")
        variables = environment("" if self._config.gpu is None else str(self._config.gpu))
        nothing = subprocess.DEVNULL
        with (folder / "log.txt").open("wb") as log:
            self._process = subprocess.Popen(
                arguments, env=variables, stdin=nothing, stdout=log, stderr=log
            )
        self._step, self._folder = step, folder

    def poll(self) -> Evaluation | None:
        """Return the evaluation that has finished since the last call, if any."""
        if self._process is None or self._process.poll() is None:
            return None
        code = self._process.returncode
        self._process = None
        shutil.rmtree(self._folder / "hf", ignore_errors=True)
        output = self._folder / "scores.json"
        if code or not output.exists():
            self.failed += 1
            self._logger.warning(
                (
                    "benchmarks of step %d exited with %s and without scores (%d failed so far); "
                    "see %s"
                ),
                self._step,
                code,
                self.failed,
                self._folder / "log.txt",
            )
            return None
        evaluation = _scores(output, self._folder / "hf", self._step)
        append_evaluation(self._run_dir, evaluation)
        shown = ", ".join(f"{name} {value:.4f}" for name, value in evaluation.scores.items())
        self._logger.info("benchmarks of step %d: %s", self._step, shown)
        return evaluation

    @report_progress("waiting for benchmarks")
    def finish(self, stopped: Callable[[], bool]) -> list[Evaluation]:
        """Wait for the running evaluation, then evaluate the last snapshot if it is queued.

        Each evaluation is limited to `timeout_s`.

        Args:
            stopped: Returns True if the wait should stop.

        Returns:
            Evaluations that have finished.
        """
        evaluations: list[Evaluation | None] = []
        while True:
            if self._process is None and self._last is not None and not stopped():
                step, folder = self._last
                self._last = None
                self.start(step, folder)
            if self._process is None:
                break
            self._logger.info(
                "waiting for the benchmarks of step %d, at most %g s",
                self._step,
                self._config.timeout_s,
            )
            ends_s = time.monotonic() + self._config.timeout_s
            while self._process.poll() is None and not stopped() and time.monotonic() < ends_s:
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(WAIT_S)
            self._process.kill()
            self._process.wait()
            evaluations.append(self.poll())
        self.close()
        return [evaluation for evaluation in evaluations if evaluation is not None]

    def close(self) -> None:
        """Stop the running evaluation and discard its scores."""
        if self._last is not None:
            shutil.rmtree(self._last[1], ignore_errors=True)
            self._last = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def _scores(output: Path, export: Path, step: int | None) -> Evaluation:
    """Return the finite scores in the output of lmms-eval."""
    results = json.loads(output.read_text())
    numbers = {name: value for name, value in results["scores"].items() if math.isfinite(value)}
    return Evaluation(str(export), step, numbers, results["samples"])
