"""Recorder of a run on rank 0: metrics.jsonl, the progress line, trackers and loss.png.

metrics.jsonl is written first and has every step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from torchmm.common.log import JsonlWriter, report_progress
from torchmm.recipe.training_section import MetricsConfig
from torchmm.training.console import ProgressLine, plot_loss
from torchmm.training.metrics import Record
from torchmm.training.tracking.trackers import Sink, TrackedRun, start_trackers


class MetricsRecorder:
    """Writer of the records of a run, on rank 0.

    Args:
        config: Section `[metrics]` of the recipe.
        run_dir: Directory of the run.
        name: Name of the run.
        steps: Number of steps of the run.
        start_step: Number of finished steps. Records of later steps, which a run wrote after its
            last checkpoint, are removed, because they will be written again.
        recipe: Resolved recipe.
        console: Console of the progress line.
        log: Logger of rank 0.
    """

    def __init__(
        self,
        config: MetricsConfig,
        run_dir: Path,
        *,
        name: str,
        steps: int,
        start_step: int,
        recipe: dict[str, Any],
        console: Console,
        log: logging.Logger,
    ) -> None:
        self._log = log
        self._log_interval = config.log_interval
        self._steps = steps
        self._run_dir = run_dir
        self._jsonl = JsonlWriter(run_dir / "metrics.jsonl", start_step)
        run = TrackedRun(config, run_dir, name, recipe, log, start_step)
        self._trackers = start_trackers(run)
        self._sinks: list[Sink] = [ProgressLine(console, steps, start_step), *self._trackers]
        self._sources: list[Callable[[], Mapping[str, Any]]] = []
        self._last: Record = {}
        """Record of the last step, as it was written."""

    def add_source(self, take: Callable[[], Mapping[str, Any]]) -> None:
        """Call `take` for each record before it is written, and add its result to the record.

        Use it for metrics that become available at any time, for example in a background thread.
        Scores are added to the scores of the record.
        """
        self._sources.append(take)

    def record(self, record: Record) -> bool:
        """Write a step to metrics.jsonl and, every `log_interval` steps, show it.

        Returns:
            Whether the step was shown.
        """
        record = dict(record)
        for take in self._sources:
            added = dict(take())
            if scores := added.pop("scores", None):
                added["scores"] = {**(record["scores"] or {}), **scores}
            record |= added
        self._last = record
        self._jsonl.write(record)
        shown = record["step"] % self._log_interval == 0 or record["step"] == self._steps
        shown = shown or record["validation_loss"] is not None
        for sink in self._sinks if shown else ():
            sink.emit(record)
        return shown

    def add_scores(self, scores: Mapping[str, float]) -> None:
        """Add scores that became available after the last step to its record."""
        scores = {**(self._last["scores"] or {}), **scores}
        self._last = {**self._last, "scores": scores}
        self._jsonl.replace_last(self._last)
        for tracker in self._trackers:
            tracker.emit({"step": self._last["step"], "scores": scores})

    @report_progress("closing metrics and trackers")
    def close(self) -> None:
        """Finish all sinks and plot loss.png. A run does not fail because of the plot."""
        self._sources.clear()  # they may reference the run, which references this recorder
        try:
            self._jsonl.close()
        finally:
            for sink in self._sinks:
                sink.close()
        image_file = self._run_dir / "loss.png"
        try:
            plot_loss(self._run_dir / "metrics.jsonl", image_file)
        except (OSError, ImportError) as error:
            self._log.warning("cannot plot %s: %s", image_file, error)
