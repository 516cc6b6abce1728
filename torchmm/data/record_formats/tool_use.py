"""Read reasoning, tool calls, tool results, tools and loss flags of messages.

All formats are converted to the format of chat templates: calls with a name and an object of
arguments, and tools with a JSON schema. Values that this format cannot express make the record
corrupt. Objects from Parquet and Arrow have the keys of all rows. Keys with the value None are
dropped, except in JSON text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torchmm.data.corrupt import CorruptSampleError
from torchmm.data.record_formats.chat_keys import describe_entry, is_empty
from torchmm.data.record_formats.json_text import parse_json

REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
_ANTHROPIC_TYPES = ("thinking", "tool_use", "tool_result")


def read_reasoning(message: Mapping[str, Any]) -> str | None:
    """Return the reasoning of an assistant message. Raise CorruptSampleError if ambiguous."""
    texts = [message[key] for key in REASONING_KEYS if _is_set(message.get(key))]
    if not texts:
        return None
    if not all(isinstance(text, str) and text == texts[0] for text in texts):
        raise CorruptSampleError(
            f"assistant message has different values in {' and '.join(REASONING_KEYS)}; keep one"
        )
    return str(texts[0])


def read_tool_calls(message: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    """Return the tool calls of a message, from `tool_calls` or the older OpenAI `function_call`.

    Returns:
        {"type": "function", "function": {"name", "arguments"}} of each call, with an optional "id".

    Raises:
        CorruptSampleError: A call is not a function call with an object of arguments.
    """
    calls = message.get("tool_calls")
    if not is_empty(message.get("function_call")):
        if not is_empty(calls):
            raise CorruptSampleError("assistant message has both tool_calls and function_call")
        calls = [message["function_call"]]
    if is_empty(calls):
        return ()
    return tuple(_read_call(call) for call in _read_list(calls, "tool_calls"))


def read_tools(columns: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    """Return the tools of a record, from `tools` or the older OpenAI `functions`.

    Returns:
        {"type": "function", "function": {"name", "description", "parameters", ...}} of each tool.

    Raises:
        CorruptSampleError: A tool is not the description of a function.
    """
    names = [key for key in ("tools", "functions") if not is_empty(columns.get(key))]
    if len(names) > 1:
        raise CorruptSampleError("columns tools and functions are both set; keep one of them")
    return tuple(
        _read_tool(tool) for key in names for tool in _read_list(columns[key], f"column {key}")
    )


def read_template_options(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return the column `chat_template_kwargs`, without keys whose value is None.

    Raises:
        CorruptSampleError: The column is not an object of JSON values.
    """
    value = columns.get("chat_template_kwargs")
    if is_empty(value):
        return {}
    options = parse_json(value, "column chat_template_kwargs")
    if not isinstance(options, Mapping):
        raise CorruptSampleError(
            f"column chat_template_kwargs is {type(options).__name__}, not a mapping"
        )
    return {key: option for key, option in options.items() if option is not None}


def read_loss_flag(message: Mapping[str, Any]) -> bool | None:
    """Return the loss flag of a message, or None if it has no flag.

    The keys are `loss` and `train`, and in assistant messages `weight` (OpenAI).

    Raises:
        CorruptSampleError: A flag is not a bool, 0 or 1, or flags differ.
    """
    keys = ("loss", "train", "weight") if message["role"] == "assistant" else ("loss", "train")
    flags = {key: message[key] for key in keys if message.get(key) is not None}
    for key, value in flags.items():
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            raise CorruptSampleError(
                f"{message['role']} message has {describe_entry(key, value)}; use true to include "
                "the "
                "message in the loss, or false"
            )
    if len({bool(value) for value in flags.values()}) > 1:
        raise CorruptSampleError(
            f"{message['role']} message has different values in {' and '.join(flags)}; keep "
            "one of them"
        )
    return bool(next(iter(flags.values()))) if flags else None


def split_anthropic_parts(message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Convert a message with Anthropic content parts to messages in the format of OpenAI.

    {"type": "thinking"} is converted to `reasoning_content`, {"type": "tool_use"} to a tool call,
    and {"type": "tool_result"} of a user message to a tool message.

    Raises:
        CorruptSampleError: The format of OpenAI cannot express the order of the content parts.
    """
    content = message.get("content")
    if not isinstance(content, list) or not any(
        _part_type(part) in _ANTHROPIC_TYPES for part in content
    ):
        return [message]
    return (
        _convert_user_parts(message)
        if message["role"] == "user"
        else [_convert_assistant_parts(message)]
    )


def _convert_assistant_parts(message: Mapping[str, Any]) -> dict[str, Any]:
    if message["role"] != "assistant":
        raise CorruptSampleError(
            f"{message['role']} message has content parts of an assistant message: "
            f"{_ANTHROPIC_TYPES}"
        )
    stages = {"thinking": 0, "tool_use": 2}
    order = [stages.get(_part_type(part), 1) for part in message["content"]]
    if order != sorted(order):
        raise CorruptSampleError(
            "assistant message has thinking after text, or text after tool_use parts, and no "
            "chat template can keep this order; split it into several messages"
        )
    reasoning, rest, calls = [], [], []
    for part in message["content"]:
        if _part_type(part) == "thinking":
            _check_keys(part, {"type", "thinking", "signature"}, "thinking part")
            reasoning.append(_check_text(part.get("thinking"), "thinking part"))
        elif _part_type(part) == "tool_use":
            _check_keys(part, {"type", "id", "name", "input"}, "tool_use part")
            function = {"name": part.get("name"), "arguments": part.get("input")}
            calls.append({"id": part.get("id"), "function": function})
        else:
            rest.append(part)
    if len(reasoning) > 1:
        raise CorruptSampleError("assistant message has several thinking parts; join them into one")
    parts = {"reasoning_content": reasoning[0] if reasoning else None, "tool_calls": calls or None}
    for key, value in parts.items():
        if value is not None and not is_empty(message.get(key)):
            raise CorruptSampleError(
                f"assistant message has {key} and content parts of the same type; keep one of them"
            )
    return {**message, **{k: v for k, v in parts.items() if v is not None}, "content": rest}


def _convert_user_parts(message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    messages: list[Mapping[str, Any]] = []
    flags = {key: message.get(key) for key in ("loss", "train")}
    for part in message["content"]:
        if _part_type(part) == "tool_result":
            _check_keys(part, {"type", "tool_use_id", "content"}, "tool_result part")
            result = {"role": "tool", "tool_call_id": part.get("tool_use_id")}
            messages.append({**flags, **result, "content": part.get("content")})
        elif _part_type(part) in _ANTHROPIC_TYPES:
            raise CorruptSampleError(
                f"user message has a {_part_type(part)} part, which is supported only for "
                "assistant "
                "messages"
            )
        elif messages and messages[-1]["role"] == "user":
            messages[-1]["content"].append(part)
        else:
            messages.append({**message, "content": [part]})
    return messages


def _read_call(call: Any) -> dict[str, Any]:
    if not isinstance(call, Mapping) or call.get("type") not in (None, "function"):
        raise CorruptSampleError(f"tool call {str(call)[:80]} is not an object of type function")
    function = call.get("function")
    if isinstance(function, Mapping):
        _check_keys(call, {"id", "type", "index", "function"}, "tool call")
    else:
        function = {key: value for key, value in call.items() if key not in ("id", "type", "index")}
    _check_keys(function, {"name", "arguments"}, "tool call")
    name = _check_text(function.get("name"), "name of a tool call")
    made: dict[str, Any] = {"type": "function"}
    if _is_set(call.get("id")):
        made["id"] = _check_text(call["id"], "id of a tool call")
    return {
        **made,
        "function": {"name": name, "arguments": _read_arguments(function.get("arguments"))},
    }


def _read_arguments(value: Any) -> dict[str, Any]:
    if value is None or (isinstance(value, str) and not value.strip()):
        return {}
    value = parse_json(value, "arguments of a tool call")
    if not isinstance(value, Mapping):
        raise CorruptSampleError(
            f"arguments of a tool call are {type(value).__name__}, not an object with named "
            "arguments"
        )
    return dict(value)


def _read_tool(tool: Any) -> dict[str, Any]:
    tool = parse_json(tool, "description of a tool")
    if not isinstance(tool, Mapping):
        raise CorruptSampleError(f"description of a tool is {type(tool).__name__}, not an object")
    function = tool.get("function", tool)
    if tool.get("type") not in (None, "function") or not isinstance(function, Mapping):
        raise CorruptSampleError(
            f"tool {describe_entry('type', tool.get('type'))} is not a function"
        )
    if function is not tool:
        _check_keys(tool, {"type", "function"}, "description of a tool")
    function = {key: value for key, value in function.items() if key != "type"}
    if "input_schema" in function:  # Anthropic
        function["parameters"] = function.pop("input_schema")
    _check_text(function.get("name"), "name of a tool")
    return {"type": "function", "function": function}


def _read_list(value: Any, what: str) -> Sequence[Any]:
    value = parse_json(value, what)
    if not isinstance(value, list | tuple):
        raise CorruptSampleError(f"{what} is {type(value).__name__}, not a list")
    return value


def _check_keys(table: Mapping[str, Any], known: set[str], what: str) -> None:
    for key, value in table.items():
        if key not in known and not is_empty(value):
            raise CorruptSampleError(
                f"{what} has {describe_entry(key, value)}, which is not supported"
            )


def _check_text(value: Any, what: str) -> str:
    if not isinstance(value, str) or not value.strip():
        description = (
            f"{value!r:.80}" if isinstance(value, str | float | int) else type(value).__name__
        )
        raise CorruptSampleError(f"{what} is {description}, not a string")
    return value


def _is_set(value: Any) -> bool:
    """Return True if a value is not empty. Unlike in `is_empty`, "{}" and "null" are text."""
    return bool(value.strip()) if isinstance(value, str) else not is_empty(value)


def _part_type(part: Any) -> Any:
    return part.get("type") if isinstance(part, Mapping) else None
