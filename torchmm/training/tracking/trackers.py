"""Trackers (the run's page, Weights & Biases, TensorBoard, Trackio) that can never stop or slow
training.

Each tracker lives in a thread of its own behind a bounded queue: connecting, sending and closing
happen there, and the first failure switches the tracker off with one warning. metrics.jsonl holds
every record anyway.
"""

from __future__ import annotations

import logging
import queue
import secrets
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import tomli_w

from torchmm.extensions.reports.local_trackers import (
    TensorBoardTracker,
    TrackioTracker,
    tensorboard_writer,
    trackio_start,
)
from torchmm.extensions.reports.page.pages import PAGE, PageSink
from torchmm.recipe.training_section import MetricsConfig
from torchmm.training.tracking.figures import Record
from torchmm.training.tracking.run_files import RunFiles, WholeModels, code_version

CLOSE_TIMEOUT_S = 60.0
ARTIFACTS_TIMEOUT_S = 3600.0
"""The same where checkpoints or exports are to be sent, which takes as long as they are large."""
QUEUE_LENGTH = 1000


class Sink(Protocol):
    """Takes the record of each step; see `torchmm.training.tracking.figures` for its fields."""

    def emit(self, record: Record) -> None:
        """Show or store one step."""

    def close(self) -> None:
        """Finish; nothing is emitted afterwards."""


def make_trackers(
    config: MetricsConfig,
    run_dir: Path,
    name: str,
    recipe: Record,
    log: logging.Logger,
    start_step: int = 0,
) -> list[Sink]:
    """The trackers a recipe asks for. `recipe`, resolved, and the code's version go with the run.

    Args:
        start_step: of the checkpoint that is resumed, whose run trackers continue; 0: none is.

    Raises:
        ConfigError: TensorBoard or Trackio is asked for and not installed.
    """
    trackers: list[Sink] = []
    files = partial(RunFiles, run_dir, start_step)
    resumed = start_step > 0
    if config.page:
        trackers.append(BackgroundSink(PAGE, partial(PageSink, run_dir), log))
    if config.wandb != "disabled":
        close_s = ARTIFACTS_TIMEOUT_S if config.artifacts else CLOSE_TIMEOUT_S
        run_id = _wandb_run_id(run_dir, resumed)
        models = WholeModels(run_dir, config.artifacts)  # what is there now belongs to the past
        # Imported on first use: the import takes 0.4 s of CPU time.
        from torchmm.training.tracking import wandb_tracker  # noqa: PLC0415

        start_wandb = lambda: wandb_tracker.WandbTracker(  # noqa: E731
            wandb_tracker.WandbRun(
                config.wandb, config.wandb_project, run_dir, name, run_id, _told(recipe),
                finish_s=close_s / 2,
            ),
            files(), models, log,
        )  # fmt: skip
        trackers.append(BackgroundSink("Weights & Biases", start_wandb, log, close_s))
    if config.tensorboard:
        writer = partial(
            tensorboard_writer(),
            str(run_dir / "tensorboard"),
            purge_step=start_step + 1 if resumed else None,  # what is repeated replaces itself
        )
        start_tensorboard = lambda: TensorBoardTracker(  # noqa: E731
            writer(), {"recipe": _as_text(recipe), "code": _as_text(code_version())}, files()
        )
        trackers.append(BackgroundSink("TensorBoard", start_tensorboard, log))
    if config.trackio:
        start = trackio_start()
        start_trackio = lambda: TrackioTracker(  # noqa: E731
            start, config.wandb_project, name, _told(recipe), resumed
        )
        trackers.append(BackgroundSink("Trackio", start_trackio, log))
    return trackers


def _wandb_run_id(run_dir: Path, resumed: bool) -> str:
    """Return the id of the Weights & Biases run and store it in the run directory.

    A resumed run continues the run of the stored id. The steps that it repeats are logged with the
    same numbers; Weights & Biases keeps the first.
    """
    file = run_dir / "wandb_run_id"
    if not resumed or not file.is_file():
        file.write_text(secrets.token_hex(4) + "\n")
    return file.read_text().strip()


def _told(recipe: Record) -> Record:
    """The resolved recipe, and what computes it."""
    return {**recipe, "code": code_version()}


def _as_text(told: Record) -> str:
    """As TOML, which has no null."""
    return tomli_w.dumps(_without_null(told))


def _without_null(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_null(v) for key, v in value.items() if v is not None}
    if isinstance(value, (list, tuple)):
        return [_without_null(v) for v in value if v is not None]
    return value


class BackgroundSink:
    """Runs a sink in a daemon thread until its first failure."""

    def __init__(
        self,
        label: str,
        start: Callable[[], Sink],
        log: logging.Logger,
        close_s: float = CLOSE_TIMEOUT_S,
    ) -> None:
        """Start `start()` in the background; records queue up until it returns.

        Args:
            close_s: how long its end is waited for.
        """
        self._label = label
        self._start = start
        self._log = log
        self._close_s = close_s
        self._queue: queue.Queue[Record | None] = queue.Queue(QUEUE_LENGTH)
        self._off = threading.Event()
        self._switching = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=label, daemon=True)
        self._thread.start()

    def emit(self, record: Record) -> None:
        """Hand over one record without waiting."""
        if self._off.is_set():
            return
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self._switch_off(f"does not keep up ({QUEUE_LENGTH} records behind)")

    def close(self) -> None:
        """Let the sink finish, but wait no longer than `close_s`."""
        timeout_s = self._close_s
        if self._off.is_set():
            return
        try:
            self._queue.put(None, timeout=timeout_s)
        except queue.Full:
            self._switch_off("is stuck")
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._switch_off(f"did not finish within {timeout_s:.0f} s")

    def _run(self) -> None:
        try:
            sink = self._start()
            while (record := self._queue.get()) is not None and not self._off.is_set():
                sink.emit(record)
            sink.close()
        except Exception as error:  # counted: the first one ends the tracker
            self._switch_off(f"failed: {type(error).__name__}: {error}")

    def _switch_off(self, reason: str) -> None:
        with self._switching:
            if not self._off.is_set():
                self._log.warning(
                    "%s %s; it is off from here on, metrics.jsonl goes on", self._label, reason
                )
                self._off.set()  # last: a closing run does not wait for what is off already
