"""Write tests/faults/README.md from the table of faults and the outcomes of their tests.

python -m pytest --outcomes=outputs/faults.jsonl TESTS
python tests/faults/write_page.py outputs/faults.jsonl

With --tests, print the tests of the table. If a case ran several times, its last outcome counts.
Outcomes of several runs are merged.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

from campaign import FAULTS, LIMITATIONS, Fault

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "tests" / "faults" / "README.md"
HEAD = """\
# Injected faults

This page lists the faults that tests inject, and their results. `write_page.py` writes it from
`campaign.py` and the outcomes of the tests. Training runs on CPUs with small models.
{total} injections, {day}.

"n" is the number of injections with the expected result. "Unchanged" lists the state that must be
the same after the fault. The second entry of "exit" is the state in STATUS.json.

| fault | n | exit | result | unchanged | tests |
|---|---:|---|---|---|---|
"""
LIMITATIONS_HEAD = """
## Known limitations

| fault | reason |
|---|---|
"""
TAIL = """
## Run the tests

```sh
python -m pytest --outcomes=outputs/faults.jsonl $(python tests/faults/write_page.py --tests)
python tests/faults/write_page.py outputs/faults.jsonl
python tests/faults/kill_trainer.py /tmp/kills 100    # number of kills; the table has ten
```

`python tests/faults/soak.py` checks whether memory, files or times grow in a long run
([2,000 steps](../../benchmarks/results/soak_cpu.md): no growth).

{kills}
"""
NO_KILLS = "`kill_trainer.py` did not run with these results."


class TestOutcomes(NamedTuple):
    """Outcomes of a test function."""

    passed: int
    skipped: int


def main() -> None:
    """Write the page, or print the tests."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("outcomes", nargs="*", type=Path)
    parser.add_argument("--tests", action="store_true", help="print the tests to be run")
    parser.add_argument("--kills", type=Path, help="output of kill_trainer.py")
    arguments = parser.parse_args()
    if arguments.tests:
        names = sorted({f"tests/{name}" for fault in FAULTS for name in fault.shown_by})
        sys.stdout.write(" ".join(names) + "\n")
        return
    lines = [line for file in arguments.outcomes for line in file.read_text().splitlines()]
    kills = arguments.kills.read_text() if arguments.kills else ""
    counts = [count_injections(fault, count_outcomes(map(json.loads, lines))) for fault in FAULTS]
    if none := [fault.what for fault, count in zip(FAULTS, counts, strict=True) if not count]:
        raise SystemExit(f"nothing passed of: {'; '.join(none)}")
    PAGE.write_text(page(counts, f"ran on {date.today()}", describe_kills(kills)))


def count_outcomes(outcomes: Iterable[Mapping[str, str]]) -> dict[str, TestOutcomes]:
    """Return the outcomes by test function, as named in the table.

    Raises:
        SystemExit: A case failed.
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
    return {name: TestOutcomes(*numbers) for name, numbers in counts.items()}


def count_injections(fault: Fault, outcomes: Mapping[str, TestOutcomes]) -> int:
    """Return the injections of a row with the expected result; 0 if a test did not run."""
    passed = [outcomes.get(name, TestOutcomes(0, 0)).passed for name in fault.shown_by]
    return fault.each * sum(passed) if all(passed) else 0


def page(counts: Sequence[int], day: str, kills: str) -> str:
    """Return the page."""
    rows = [row(fault, count) for fault, count in zip(FAULTS, counts, strict=True)]
    limitations = [f"| {limitation.what} | {limitation.why} |" for limitation in LIMITATIONS]
    parts = [HEAD.format(total=sum(counts), day=day), *(f"{line}\n" for line in rows)]
    parts += [LIMITATIONS_HEAD, *(f"{line}\n" for line in limitations), TAIL.format(kills=kills)]
    return "".join(parts)


def row(fault: Fault, count: int) -> str:
    """Return a line of the table."""
    files = dict.fromkeys(name.partition("::")[0] for name in fault.shown_by)
    links = ", ".join(f"[{Path(name).stem[5:]}]({relative(name)})" for name in files)
    ends = fault.code if fault.status == "-" else f"{fault.code}, {fault.status}"
    return f"| {fault.what} | {count} | {ends} | {fault.happens} | {fault.equal} | {links} |"


def relative(name: str) -> str:
    """Return the path of a test file relative to the page."""
    return name.removeprefix("faults/") if name.startswith("faults/") else f"../{name}"


def parse_page(text: str) -> tuple[list[int], str, str]:
    """Return the counts, the date and the sentence about kills of a page."""
    table = text.partition("|---|---:|---|---|---|---|\n")[2].partition("\n\n")[0]
    counts = [int(line.split(" | ")[1]) for line in table.splitlines()]
    day = re.search(r"injections, (.*)\.\n", text)
    assert day is not None
    return counts, day[1], text.rpartition("\n\n")[2].removesuffix("\n")


def describe_kills(printed: str) -> str:
    """Return a sentence about the output of kill_trainer.py."""
    if not printed:
        return NO_KILLS
    *kills, end = [json.loads(line) for line in printed.splitlines()]
    assert end["equal"]
    torn = sum(bool(kill["torn_here"] or kill["torn_there"]) for kill in kills)
    return (
        f"Last run of `kill_trainer.py`: {len(kills)} kills on {end['machines']} machines, "
        f"{torn} of which left an incomplete save or upload, to step {end['end']}. Every start, "
        "every upload and the end were bitwise identical to an undisturbed run, and no start found "
        "less than an earlier one."
    )


if __name__ == "__main__":
    main()
