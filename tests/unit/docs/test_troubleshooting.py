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


def is_message_of(message: str, strings: list[str]) -> bool:
    """Return whether one string has the fixed parts of a message in their order."""
    parts = [part.strip() for part in message.replace("'columns'", "`columns`").split("...")]
    for string in strings:
        place = 0
        for part in parts:
            place = string.find(part, place)
            if place < 0:
                break
            place += len(part)
        else:
            return True
    return False


@pytest.mark.parametrize("message", messages())
def test_every_quoted_message_is_in_the_source(message, strings):
    assert len(message.replace("...", "").strip()) > 10
    assert is_message_of(message, strings)


def test_other_messages_are_not(strings):
    assert not is_message_of("the moon is in the way of ...; wait", strings)
    assert len(messages()) >= 25


def test_every_row_has_a_remedy():
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    assert all(len(re.split(r" \| ", row.strip("| "))) == 3 for row in rows)
