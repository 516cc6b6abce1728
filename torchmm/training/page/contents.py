"""What the files of a run directory say, for its page.

Any of them may be missing, torn by a crash or of an older version: what cannot be read is left out,
never an error. A run must not fail because of its page.
"""

from __future__ import annotations

import base64
import json
import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import tomli

from torchmm.training.ending import STATUS_NAME, Status, read_status
from torchmm.training.evaluation.results import Evaluation, read

Records = Sequence[Mapping[str, Any]]
Point = tuple[int, float]
"""Step and value."""
MOST_POINTS = 800
"""Of a curve; of more, the lowest and the highest of each stretch are kept."""
MOST_WARNINGS = 200
PERIODS = 4
SAMPLES_FILE, SAMPLES_FOLDER = "samples.json", "samples"
MEMORY_FILE = "memory.json"


class Memory(NamedTuple):
    """Peaks of memory by rank."""

    step: int
    """Up to which, and of whose plan."""
    device: str
    ranks: list[tuple[int, int | None]]
    """Bytes, measured and predicted."""


@dataclass(frozen=True)
class RunContents:
    """A run directory.

    Attributes:
        directory: as the user named it; commands on the page name it so, too.
        records: lines of metrics.jsonl.
        recipe: the resolved recipe, as nested tables.
    """

    directory: Path
    records: Records
    recipe: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The run's."""
        return str(self.recipe.get("name") or self.directory.resolve().name)

    @cached_property
    def status(self) -> Status | None:
        """How it stands; None: nothing says so."""
        return read_status(self.directory)

    @property
    def status_age_s(self) -> float:
        """Seconds since the newest sign of life."""
        files = [self.directory / "metrics.jsonl", self.directory / STATUS_NAME]
        return time.time() - max((f.stat().st_mtime for f in files if f.exists()), default=0.0)

    @property
    def steps(self) -> int:
        """That the run is to have."""
        return int(self.recipe.get("training", {}).get("steps", 0))

    @property
    def evaluations(self) -> list[Evaluation]:
        """Of exports, by `evaluate.py`."""
        try:
            return read(self.directory)
        except (OSError, ValueError, TypeError):
            return []

    def points(self, key: str, scale: float = 1.0) -> list[Point]:
        """A figure over the steps; "scores/NAME" is one of the scores."""
        values = ((int(record["step"]), _figure(record, key)) for record in self.records)
        return [(step, scale * value) for step, value in values if value is not None]

    def last(self, key: str) -> float | None:
        """The newest value of a figure; None: there is none."""
        values = (_figure(record, key) for record in reversed(self.records))
        return next((value for value in values if value is not None), None)

    @cached_property
    def score_names(self) -> list[str]:
        """Of all steps, in order of their names."""
        return sorted({name for r in self.records for name in r.get("scores") or {}})

    @cached_property
    def samples(self) -> dict[tuple[str, int], list[Mapping[str, Any]]]:
        """What was written for each held-out sample, by source and index, in order of steps."""
        try:
            entries = json.loads((self.directory / SAMPLES_FILE).read_text())
            found: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
            for entry in sorted(entries, key=lambda e: e["step"]):
                found.setdefault((entry["source"], entry["index"]), []).append(entry)
        except (OSError, ValueError, KeyError, TypeError):
            return {}
        return found

    def memory(self) -> Memory | None:
        """Of all ranks; None: it was not compared."""
        try:
            told = json.loads((self.directory / MEMORY_FILE).read_text())
            ranks = [(int(r["measured_bytes"]), r["predicted_bytes"]) for r in told["ranks"]]
            return Memory(int(told["step"]), str(told["device"]), ranks)
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def warnings(self) -> list[str]:
        """The newest lines of all ranks' logs, in order of time."""
        lines: list[str] = []
        for file in sorted((self.directory / "logs").glob("rank-*.log")):
            lines += _text(file).splitlines()
        return sorted(line for line in lines if line.strip())[-MOST_WARNINGS:]

    def timelines(self) -> Iterator[tuple[str, str]]:
        """Pictures of pipelines, (name, SVG), in order of steps."""
        files = (self.directory / "timeline").glob("step-*.svg")
        for file in sorted(files, key=lambda f: (len(f.name), f.name)):
            picture = _text(file)
            if "<svg" in picture:
                yield file.name, picture[picture.index("<svg") :]

    def drawings(self) -> list[Path]:
        """Pictures of what the generator drew, the newest last."""
        files = (self.directory / "drawings").glob("step-*.png")
        return sorted(files, key=lambda f: (len(f.name), f.name))


def read_run(directory: Path) -> RunContents:
    """All that a page needs.

    Raises:
        FileNotFoundError: it is no run directory: there is no metrics.jsonl.
    """
    records = []
    for line in (directory / "metrics.jsonl").read_text(errors="replace").splitlines():
        try:
            record = json.loads(line)
        except ValueError:  # the last one of a run that was killed, or that is being written
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            records.append(record)
    try:
        recipe = tomli.loads((directory / "recipe.toml").read_text())
    except (OSError, ValueError):
        recipe = {}
    return RunContents(directory, records, recipe)


class SlowestRanks(NamedTuple):
    """Whom the others waited for, over the quarters of a run."""

    steps: list[tuple[int, int]]
    """First and last of each quarter."""
    shares: dict[int, list[float]]
    """By rank, the most frequent first: share of a quarter's steps in which it was the slowest."""
    beyond_median: list[float]
    """Share of the slowest rank's time that the median rank did not need."""


def slowest_ranks(records: Records, most: int) -> SlowestRanks | None:
    """None for a run of one rank.

    Args:
        most: ranks that are named.
    """
    counts = Counter(r["slowest_rank"] for r in records if r.get("slowest_rank") is not None)
    if not any(counts):
        return None
    size = -(-len(records) // PERIODS)
    periods = [records[start : start + size] for start in range(0, len(records), size)]
    shares = {
        rank: [mean(r.get("slowest_rank") == rank for r in period) for period in periods]
        for rank, _ in counts.most_common(most)
    }
    steps = [(period[0]["step"], period[-1]["step"]) for period in periods]
    beyond = [mean(r.get("straggler_share") or 0.0 for r in period) for period in periods]
    return SlowestRanks(steps, shares, beyond)


def _figure(record: Mapping[str, Any], key: str) -> float | None:
    """A record's, if it is a number."""
    value = record.get(key)
    if key.startswith("scores/"):
        value = (record.get("scores") or {}).get(key.removeprefix("scores/"))
    return value if isinstance(value, (int, float)) and math.isfinite(value) else None


def thinned(points: Sequence[Point]) -> list[Point]:
    """At most `MOST_POINTS` of a curve, with all its extremes."""
    if len(points) <= MOST_POINTS:
        return list(points)
    size = -(-2 * len(points) // (MOST_POINTS - 2))
    kept = {points[0], points[-1]}
    for start in range(0, len(points), size):
        stretch = points[start : start + size]
        kept |= {min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1])}
    return sorted(kept)


def data_uri(file: Path) -> str:
    """A PNG, to stand in a page; empty if it cannot be read."""
    try:
        return f"data:image/png;base64,{base64.b64encode(file.read_bytes()).decode()}"
    except OSError:
        return ""


def _text(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""
