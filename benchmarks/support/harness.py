"""What all benchmarks share: rows with a goal, the printed table, the JSON file, paired timing.

Two programs are compared within one process by interleaving: each pair times both, in turns of
changing order, and the speed ratio is the median over pairs. A slow minute of the machine then
hits both sides alike. Rejected: one program after the other, which on a shared machine measures
the neighbours.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple

import torch
from rich.table import Table

from torchmm.common.log import make_console


@dataclass(frozen=True)
class Row:
    """One line of the table. None where there is no such value."""

    case: str
    metric: str
    unit: str
    ours: float
    baseline: float | None = None
    paper: float | None = None
    """Published value."""
    goal: float | None = None
    better: Literal["higher", "lower"] = "higher"
    kind: Literal["measured", "simulated"] = "measured"

    @property
    def met(self) -> bool | None:
        """Whether `ours` reaches the goal."""
        if self.goal is None:
            return None
        reached = self.ours >= self.goal if self.better == "higher" else self.ours <= self.goal
        return bool(reached)  # NumPy's truth is no JSON


class Seconds(NamedTuple):
    """How long one call took."""

    wall: float
    cpu: float
    """CPU time of all threads, without what other programs took of the machine."""


@dataclass(frozen=True)
class PairedTimes:
    """Times of both programs, pair by pair."""

    ours: list[Seconds]
    baseline: list[Seconds]

    @property
    def median_ours_s(self) -> float:
        return median(t.wall for t in self.ours)

    @property
    def median_baseline_s(self) -> float:
        return median(t.wall for t in self.baseline)

    @property
    def speed_ratio(self) -> float:
        """Median over pairs of baseline time / our time: above 1, ours is faster."""
        return median(b.wall / a.wall for a, b in zip(self.ours, self.baseline, strict=True))

    @property
    def cpu_ratio(self) -> float:
        """The same of CPU time, which holds on a shared machine too."""
        return median(b.cpu / a.cpu for a, b in zip(self.ours, self.baseline, strict=True))


def time_pairs(
    ours: Callable[[], object],
    baseline: Callable[[], object],
    pairs: int,
    device: torch.device,
) -> PairedTimes:
    """Times `pairs` calls of both programs; the order changes from pair to pair.

    Both must be warm: what they compile or allocate on the first call would be timed.
    """
    times = PairedTimes([], [])
    for index in range(pairs):
        both = [(ours, times.ours), (baseline, times.baseline)]
        for program, record in both if index % 2 == 0 else reversed(both):
            record.append(_time(program, device))
    return times


def _time(program: Callable[[], object], device: torch.device) -> Seconds:
    _synchronize(device)
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    program()
    _synchronize(device)
    return Seconds(time.perf_counter() - begin_s, time.process_time() - begin_cpu_s)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def make_parser(description: str) -> argparse.ArgumentParser:
    """Command line with the arguments that every benchmark takes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="fewer, smaller cases: under 45 s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows there")
    return parser


def describe_machine(device: torch.device) -> str:
    """Device, threads, load and versions in one line."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name()
    return (
        f"{name}; {os.cpu_count()} cores, {torch.get_num_threads()} threads, "
        f"load {os.getloadavg()[0]:.2f}; Python {platform.python_version()}, "
        f"torch {torch.__version__}"
    )


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def report(title: str, rows: Sequence[Row], json_file: Path | None) -> None:
    """Prints the table and writes `json_file`, if any."""
    table = Table(title=title, title_justify="left")
    for column in ("case", "metric", "unit"):
        table.add_column(column, no_wrap=True)
    for column in ("ours", "baseline", "paper", "goal", "met"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        values = (_number(v) for v in (row.ours, row.baseline, row.paper, row.goal))
        met = {None: "", True: "yes", False: "no"}[row.met]
        table.add_row(row.case, row.metric, row.unit, *values, met)
    make_console(width=160).print(table)
    if json_file is not None:
        write_rows(rows, json_file)


def run_cases(
    title: str,
    description: str | None,
    cases: Mapping[str, Callable[[str], Iterable[Sequence[Row]]]],
    conditions: str,
) -> None:
    """Run a benchmark that consists of several cases, all of them or those of `--cases`.

    The table of each case is printed when it is finished. The JSON file then has its rows in place
    of older rows of the same case, so that a long benchmark can run in pieces.

    Args:
        title: Title of the tables.
        description: Description of the command line; the first line is shown.
        cases: Rows by name of the case, one table after the other, for "tiny", "quick" or "full".
        conditions: Data and seeds, printed after the machine.
    """
    parser = make_parser((description or "").splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=cases, default=list(cases), metavar="NAME")
    parser.add_argument("--tiny", action="store_true", help="for tests: seconds, says nothing")
    arguments = parser.parse_args()
    size = "tiny" if arguments.tiny else "quick" if arguments.quick else "full"
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    torch.set_num_threads(1)
    print(f"machine: {describe_machine(torch.device('cpu'))}")
    print(conditions)
    found: list[Row] = []
    for case in arguments.cases:
        for rows in cases[case](size):
            report(f"{title}: {case}", rows, None)
            found += rows
            if arguments.json is not None:
                others = kept_rows(arguments.json, {row.case for row in found})
                write_rows(others + found, arguments.json)


def kept_rows(json_file: Path | None, cases: Collection[str]) -> list[Row]:
    """Rows that a file has of other cases, so that a long benchmark can be run in parts."""
    if json_file is None or not json_file.exists():
        return []
    records = json.loads(json_file.read_text())
    names = {field.name for field in fields(Row)}
    rows = [Row(**{k: v for k, v in record.items() if k in names}) for record in records]
    return [row for row in rows if row.case not in cases]


def read_records(file: Path | None) -> list[dict[str, Any]]:
    """Return the objects of a file of JSON lines; incomplete lines are skipped."""
    if file is None or not file.exists():
        return []
    records = []
    for line in file.read_text().splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:  # the benchmark was stopped while it wrote this line
            continue
    return records


def append_record(record: Mapping[str, Any], file: Path) -> None:
    """Append an object to a file of JSON lines."""
    is_open = file.exists() and not file.read_text().endswith("\n") and file.stat().st_size > 0
    with file.open("a") as stream:
        stream.write(("\n" if is_open else "") + json.dumps(record) + "\n")


def replace_table(page: Path, table: str) -> None:
    """Replace the table at the end of a Markdown page; the text above it stays."""
    text = page.read_text()
    page.write_text(text[: text.index("\n|") + 1] + table + "\n")


def write_rows(rows: Sequence[Row], json_file: Path) -> None:
    """Writes the rows as a list of objects."""
    records = [{**asdict(row), "met": row.met} for row in rows]
    json_file.write_text(json.dumps(records, indent=1) + "\n")


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
