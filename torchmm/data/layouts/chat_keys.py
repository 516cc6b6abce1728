"""Supported keys of chat messages and columns of chats. Other keys make the record corrupt.

Public chats have more than role and content: tool calls, reasoning, citations. If unsupported keys
were dropped, the model would be trained on empty messages, or on responses without their reasoning.
Empty values are accepted, because Parquet and Arrow add the keys of all turns to each turn.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torchmm.data.corrupt import CorruptSampleError
from torchmm.data.layouts.columns import FILE_KINDS, file_columns, is_no_file

METADATA = frozenset(
    {
        "country",
        "create_time",
        "created_at",
        "date",
        "hashed_ip",
        "header",
        "id",
        "index",
        "language",
        "message_id",
        "model",
        "name",
        "openai_id",
        "parent_id",
        "redacted",
        "source",
        "state",
        "timestamp",
        "toxic",
        "turn",
        "turn_id",
        "turn_identifier",
    }
)
"""Keys with the origin of a turn, which have no effect on the model. `name` distinguishes
participants with the same role. Chat templates use it only for tools."""
_ALL_ROLES = {"role", "content", "loss", "train", "weight"}
_UNDERSTOOD = {
    "assistant": {"reasoning_content", "reasoning", "thinking", "tool_calls", "function_call"},
    "tool": {"name", "tool_call_id"},
}
"""Further keys that `tool_use.py` reads, by role. As in the OpenAI format, `weight` has an effect
on assistant messages only."""
_EMPTY_TEXTS = ("", "[]", "{}", "null")
_WITH_FILE = {"type", "index", "path", "url", "bytes"}
_AS_SYSTEM = 'map it in the recipe: columns = { system = "%s" }, or remove it'
_WEIGHTS = "all records have the same weight; remove it, or set `train` in the messages"
_UNREAD = {
    "documents": "write the documents into a message",
    "system_prompt": _AS_SYSTEM % "system_prompt",
    "system_message": _AS_SYSTEM % "system_message",
    "loss_scale": _WEIGHTS,
    "loss_weight": _WEIGHTS,
    "sample_weight": _WEIGHTS,
    "add_generation_prompt": "end the chat with the assistant message, and remove it",
    "continue_final_message": "the loss includes the end of each assistant message; remove it",
}
"""Columns that affect training in other libraries, and how to fix the record."""
_RENAME = 'if it has no effect, map it in the recipe: columns = { unused = "%s" }'
_FILLED_BY = {
    "<ref-object>": ("objects",),
    "<bbox>": ("objects", "bbox", "bboxes"),
    "<box>": ("objects", "box", "boxes"),
    "<point>": ("objects", "point", "points"),
    "<region>": ("regions", "region"),
    "<seg>": ("seg", "segmentation", "segmentations", "masks", "mask"),
    "<mask>": ("masks", "mask"),
}
"""Placeholders for values that are not files, and the columns with the values."""
_NUMBERED = re.compile(rf"({'|'.join(FILE_KINDS)})_?\d{{1,2}}")
"""Pattern of columns with one of several files, such as "image_1"."""


def check_turn(message: Mapping[str, Any]) -> None:
    """Check the keys of a message other than role and content.

    Raises:
        CorruptSampleError: A key is not supported.
    """
    role = message["role"]
    for key in _filled(message, _ALL_ROLES | _UNDERSTOOD.get(role, set())):
        if key not in METADATA:
            raise CorruptSampleError(
                f"{role} message has {shown(key, message[key])}, which is not supported; "
                "write it into the content, or remove such conversations"
            )


def check_part(part: Mapping[str, Any], role: str) -> None:
    """Check the keys of a content part.

    Keys that name the file are accepted, because the order of content parts determines the files.

    Raises:
        CorruptSampleError: A key is not supported.
    """
    kind = part["type"]
    known = {"type", "text", "index"} if kind == "text" else {*_WITH_FILE, kind}
    for key in _filled(part, known):
        raise CorruptSampleError(
            f"{kind} part of a {role} message has {shown(key, part[key])}, which is not "
            "supported; remove it, or make it a separate part"
        )


def check_columns(columns: Mapping[str, Any], messages: Sequence[Any] = ()) -> None:
    """Raise CorruptSampleError if a column that changes the meaning of a chat is not read.

    Args:
        columns: Columns of the record.
        messages: Messages of the record. A column that repeats the system message is accepted.
    """
    contents = [m.get("content") for m in messages if isinstance(m, Mapping)]
    for name, fix in _UNREAD.items():
        value = columns.get(name)
        # A weight of 1 and a false flag have no effect.
        if is_empty(value) or value is False or (fix == _WEIGHTS and value == 1):
            continue
        if name.startswith("system") and value in (columns.get("system"), *contents):
            continue
        raise CorruptSampleError(
            f"column {shown(name, value)} is not supported for chats; {fix}; {_RENAME % name}"
        )


def check_placeholders(columns: Mapping[str, Any], texts: Iterable[str]) -> None:
    """Raise CorruptSampleError if a text has a placeholder that was not replaced by a file.

    A placeholder in a record without the column is ordinary text.

    Args:
        columns: columns of the record.
        texts: texts that become tokens, without the placeholders of files.
    """
    for name, value in columns.items():
        is_file = not isinstance(value, int | float) and not is_no_file(value)
        if is_file and _NUMBERED.fullmatch(name):
            kind = _NUMBERED.sub(r"\1s", name)
            raise CorruptSampleError(
                f"column {name} contains a file that is not used; write one list of files, {kind}"
            )
    present = {name for name, value in columns.items() if value is not None}
    empty = {
        f"<{kind}>": file_columns(kind)
        for kind in FILE_KINDS
        if all(is_no_file(columns.get(name)) for name in file_columns(kind))
    }
    unfilled = {
        mark: name
        for mark, names in {**_FILLED_BY, **empty}.items()
        for name in names
        if name in present
    }
    for text in texts if unfilled else ():
        for mark, name in unfilled.items():
            if mark not in text:
                continue
            if mark in empty:
                raise CorruptSampleError(f"text contains {mark}, but column {name} has no file")
            raise CorruptSampleError(
                f"text contains {mark}, but column {name} is not supported, because its "
                f"format depends on the model; replace {mark} with the text that the model "
                "expects"
            )


def is_empty(value: Any) -> bool:
    """Return True for None, blank text, and lists and objects of only such values.

    JSON text such as "[]" is also empty. False and 0 are not empty.
    """
    left = [value]
    while left:  # no recursion, because data may be deeply nested
        item = left.pop()
        if isinstance(item, Mapping):
            left.extend(item.values())
        elif isinstance(item, list | tuple):
            left.extend(item)
        elif item is not None and not (isinstance(item, str) and item.strip() in _EMPTY_TEXTS):
            return False
    return True


def _filled(table: Mapping[str, Any], known: set[str]) -> Iterator[str]:
    return (key for key, value in table.items() if key not in known and not is_empty(value))


def shown(key: str, value: Any) -> str:
    """Return a key and its value for messages, or only the key of an object or list."""
    return f"{key} = {value!r:.80}" if isinstance(value, str | float | int) else key
