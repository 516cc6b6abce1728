"""Contents of a run directory, for its page.

Files with unexpected content are skipped with a note on the page, see `RunDirectory`.
"""

from __future__ import annotations

import base64
import json
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import tomli

from torchmm.recipe.changes import with_current_metrics, with_current_names
from torchmm.training.shutdown import STATUS_NAME, Status, read_status
from torchmm.training.tracking.evaluations import RESULTS, Evaluation, parse_evaluation
from torchmm.training.tracking.run_directory import (
    CONTENT_ERRORS,
    RunDirectory,
    is_count,
    read_inside,
)

NAMED_METRICS = ("scores", "loss_by_source", "validation_loss_by_source")
"""Metrics with several values by name, such as scores and losses by data source."""
Records = Sequence[Mapping[str, Any]]
CurvePoint = tuple[int, float]
"""Step and value."""
MAX_POINTS = 800
"""Maximum number of points of a curve.

Longer curves retain the minimum and maximum of each block.
"""
MAX_WARNINGS = 200
NUM_PERIODS = 4
MEMORY_FILE = "memory.json"
_PNG_MAGIC = b"\x89PNG\r\n"


class MemoryPeaks(NamedTuple):
    """Memory peaks by rank."""

    step: int
    """Step up to which peaks are measured, and whose plan is predicted."""
    device: str
    ranks: list[tuple[int, int | None]]
    """Measured and predicted bytes of each rank."""


@dataclass(frozen=True)
class RunContents(RunDirectory):
    """A run directory with its metrics and its recipe.

    Attributes:
        records: Lines of metrics.jsonl.
        recipe: The resolved recipe as nested tables.
    """

    records: Records
    recipe: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Name of the run."""
        name = self.recipe.get("name")
        return name if isinstance(name, str) and name else self.directory.resolve().name

    @cached_property
    def status(self) -> Status | None:
        """Status of the run, or None if it is unknown."""
        return read_status(self.directory)

    @property
    def status_age_s(self) -> float:
        """Time in seconds since the last update of a file of the run."""
        files = [self.directory / "metrics.jsonl", self.directory / STATUS_NAME]
        return time.time() - max((f.stat().st_mtime for f in files if f.exists()), default=0.0)

    @property
    def steps(self) -> int:
        """Number of steps of the run, or 0 if the recipe does not set it."""
        training = self.recipe.get("training")
        steps = training.get("steps", 0) if isinstance(training, dict) else 0
        return steps if is_count(steps) else 0

    @property
    def evaluations(self) -> list[Evaluation]:
        """Scores of exports, written by `evaluate.py`."""
        results = []
        for line in self.read_text(RESULTS).splitlines():
            try:
                results.append(parse_evaluation(line))
            except ValueError as error:
                self.skip(RESULTS, error)
        return results

    def points(self, key: str, scale: float = 1.0) -> list[CurvePoint]:
        """Return the values of a metric over the steps, such as "loss" or "scores/NAME"."""
        values = ((int(record["step"]), _metric(record, key)) for record in self.records)
        return [(step, scale * value) for step, value in values if value is not None]

    def last(self, key: str) -> float | None:
        """Return the newest value of a metric, or None without values."""
        values = (_metric(record, key) for record in reversed(self.records))
        return next((value for value in values if value is not None), None)

    def names_in(self, metric: str) -> list[str]:
        """Return the names in all values of a metric of `NAMED_METRICS`, sorted."""
        return sorted({name for r in self.records for name in r.get(metric) or {}})

    def memory(self) -> MemoryPeaks | None:
        """Return the memory peaks of all ranks, or None if they were not compared."""
        content = self.read_json(MEMORY_FILE)
        if content is None:
            return None
        try:
            ranks = [(r["measured_bytes"], r["predicted_bytes"]) for r in content["ranks"]]
            if not all(is_count(a) and (b is None or is_count(b)) for a, b in ranks):
                raise ValueError("bytes are not integers >= 0")
            return MemoryPeaks(int(content["step"]), str(content["device"]), ranks)
        except CONTENT_ERRORS as error:
            self.skip(MEMORY_FILE, error)
            return None

    def warnings(self) -> list[str]:
        """Return the newest lines of the logs of all ranks, sorted by time."""
        lines: list[str] = []
        for file in sorted((self.directory / "logs").glob("rank-*.log")):
            lines += self.read_text(f"logs/{file.name}").splitlines()
        return sorted(line for line in lines if line.strip())[-MAX_WARNINGS:]

    def png_uri(self, name: object) -> str:
        """Return a PNG of the run directory as a data URI, or "" if the file does not exist.

        Args:
            name: Path of the file inside the run directory, which may come from a file.
        """
        data = self.read_bytes(name)
        if not data.startswith(_PNG_MAGIC):
            if data:
                self.skip(f"{name!a}", "it is not a PNG file")
            return ""
        return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def read_run(directory: Path) -> RunContents:
    """Read the contents of a run directory.

    Raises:
        FileNotFoundError: metrics.jsonl does not exist, or is a link to a file outside.
    """
    run = RunContents(directory, [], {})
    try:
        lines = read_inside(directory, "metrics.jsonl").decode(errors="replace").splitlines()
        records = [record for line in lines if (record := _parse_record(line)) is not None]
    except ValueError as error:
        raise FileNotFoundError(str(error)) from error
    # The last line may be truncated if the run was killed or is writing.
    if len(records) < len(lines) - 1:
        run.skip("metrics.jsonl", f"{len(lines) - len(records)} lines are not records of steps")
    recipe: dict[str, Any] = {}
    try:
        recipe = with_current_names(tomli.loads(run.read_text("recipe.toml")))
    except CONTENT_ERRORS as error:
        run.skip("recipe.toml", error)
    return RunContents(directory, records, recipe, skipped=run.skipped)


def _parse_record(line: str) -> dict[str, Any] | None:
    """Return the record of a step without values of other types, or None if it is not a record."""
    try:
        record = json.loads(line)
        if not is_count(record["step"]):
            return None
        named = {metric: record.get(metric) for metric in NAMED_METRICS}
    except (*CONTENT_ERRORS, AttributeError):
        return None
    kept = {key: v for key, v in with_current_metrics(record).items() if _is_number(v)}
    if not is_count(kept.get("slowest_rank", 0)):
        del kept["slowest_rank"]
    for metric, values in named.items():
        if isinstance(values, dict):
            kept[metric] = {name: value for name, value in values.items() if _is_number(value)}
    return kept


def _is_number(value: object) -> bool:
    """Return True for finite numbers that a float can represent."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return abs(value) <= sys.float_info.max


class SlowestRanks(NamedTuple):
    """Ranks that were most often the slowest, by quarters of a run."""

    steps: list[tuple[int, int]]
    """First and last step of each quarter."""
    slowest_fractions: dict[int, list[float]]
    """Maps a rank to the fraction of steps per quarter in which it was the slowest.

    The most frequent rank is first.
    """
    excess_fractions: list[float]
    """Fraction of the time of the slowest rank beyond the time of the median rank."""


def slowest_ranks(records: Records, max_ranks: int) -> SlowestRanks | None:
    """Return the slowest ranks, or None for a run with one rank.

    Args:
        records: Records of the run.
        max_ranks: Maximum number of ranks in the result.
    """
    counts = Counter(r["slowest_rank"] for r in records if r.get("slowest_rank") is not None)
    if not any(counts):
        return None
    size = -(-len(records) // NUM_PERIODS)
    periods = [records[start : start + size] for start in range(0, len(records), size)]
    shares = {
        rank: [mean(r.get("slowest_rank") == rank for r in period) for period in periods]
        for rank, _ in counts.most_common(max_ranks)
    }
    steps = [(period[0]["step"], period[-1]["step"]) for period in periods]
    beyond = [mean(r.get("straggler_fraction") or 0.0 for r in period) for period in periods]
    return SlowestRanks(steps, shares, beyond)


def _metric(record: Mapping[str, Any], key: str) -> float | None:
    """Return a metric of a record if it is a number."""
    value = record.get(key)
    metric, _, name = key.partition("/")
    if metric in NAMED_METRICS:
        value = (record.get(metric) or {}).get(name)
    return value if _is_number(value) else None


def downsample_curve(points: Sequence[CurvePoint]) -> list[CurvePoint]:
    """Return at most `MAX_POINTS` points of a curve, including all extremes."""
    if len(points) <= MAX_POINTS:
        return list(points)
    size = -(-2 * len(points) // (MAX_POINTS - 2))
    kept = {points[0], points[-1]}
    for start in range(0, len(points), size):
        block = points[start : start + size]
        kept |= {min(block, key=lambda p: p[1]), max(block, key=lambda p: p[1])}
    return sorted(kept)
