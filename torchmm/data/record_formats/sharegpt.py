"""Chats in a column `conversations`, in the formats of ShareGPT, LLaVA and LLaMA-Factory.

    {"image": "a.jpg", "conversations": [{"from": "human", "value": "<image>\\nWhat is it?"},
                                         {"from": "gpt", "value": "A cat."}]}

Files have placeholders in the text of any turn. The LLaVA loader moves files to the start of their
turn, but they keep their position here. LLaVA video datasets use `<image>` for a video. This is
supported for records with videos and without images and `<video>`.
"""

from __future__ import annotations

import json
from typing import Any

from torchmm.data.corrupt import CorruptSampleError
from torchmm.data.record_formats.chat_types import Conversation
from torchmm.data.record_formats.columns import get_list, read_files, truncate_repr
from torchmm.data.record_formats.messages import record_to_conversation
from torchmm.data.record_formats.sample import Record

CONVERSATION_COLUMNS = ("conversations", "conversation")
_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "observation": "tool",
    "tool": "tool",
    "function_call": "call",
}
"""Maps names in the data to roles. A "call" is an assistant message with a tool call."""
_KEY_PAIRS = (("from", "value"), ("role", "content"))
_QUESTION_KEYS = {"human": "user", "assistant": "assistant"}
"""Keys of entries of ms-swift, which have a question and its answer."""


def read_conversations(record: Record) -> Conversation:
    """Read entries with from and value, role and content, or human and assistant (ms-swift).

    Raises:
        CorruptSampleError: An entry has none of these formats or an unknown role, or the chat is
            not valid (see `messages.py`).
    """
    column = next(name for name in CONVERSATION_COLUMNS if record.columns.get(name) is not None)
    messages: list[dict[str, Any]] = []
    for number, entry in enumerate(get_list(record.columns, column), start=1):
        location = f"column `{column}` exists, but entry {number}"
        for message in _read_messages(entry, location):
            if messages and _is_tool_call(message) and _is_tool_call(messages[-1]):
                messages[-1]["tool_calls"] += message["tool_calls"]  # several at a time
            else:
                messages.append(message)
    files = read_files(record.columns, record.root)
    if files["video"] and not files["image"]:
        texts = [message for message in messages if isinstance(message["content"], str)]
        if not any("<video>" in message["content"] for message in texts):
            for message in texts:
                message["content"] = message["content"].replace("<image>", "<video>")
    return record_to_conversation(record, messages, placeholders=True, files=files)


def _is_tool_call(message: dict[str, Any]) -> bool:
    """Return True if a message is from an entry of "function_call" without further keys."""
    calls = message.get("tool_calls")
    return len(message) == 3 and message["content"] == "" and isinstance(calls, list)


def _read_messages(entry: Any, location: str) -> list[dict[str, Any]]:
    if not isinstance(entry, dict):
        raise CorruptSampleError(f"{location} is {type(entry).__name__}, not an object")
    for role_key, text_key in _KEY_PAIRS:
        if entry.get(role_key) is not None:
            if text_key not in entry:
                raise CorruptSampleError(f"{location} has {role_key} but no {text_key}")
            return [_read_message(entry, role_key, text_key, location)]
    if all(entry.get(key) is not None for key in _QUESTION_KEYS):
        other_keys = {key: value for key, value in entry.items() if key not in _QUESTION_KEYS}
        return [
            {**other_keys, "role": role, "content": entry[key]}
            for key, role in _QUESTION_KEYS.items()
        ]
    keys = ", ".join(sorted(map(str, entry)))
    raise CorruptSampleError(
        f"{location} has neither from/value nor role/content, only {keys:.80}"
        if keys
        else f"{location} has neither from/value nor role/content, because it is empty"
    )


def _read_message(
    entry: dict[str, Any], role_key: str, text_key: str, location: str
) -> dict[str, Any]:
    role = _ROLES.get(entry[role_key]) if isinstance(entry[role_key], str) else None
    if role is None:
        raise CorruptSampleError(
            f"{location} has {role_key} = {truncate_repr(entry[role_key])}; use one of "
            f"{', '.join(_ROLES)}"
        )
    other_keys = {key: value for key, value in entry.items() if key not in (role_key, text_key)}
    if role == "call":
        calls = _parse_calls(entry[text_key], location)
        return {**other_keys, "role": "assistant", "content": "", "tool_calls": calls}
    return {**other_keys, "role": role, "content": entry[text_key]}


def _parse_calls(value: Any, location: str) -> list[dict[str, Any]]:
    """Parse tool calls: JSON text of {"name", "arguments"}, or of a list of these."""
    try:
        parsed = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise CorruptSampleError(
            f"{location} contains a tool call that is not valid JSON: {error}"
        ) from error
    calls = parsed if isinstance(parsed, list) else [parsed]
    for call in calls:
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            raise CorruptSampleError(
                f"{location} contains a tool call without a name: {truncate_repr(call)}"
            )
        if "arguments" not in call:
            raise CorruptSampleError(
                f"{location} contains a call of {call['name']} without arguments"
            )
    return [{"type": "function", "function": call} for call in calls]
