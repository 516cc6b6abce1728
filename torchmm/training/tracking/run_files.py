"""Files of a run directory that a tracker has not shown yet: samples, pictures, complete models.

Trackers read everything except metrics from these files. The training loop is therefore independent
of tables and pictures, and a tracker that lags behind shows the same content.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

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


class Sample(NamedTuple):
    """A held-out sample and what was written for it after a step."""

    step: int
    source: str
    number: int
    """Its index in the source."""
    picture: Path | None
    prompt: str
    truth: str
    generated: str


@dataclass(frozen=True)
class NewFiles:
    """Of some steps.

    Attributes:
        timelines: SVG by file name.
        measured: pipelines of the same, to be drawn otherwise, by step.
        drawings: what a generator drew, by step.
    """

    samples: Sequence[Sample]
    timelines: Mapping[str, str]
    measured: Mapping[int, Panel]
    drawings: Mapping[int, Path]


class RunFiles:
    """Args:
    after_step: what belongs to steps up to it was shown before the run was resumed.
    """

    def __init__(self, run_dir: Path, after_step: int) -> None:
        self._run_dir = run_dir
        self._seen_step = after_step
        self._read_ns = 0
        self._entries: list[GeneratedSample] = []

    def until(self, step: int) -> NewFiles:
        """What is new up to a step that is recorded: its files are there before its record."""
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
        drawings = {_step(file.name): file for file in run.drawings() if _step(file.name) in steps}
        return NewFiles(self._samples(run, steps), timelines, measured, drawings)

    def _samples(self, run: RunDirectory, steps: Collection[int]) -> list[Sample]:
        file = self._run_dir / SAMPLES_FILE
        written_ns = file.stat().st_mtime_ns if file.is_file() else 0
        if written_ns != self._read_ns:
            self._entries = [entry for of_sample in run.samples.values() for entry in of_sample]
            self._read_ns = written_ns
        # The file may be ahead of the records, which wait in a queue.
        return [self._sample(entry) for entry in self._entries if entry.step in steps]

    def _sample(self, entry: GeneratedSample) -> Sample:
        picture = self._run_dir / SAMPLES_FOLDER / (entry.picture or "")
        shown = picture if picture.is_file() and not picture.is_symlink() else None
        return Sample(
            entry.step,
            entry.source,
            entry.index,
            shown,
            entry.prompt,
            entry.truth,
            entry.generated,
        )


def _step(name: str) -> int:
    found = _STEP.match(name)
    return int(found[1]) if found else 0


class WholeModels:
    """Checkpoints and exports of a run as they come; those that were there before do not count.

    Both appear whole, under their names, so that what is there is complete. An export that is
    written again (`hf-best/`) counts again.

    Args:
        kinds: that are asked for.
    """

    def __init__(self, run_dir: Path, kinds: Collection[Artifact]) -> None:
        self._run_dir, self._kinds = run_dir, kinds
        self._known = dict(self._found())

    def new(self) -> list[Path]:
        """Since the last time, in order of their names."""
        found = dict(self._found())
        new = [path for path, node in found.items() if self._known.get(path) != node]
        self._known = found
        return new

    def _found(self) -> Iterator[tuple[Path, int]]:
        """With what is another number for another directory of the same name."""
        paths: list[Path] = []
        if "checkpoints" in self._kinds:
            paths += reversed(list_steps(self._run_dir / "checkpoints"))
        if "exports" in self._kinds:
            exports = {path for form in _EXPORTS for path in self._run_dir.glob(form)}
            paths += sorted(path for path in exports if path.is_dir())
        for path in paths:
            yield path, path.stat().st_ino


def code_version() -> dict[str, str]:
    """What computed a run: versions, and the commit where the code is a repository's."""
    root = Path(__file__).parents[3]
    found = {}
    for name in ("torchmm", "torch", "transformers"):
        with suppress(PackageNotFoundError):  # it may run from a clone, not installed
            found[name] = version(name)
    if (root / ".git").exists():
        try:
            found["commit"] = _git(root, "rev-parse", "HEAD")
            if _git(root, "status", "--porcelain", "--untracked-files=no"):
                found["commit"] += " with changes"
        except (OSError, subprocess.SubprocessError):
            found.pop("commit", None)  # no git here, or not the owner's
    return found


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(root), *arguments],
        capture_output=True, text=True, check=True, timeout=GIT_TIMEOUT_S,
    )  # fmt: skip
    return done.stdout.strip()
