"""Functions that all benchmarks share: result rows, printed tables, JSON files and paired timing.

Two programs are compared in one process with interleaved pairs. Each pair times both programs, and
the order alternates from pair to pair. The speedup is the median over pairs, so that a slow minute
of a shared machine affects both programs equally.
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

from support.pages import FIELDS, format_number, update_page
from torchmm.common.log import make_console

JSON_HELP = "write all rows to FILE and update the tables of the page FILE.md, if it exists"


@dataclass(frozen=True)
class Row:
    """Measured or simulated value. Fields without a value are None."""

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
        """Return True if `ours` reaches the goal, None without a goal."""
        if self.goal is None:
            return None
        reached = self.ours >= self.goal if self.better == "higher" else self.ours <= self.goal
        return bool(reached)  # json cannot write numpy.bool


class Seconds(NamedTuple):
    """Duration of one call, in seconds."""

    wall: float
    cpu: float
    """CPU time of all threads. Other programs do not add to it."""


@dataclass(frozen=True)
class PairedTimes:
    """Times of both programs, in the order of the pairs."""

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
        """Median over pairs of baseline time / torchmm time. Above 1, torchmm is faster."""
        return median(b.wall / a.wall for a, b in zip(self.ours, self.baseline, strict=True))

    @property
    def cpu_ratio(self) -> float:
        """Median over pairs of the CPU time ratio, which is also valid on a shared machine."""
        return median(b.cpu / a.cpu for a, b in zip(self.ours, self.baseline, strict=True))


def time_pairs(
    ours: Callable[[], object],
    baseline: Callable[[], object],
    pairs: int,
    device: torch.device,
) -> PairedTimes:
    """Time `pairs` calls of both programs, in an order that alternates from pair to pair.

    Call both programs once before, so that compilation and first allocations are not timed.
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
    """Return a parser with the arguments of every benchmark."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--quick", action="store_true", help="run fewer, smaller cases (at most 45 s)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help=JSON_HELP)
    return parser


def describe_machine(device: torch.device) -> str:
    """Return device, threads, load and versions in one line."""
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
    """Print the table and write `json_file`, if given."""
    table = Table(title=title, title_justify="left")
    for column in ("case", "metric", "unit"):
        table.add_column(column, no_wrap=True)
    for column in FIELDS:
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        values = (row.ours, row.baseline, row.paper, row.goal, row.met)
        table.add_row(row.case, row.metric, row.unit, *map(format_number, values))
    make_console(width=160).print(table)
    if json_file is not None:
        write_rows(rows, json_file)


def run_cases(
    title: str,
    description: str | None,
    cases: Mapping[str, Callable[[str], Iterable[Sequence[Row]]]],
    conditions: str,
) -> None:
    """Run all cases of a benchmark, or those of `--cases`.

    The table of a case is printed when the case is finished. Its rows then replace older rows of
    the same case in the JSON file, so that a long benchmark can run in several calls.

    Args:
        title: Title of the tables.
        description: Docstring of the benchmark. `--help` shows the first line.
        cases: Maps the name of a case to a function of the size ("tiny", "quick" or "full") that
            yields tables.
        conditions: Data and seeds, printed after the machine.
    """
    parser = make_parser((description or "").splitlines()[0])
    parser.add_argument(
        "--cases",
        nargs="+",
        choices=cases,
        default=list(cases),
        metavar="NAME",
        help="cases to run (default: all)",
    )
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="run the smallest cases, for tests",
    )
    arguments = parser.parse_args()
    size = "tiny" if arguments.tiny else "quick" if arguments.quick else "full"
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    torch.set_num_threads(1)
    print(f"machine: {describe_machine(torch.device('cpu'))}")
    print(conditions)
    new_rows: list[Row] = []
    for case in arguments.cases:
        for rows in cases[case](size):
            report(f"{title}: {case}", rows, None)
            new_rows += rows
            if arguments.json is not None:
                kept = kept_rows(arguments.json, {row.case for row in new_rows})
                write_rows(kept + new_rows, arguments.json)


def kept_rows(json_file: Path | None, cases: Collection[str]) -> list[Row]:
    """Return the rows of all other cases in a file, so that a long benchmark can run in parts."""
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
    """Write all rows as a list of objects, and update the tables of the page next to the file."""
    records = [{**asdict(row), "met": row.met} for row in rows]
    json_file.write_text(json.dumps(records, indent=1) + "\n")
    page = json_file.with_suffix(".md")
    if page.exists():
        update_page(page, records)
