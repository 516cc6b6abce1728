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
from torchmm.data.record_formats.columns import MEDIA_TYPES, file_columns, is_missing_file

METADATA_KEYS = frozenset(
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
_COMMON_KEYS = {"role", "content", "loss", "train", "weight"}
_ROLE_KEYS = {
    "assistant": {"reasoning_content", "reasoning", "thinking", "tool_calls", "function_call"},
    "tool": {"name", "tool_call_id"},
}
"""Further keys that `tool_use.py` reads, by role. As in the OpenAI format, `weight` has an effect
on assistant messages only."""
_EMPTY_JSON = ("", "[]", "{}", "null")
_FILE_PART_KEYS = {"type", "index", "path", "url", "bytes"}
_MAP_TO_SYSTEM = 'map it in the recipe: columns = { system = "%s" }, or remove it'
_EQUAL_WEIGHTS = "all records have the same weight; remove it, or set `train` in the messages"
_UNSUPPORTED_COLUMNS = {
    "documents": "write the documents into a message",
    "system_prompt": _MAP_TO_SYSTEM % "system_prompt",
    "system_message": _MAP_TO_SYSTEM % "system_message",
    "loss_scale": _EQUAL_WEIGHTS,
    "loss_weight": _EQUAL_WEIGHTS,
    "sample_weight": _EQUAL_WEIGHTS,
    "add_generation_prompt": "end the chat with the assistant message, and remove it",
    "continue_final_message": "the loss includes the end of each assistant message; remove it",
}
"""Columns that affect training in other libraries, and how to fix the record."""
_MAP_TO_UNUSED = 'if it has no effect, map it in the recipe: columns = { unused = "%s" }'
_PLACEHOLDER_COLUMNS = {
    "<ref-object>": ("objects",),
    "<bbox>": ("objects", "bbox", "bboxes"),
    "<box>": ("objects", "box", "boxes"),
    "<point>": ("objects", "point", "points"),
    "<region>": ("regions", "region"),
    "<seg>": ("seg", "segmentation", "segmentations", "masks", "mask"),
    "<mask>": ("masks", "mask"),
}
"""Placeholders for values that are not files, and the columns with the values."""
_NUMBERED_COLUMN = re.compile(rf"({'|'.join(MEDIA_TYPES)})_?\d{{1,2}}")
"""Pattern of columns with one of several files, such as "image_1"."""


def check_message_keys(message: Mapping[str, Any]) -> None:
    """Check the keys of a message other than role and content.

    Raises:
        CorruptSampleError: A key is not supported.
    """
    role = message["role"]
    for key in _unsupported_keys(message, _COMMON_KEYS | _ROLE_KEYS.get(role, set())):
        if key not in METADATA_KEYS:
            raise CorruptSampleError(
                f"{role} message has {describe_entry(key, message[key])}, which is not supported; "
                "write it into the content, or remove such conversations"
            )


def check_part_keys(part: Mapping[str, Any], role: str) -> None:
    """Check the keys of a content part.

    Keys that name the file are accepted, because the order of content parts determines the files.

    Raises:
        CorruptSampleError: A key is not supported.
    """
    kind = part["type"]
    known = {"type", "text", "index"} if kind == "text" else {*_FILE_PART_KEYS, kind}
    for key in _unsupported_keys(part, known):
        raise CorruptSampleError(
            f"{kind} part of a {role} message has {describe_entry(key, part[key])}, which is not "
            "supported; remove it, or make it a separate part"
        )


def check_chat_columns(columns: Mapping[str, Any], messages: Sequence[Any] = ()) -> None:
    """Raise CorruptSampleError if a column that changes the meaning of a chat is not read.

    Args:
        columns: Columns of the record.
        messages: Messages of the record. A column that repeats the system message is accepted.
    """
    contents = [m.get("content") for m in messages if isinstance(m, Mapping)]
    for name, fix in _UNSUPPORTED_COLUMNS.items():
        value = columns.get(name)
        # A weight of 1 and a false flag have no effect.
        if is_empty(value) or value is False or (fix == _EQUAL_WEIGHTS and value == 1):
            continue
        if name.startswith("system") and value in (columns.get("system"), *contents):
            continue
        raise CorruptSampleError(
            f"column {describe_entry(name, value)} is not supported for chats; {fix}; "
            f"{_MAP_TO_UNUSED % name}"
        )


def check_placeholders(
    columns: Mapping[str, Any], texts: Iterable[str], filled: Sequence[str] = ()
) -> None:
    """Raise CorruptSampleError if a text has a placeholder that was not replaced by a file.

    A placeholder in a record without the column is ordinary text.

    Args:
        columns: columns of the record.
        texts: texts that become tokens, without the placeholders of files.
        filled: Placeholders that are replaced later.
    """
    for name, value in columns.items():
        is_file = not isinstance(value, int | float) and not is_missing_file(value)
        if is_file and _NUMBERED_COLUMN.fullmatch(name):
            kind = _NUMBERED_COLUMN.sub(r"\1s", name)
            raise CorruptSampleError(
                f"column {name} contains a file that is not used; write one list of files, {kind}"
            )
    present = {name for name, value in columns.items() if value is not None}
    empty = {
        f"<{kind}>": file_columns(kind)
        for kind in MEDIA_TYPES
        if all(is_missing_file(columns.get(name)) for name in file_columns(kind))
    }
    unfilled = {
        mark: name
        for mark, names in {**_PLACEHOLDER_COLUMNS, **empty}.items()
        for name in names
        if name in present and mark not in filled
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
        elif item is not None and not (isinstance(item, str) and item.strip() in _EMPTY_JSON):
            return False
    return True


def _unsupported_keys(table: Mapping[str, Any], known: set[str]) -> Iterator[str]:
    return (key for key, value in table.items() if key not in known and not is_empty(value))


def describe_entry(key: str, value: Any) -> str:
    """Return a key and its value for messages, or only the key of an object or list."""
    return f"{key} = {value!r:.80}" if isinstance(value, str | float | int) else key
