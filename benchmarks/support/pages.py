"""Tables of the pages in `benchmarks/results`, filled from the JSON file next to each page.

A page has a title, the conditions, a conclusion and at most `MAX_ROWS` table rows. The JSON file
has all rows. Tables whose first column is "case" are filled from these rows. They have one of two
forms:

    | case | metric | unit | torchmm | baseline | paper | goal | met |
    | case | speedup (x) | step time (s) | step time (s), baseline |

The first form has one line per row. The second form has one line per case and one column per
metric.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

MAX_ROWS = 30
FIELDS = {"torchmm": "ours", "baseline": "baseline", "paper": "paper", "goal": "goal", "met": "met"}
"""Maps the column head of a page to the key of a JSON row."""
NAMES = ("case", "metric", "unit", "kind")
TABLE = re.compile(r"^\|.*(?:\n\|.*)*", re.MULTILINE)

Record = Mapping[str, Any]


def format_number(value: float | str | None) -> str:
    """Return a value as it is shown in tables, with four significant digits."""
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def split_cells(line: str) -> list[str]:
    """Return the cells of one line of a Markdown table."""
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def update_page(page: Path, records: Iterable[Record]) -> None:
    """Fill the tables of a page from the rows of its JSON file."""
    page.write_text(fill_tables(page.read_text(), list(records)))


def fill_tables(text: str, records: Sequence[Record]) -> str:
    """Return a page with the values of all tables whose first column is "case".

    The rows of a table stay the same if the benchmark still has them. If none is left, the table
    gets the first `MAX_ROWS` rows of the benchmark.
    """

    def fill(match: re.Match[str]) -> str:
        header, ruler, *body = (line for line in match.group().splitlines())
        columns = split_cells(header)
        if columns[0] != "case":
            return match.group()
        keys = [split_cells(line) for line in body]
        by_line = "torchmm" in columns
        fill_lines = _lines_by_row if by_line else _lines_by_case
        lines = fill_lines(columns, keys, records)
        if not lines:
            shown = [[format_number(row.get(name)) for name in columns] for row in records]
            if not by_line:
                shown = [[case] for case in dict.fromkeys(row["case"] for row in records)]
            lines = fill_lines(columns, shown[:MAX_ROWS], records)
        return "\n".join([header, ruler, *("| " + " | ".join(cells) + " |" for cells in lines)])

    return TABLE.sub(fill, text)


def _lines_by_row(
    columns: list[str], keys: list[list[str]], records: Sequence[Record]
) -> list[list[str]]:
    names = [index for index, column in enumerate(columns) if column in NAMES]
    waiting: dict[tuple[str, ...], list[Record]] = {}
    for record in records:
        waiting.setdefault(tuple(record[columns[i]] for i in names), []).append(record)
    lines = []
    for key in keys:
        matching = waiting.get(tuple(key[i] for i in names))
        if matching:
            record = matching.pop(0)
            lines.append(
                [format_number(record.get(FIELDS.get(column, column))) for column in columns]
            )
    return lines


def _lines_by_case(
    columns: list[str], keys: list[list[str]], records: Sequence[Record]
) -> list[list[str]]:
    values: dict[tuple[str, str], str] = {}
    for record in records:
        unit = f" ({record['unit']})" if record["unit"] else ""
        for suffix, field in [("", "ours"), *((f", {head}", key) for head, key in FIELDS.items())]:
            column = f"{record['metric']}{unit}{suffix}"
            values[record["case"], column] = format_number(record.get(field))
    cases = [key[0] for key in keys]
    lines = [[case, *(values.get((case, column), "") for column in columns[1:])] for case in cases]
    return [line for line in lines if any(line[1:])]
