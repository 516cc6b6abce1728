"""Which keys of a chat message are understood; one that would be lost makes the record corrupt.

Public chats carry more than roles and contents: tool calls, thoughts, refusals, citations. If they
were silently dropped, an answer that only calls a tool would be learnt as "say nothing", and one
that follows from thoughts as one without any. Empty values do not count: Parquet and Arrow give
every turn every key that any turn has, and fill them with None.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torchmm.data.corrupt import CorruptSampleError

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
"""Keys of a turn that say where it comes from; no model reads them. `name` distinguishes
participants of one role, which templates do not write either, except that of a tool."""
_ALL_ROLES = {"role", "content", "loss", "train", "weight"}
_UNDERSTOOD = {
    "assistant": {"reasoning_content", "reasoning", "thinking", "tool_calls", "function_call"},
    "tool": {"name", "tool_call_id"},
}
"""What `tool_use.py` reads besides, by role. A weight says something of answers only, as in
OpenAI's format."""
_EMPTY_TEXTS = ("", "[]", "{}", "null")
_WITH_FILE = {"type", "index", "path", "url", "bytes"}


def check_turn(message: Mapping[str, Any]) -> None:
    """Looks at the keys of one message besides its role and content.

    Raises:
        CorruptSampleError: one of them would be lost.
    """
    role = message["role"]
    for key in _filled(message, _ALL_ROLES | _UNDERSTOOD.get(role, set())):
        if key not in METADATA:
            raise CorruptSampleError(
                f"{role} message has {shown(key, message[key])}, which is not supported and "
                "would be lost; write it into the content, or leave such conversations out"
            )


def check_part(part: Mapping[str, Any], role: str) -> None:
    """The same for one part of a content that is a list.

    Parts with files may name them once more: which file is meant follows from their order.

    Raises:
        CorruptSampleError: one of its keys would be lost.
    """
    kind = part["type"]
    known = {"type", "text", "index"} if kind == "text" else {*_WITH_FILE, kind}
    for key in _filled(part, known):
        raise CorruptSampleError(
            f"{kind} part of a {role} message has {shown(key, part[key])}, which is not "
            "supported and would be lost; remove it, or make it a separate part"
        )


def is_empty(value: Any) -> bool:
    """Whether a value is None, blank, or lists and tables of only such values.

    Also as JSON text, which is how lists of tools are often stored. False and 0 are not empty.
    """
    left = [value]
    while left:  # no recursion: data may be nested as deeply as it likes
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
    """A key and its value, but for tables and lists, which may be nested too deeply."""
    return f"{key} = {value!r:.80}" if isinstance(value, str | float | int) else key
