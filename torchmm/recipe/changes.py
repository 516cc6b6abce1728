"""What differs between two recipes, or other tables of settings, for a person to read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

_LONGEST_VALUE = 40
_ABSENT = "(not set)"


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """ "key old -> new" for every key, dotted, whose value differs."""
    before = dict(_flat(old))
    after = dict(_flat(new))
    return [
        f"{key} {short(before.get(key, _ABSENT))} -> {short(after.get(key, _ABSENT))}"
        for key in dict.fromkeys([*before, *after])
        if before.get(key, _ABSENT) != after.get(key, _ABSENT)
    ]


def short(value: Any) -> str:
    """A value in a line of text."""
    text = value if value is _ABSENT else json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 3] + "..."


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
