"""docs/troubleshooting.md quotes messages as they stand in the source, and gives each a remedy."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "troubleshooting.md"


def messages() -> list[str]:
    """The first cells of tables whose first column is headed "message"."""
    found, inside = [], False
    for line in PAGE.read_text().splitlines():
        inside = line.startswith("| message |") or (inside and line.startswith("|"))
        if inside and line.startswith("| `"):
            found.append(line.split("` |")[0].removeprefix("| `"))
    return found


@pytest.fixture(scope="module")
def strings() -> list[str]:
    """All strings of the package, with `...` for what is put into them."""
    found = []
    for file in (ROOT / "torchmm").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = (p.value if isinstance(p, ast.Constant) else "..." for p in node.values)
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def stands_in(message: str, strings: list[str]) -> bool:
    """Its fixed parts are found in this order in one string."""
    parts = [part for part in re.split(r"\.\.\.", message.replace("'columns'", "`columns`"))]
    pattern = re.compile(".*?".join(re.escape(part.strip()) for part in parts), re.DOTALL)
    return any(pattern.search(string) for string in strings)


@pytest.mark.parametrize("message", messages())
def test_every_quoted_message_is_in_the_source(message, strings):
    assert len(message.replace("...", "").strip()) > 10
    assert stands_in(message, strings)


def test_other_messages_are_not(strings):
    assert not stands_in("the moon is in the way of ...; wait", strings)
    assert len(messages()) >= 25


def test_every_row_has_a_remedy():
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    assert all(len(re.split(r" \| ", row.strip("| "))) == 3 for row in rows)
