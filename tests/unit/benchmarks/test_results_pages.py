"""Pages of simulated results: their rows are in the JSON file, and there are few of them."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
PAGES = (
    "bubble_scheduling_cpu",
    "disttrain_figures",
    "layer_tuning_cpu",
    "newer_systems",
    "paper_tables",
    "pipeweaver_figures",
)
MAX_ROWS = 30


def tables(text: str) -> Iterator[tuple[list[str], list[str]]]:
    """Yield header and cells of each row of the tables that begin with the column "case"."""
    header: list[str] = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            header = []
        elif not header:
            header = cells
        elif header[0] == "case" and not cells[0].startswith("-"):
            yield header, cells


def unknown_rows(text: str, records: list[dict], number) -> list[list[str]]:
    """Return the rows of a page that are not in the records."""

    def shown(record: dict, column: str) -> str:
        value = record[column]
        return value if isinstance(value, str) else number(value)

    return [
        cells
        for header, cells in tables(text)
        if cells not in [[shown(record, column) for column in header] for record in records]
    ]


@pytest.mark.parametrize("name", PAGES)
def test_page_rows_are_in_json(load, name):
    text = (RESULTS / f"{name}.md").read_text()
    records = json.loads((RESULTS / f"{name}.json").read_text())
    number = load("support.harness")._number
    rows = list(tables(text))
    assert rows and len(rows) <= MAX_ROWS
    assert unknown_rows(text, records, number) == []
    changed = [{**record, "ours": 1.01 * record["ours"] + 1} for record in records]
    assert unknown_rows(text, changed, number)  # a control
