"""Tests of the pages in `benchmarks/results`: their tables are filled from the JSON files."""

import json
from pathlib import Path

import pytest

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
OTHER_PAGES = {"README", "paper_verdicts"}
PAGES = sorted(page.stem for page in RESULTS.glob("*.md") if page.stem not in OTHER_PAGES)


def records(name: str) -> list[dict]:
    """Return the rows of a page's JSON file, or nothing if the file has another format."""
    file = RESULTS / f"{name}.json"
    rows = json.loads(file.read_text()) if file.exists() else []
    return rows if rows and "metric" in rows[0] else []


FILLED = [
    name for name in PAGES if records(name) and "\n| case |" in (RESULTS / f"{name}.md").read_text()
]


@pytest.mark.parametrize("name", FILLED)
def test_page_tables_equal_json(load, name):
    pages = load("support.pages")
    text = (RESULTS / f"{name}.md").read_text()
    rows = records(name)
    assert pages.fill_tables(text, rows) == text
    changed = [{**row, "ours": 1.01 * row["ours"] + 1} for row in rows]
    assert pages.fill_tables(text, changed) != text  # the comparison detects changes


@pytest.mark.parametrize("name", PAGES)
def test_page_is_short_and_links_its_data(load, name):
    pages = load("support.pages")
    text = (RESULTS / f"{name}.md").read_text()
    tables = pages.TABLE.findall(text)
    assert sum(table.count("\n") - 1 for table in tables) <= pages.MAX_ROWS
    files = [file.name for file in RESULTS.glob(f"{name}*.json*")]
    assert any(f"[{file}]({file})" in text for file in files)


def test_filled_pages_are_detected():
    assert len(FILLED) >= 28


ROWS = [
    {"case": case, "metric": metric, "unit": unit, "ours": ours, "baseline": baseline}
    for case, metric, unit, ours, baseline in [
        ("a", "speedup", "x", 2.0, 1.0),
        ("a", "step", "ms", 12345.6, None),
        ("b", "speedup", "x", 3.0, 1.0),
    ]
]


def test_line_per_case_gets_columns_by_metric(load):
    text = "# T\n\n| case | speedup (x) | speedup (x), baseline | step (ms) |\n|---|--:|--:|--:|\n"
    filled = load("support.pages").fill_tables(
        text + "| b | 1 | 1 | 1 |\n| removed | 1 | | |\n", ROWS
    )
    assert filled == text + "| b | 3 | 1 |  |\n"


def test_line_per_row_gets_values(load):
    text = "| case | metric | unit | torchmm | baseline |\n|---|---|---|--:|--:|\n"
    filled = load("support.pages").fill_tables(text + "| a | step | ms | 1 | 1 |\n", ROWS)
    assert filled == text + "| a | step | ms | 12,346 |  |\n"


def test_table_without_known_rows_gets_first_rows(load, monkeypatch):
    pages = load("support.pages")
    monkeypatch.setattr(pages, "MAX_ROWS", 1)
    text = "| case | metric | unit | torchmm |\n|---|---|---|--:|\n"
    assert pages.fill_tables(text, ROWS) == text.rstrip() + "\n| a | speedup | x | 2 |\n"


def test_different_tables_are_unchanged(load):
    text = "| workload | step |\n|---|--:|\n| a | 1 |\n"
    assert load("support.pages").fill_tables(text, ROWS) == text


def test_written_rows_update_page(load, tmp_path):
    harness = load("support.harness")
    page = tmp_path / "x.md"
    page.write_text(
        "# T\n\n| case | metric | unit | torchmm |\n|---|---|---|--:|\n| a | m | s | 1 |\n"
    )
    harness.write_rows([harness.Row("a", "m", "s", 2.5)], tmp_path / "x.json")
    assert page.read_text().endswith("| a | m | s | 2.5 |\n")
