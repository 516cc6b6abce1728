"""Chats as `messages`: role and content, where a content is text or a list of parts.

Files lie in columns of their own (`images`, `videos`, `audios`), one per part of their kind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torchmm.data.corrupt import CorruptSampleError
from torchmm.data.layouts.chat_keys import check_part, check_turn, is_empty
from torchmm.data.layouts.columns import FILE_KINDS, file_segment, list_of
from torchmm.data.layouts.conversation import ROLES, Conversation, Part, Turn
from torchmm.data.layouts.sample import FileSegment, Record
from torchmm.data.layouts.tool_use import expand, reasoning_of, tool_calls_of, tools_of, train_of

OTHER_NAMES = {"developer": "system", "function": "tool"}
"""Roles of OpenAI's that mean one of ROLES: a newer name, and an older one."""


def is_chat(record: Record) -> bool:
    """Whether there are messages."""
    return record.columns.get("messages") is not None


def read_chat(record: Record) -> Conversation:
    """Messages, with their files.

    Raises:
        CorruptSampleError: malformed messages, an empty answer, keys that would be lost (see
            `chat_keys.py`), or other numbers of files than parts for them.
    """
    files = {
        kind: [file_segment(kind, v, record.root) for v in list_of(record.columns, f"{kind}s")]
        for kind in FILE_KINDS
    }
    messages = list_of(record.columns, "messages")
    return conversation_of(messages, files, tools=tools_of(record.columns))


def conversation_of(
    messages: Sequence[Any],
    files: Mapping[str, Sequence[FileSegment]],
    tools: tuple[dict[str, Any], ...] = (),
) -> Conversation:
    """The conversation of messages that name no files.

    Args:
        messages: {"role", "content"}; content is a string or a list of parts
            {"type": "text", "text": ...}, {"type": "image"}, {"type": "audio"}, {"type": "video"}.
        files: by kind, one per part of this kind, in order.
        tools: see `tool_use.tools_of`.

    Raises:
        CorruptSampleError: as `read_chat`.
    """
    remaining: dict[str, list[Any]] = {kind: list(files.get(kind, ())) for kind in FILE_KINDS}
    turns: list[Turn] = []
    for message in messages:
        turns.extend(_turn(part, remaining) for part in expand(_with_role(message)))
    for kind, rest in remaining.items():
        if rest:
            raise CorruptSampleError(f"{len(rest)} {kind}s more than {kind} parts in messages")
    return Conversation(tuple(turns), tools)


def _with_role(message: Any) -> Mapping[str, Any]:
    """The message with one of ROLES; raises CorruptSampleError."""
    role = message.get("role") if isinstance(message, Mapping) else None
    known = role if not isinstance(role, str) else OTHER_NAMES.get(role, role)
    if known not in ROLES:
        raise CorruptSampleError(f"message {str(message)[:80]} has no role of {ROLES}")
    return {**message, "role": known}


def _turn(message: Mapping[str, Any], remaining: dict[str, list[Any]]) -> Turn:
    check_turn(message)
    role = message["role"]
    content = message.get("content")
    answers = role == "assistant"
    calls = tool_calls_of(message) if answers else ()
    # An empty answer would teach the model to end its turn at once. It is the mark of a record
    # that has lost something (a refusal), never of one worth learning, unless it is a call. Empty
    # instructions and questions do no harm: they are only read.
    if answers and not calls and _says_nothing(content):
        raise CorruptSampleError("assistant message has no content; leave such conversations out")
    if content is None and (calls or role == "tool"):
        content = ""
    parts = tuple(_parts(content, role, remaining))
    named = {}
    if role == "tool":
        keys = (key for key in ("name", "tool_call_id") if not is_empty(message.get(key)))
        named = {key: str(message[key]) for key in keys}
    reasoning = reasoning_of(message) if answers else None
    return Turn(role, parts, reasoning, calls, **named, train=train_of(message))


def _says_nothing(content: Any) -> bool:
    if isinstance(content, list):
        return all(
            isinstance(part, dict)
            and part.get("type") == "text"
            and _says_nothing(part.get("text"))
            for part in content
        )
    return content is None or (isinstance(content, str) and not content.strip())


def _parts(content: Any, role: str, remaining: dict[str, list[Any]]) -> list[Part]:
    """Content parts of one message; takes its files from the front of `remaining`."""
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise CorruptSampleError(f"content is {type(content).__name__}, not text or a list")
    parts: list[Part] = []
    for item in content:
        kind = item.get("type") if isinstance(item, dict) else None
        if kind == "text" or kind in remaining:
            check_part(item, role)
        if kind == "text" and isinstance(item.get("text"), str):
            parts.append(item["text"])
        elif kind in remaining:
            if not remaining[kind]:
                raise CorruptSampleError(f"more {kind} parts in messages than {kind}s")
            parts.append(remaining[kind].pop(0))
        else:
            raise CorruptSampleError(
                f"content part {str(item)[:80]} is none of text, {', '.join(remaining)}"
            )
    return parts
