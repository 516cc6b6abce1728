"""TensorBoard and Trackio: trackers that are written to local files, both optional dependencies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from torchmm.common.errors import ConfigError, install_command
from torchmm.pipelining.view.draw import timeline_picture
from torchmm.training.tracking.figures import Record, grouped
from torchmm.training.tracking.run_files import RunFiles, Sample


class TensorBoardTracker:
    """TensorBoard event files in `tensorboard/` of the run directory.

    Args:
        writer: of the events.
        texts: that say what ran, by what they are.
        files: of the run.
    """

    def __init__(self, writer: Any, texts: dict[str, str], files: RunFiles) -> None:
        self._writer, self._files = writer, files
        for name, text in texts.items():
            writer.add_text(name, f"```\n{text}\n```", 0)

    def emit(self, record: Record) -> None:
        """Write one step, and what is new since the one before."""
        step = record["step"]
        for name, value in grouped(record).items():
            self._writer.add_scalar(name, value, step)
        new = self._files.until(step)
        if new.samples:
            self._writer.add_text("validation/samples", _as_markdown(new.samples), step)
        for place, sample in enumerate(new.samples):
            if sample.picture is not None:
                self._add_picture(f"validation/sample {place}", sample.step, sample.picture)
        for drawn, file in new.drawings.items():
            self._add_picture("validation/drawings", drawn, file)
        for measured, panel in new.measured.items():
            pixels = np.asarray(timeline_picture(panel))
            self._writer.add_image("pipeline/timeline", pixels, measured, dataformats="HWC")

    def _add_picture(self, name: str, step: int, file: Path) -> None:
        with Image.open(file) as picture:
            pixels = np.asarray(picture.convert("RGB"))
        self._writer.add_image(name, pixels, step, dataformats="HWC")

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()


def _as_markdown(samples: Sequence[Sample]) -> str:
    rows = ["| sample | prompt | should be | written |", "|---|---|---|---|"]
    for sample in samples:
        texts = (sample.prompt, sample.truth, sample.generated)
        cells = [f"{sample.source}[{sample.number}]", *texts]
        rows.append("| " + " | ".join(_in_cell(cell) for cell in cells) + " |")
    return "\n".join(rows)


def _in_cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def tensorboard_writer() -> Callable[..., Any]:
    """What makes event files.

    Raises:
        ConfigError: TensorBoard is not installed.
    """
    try:  # an optional dependency
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(
            f"metrics.tensorboard = true: TensorBoard cannot be imported ({error}); "
            f"{install_command('tensorboard')} or set it to false"
        ) from error
    return SummaryWriter


class TrackioTracker:
    """A run of Trackio, on this machine: `trackio show` shows it.

    Args:
        start: `trackio.init`.
        resumed: the newest run of this name is continued.
    """

    def __init__(
        self, start: Callable[..., Any], project: str, name: str, config: Record, resumed: bool
    ) -> None:
        resume = "allow" if resumed else "never"
        self._run = start(
            project=project, name=name, config=dict(config), resume=resume, embed=False,
            auto_log_gpu=False, auto_log_cpu=False,
        )  # fmt: skip

    def emit(self, record: Record) -> None:
        """Log one step."""
        self._run.log(grouped(record), step=record["step"])

    def close(self) -> None:
        """Write what is left."""
        self._run.finish()


def trackio_start() -> Callable[..., Any]:
    """`trackio.init`.

    Raises:
        ConfigError: Trackio is not installed.
    """
    try:  # an optional dependency
        from trackio import init  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(
            f"metrics.trackio = true: Trackio cannot be imported ({error}); "
            "pip install trackio or set it to false"
        ) from error
    return init
