"""Tests of measured values on pages: each has a date or a link to the results.

A section with seconds, bytes, fractions or factors requires a date, or a link to a page of results.
Pages of results state the date of their rows. `NO_FINDINGS` lists values that are not measured,
such as settings and limits.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FOLDERS = ("get_started", "guides", "concepts")
UNITS = r"ms|us|µs|s|min|minutes|seconds|hours|[KMG]i?B|%|x|times"
FIGURE = re.compile(rf"(?<![\w.,-])(\d+(?:[.,]\d+)*\s?(?:{UNITS}))(?![\w/-])")
DAY = re.compile(r"\b\d{1,2}(?: and \d{1,2})?\s[A-Z][a-z]+\s20\d\d\b")
RESULTS = "benchmarks/results/"
CODE = re.compile(r"^( *)```.*?^\1```|`[^`\n]*`", re.MULTILINE | re.DOTALL)
NO_FINDINGS = {
    'guides/balance_data: Choice of "auto"': "a setting",
    "guides/balance_data: Reordering": "a limit",
    "guides/check_gpus: Check a GPU": "a default",
    "guides/checkpoints: Stop a run": "a limit",
    "guides/cluster: Continue without a lost node": "a default",
    "guides/large_data: Large data": "advice",
    "guides/large_data: Reading and caching": "an estimate that shows how it is computed",
    "guides/plan_cluster: Check the result": "a setting",
    "guides/run_page: Progress of a run": "a limit",
    "guides/run_page: Run report": "an interval",
    "concepts/disaggregated: Disaggregated modules": "assumptions of a figure",
    "concepts/cost_model: Limits": "bounds that tests check",
    "concepts/layer_tuning: Memory that the limit includes": "a default",
    "concepts/optimus: Encoders in LLM bubbles": "times in a plot that a test computes again",
    "concepts/pipelining: Pipelining": "times in a plot that a test computes again",
    "concepts/schedule_search: Segments and sub-microbatches": "settings",
}
"""Reason why the values of a section are not measured, by page and heading."""


def sections(text: str) -> Iterator[tuple[str, str]]:
    """Yield the heading and the text of each section, without code."""
    for part in re.split(r"^(?=#+ )", CODE.sub("", text), flags=re.MULTILINE):
        heading, _, rest = part.partition("\n")
        yield heading.lstrip("# "), rest


def undated(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield sections that have values without a date, with these values."""
    for heading, rest in sections(text):
        figures = FIGURE.findall(rest)
        if figures and not DAY.search(rest) and RESULTS not in rest:
            yield heading, figures


PAGES = [page for folder in FOLDERS for page in sorted((ROOT / "docs" / folder).glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}/{page.stem}")
def test_measured_values_have_a_date(page):
    name = f"{page.parent.name}/{page.stem}"
    values_by_section = {
        f"{name}: {heading}": figures for heading, figures in undated(page.read_text())
    }
    assert {
        name: values for name, values in values_by_section.items() if name not in NO_FINDINGS
    } == {}


def test_exceptions_are_necessary():
    undated_sections = {
        f"{page.parent.name}/{page.stem}: {heading}"
        for page in PAGES
        for heading, _ in undated(page.read_text())
    }
    assert NO_FINDINGS.keys() <= undated_sections


RESULT_PAGES = sorted((ROOT / "benchmarks/results").glob("*_*.md"))


@pytest.mark.parametrize("page", RESULT_PAGES, ids=str)
def test_result_pages_have_a_date(page):
    assert DAY.search(page.read_text())


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("# A\nIt takes 3.5 s.\n## B\nIt takes 2 GiB, 3 November 2026.", 1),
        ("# A\nIt takes 3 s ([rows](../benchmarks/results/x.md)).", 0),
        ("# A\n```sh\nsleep 5 s\n```\nIt takes `5 s`, or 3 steps of 4 ranks.", 0),
        ("# A\n1.4 times as fast", 1),
    ],
)
def test_undated_values_are_detected(text, count):
    assert len(list(undated(text))) == count
