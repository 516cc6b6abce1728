"""Tasks of lmms-eval, answered by a process of its own while training goes on, or afterwards.

That process has a Python of its own (`scripts/lmms_eval.sh`), as lmms-eval wants other versions of
packages than training does. It gets an exported snapshot and leaves a file with scores, so a task
that fails, hangs or takes long costs the run nothing but a line in its log.
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
from typing import NamedTuple

from torchmm.common.errors import ConfigError
from torchmm.common.log import working
from torchmm.extensions.evaluation.section import BenchmarksConfig
from torchmm.training.tracking.evaluations import Evaluation, append_evaluation

PROGRAM = "torchmm.extensions.evaluation.lmms_tasks"
FOLDER = "benchmarks"
WAIT_S = 0.2
"""Until it is asked again whether anybody waits."""


def command(config: BenchmarksConfig, export: Path, output: Path) -> list[str]:
    """What answers the tasks of `config`, and writes scores into `output`."""
    words = [config.python, "-m", PROGRAM, str(export.resolve()), "--output", str(output.resolve())]
    words += ["--batch-size", str(config.batch_size), "--tasks", *config.tasks]
    words += [] if config.folder is None else ["--include", config.folder]
    return words + ([] if config.limit is None else ["--limit", str(config.limit)])


def environment(devices: str | None) -> dict[str, str]:
    """Of that process, which is no rank.

    Args:
        devices: numbers of the GPUs that it sees; None: those that this process sees.
    """
    ranks = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {name: value for name, value in os.environ.items() if name not in ranks}
    here = str(Path(__file__).parents[3])
    paths = [here, *filter(None, [kept.get("PYTHONPATH")])]
    kept["PYTHONPATH"] = os.pathsep.join(paths)
    return kept if devices is None else kept | {"CUDA_VISIBLE_DEVICES": devices}


def answer(config: BenchmarksConfig, export: Path, output: Path, step: int | None) -> Evaluation:
    """Answers the tasks now, showing what lmms-eval says.

    Raises:
        ConfigError: it failed.
    """
    code = subprocess.run(
        command(config, export, output), env=environment(None), check=False, stdout=sys.stderr
    ).returncode
    if code or not output.exists():
        raise ConfigError(f"lmms-eval ended with {code} and without scores; see above")
    return _scores(output, export, step)


class _Started(NamedTuple):
    process: subprocess.Popen[bytes]
    step: int
    folder: Path


class Benchmarks:
    """Those of one run, on rank 0.

    Args:
        run_dir: snapshots and logs are below it, in `benchmarks/step-N`.
    """

    def __init__(self, config: BenchmarksConfig, run_dir: Path, logger: logging.Logger) -> None:
        self._config, self._run_dir, self._logger = config, run_dir, logger
        self._started: _Started | None = None
        self._last: tuple[int, Path] | None = None
        """Step and folder of a snapshot that waits for the one before."""
        self.failed = 0

    def start(self, step: int, folder: Path, last: bool = False) -> None:
        """Answers the tasks with the export in `folder`/hf, which is removed then; unless earlier
        ones are not through.

        Args:
            last: whether none comes after it: then `finish` answers with it in any case.
        """
        if self._started is not None and last:
            self._last = step, folder
            return
        if self._started is not None:
            self._logger.warning(
                "no benchmarks of step %d: those of step %d are not through; raise "
                "validation.benchmarks.interval",
                step,
                self._started.step,
            )
            shutil.rmtree(folder)
            return
        (folder / "scores.json").unlink(missing_ok=True)  # of a run that was resumed before it
        words = command(self._config, folder / "hf", folder / "scores.json")
        own = environment("" if self._config.gpu is None else str(self._config.gpu))
        nothing = subprocess.DEVNULL
        with (folder / "log.txt").open("wb") as log:
            process = subprocess.Popen(words, env=own, stdin=nothing, stdout=log, stderr=log)
        self._started = _Started(process, step, folder)

    def poll(self) -> Evaluation | None:
        """What has come to an end, once."""
        started = self._started
        if started is None or started.process.poll() is None:
            return None
        self._started = None
        shutil.rmtree(started.folder / "hf", ignore_errors=True)
        output = started.folder / "scores.json"
        if started.process.returncode or not output.exists():
            self.failed += 1
            self._logger.warning(
                "benchmarks of step %d ended with %s and without scores (%d failed so far); see %s",
                started.step,
                started.process.returncode,
                self.failed,
                started.folder / "log.txt",
            )
            return None
        found = _scores(output, started.folder / "hf", started.step)
        append_evaluation(self._run_dir, found)
        shown = ", ".join(f"{name} {value:.4f}" for name, value in found.scores.items())
        self._logger.info("benchmarks of step %d: %s", started.step, shown)
        return found

    @working("waiting for benchmarks")
    def finish(self, stopped: Callable[[], bool]) -> list[Evaluation]:
        """Waits for what is being answered, for `timeout_s` at most; for the last snapshot as long
        again, if it has waited itself. What has come.

        Args:
            stopped: whether nobody wants to wait any more.
        """
        found = [self._wait(stopped)]
        if self._last is not None and not stopped():
            step, folder = self._last
            self._last = None
            self.start(step, folder)
            found.append(self._wait(stopped))
        self.close()
        return [evaluation for evaluation in found if evaluation is not None]

    def _wait(self, stopped: Callable[[], bool]) -> Evaluation | None:
        if self._started is None:
            return None
        process = self._started.process
        limit_s = self._config.timeout_s
        self._logger.info(
            "waiting for the benchmarks of step %d, %g s at most", self._started.step, limit_s
        )
        ends_s = time.monotonic() + limit_s
        while process.poll() is None and not stopped() and time.monotonic() < ends_s:
            with suppress(subprocess.TimeoutExpired):
                process.wait(WAIT_S)
        process.kill()
        process.wait()
        return self.poll()

    def close(self) -> None:
        """Ends what is being answered; its scores are lost."""
        if self._last is not None:
            shutil.rmtree(self._last[1], ignore_errors=True)
            self._last = None
        if self._started is not None:
            self._started.process.kill()
            self._started.process.wait()
            self._started = None


def _scores(output: Path, export: Path, step: int | None) -> Evaluation:
    found = json.loads(output.read_text())
    numbers = {name: value for name, value in found["scores"].items() if math.isfinite(value)}
    return Evaluation(str(export), step, numbers, found["samples"])
