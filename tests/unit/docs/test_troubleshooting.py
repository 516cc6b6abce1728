"""Tests of docs/troubleshooting.md: quoted messages exist in the source, and each has a fix."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "troubleshooting.md"


def messages() -> list[str]:
    """Return the first cells of tables whose first column is "message"."""
    messages_, inside = [], False
    for line in PAGE.read_text().splitlines():
        inside = line.startswith("| message |") or (inside and line.startswith("|"))
        if inside and line.startswith("| `"):
            messages_.append(line.split("` |")[0].removeprefix("| `"))
    return messages_


@pytest.fixture(scope="module")
def strings() -> list[str]:
    """Return all strings of the package, with `...` for formatted values."""
    strings_ = []
    for file in (ROOT / "torchmm").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = (p.value if isinstance(p, ast.Constant) else "..." for p in node.values)
                strings_.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                strings_.append(node.value)
    return strings_


def is_message_of(message: str, strings: list[str]) -> bool:
    """Return True if a string contains the fixed parts of a message in order."""
    parts = [part.strip() for part in message.replace("'columns'", "`columns`").split("...")]
    for string in strings:
        position = 0
        for part in parts:
            position = string.find(part, position)
            if position < 0:
                break
            position += len(part)
        else:
            return True
    return False


@pytest.mark.parametrize("message", messages())
def test_every_quoted_message_is_in_the_source(message, strings):
    assert len(message.replace("...", "").strip()) > 10
    assert is_message_of(message, strings)


def test_unknown_messages_are_not_in_the_source(strings):
    assert not is_message_of("the moon is in the way of ...; wait", strings)
    assert len(messages()) >= 25


def test_every_row_has_a_fix():
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    assert all(len(re.split(r" \| ", row.strip("| "))) == 3 for row in rows)
