"""Trackers (the run's page, Weights & Biases, TensorBoard) that can never stop or slow training.

Each tracker lives in a thread of its own behind a bounded queue: connecting, sending and closing
happen there, and the first failure switches the tracker off with one warning. metrics.jsonl holds
every record anyway. Whether W&B can be reached is found out by one HTTP request *before* its
first `init`; if not, the run is recorded offline, to be uploaded later with `wandb sync`.
Rejected: falling back to offline after a failed online `init`, which can hang as well.
"""

from __future__ import annotations

import logging
import queue
import secrets
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import wandb

from torchmm.common.errors import ConfigError
from torchmm.recipe.training_section import MetricsConfig
from torchmm.training.page.pages import PAGE, PageSink
from torchmm.training.tracking.figures import grouped

PROBE_TIMEOUT_S = 5.0
CLOSE_TIMEOUT_S = 60.0
QUEUE_LENGTH = 1000

Record = Mapping[str, Any]


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
    resumed: bool = False,
) -> list[Sink]:
    """The trackers a recipe asks for. `recipe` is stored with the W&B run.

    Args:
        resumed: from a checkpoint: the W&B run of this directory is continued.

    Raises:
        ConfigError: TensorBoard is asked for and not installed.
    """
    trackers: list[Sink] = []
    if config.page:
        trackers.append(BackgroundSink(PAGE, partial(PageSink, run_dir), log))
    if config.wandb != "disabled":
        mode = config.wandb
        project = config.wandb_project
        run_id = wandb_run_id(run_dir, resumed)
        start_wandb = lambda: WandbTracker(  # noqa: E731
            mode, project, run_dir, name, recipe, log, run_id
        )
        trackers.append(BackgroundSink("Weights & Biases", start_wandb, log))
    if config.tensorboard:
        writer_class = _tensorboard_writer()
        start_tensorboard = lambda: TensorBoardTracker(writer_class, run_dir)  # noqa: E731
        trackers.append(BackgroundSink("TensorBoard", start_tensorboard, log))
    return trackers


def wandb_run_id(run_dir: Path, resumed: bool) -> str:
    """Identity of the W&B run: the directory's last one if resumed, else a new one, kept in a file.

    Steps that a resumed run repeats are the same numbers again; W&B keeps the first.
    """
    file = run_dir / "wandb_run_id"
    if not resumed or not file.is_file():
        file.write_text(secrets.token_hex(4) + "\n")
    return file.read_text().strip()


class BackgroundSink:
    """Runs a sink in a daemon thread until its first failure."""

    def __init__(self, label: str, start: Callable[[], Sink], log: logging.Logger) -> None:
        """Start `start()` in the background; records queue up until it returns."""
        self._label = label
        self._start = start
        self._log = log
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

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Let the sink finish, but wait no longer than `timeout_s`."""
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


class WandbTracker:
    """A Weights & Biases run; files are in `wandb/` of the run directory."""

    def __init__(
        self,
        mode: str,
        project: str,
        run_dir: Path,
        name: str,
        recipe: Record,
        log: logging.Logger,
        run_id: str,
    ) -> None:
        """Connect; may block for the service's `init_timeout`."""
        settings = wandb.Settings(
            init_timeout=30,
            finish_timeout=CLOSE_TIMEOUT_S / 2,
            console="off",
            silent=True,
            disable_git=True,
        )
        base_url = str(wandb.setup().settings.base_url)  # from environment or settings file
        if mode == "online" and not _answers(base_url):
            log.warning(
                "Weights & Biases at %s cannot be reached; recording offline, upload later with "
                "wandb sync %s",
                base_url,
                run_dir / "wandb" / "offline-run-*",
            )
            mode = "offline"
        self._run = wandb.init(
            project=project,
            name=name,
            id=run_id,
            resume="allow",  # continue the run of this identity if there is one
            dir=str(run_dir),
            config=dict(recipe),
            mode="offline" if mode == "offline" else "online",
            settings=settings,
        )
        if mode == "online":
            log.info("Weights & Biases run: %s", self._run.url)

    def emit(self, record: Record) -> None:
        """Log one step."""
        self._run.log(grouped(record), step=record["step"])

    def close(self) -> None:
        """Upload what is left, for `finish_timeout` at most."""
        self._run.finish()


def _answers(url: str) -> bool:
    """Whether an HTTP server answers at all; goes through a proxy where one is set."""
    try:
        with urllib.request.urlopen(url, timeout=PROBE_TIMEOUT_S):
            return True
    except urllib.error.HTTPError:
        return True
    except (OSError, ValueError):
        return False


class TensorBoardTracker:
    """TensorBoard event files in `tensorboard/` of the run directory."""

    def __init__(self, writer_class: Callable[[str], Any], run_dir: Path) -> None:
        self._writer = writer_class(str(run_dir / "tensorboard"))

    def emit(self, record: Record) -> None:
        """Write one step."""
        for name, value in grouped(record).items():
            self._writer.add_scalar(name, value, record["step"])

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()


def _tensorboard_writer() -> Callable[[str], Any]:
    try:  # an optional dependency
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(
            f"metrics.tensorboard = true: TensorBoard cannot be imported ({error}); "
            "pip install 'torchmm[tensorboard]' or set it to false"
        ) from error
    return SummaryWriter
