"""Pipelines against torch's own: bookkeeping, real wall clock, and a depth that only sleeps.

    python benchmarks/pipeline_runtime.py [--quick] [--json FILE] [--cases NAME ...]

    bookkeeping   `pipeline_bookkeeping`: what the runtime costs per compute action
    model         `pipeline_model_case`: an image-text model on two ranks
    sleep         `pipeline_sleep_case`: eight ranks whose layers sleep

Numbers of images per microbatch are those of real documents (`documents`), which are committed.
Every rank computes with one thread. "stock" is torch's `Schedule1F1B` or
`ScheduleInterleaved1F1B`, whichever is faster, with its best split of the layers.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator

import pipeline_bookkeeping as bookkeeping
import pipeline_model_case as model_case
import pipeline_sleep_case as sleep_case
import torch
from documents import load_documents
from harness import Row, describe_machine, make_parser, report, write_rows
from pipeline_model import SEED
from ranks import run_ranks


def run_bookkeeping(size: str) -> Iterator[list[Row]]:
    """One rank and two."""
    yield bookkeeping.measure(bookkeeping.REPETITIONS[size])


def run_model(size: str) -> Iterator[list[Row]]:
    """Two ranks that compute."""
    for setting in model_case.SETTINGS[size]:
        found = run_ranks(model_case.run_rank, model_case.RANKS, setting)
        _describe("model", found)
        print(f"model: the tower takes {found['tower share']:.0%} of the computing time")
        yield model_case.rows(setting, found)


def run_sleep(size: str) -> Iterator[list[Row]]:
    """Eight ranks that sleep."""
    for setting in sleep_case.SETTINGS[size]:
        found = sleep_case.run(setting)
        _describe("sleep", found)
        yield sleep_case.rows(setting, found)


CASES = {"bookkeeping": run_bookkeeping, "model": run_model, "sleep": run_sleep}


def _describe(case: str, found: dict) -> None:
    print(f"{case}: images per microbatch, by step: {found['images']}")
    print(f"{case}: ours: {found['choice']}")
    for name, split in found["splits"].items():
        print(f"{case}: stock, {name}: layers per stage {split}")
    print(f"{case}: {found['comparison']}")


def main() -> None:
    """Prints a table whenever a case has ended; the file then has the rows so far."""
    parser = make_parser((__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="NAME")
    parser.add_argument("--tiny", action="store_true", help="for tests: seconds, says nothing")
    arguments = parser.parse_args()
    size = "tiny" if arguments.tiny else "quick" if arguments.quick else "full"
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    torch.set_num_threads(1)
    print(f"machine: {describe_machine(torch.device('cpu'))}")
    print(f"documents: {load_documents().source}; seed {SEED}")
    found: list[Row] = []
    for case in arguments.cases:
        for rows in CASES[case](size):
            report(f"Pipelines against torch's schedules: {case}", rows, None)
            found += rows
            if arguments.json is not None:
                write_rows(found, arguments.json)


if __name__ == "__main__":
    main()
