"""Tests of tests/faults/README.md: up to date, existing tests, and enough injected faults."""

import re
import runpy
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[2]
SCRIPT = TESTS / "faults" / "write_page.py"


@pytest.fixture(scope="module")
def script():
    return runpy.run_path(str(SCRIPT))


def test_reliability_page_is_up_to_date(script):
    text = script["PAGE"].read_text()
    counts, day, kills = script["parse_page"](text)
    assert script["page"](counts, day, kills) == text, "run tests/faults/write_page.py"
    assert min(counts) > 0 and sum(counts) >= 100
    assert len(counts) == len(script["FAULTS"])


def test_every_listed_fault_has_a_row(script):
    rows = [*script["FAULTS"], *script["LIMITATIONS"]]
    numbers = {number for row in rows for number in row.number.split(", ")}
    last_numbers = {"F": 33, "R": 11, "S": 10}
    expected = {f"{letter}{n}" for letter, last in last_numbers.items() for n in range(1, last + 1)}
    assert expected - numbers == set()


def test_every_test_of_a_fault_exists(script):
    for fault in script["FAULTS"]:
        for node_id in fault.shown_by:
            file, _, name = node_id.partition("::")
            assert re.search(rf"^def {name}\(", (TESTS / file).read_text(), re.MULTILINE), node_id


def test_skipped_or_failed_tests_are_not_counted(script):
    fault = script["FAULTS"][0]
    ran, injected = script["count_outcomes"], script["count_injections"]
    cases = [f"tests/{name}[{case}]" for name in fault.shown_by for case in "ab"]
    lines = [{"test": case, "outcome": "passed"} for case in cases]
    assert injected(fault, ran(lines)) == 2 * len(fault.shown_by) * fault.each
    assert injected(fault, ran(lines[:2])) == 0
    skipped = [{**line, "outcome": "skipped"} for line in lines[:2]]
    assert injected(fault, ran([*skipped, *lines[2:]])) == 0
    with pytest.raises(SystemExit, match="failed: "):
        ran([{**lines[0], "outcome": "failed"}])
    assert injected(fault, ran([{**lines[0], "outcome": "failed"}, *lines])) > 0
