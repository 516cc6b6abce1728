"""Files of a run directory that a tracker has not shown yet: samples, images, complete models.

Trackers read all data except metrics from these files. The training loop is therefore independent
of tables and images, and a slow tracker shows the same content.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from torchmm.pipelining.view.draw import Panel
from torchmm.pipelining.view.records import read_records
from torchmm.recipe.training_section import Artifact
from torchmm.training.checkpoint.manifest import list_steps
from torchmm.training.tracking.run_directory import (
    SAMPLES_FILE,
    SAMPLES_FOLDER,
    TIMELINE_FOLDER,
    GeneratedSample,
    RunDirectory,
)

GIT_TIMEOUT_S = 5.0
_STEP = re.compile(r"step-(\d+)\.")
_EXPORTS = ("hf", "hf-*", "adapters", "adapters-*")


@dataclass(frozen=True)
class NewFiles:
    """Files of a range of steps.

    Attributes:
        samples: Generated text of held-out samples, each with the file of its image.
        timelines: SVG by file name.
        measured: Panels of the same timelines by step, for other plots.
        drawings: Files of generated images by step.
    """

    samples: Sequence[tuple[GeneratedSample, Path | None]]
    timelines: Mapping[str, str]
    measured_panels: Mapping[int, Panel]
    generated_images: Mapping[int, Path]


class RunFiles:
    """Reader of the files that a run writes.

    Args:
        run_dir: Directory of the run.
        after_step: Step of the checkpoint that the run resumes. Its files were shown before.
    """

    def __init__(self, run_dir: Path, after_step: int) -> None:
        self._run_dir = run_dir
        self._seen_step = after_step
        self._read_ns = 0
        self._entries: list[GeneratedSample] = []

    def until(self, step: int) -> NewFiles:
        """Return the files of steps up to a recorded step that no earlier call has returned."""
        first, self._seen_step = self._seen_step + 1, step
        steps = range(first, step + 1)
        run = RunDirectory(self._run_dir)
        timelines = {name: svg for name, svg in run.timelines() if _step(name) in steps}
        files = [self._run_dir / TIMELINE_FOLDER / f"step-{_step(name)}.json" for name in timelines]
        measured = {}
        for file in files:
            if file.is_file():
                records, graph = read_records(file)
                measured[_step(file.name)] = Panel("measured", records, graph.layout)
        drawings = {
            _step(file.name): file for file in run.generated_images() if _step(file.name) in steps
        }

        samples_file = self._run_dir / SAMPLES_FILE
        written_ns = samples_file.stat().st_mtime_ns if samples_file.is_file() else 0
        if written_ns != self._read_ns:
            self._entries = [entry for of_sample in run.samples.values() for entry in of_sample]
            self._read_ns = written_ns
        samples: list[tuple[GeneratedSample, Path | None]] = []
        # The file may have samples of later steps, whose records are still in the queue.
        for entry in self._entries:
            if entry.step in steps:
                picture = self._run_dir / SAMPLES_FOLDER / (entry.picture or "")
                is_readable = picture.is_file() and not picture.is_symlink()
                samples.append((entry, picture if is_readable else None))
        return NewFiles(samples, timelines, measured, drawings)


def _step(name: str) -> int:
    match = _STEP.match(name)
    return int(match[1]) if match else 0


class NewModelDirectories:
    """New checkpoints and exports of a run.

    Both get their final names when they are complete. An export that is replaced (`hf-best/`) is
    new again.

    Args:
        run_dir: Directory of the run. Existing checkpoints and exports are not new.
        kinds: Types to find.
    """

    def __init__(self, run_dir: Path, kinds: Collection[Artifact]) -> None:
        self._run_dir, self._artifact_types = run_dir, kinds
        self._known = dict(self._scan())

    def new(self) -> list[Path]:
        """Return the directories that are new since the last call."""
        current = dict(self._scan())
        new = [path for path, node in current.items() if self._known.get(path) != node]
        self._known = current
        return new

    def _scan(self) -> Iterator[tuple[Path, int]]:
        """Yield directories with their inodes, which differ if a directory is replaced."""
        paths: list[Path] = []
        if "checkpoints" in self._artifact_types:
            paths += reversed(list_steps(self._run_dir / "checkpoints"))
        if "exports" in self._artifact_types:
            exports = {path for form in _EXPORTS for path in self._run_dir.glob(form)}
            paths += sorted(path for path in exports if path.is_dir())
        for path in paths:
            yield path, path.stat().st_ino


def code_version() -> dict[str, str]:
    """Return the versions of the packages, and the commit if the code is in a repository."""
    root = Path(__file__).parents[3]
    versions = {}
    for name in ("torchmm", "torch", "transformers"):
        with suppress(PackageNotFoundError):  # torchmm may run from a clone
            versions[name] = version(name)
    if (root / ".git").exists():
        try:
            versions["commit"] = _git(root, "rev-parse", "HEAD")
            if _git(root, "status", "--porcelain", "--untracked-files=no"):
                versions["commit"] += " with changes"
        except (OSError, subprocess.SubprocessError):
            # git is not installed, or the repository has another owner
            versions.pop("commit", None)
    return versions


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(root), *arguments],
        capture_output=True, text=True, check=True, timeout=GIT_TIMEOUT_S,
    )  # fmt: skip
    return done.stdout.strip()
