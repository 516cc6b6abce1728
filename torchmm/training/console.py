"""Console output of a run: the summary at the start, the progress line, and the loss plot."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from torchmm.training.metrics import METRICS, Record


def print_summary(console: Console, title: str, lines: Mapping[str, str]) -> None:
    """Print the label and value of each line as a table."""
    table = Table(title=title, title_justify="left", show_header=False, box=None)
    for label, value in lines.items():
        table.add_row(label, value, style=None)
    console.print(table)


class ProgressLine:
    """Progress of a run: a bar with metrics below it on a terminal, one line per step otherwise."""

    def __init__(self, console: Console, steps: int, start_step: int) -> None:
        """Start the progress line of a run of `steps` steps, `start_step` of which are finished."""
        self._console = console
        self._steps = steps
        self._emitted = 0
        self._mean_step_ms = 0.0
        self._bar: _Bar | None = None
        if console.is_terminal:
            self._bar = _Bar(console, steps, start_step)

    def emit(self, record: Record) -> None:
        """Show the metrics of one step."""
        step_ms = record["step_ms"]
        self._emitted += 1
        # The first step includes compilation and worker startup, so it is not used for the
        # estimate.
        remember = 0.8 if self._emitted > 2 else 0.0
        self._mean_step_ms = remember * self._mean_step_ms + (1 - remember) * step_ms
        eta_s = (self._steps - record["step"]) * self._mean_step_ms / 1e3
        line = describe_step(record, eta_s)
        if self._bar is not None:
            self._bar.show(record["step"], line)
        else:
            self._console.out(f"step {record['step']}/{self._steps} | {line}", highlight=False)

    def close(self) -> None:
        """Stop the bar. The last state remains on the screen."""
        if self._bar is not None:
            self._bar.stop()


class _Bar(Progress):
    """Progress bar with a line of text below it."""

    def __init__(self, console: Console, steps: int, start_step: int) -> None:
        self._line = Text("")
        columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(bar_width=None))
        super().__init__(*columns, console=console, auto_refresh=False, expand=True)
        self._task = self.add_task("", total=steps, completed=start_step)
        self.start()

    def show(self, step: int, line: str) -> None:
        self._line = Text(line)
        self.update(self._task, completed=step, refresh=True)

    def get_renderables(self) -> Any:
        yield from super().get_renderables()
        yield self._line


def describe_step(record: Record, eta_s: float) -> str:
    """Return the line of one step: the metrics with a format that are not None."""
    parts = []
    for name, metric in METRICS.items():
        value = record.get(name) if metric.progress_format else None
        if name == "data_wait_ms" and value is not None:
            value /= max(record["step_ms"], 1e-9)  # shown as a fraction of the step
        if isinstance(value, Mapping):
            parts += [
                f"{key} {metric.progress_format.format(number)}" for key, number in value.items()
            ]
        elif value is not None:
            parts.append(metric.progress_format.format(value * metric.scale))
    return " | ".join([*parts, f"ETA {timedelta(seconds=round(eta_s))}"])


def make_figure(width_in: float, height_in: float) -> Any:
    """Return an empty matplotlib figure that requires no display and no global state."""
    # Imported on first use: the import takes 0.3 s of CPU time, and most ranks have no plots.
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(width_in, height_in), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def plot_loss(metrics_file: Path, image_file: Path) -> None:
    """Plot the training and held-out loss over the steps in `metrics_file` to a PNG file."""
    records = [json.loads(line) for line in metrics_file.read_text().splitlines()]
    figure = make_figure(7, 4)
    axes = figure.add_subplot()
    for key, label, style in (("loss", "training", "-"), ("validation_loss", "held-out", "o-")):
        points = [(r["step"], r[key]) for r in records if r.get(key) is not None]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=label, markersize=4)
    axes.set_xlabel("step")
    axes.set_ylabel("loss per target token (nats)")
    axes.grid(alpha=0.3)
    if axes.get_lines():
        axes.legend()
    figure.savefig(image_file, dpi=120)
