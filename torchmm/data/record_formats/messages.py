"""Chats in a column `messages`, with role and content. A content is text or a list of parts.

Files are in separate columns (`images`, `videos`, `audios`, `image`), in content parts (see
`content_parts.py`), or have placeholders in text. All chat formats are converted to such messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torchmm.data.corrupt import CorruptSampleError
from torchmm.data.record_formats.chat_keys import check_chat_columns, check_message_keys, is_empty
from torchmm.data.record_formats.chat_types import ROLES, Conversation, Turn
from torchmm.data.record_formats.columns import get_list, read_files, truncate_repr
from torchmm.data.record_formats.contents import read_contents
from torchmm.data.record_formats.sample import FileSegment, Record, Root
from torchmm.data.record_formats.tool_use import (
    read_loss_flag,
    read_reasoning,
    read_template_options,
    read_tool_calls,
    read_tools,
    split_anthropic_parts,
)

ROLE_ALIASES = {"developer": "system", "function": "tool"}
"""Alternative OpenAI names of ROLES."""


def read_chat(record: Record) -> Conversation:
    """Read a record with messages.

    Raises:
        CorruptSampleError: Messages are malformed, an assistant message is empty, a key is not
            supported (see `chat_keys.py`), or the numbers of files and content parts differ.
    """
    return record_to_conversation(record, get_list(record.columns, "messages"), placeholders=False)


def record_to_conversation(
    record: Record,
    messages: Sequence[Any],
    placeholders: bool,
    num_context_messages: int = 0,
    files: Mapping[str, Sequence[FileSegment]] | None = None,
) -> Conversation:
    """Return the conversation of a record whose messages are already converted.

    Args:
        record: Record with the files and the columns `system`, `tools` and `chat_template_kwargs`.
        messages: See `messages_to_conversation`.
        placeholders: See `read_contents`.
        num_context_messages: Number of first messages that are not included in the loss.
        files: Files of the record. If None, they are read from the columns.

    Raises:
        CorruptSampleError: See `read_chat`.
    """
    columns = record.columns
    tools = read_tools(columns)
    if not messages:
        raise CorruptSampleError("the chat has no messages")
    before: list[dict[str, Any]] = []
    system = columns.get("system")
    if not is_empty(system):
        first = messages[0] if isinstance(messages[0], dict) else {}
        if first.get("role") not in ("system", "developer"):
            before = [{"role": "system", "content": system}]
        elif first.get("content") != system:
            raise CorruptSampleError(
                f"column system ({truncate_repr(system)}) and a system message "
                f"({truncate_repr(first.get('content'))}) are both set; keep one"
            )
    num_context_messages += len(before) if num_context_messages else 0
    if files is None:
        files = read_files(columns, record.root)
    all_messages = [*before, *messages]
    check_chat_columns(columns, all_messages)
    conversation = messages_to_conversation(
        all_messages, files, tools, record.root, placeholders, num_context_messages
    )
    return replace(conversation, template_options=read_template_options(columns))


def messages_to_conversation(
    messages: Sequence[Any],
    files: Mapping[str, Sequence[FileSegment]],
    tools: tuple[dict[str, Any], ...] = (),
    root: Root = None,
    placeholders: bool = False,
    num_context_messages: int = 0,
) -> Conversation:
    """Return the conversation of messages.

    Args:
        messages: Objects with "role" and "content", a string or a list of content parts.
        files: Files of the columns in order, by type.
        tools: Descriptions of tools.
        root: Directory to which paths are relative.
        placeholders: See `read_contents`.
        num_context_messages: See `record_to_conversation`.

    Raises:
        CorruptSampleError: See `read_chat`.
    """
    turns: list[Turn] = []
    contents: list[tuple[str, Any]] = []
    for number, message in enumerate(messages):
        role = message.get("role") if isinstance(message, Mapping) else None
        role = ROLE_ALIASES.get(role, role) if isinstance(role, str) else role
        if role not in ROLES:
            raise CorruptSampleError(
                f"message {truncate_repr(message)} has an unknown role; use one of {ROLES}"
            )
        for part in split_anthropic_parts({**message, "role": role}):
            turn, content = _read_turn(part)
            if turns and _continues(turn, content, turns[-1]):
                turns[-1] = replace(turns[-1], tool_calls=turn.tool_calls)
                continue
            turns.append(replace(turn, train=False) if number < num_context_messages else turn)
            contents.append((turn.role, content))
    parts = read_contents(contents, files, root, placeholders)
    turns = [replace(turn, parts=each) for turn, each in zip(turns, parts, strict=True)]
    return Conversation(tuple(turns), tools)


def _read_turn(message: Mapping[str, Any]) -> tuple[Turn, Any]:
    """Return a turn without content, and the content of the message."""
    check_message_keys(message)
    role = message["role"]
    content = message.get("content")
    answers = role == "assistant"
    calls = read_tool_calls(message) if answers else ()
    # The model would learn to end its turn immediately. Empty assistant messages without tool calls
    # indicate that content was lost. Empty system and user messages are not in the loss.
    if answers and not calls and _is_empty_content(content):
        raise CorruptSampleError("assistant message has no content; remove such conversations")
    if content is None and (calls or role == "tool"):
        content = ""
    named = {}
    if role == "tool":
        keys = (key for key in ("name", "tool_call_id") if not is_empty(message.get(key)))
        named = {key: str(message[key]) for key in keys}
    reasoning = read_reasoning(message) if answers else None
    turn = Turn(role, (), reasoning, calls, **named, train=read_loss_flag(message))
    return turn, content


def _continues(turn: Turn, content: Any, previous: Turn) -> bool:
    """Return True if a message with tool calls only continues the answer before it.

    Some formats store the text and the tool calls of an answer as two messages.
    """
    return (
        bool(turn.tool_calls)
        and _is_empty_content(content)
        and turn.reasoning is None
        and previous.role == "assistant"
        and not previous.tool_calls
        and previous.train == turn.train
    )


def _is_empty_content(content: Any) -> bool:
    if isinstance(content, list):
        return all(
            isinstance(part, dict)
            and part.get("type") == "text"
            and _is_empty_content(part.get("text"))
            for part in content
        )
    return content is None or (isinstance(content, str) and not content.strip())
