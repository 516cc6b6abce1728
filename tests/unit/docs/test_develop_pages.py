"""Tests of pages for contributors: the reading list and the architecture figure."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
MAX_LINES = 7_000
"""Number of lines that can be read in four hours at 30 lines per minute."""


def reading_list() -> list[str]:
    page = (ROOT / "docs/develop/read_this.md").read_text()
    return re.findall(r"^\| \d+ \| `([^`]+)` \|", page, re.MULTILINE)


def test_reading_list_names_core_files_only():
    files = reading_list()
    assert 20 <= len(files) <= 24
    assert [name for name in files if not (ROOT / name).is_file()] == []
    extensions = ("torchmm/balance/", "torchmm/extensions/")
    assert [name for name in files if name.startswith(extensions)] == []


def test_reading_list_is_readable_in_an_afternoon():
    lines = {name: len((ROOT / name).read_text().splitlines()) for name in reading_list()}
    assert sum(lines.values()) <= MAX_LINES, lines


@pytest.mark.parametrize("name", ["architecture", "pipeline_internals", "read_this"])
def test_develop_page_names_existing_files(name):
    page = (ROOT / f"docs/develop/{name}.md").read_text()
    paths = [path for path in re.findall(r"`([\w/]+(?:/|\.py))`", page) if "NAME" not in path]
    tops = (ROOT, ROOT / "torchmm")
    assert [path for path in paths if not any((top / path).exists() for top in tops)] == []
    assert len(paths) > 20


def test_architecture_figure_is_up_to_date():
    script = runpy.run_path(str(ROOT / "scripts" / "architecture_figure.py"))
    assert script["TARGET"].read_text() == script["render"](), (
        "docs/images/architecture.svg is stale: run python scripts/architecture_figure.py"
    )
