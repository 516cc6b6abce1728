"""A run in Weights & Biases: figures in groups, a table of held-out samples, pictures, artifacts.

Whether W&B can be reached is found out by one HTTP request *before* its first `init`; if not, the
run is recorded offline, to be uploaded later with `wandb sync`. Rejected: falling back to offline
after a failed online `init`, which can hang as well.
"""

from __future__ import annotations

import logging
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import wandb

from torchmm.training.checkpoint.manifest import step_of
from torchmm.training.tracking.figures import Record, grouped
from torchmm.training.tracking.run_files import RunFiles, Sample, WholeModels

PROBE_TIMEOUT_S = 5.0
COLUMNS: list[str | int] = ["step", "sample", "picture", "prompt", "should be", "written"]


class WandbRun(NamedTuple):
    """Which run, and what is told of it once.

    Attributes:
        mode: "online" or "offline".
        config: the resolved recipe, and what computes it.
        finish_s: how long sending what is left may take at the end.
    """

    mode: str
    project: str
    run_dir: Path
    name: str
    run_id: str
    config: Record
    finish_s: float


class WandbTracker:
    """A Weights & Biases run; its files are in `wandb/` of the run directory.

    Args:
        files: of the run.
        models: that become artifacts.
    """

    def __init__(
        self, told: WandbRun, files: RunFiles, models: WholeModels, log: logging.Logger
    ) -> None:
        """Connect; may block for the service's `init_timeout`."""
        self._name = told.name
        self._log = log
        self._files = files
        self._models = models
        settings = wandb.Settings(
            init_timeout=30,
            finish_timeout=told.finish_s,
            console="off",
            silent=True,
            disable_git=True,  # of the working directory, which need not be that of the code
        )
        base_url = str(wandb.setup().settings.base_url)  # from environment or settings file
        mode = told.mode
        if mode == "online" and not _answers(base_url):
            log.warning(
                "Weights & Biases at %s cannot be reached; recording offline, upload later with "
                "wandb sync %s",
                base_url,
                told.run_dir / "wandb" / "offline-run-*",
            )
            mode = "offline"
        self._run = wandb.init(
            project=told.project,
            name=told.name,
            id=told.run_id,
            resume="allow",  # continue the run of this identity if there is one
            dir=str(told.run_dir),
            config=dict(told.config),
            mode="offline" if mode == "offline" else "online",
            settings=settings,
        )
        if mode == "online":
            log.info("Weights & Biases run: %s", self._run.url)

    def emit(self, record: Record) -> None:
        """Log one step, and what is new since the one before."""
        step = record["step"]
        new = self._files.until(step)
        shown = grouped(record)
        if new.samples:
            shown["validation/samples"] = _table(new.samples)
        for file in new.drawings.values():
            shown["validation/drawings"] = wandb.Image(str(file), caption=file.stem)
        for name, picture in new.timelines.items():
            what = "schedules" if "schedules" in name else "timeline"
            shown[f"pipeline/{what}"] = wandb.Html(picture, inject=False)
        self._run.log(shown, step=step)
        self._log_models()

    def _log_models(self) -> None:
        for path in self._models.new():
            is_checkpoint = step_of(path) is not None
            what = "checkpoint" if is_checkpoint else path.name
            artifact = wandb.Artifact(
                f"{self._name}-{what}", "checkpoint" if is_checkpoint else "model"
            )
            try:
                artifact.add_dir(str(path))
            except (OSError, ValueError) as error:  # it went meanwhile (`checkpoint.keep`)
                self._log.warning("%s becomes no artifact: %s", path, error)
                continue
            self._run.log_artifact(artifact, aliases=["latest", path.name])

    def close(self) -> None:
        """Log what came after the last step; upload what is left, within `finish_s`."""
        self._log_models()
        self._run.finish()


def _table(samples: Sequence[Sample]) -> wandb.Table:
    rows = [
        [
            sample.step,
            f"{sample.source}[{sample.number}]",
            wandb.Image(str(sample.picture)) if sample.picture is not None else None,
            sample.prompt,
            sample.truth,
            sample.generated,
        ]
        for sample in samples
    ]
    return wandb.Table(COLUMNS, rows)


def _answers(url: str) -> bool:
    """Whether an HTTP server answers at all; goes through a proxy where one is set."""
    try:
        with urllib.request.urlopen(url, timeout=PROBE_TIMEOUT_S):
            return True
    except urllib.error.HTTPError:
        return True
    except (OSError, ValueError):
        return False
