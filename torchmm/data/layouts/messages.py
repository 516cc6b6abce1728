"""Chats as `messages`: role and content, where a content is text or a list of parts.

Files lie in columns of their own (`images`, `videos`, `audios`, or `image` and so on), or in their
parts (see `inline_files.py`), or have placeholders in the texts. All layouts that are chats come
here: they write themselves as such messages, so that there is one answer to what a message means.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torchmm.data.corrupt import CorruptSampleError
from torchmm.data.layouts.chat_keys import check_columns, check_turn, is_empty
from torchmm.data.layouts.columns import brief, files_of, list_of
from torchmm.data.layouts.conversation import ROLES, Conversation, Turn
from torchmm.data.layouts.parts import read_contents
from torchmm.data.layouts.sample import FileSegment, Record, Root
from torchmm.data.layouts.tool_use import (
    expand,
    reasoning_of,
    template_options_of,
    tool_calls_of,
    tools_of,
    train_of,
)

OTHER_NAMES = {"developer": "system", "function": "tool"}
"""Roles of OpenAI's that mean one of ROLES: a newer name, and an older one."""


def read_chat(record: Record) -> Conversation:
    """Messages, with their files.

    Raises:
        CorruptSampleError: malformed messages, an empty answer, keys that would be lost (see
            `chat_keys.py`), or other numbers of files than parts for them.
    """
    return chat_of(record, list_of(record.columns, "messages"), placeholders=False)


def chat_of(
    record: Record,
    messages: Sequence[Any],
    placeholders: bool,
    read_only: int = 0,
    files: Mapping[str, Sequence[FileSegment]] | None = None,
) -> Conversation:
    """Return the conversation of a record of any layout, written as messages.

    Args:
        record: has the files, and the columns of every chat: `system`, `tools`,
            `chat_template_kwargs`.
        messages: see `conversation_of`.
        placeholders: see `read_contents`.
        read_only: the first so many messages do not count in the loss, whoever says them.
        files: those of the record; None: they are looked up.

    Raises:
        CorruptSampleError: as `read_chat`.
    """
    columns = record.columns
    tools = tools_of(columns)
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
                f"column system ({brief(system)}) and a system message "
                f"({brief(first.get('content'))}) are both set; keep one"
            )
    read_only += len(before) if read_only else 0
    if files is None:
        files = files_of(columns, record.root)
    said = [*before, *messages]
    check_columns(columns, said)
    conversation = conversation_of(said, files, tools, record.root, placeholders, read_only)
    return replace(conversation, template_options=template_options_of(columns))


def conversation_of(
    messages: Sequence[Any],
    files: Mapping[str, Sequence[FileSegment]],
    tools: tuple[dict[str, Any], ...] = (),
    root: Root = None,
    placeholders: bool = False,
    read_only: int = 0,
) -> Conversation:
    """Return the conversation of messages.

    Args:
        messages: {"role", "content"}; content is a string or a list of parts.
        files: by kind, in order: those that parts and placeholders do not name themselves.
        root: directory that paths are relative to.
        placeholders: see `read_contents`.
        read_only: see `chat_of`.

    Raises:
        CorruptSampleError: as `read_chat`.
    """
    turns: list[Turn] = []
    contents: list[tuple[str, Any]] = []
    for number, message in enumerate(messages):
        role = message.get("role") if isinstance(message, Mapping) else None
        role = OTHER_NAMES.get(role, role) if isinstance(role, str) else role
        if role not in ROLES:
            raise CorruptSampleError(
                f"message {brief(message)} has an unknown role; use one of {ROLES}"
            )
        for part in expand({**message, "role": role}):
            turn, content = _turn(part)
            turns.append(replace(turn, train=False) if number < read_only else turn)
            contents.append((turn.role, content))
    parts = read_contents(contents, files, root, placeholders)
    turns = [replace(turn, parts=own) for turn, own in zip(turns, parts, strict=True)]
    return Conversation(tuple(turns), tools)


def _turn(message: Mapping[str, Any]) -> tuple[Turn, Any]:
    """A message as a turn without parts, and its content."""
    check_turn(message)
    role = message["role"]
    content = message.get("content")
    answers = role == "assistant"
    calls = tool_calls_of(message) if answers else ()
    # An empty answer would teach the model to end its turn at once. It is the mark of a record
    # that has lost something (a refusal), never of one worth learning, unless it is a call. Empty
    # instructions and questions do no harm: they are only read.
    if answers and not calls and _says_nothing(content):
        raise CorruptSampleError("assistant message has no content; remove such conversations")
    if content is None and (calls or role == "tool"):
        content = ""
    named = {}
    if role == "tool":
        keys = (key for key in ("name", "tool_call_id") if not is_empty(message.get(key)))
        named = {key: str(message[key]) for key in keys}
    reasoning = reasoning_of(message) if answers else None
    turn = Turn(role, (), reasoning, calls, **named, train=train_of(message))
    return turn, content


def _says_nothing(content: Any) -> bool:
    if isinstance(content, list):
        return all(
            isinstance(part, dict)
            and part.get("type") == "text"
            and _says_nothing(part.get("text"))
            for part in content
        )
    return content is None or (isinstance(content, str) and not content.strip())
