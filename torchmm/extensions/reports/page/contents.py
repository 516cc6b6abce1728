"""Contents of a run directory, for its page.

Any file may be missing, torn by a crash, of an older version, or made by somebody else. Values of
other types are left out with a note on the page, so that neither a run nor `show_run.py` fails.
Only regular files inside the directory are read: a page never shows what a link points to outside.
"""

from __future__ import annotations

import base64
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import tomli

from torchmm.common.files import require_relative_name
from torchmm.extensions.evaluation.results import RESULTS, Evaluation, parse_evaluation
from torchmm.training.ending import STATUS_NAME, Status, read_status

Records = Sequence[Mapping[str, Any]]
Point = tuple[int, float]
"""Step and value."""
MOST_POINTS = 800
"""Of a curve; of more, the lowest and the highest of each stretch are kept."""
MOST_WARNINGS = 200
PERIODS = 4
SAMPLES_FILE, SAMPLES_FOLDER = "samples.json", "samples"
MEMORY_FILE = "memory.json"


MOST_BYTES = 1 << 30
"""Of a file that is read for a page."""
MOST_COUNT = 2**63
_ODD = (ValueError, KeyError, TypeError, RecursionError, OverflowError)
"""Errors of files with other content than expected."""
_PNG = b"\x89PNG\r\n"


@dataclass(frozen=True)
class GeneratedText:
    """The text that was generated for a held-out sample at one step."""

    step: int
    source: str
    index: int
    prompt: str
    generated: str
    truth: str
    references: tuple[str, ...]
    picture: str | None
    """Name of its image in `SAMPLES_FOLDER`."""

    @classmethod
    def of(cls, entry: Any) -> GeneratedText:
        """Return an entry of samples.json; raise an error of `_ODD` if it has other types."""
        step = entry["step"]
        index = entry["index"]
        picture = entry.get("picture")
        if not _is_count(step) or not _is_count(index):
            raise ValueError("step and index must be integers >= 0")
        if picture is not None:
            require_relative_name(picture, SAMPLES_FILE)
        return cls(
            step,
            str(entry["source"]),
            index,
            prompt=str(entry.get("prompt", "")).strip(),
            generated=str(entry.get("generated", "")).strip(),
            truth=str(entry.get("truth", "")).strip(),
            references=tuple(str(text).strip() for text in entry.get("references") or ()),
            picture=picture,
        )

    @property
    def is_right(self) -> bool:
        """Whether the text is exactly the truth or a reference."""
        return self.generated in {self.truth, *self.references}


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
        skipped: Notes on files and lines that were left out, in the order in which they were read.
    """

    directory: Path
    records: Records
    recipe: Mapping[str, Any]
    skipped: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The run's."""
        name = self.recipe.get("name")
        return name if isinstance(name, str) and name else self.directory.resolve().name

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
        """Number of steps of the run; 0 if the recipe does not say."""
        training = self.recipe.get("training")
        steps = training.get("steps", 0) if isinstance(training, dict) else 0
        return steps if _is_count(steps) else 0

    @property
    def evaluations(self) -> list[Evaluation]:
        """Scores of exports, by `evaluate.py`."""
        found = []
        for line in self._read(RESULTS).splitlines():
            try:
                found.append(parse_evaluation(line))
            except ValueError as error:
                self._skip(RESULTS, error)
        return found

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
    def samples(self) -> dict[tuple[str, int], list[GeneratedText]]:
        """Texts generated for each held-out sample, by source and index, in order of steps."""
        found: dict[tuple[str, int], list[GeneratedText]] = {}
        for sample in sorted(self._samples(), key=lambda sample: sample.step):
            found.setdefault((sample.source, sample.index), []).append(sample)
        return found

    def _samples(self) -> Iterator[GeneratedText]:
        entries = self._json(SAMPLES_FILE)
        if not isinstance(entries, list):
            if entries is not None:
                self._skip(SAMPLES_FILE, "it is not a list")
            return
        for number, entry in enumerate(entries):
            try:
                yield GeneratedText.of(entry)
            except (*_ODD, AttributeError) as error:
                self._skip(f"{SAMPLES_FILE}: entry {number}", error)

    def memory(self) -> Memory | None:
        """Peaks of memory of all ranks; None if they were not compared."""
        told = self._json(MEMORY_FILE)
        if told is None:
            return None
        try:
            ranks = [(r["measured_bytes"], r["predicted_bytes"]) for r in told["ranks"]]
            if not all(_is_count(a) and (b is None or _is_count(b)) for a, b in ranks):
                raise ValueError("bytes are not integers >= 0")
            return Memory(int(told["step"]), str(told["device"]), ranks)
        except _ODD as error:
            self._skip(MEMORY_FILE, error)
            return None

    def warnings(self) -> list[str]:
        """The newest lines of all ranks' logs, in order of time."""
        lines: list[str] = []
        for file in sorted((self.directory / "logs").glob("rank-*.log")):
            lines += self._read(f"logs/{file.name}").splitlines()
        return sorted(line for line in lines if line.strip())[-MOST_WARNINGS:]

    def timelines(self) -> Iterator[tuple[str, str]]:
        """Timelines of pipelines, (name, SVG), in order of steps."""
        files = (self.directory / "timeline").glob("step-*.svg")
        for file in sorted(files, key=lambda f: (len(f.name), f.name)):
            svg = self._read(f"timeline/{file.name}")
            if "<svg" in svg:
                yield file.name, svg[svg.index("<svg") :]

    def png_uri(self, name: object) -> str:
        """Return a PNG of the run directory as a data URI; empty if there is no such file.

        Args:
            name: Path of the file inside the run directory, which may come from a file.
        """
        data = self._bytes(name)
        if not data.startswith(_PNG):
            if data:
                self._skip(f"{name!a}", "it is not a PNG file")
            return ""
        return f"data:image/png;base64,{base64.b64encode(data).decode()}"

    def _skip(self, what: str, why: object) -> None:
        if len(self.skipped) < MOST_WARNINGS:
            self.skipped.append(f"{what} is left out: {why!r}"[:500])

    def _json(self, name: str) -> Any:
        """Return the content of a JSON file; None if there is none or it cannot be read."""
        text = self._read(name)
        try:
            return json.loads(text) if text else None
        except _ODD as error:
            self._skip(name, error)
            return None

    def _read(self, name: str) -> str:
        return self._bytes(name).decode(errors="replace")

    def _bytes(self, name: object) -> bytes:
        """Return the content of a file inside the directory; empty if it cannot be read."""
        try:
            return read_inside(self.directory, name)
        except FileNotFoundError:
            return b""
        except (OSError, ValueError) as error:
            self._skip(f"{name!a}", error)
            return b""

    def drawings(self) -> list[Path]:
        """Pictures of what the generator drew, the newest last."""
        files = (self.directory / "drawings").glob("step-*.png")
        return sorted(files, key=lambda f: (len(f.name), f.name))


def read_inside(directory: Path, name: object) -> bytes:
    """Return the content of a regular file of a run directory, at most `MOST_BYTES`.

    Raises:
        FileNotFoundError: There is no such file.
        OSError: It cannot be read.
        ValueError: The name, or a symbolic link, leads out of the directory, or the file is too
            large or not a regular one.
    """
    file = directory / require_relative_name(name, str(directory))
    if not file.resolve(strict=True).is_relative_to(directory.resolve()):
        raise ValueError(f"{file} is a link to a file outside {directory}")
    if not file.is_file():  # a named pipe would block
        raise ValueError(f"{file} is not a regular file")
    if file.stat().st_size > MOST_BYTES:
        raise ValueError(f"{file} has more than {MOST_BYTES} bytes")
    return file.read_bytes()


def read_run(directory: Path) -> RunContents:
    """Read the contents of a run directory.

    Raises:
        FileNotFoundError: There is no metrics.jsonl, or only a link to one outside.
    """
    run = RunContents(directory, [], {})
    try:
        lines = read_inside(directory, "metrics.jsonl").decode(errors="replace").splitlines()
        records = [record for line in lines if (record := _record(line)) is not None]
    except ValueError as error:
        raise FileNotFoundError(str(error)) from error
    # The last line of a run that was killed, or that is being written, may be torn.
    if len(records) < len(lines) - 1:
        run._skip("metrics.jsonl", f"{len(lines) - len(records)} lines are not records of steps")
    recipe: dict[str, Any] = {}
    try:
        recipe = tomli.loads(run._read("recipe.toml"))
    except _ODD as error:
        run._skip("recipe.toml", error)
    return RunContents(directory, records, recipe, run.skipped)


def _record(line: str) -> dict[str, Any] | None:
    """Return the record of a step, with values of other types left out; None if it is not one."""
    try:
        record = json.loads(line)
        if not _is_count(record["step"]):
            return None
        scores = record.get("scores")
    except (*_ODD, AttributeError):
        return None
    kept = {key: value for key, value in record.items() if _is_number(value)}
    if not _is_count(kept.get("slowest_rank", 0)):
        del kept["slowest_rank"]
    if isinstance(scores, dict):
        kept["scores"] = {name: value for name, value in scores.items() if _is_number(value)}
    return kept


def _is_number(value: object) -> bool:
    """Return True for finite numbers that a float can hold."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return abs(value) <= sys.float_info.max


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= MOST_COUNT


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
    return value if _is_number(value) else None


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
