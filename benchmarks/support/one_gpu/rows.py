"""Results of a run on one GPU: rows, time limits, errors, and the Markdown table.

A row is appended to `rows.jsonl` as soon as it is measured, so that a killed program loses nothing.
Errors, out-of-memory and exceeded limits are rows, too.
"""

from __future__ import annotations

import gc
import json
import signal
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

import torch

from support.pages import MAX_ROWS, format_number

MAX_ERRORS = 60
"""Unexpected errors after which the program stops: then the program itself is broken."""
REPEAT_S = 3.0
"""Interval at which an expired alarm is repeated, as libraries may swallow an exception."""
SIDE_METRICS = (
    "tokens/s", "MFU", "step", "GPU idle", "host", "update", "peak memory", "memory error",
)  # fmt: skip


class LimitError(BaseException):
    """A time limit expired. Not an `Exception`, so that torch.compile does not wrap it."""


RESULTS = {"aim": "target met", "must": "requirement met", "below": "missed"}
"""Maps the verdict of a row to its text on the page."""


@dataclass(frozen=True)
class Row:
    """A measurement, or the reason for a missing one.

    Attributes:
        value: None if nothing was measured; `note` has the reason.
        must: value that is required.
        aim: value that is the goal.
    """

    part: str
    case: str
    side: str
    metric: str
    value: float | None = None
    unit: str = ""
    must: float | None = None
    aim: float | None = None
    lower_is_better: bool = False
    note: str = ""

    @property
    def verdict(self) -> str:
        """Return "aim", "must" or "below", or nothing without a goal or value."""
        if self.value is None or self.must is None:
            return ""
        sign = -1 if self.lower_is_better else 1
        if self.aim is not None and sign * self.value >= sign * self.aim:
            return "aim"
        return "must" if sign * self.value >= sign * self.must else "below"


class Recorder:
    """Appends rows to a file and enforces time limits.

    Args:
        directory: directory of the results.
        card: name of the device, for the Markdown file.
        seconds: time limit of the program.
        patience: factor of all other limits, for rehearsals on slow machines.
    """

    def __init__(self, directory: Path, card: str, seconds: float, patience: float = 1.0) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.card = card
        self._patience = patience
        self.rows: list[Row] = []
        self.errors = 0
        self._begin_s = time.monotonic()
        self._ends_s = [self._begin_s + seconds]
        self._file = (directory / "rows.jsonl").open("a")
        signal.signal(signal.SIGALRM, _expire)

    @property
    def left_s(self) -> float:
        """Seconds until the innermost limit."""
        return min(self._ends_s) - time.monotonic()

    def add(self, part: str, case: str, side: str, metric: str, *values: object, **more) -> None:
        """Append a row and print it."""
        row = Row(part, case, side, metric, *values, **more)
        self.rows.append(row)
        seconds = time.monotonic() - self._begin_s
        record = {"at_s": round(seconds, 1), **asdict(row), "verdict": row.verdict}
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        value = "-" if row.value is None else f"{row.value:.5g} {row.unit}"
        print(f"{seconds:6.1f} s  {part}: {case}, {side}: {metric} {value} "
              f"{row.verdict} {row.note}".rstrip(), flush=True)  # fmt: skip

    def skip(self, part: str, case: str, side: str, reason: str) -> None:
        """Append a row for something that was not measured."""
        self.add(part, case, side, "not measured", note=reason)

    @contextmanager
    def attempt(self, part: str, case: str, side: str, limit_s: float) -> Iterator[None]:
        """Turn errors, out-of-memory and a time limit of the block into a row; free memory.

        Raises:
            RuntimeError: there were more than `MAX_ERRORS` unexpected errors.
        """
        limit_s *= self._patience
        self._ends_s.append(min(self._ends_s[-1], time.monotonic() + limit_s))
        self._arm()
        try:
            yield
        except LimitError as error:
            self._disarm()
            self.skip(part, case, side, f"time limit of {limit_s:.0f} s")
            _clear_frames(error)
        except Exception as error:  # counted, limited, and a result
            self._disarm()
            self._add_error(part, case, side, error)
        finally:
            self._disarm()
            self._ends_s.pop()
            free_memory()
            self._arm()

    def reset(self) -> None:
        """Remove all limits except that of the program."""
        self._disarm()
        del self._ends_s[1:]

    def _add_error(self, part: str, case: str, side: str, error: Exception) -> None:
        text = " ".join(str(error).split())[:300]
        if isinstance(error, torch.OutOfMemoryError):
            self.add(part, case, side, "out of memory", note=text)
        else:
            self.errors += 1
            self.add(part, case, side, "error", note=f"{type(error).__name__}: {text}")
            with (self.directory / "errors.log").open("a") as log:
                log.write(
                    f"== {part}, {case}, {side}\n{''.join(traceback.format_exception(error))}"
                )
        _clear_frames(error)
        if self.errors > MAX_ERRORS:
            raise RuntimeError(f"more than {MAX_ERRORS} errors; see errors.log") from None

    def _arm(self) -> None:
        if len(self._ends_s) > 1:
            signal.setitimer(signal.ITIMER_REAL, max(0.01, self.left_s), REPEAT_S)

    def _disarm(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)

    def close(self) -> None:
        """Close the file of rows."""
        self._disarm()
        self._file.close()

    def write_markdown(self) -> Path:
        """Write goals and training steps, at most `MAX_ROWS` rows, as `one_gpu_<card>.md`."""
        name = "_".join(self.card.lower().replace("nvidia", "").split()) or "device"
        file = self.directory / f"one_gpu_{name}.md"
        goals = [row for row in self.rows if row.must is not None]
        losses = [row for row in self.rows if row.metric.startswith("loss ")]
        sides = {(row.case, row.side): None for row in self.rows if row.metric == "tokens/s"}
        lines = [f"# Training on one GPU: {self.card}", "",
                 "All rows are in [rows.jsonl](rows.jsonl).", "", "## Goals", "",
                 "| case | program | metric | measured | required | target | result |",
                 "|---|---|---|--:|--:|--:|---|"]  # fmt: skip
        lines += [
            f"| {r.case} | {r.side} | {r.metric} | {_value(r)} | {r.must:g} | "
            f"{'' if r.aim is None else f'{r.aim:g}'} | {RESULTS.get(r.verdict, r.note)} |"
            for r in goals[:MAX_ROWS]
        ]
        lines += ["", "## Largest losses in the trace", ""]
        lines += [f"{i}. {r.metric.removeprefix('loss ')}: {_value(r)}; {r.note}"
                  for i, r in enumerate(losses[:3], 1)]  # fmt: skip
        lines += ["", "## Training steps", "", f"| case | program | {' | '.join(SIDE_METRICS)} |",
                  "|---|---|" + "--:|" * len(SIDE_METRICS)]  # fmt: skip
        for case, side in list(sides)[: max(MAX_ROWS - len(goals), 0)]:
            found = {r.metric: _value(r) for r in self.rows if (r.case, r.side) == (case, side)}
            cells = " | ".join(found.get(metric, "") for metric in SIDE_METRICS)
            lines.append(f"| {case} | {side} | {cells} |")
        file.write_text("\n".join(lines) + "\n")
        return file


def free_memory() -> None:
    """Free the memory of models, which hooks and compiled code keep in reference cycles."""
    torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _clear_frames(error: BaseException | None) -> None:
    """Free the local variables in the frames of an error, which may reference a model."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__


def _expire(_: int, __: FrameType | None) -> None:
    raise LimitError


def _value(row: Row) -> str:
    if row.value is None:
        return "-"
    return f"{format_number(row.value)} {row.unit}".strip()
