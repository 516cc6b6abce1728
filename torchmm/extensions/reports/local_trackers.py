"""Trackers that write local files: TensorBoard and Trackio, both optional dependencies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
from PIL import Image

from torchmm.common.errors import ConfigError, install_command
from torchmm.pipelining.view.draw import timeline_image
from torchmm.training.metrics import Record, group_by_panel
from torchmm.training.tracking.run_directory import GeneratedSample
from torchmm.training.tracking.run_files import RunFiles, code_version
from torchmm.training.tracking.trackers import BackgroundSink, TrackedRun


def start_tensorboard(run: TrackedRun) -> BackgroundSink:
    """Start the TensorBoard tracker.

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

    def start() -> TensorBoardTracker:
        # A resumed run repeats steps: their earlier events are removed.
        purge_step = run.start_step + 1 if run.is_resumed else None
        writer = SummaryWriter(str(run.run_dir / "tensorboard"), purge_step=purge_step)
        texts = {"recipe": _to_toml(run.recipe), "code": _to_toml(code_version())}
        return TensorBoardTracker(writer, texts, run.files())

    return BackgroundSink("TensorBoard", start, run.log)


def start_trackio(run: TrackedRun) -> BackgroundSink:
    """Start the Trackio tracker.

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
    return BackgroundSink("Trackio", lambda: TrackioTracker(init, run), run.log)


class TensorBoardTracker:
    """TensorBoard event files in `tensorboard/` of the run directory.

    Args:
        writer: Writer of events.
        texts: Text about the run, by title.
        files: Files of the run.
    """

    def __init__(self, writer: Any, texts: dict[str, str], files: RunFiles) -> None:
        self._writer, self._files = writer, files
        for name, text in texts.items():
            writer.add_text(name, f"```\n{text}\n```", 0)

    def emit(self, record: Record) -> None:
        """Write one step, and the files that are new since the previous step."""
        step = record["step"]
        for name, value in group_by_panel(record).items():
            self._writer.add_scalar(name, value, step)
        new = self._files.until(step)
        if new.samples:
            text = _as_markdown([sample for sample, _ in new.samples])
            self._writer.add_text("validation/samples", text, step)
        for index, (sample, image) in enumerate(new.samples):
            if image is not None:
                self._add_image(f"validation/sample {index}", sample.step, image)
        for image_step, file in new.generated_images.items():
            self._add_image("validation/generated_images", image_step, file)
        for measured_step, panel in new.measured_panels.items():
            pixels = np.asarray(timeline_image(panel))
            self._writer.add_image("pipeline/timeline", pixels, measured_step, dataformats="HWC")

    def _add_image(self, name: str, step: int, file: Path) -> None:
        with Image.open(file) as image:
            pixels = np.asarray(image.convert("RGB"))
        self._writer.add_image(name, pixels, step, dataformats="HWC")

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()


def _as_markdown(samples: Sequence[GeneratedSample]) -> str:
    rows = ["| sample | prompt | reference | generated |", "|---|---|---|---|"]
    for sample in samples:
        texts = (f"{sample.source}[{sample.index}]", sample.prompt, sample.truth, sample.generated)
        cells = [" ".join(text.replace("|", "\\|").split()) for text in texts]
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


class TrackioTracker:
    """Local Trackio run, which `trackio show` displays.

    Args:
        init: `trackio.init`. If the run is resumed, it continues the newest run of this name.
        run: Run to show.
    """

    def __init__(self, init: Callable[..., Any], run: TrackedRun) -> None:
        resume = "allow" if run.is_resumed else "never"
        self._run = init(
            project=run.config.wandb_project, name=run.name, config=dict(run.facts()),
            resume=resume, embed=False, auto_log_gpu=False, auto_log_cpu=False,
        )  # fmt: skip

    def emit(self, record: Record) -> None:
        """Log one step."""
        self._run.log(group_by_panel(record), step=record["step"])

    def close(self) -> None:
        """Write the remaining records."""
        self._run.finish()


def _to_toml(facts: Mapping[str, Any]) -> str:
    """Return nested tables as TOML, without null values, which TOML does not have."""
    return tomli_w.dumps(_without_null(facts))


def _without_null(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_null(v) for key, v in value.items() if v is not None}
    if isinstance(value, (list, tuple)):
        return [_without_null(v) for v in value if v is not None]
    return value
