"""Weights & Biases tracker: metrics in groups, a table of held-out samples, images, artifacts.

One HTTP request before the first `init` checks that the server can be reached. Otherwise the run is
recorded offline, and `wandb sync` can upload it later. A failed online `init` is not a usable
check, because it can hang as well.
"""

from __future__ import annotations

import secrets
import urllib.error
import urllib.request
from functools import partial
from pathlib import Path

import wandb

from torchmm.training.checkpoint.manifest import step_of
from torchmm.training.metrics import Record, group_by_panel
from torchmm.training.tracking.run_files import NewModelDirectories
from torchmm.training.tracking.trackers import CLOSE_TIMEOUT_S, BackgroundSink, TrackedRun

ARTIFACTS_TIMEOUT_S = 3600.0
"""Time limit of closing if checkpoints or exports are uploaded, which may be large, in seconds."""
PROBE_TIMEOUT_S = 5.0
COLUMNS: list[str | int] = ["step", "sample", "image", "prompt", "reference", "generated"]


def start_wandb(run: TrackedRun) -> BackgroundSink:
    """Start the tracker of Weights & Biases."""
    close_s = ARTIFACTS_TIMEOUT_S if run.config.artifacts else CLOSE_TIMEOUT_S
    run_id = _read_run_id(run.run_dir, run.is_resumed)
    # Created before training starts: existing checkpoints and exports are not uploaded.
    models = NewModelDirectories(run.run_dir, run.config.artifacts)
    start = partial(WandbTracker, run, run_id, models, finish_s=close_s / 2)
    return BackgroundSink("Weights & Biases", start, run.log, close_s)


def _read_run_id(run_dir: Path, is_resumed: bool) -> str:
    """Return the id of the Weights & Biases run and store it in the run directory.

    A resumed run continues the run of the stored id. The steps that it repeats are logged with the
    same numbers, and Weights & Biases retains the first values.
    """
    file = run_dir / "wandb_run_id"
    if not is_resumed or not file.is_file():
        file.write_text(secrets.token_hex(4) + "\n")
    return file.read_text().strip()


class WandbTracker:
    """A Weights & Biases run. Its files are in `wandb/` of the run directory.

    Args:
        run: Run to show.
        run_id: Id of the run in Weights & Biases.
        models: Checkpoints and exports that are uploaded as artifacts.
        finish_s: Time limit of the last upload, in seconds.
    """

    def __init__(
        self, run: TrackedRun, run_id: str, models: NewModelDirectories, finish_s: float
    ) -> None:
        """Connect. May block for the `init_timeout` of the service."""
        self._name = run.name
        self._log = run.log
        self._files = run.files()
        self._models = models
        settings = wandb.Settings(
            init_timeout=30,
            finish_timeout=finish_s,
            console="off",
            silent=True,
            disable_git=True,  # the working directory may not be the repository of the code
        )
        base_url = str(wandb.setup().settings.base_url)  # from environment or settings file
        mode = run.config.wandb
        if mode == "online" and not _is_reachable(base_url):
            run.log.warning(
                "Weights & Biases at %s is unreachable; recording offline, upload later with "
                "wandb sync %s",
                base_url,
                run.run_dir / "wandb" / "offline-run-*",
            )
            mode = "offline"
        self._run = wandb.init(
            project=run.config.wandb_project,
            name=run.name,
            id=run_id,
            resume="allow",  # continue an existing run with this id
            dir=str(run.run_dir),
            config=dict(run.facts()),
            mode="offline" if mode == "offline" else "online",
            settings=settings,
        )
        if mode == "online":
            run.log.info("Weights & Biases run: %s", self._run.url)

    def emit(self, record: Record) -> None:
        """Log one step, and the files that are new since the previous step."""
        step = record["step"]
        new = self._files.until(step)
        shown = group_by_panel(record)
        if new.samples:
            rows = [
                [
                    sample.step,
                    f"{sample.source}[{sample.index}]",
                    wandb.Image(str(svg)) if svg is not None else None,
                    sample.prompt,
                    sample.truth,
                    sample.generated,
                ]
                for sample, svg in new.samples
            ]
            shown["validation/samples"] = wandb.Table(COLUMNS, rows)
        for file in new.generated_images.values():
            shown["validation/generated_images"] = wandb.Image(str(file), caption=file.stem)
        for name, svg in new.timelines.items():
            title = "schedules" if "schedules" in name else "timeline"
            shown[f"pipeline/{title}"] = wandb.Html(svg, inject=False)
        self._run.log(shown, step=step)
        self._log_models()

    def _log_models(self) -> None:
        for path in self._models.new():
            is_checkpoint = step_of(path) is not None
            title = "checkpoint" if is_checkpoint else path.name
            kind = "checkpoint" if is_checkpoint else "model"
            artifact = wandb.Artifact(f"{self._name}-{title}", kind)
            try:
                artifact.add_dir(str(path))
            except (OSError, ValueError) as error:  # already removed (`checkpoint.keep_latest`)
                self._log.warning("cannot upload %s as an artifact: %s", path, error)
                continue
            self._run.log_artifact(artifact, aliases=["latest", path.name])

    def close(self) -> None:
        """Log the last checkpoints and exports, and upload the rest within `finish_s`."""
        self._log_models()
        self._run.finish()


def _is_reachable(url: str) -> bool:
    """Return True if an HTTP server responds, through the proxy of the environment if set."""
    try:
        with urllib.request.urlopen(url, timeout=PROBE_TIMEOUT_S):
            return True
    except urllib.error.HTTPError:
        return True
    except (OSError, ValueError):
        return False
