"""Writes tests/faults/README.md from the table of faults and what tests of them did.

python -m pytest --outcomes=outputs/faults.jsonl TESTS
python tests/faults/write_page.py outputs/faults.jsonl

With --tests it prints the tests of the table, to be run. Of a case that ran several
times the last outcome counts. Lines of several runs make one page.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

from campaign import FAULTS, REFUSED, Fault

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "tests" / "faults" / "README.md"
HEAD = """\
# Reliability

This page lists the faults that tests inject, and their outcomes. `tests/faults/write_page.py`
writes it from the table in `tests/faults/campaign.py` and the outcomes of the tests.
{total} injections, {day}.

| number | source |
|---|---|
| F | the first list of faults of the project |
| R, S | a review at commit 4776752: 61 of its 256 injections failed, with about 25 causes |
| N | a review at commit 35e13daa: 115 of its 382 injections failed, with 22 causes |
| U, P, M | copies of checkpoints in a store, background processes, disaggregated modules |
| Q, E | schedulers, exports |

"before" is the outcome in that review. "times" is the number of injections with the expected
outcome.

| | injected | times | code | STATUS | what happens | the same afterwards | before | now, by |
|---|---|---|---|---|---|---|---|---|
"""
REFUSALS = """
## Not mended

| | fault | why |
|---|---|---|
"""
TAIL = """
## To run it

```sh
python -m pytest --outcomes=outputs/faults.jsonl $(python tests/faults/write_page.py --tests)
python tests/faults/write_page.py outputs/faults.jsonl
python tests/faults/kill_trainer.py /tmp/kills 100    # any number of kills; ten are in the table
```

Whether anything grows in a long run: `python tests/faults/soak.py`
([2,000 steps](../../benchmarks/results/soak_cpu.md): nothing).

{kills}
"""
NO_KILLS = "The last command has not been recorded with these results."


class Ran(NamedTuple):
    """What a test of the table did."""

    passed: int
    skipped: int


def main() -> None:
    """Writes the page, or prints the tests."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("outcomes", nargs="*", type=Path)
    parser.add_argument("--tests", action="store_true", help="print the tests to be run")
    parser.add_argument("--kills", type=Path, help="what kill_trainer.py has printed")
    arguments = parser.parse_args()
    if arguments.tests:
        names = sorted({f"tests/{name}" for fault in FAULTS for name in fault.shown_by})
        sys.stdout.write(" ".join(names) + "\n")
        return
    lines = [line for file in arguments.outcomes for line in file.read_text().splitlines()]
    kills = arguments.kills.read_text() if arguments.kills else ""
    counts = [injected(fault, ran(map(json.loads, lines))) for fault in FAULTS]
    if none := [fault.what for fault, count in zip(FAULTS, counts, strict=True) if not count]:
        raise SystemExit(f"nothing passed of: {'; '.join(none)}")
    PAGE.write_text(page(counts, f"ran on {date.today()}", describe_kills(kills)))


def ran(outcomes: Iterable[Mapping[str, str]]) -> dict[str, Ran]:
    """By test function, as the table names it.

    Raises:
        SystemExit: a case failed.
    """
    cases: dict[str, str] = {}
    for outcome in outcomes:
        cases[outcome["test"].removeprefix("tests/")] = outcome["outcome"]
    failed = [case for case, outcome in cases.items() if outcome == "failed"]
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for case, outcome in cases.items():
        counts[case.partition("[")[0]][outcome == "skipped"] += 1
    return {name: Ran(*found) for name, found in counts.items()}


def injected(fault: Fault, outcomes: Mapping[str, Ran]) -> int:
    """Injections of a row that went as it says; 0 if one of its tests did not run."""
    passed = [outcomes.get(name, Ran(0, 0)).passed for name in fault.shown_by]
    return fault.each * sum(passed) if all(passed) else 0


def page(counts: Sequence[int], day: str, kills: str) -> str:
    """The whole page."""
    rows = [row(fault, count) for fault, count in zip(FAULTS, counts, strict=True)]
    refused = [f"| {found.number} | {found.what} | {found.why} |" for found in REFUSED]
    parts = [HEAD.format(total=sum(counts), day=day), *(f"{line}\n" for line in rows)]
    parts += [REFUSALS, *(f"{line}\n" for line in refused), TAIL.format(kills=kills)]
    return "".join(parts)


def row(fault: Fault, count: int) -> str:
    """A line of the table."""
    files = dict.fromkeys(name.partition("::")[0] for name in fault.shown_by)
    links = ", ".join(
        f"[{Path(name).stem[5:]}]({os.path.relpath(name, 'faults')})" for name in files
    )
    before = f"**{fault.before}**" if fault.before.startswith("FAIL") else fault.before
    shown = (fault.code, fault.status, fault.happens, fault.equal)
    cells = (fault.number, fault.what, count, *shown, before, links)
    return f"| {' | '.join(map(str, cells))} |"


def said(text: str) -> tuple[list[int], str, str]:
    """The numbers, the day and the sentence about kills that a page consists of, apart from the
    table of faults."""
    table = text.partition(f"|{'---|' * 9}\n")[2].partition("\n\n")[0]
    counts = [int(line.split(" | ")[2]) for line in table.splitlines()]
    day = re.search(r"injections, (.*)\.\n", text)
    assert day is not None
    return counts, day[1], text.rpartition("\n\n")[2].removesuffix("\n")


def describe_kills(printed: str) -> str:
    """What kill_trainer.py found, from its lines."""
    if not printed:
        return NO_KILLS
    *kills, end = [json.loads(line) for line in printed.splitlines()]
    assert end["equal"]
    torn = sum(bool(kill["torn_here"] or kill["torn_there"]) for kill in kills)
    return (
        f"The last command, run with these results: {len(kills)} kills, {torn} of which left a "
        f"torn save or copy, on {end['machines']} machines one after another, to step "
        f"{end['end']}. Every start, every copy and the end had the bits of a run that nothing "
        "happened to, and no start found less than an earlier one."
    )


if __name__ == "__main__":
    main()
