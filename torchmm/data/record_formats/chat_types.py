"""Types for chats, independent of the record format.

All chat formats are converted to these types, and `torchmm.data.media.chat` applies the chat
template of the tokenizer. Values that cannot be expressed make the record corrupt. They are never
dropped without a message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torchmm.data.record_formats.sample import AudioSegment, ImageSegment, VideoSegment

ROLES = ("system", "user", "assistant", "tool")
THINK_START, THINK_END = "<think>", "</think>"
"""Tags around the reasoning in the content of an answer, as in most public reasoning data."""

Part = str | ImageSegment | AudioSegment | VideoSegment
"""Content part: text or a file."""


@dataclass(frozen=True)
class Turn:
    """Message of a chat."""

    role: str
    """One of ROLES."""
    parts: tuple[Part, ...] = ()
    reasoning: str | None = None
    """Reasoning of an assistant before its response."""
    tool_calls: tuple[dict[str, Any], ...] = ()
    """Tool calls as chat templates expect them: {"type": "function", "function": {"name",
    "arguments"}}, where arguments are an object, with an optional "id"."""
    name: str | None = None
    """Name of the tool in a tool message."""
    tool_call_id: str | None = None
    """Id of the call that a tool message answers."""
    train: bool | None = None
    """Whether the message is included in the loss. None to use `train_on` of the source."""


@dataclass(frozen=True)
class Conversation:
    """Turns in order."""

    turns: tuple[Turn, ...]
    tools: tuple[dict[str, Any], ...] = ()
    """Descriptions of available tools for the chat template."""
    template_options: dict[str, Any] = field(default_factory=dict)
    """Variables of the chat template from the record, such as `enable_thinking`."""


def split_reasoning(turn: Turn) -> Turn:
    """Return an answer such as "<think>reasoning</think>answer" with its reasoning in `reasoning`.

    The opening tag may be missing, because some templates write it as part of the prompt. Other
    turns are returned unchanged.
    """
    text = turn.parts[0] if turn.parts else ""
    if turn.role != "assistant" or turn.reasoning is not None or not isinstance(text, str):
        return turn
    before, _, answer = text.partition(THINK_END)
    outside, _, reasoning = before.rpartition(THINK_START)
    is_split = THINK_END in text and THINK_END not in answer and not outside.strip()
    if not is_split or THINK_START in outside or THINK_START in answer:
        return turn
    answer = answer.lstrip("\n")
    if not answer and not turn.parts[1:] and not turn.tool_calls:
        return turn  # reasoning without an answer
    reasoning = reasoning.strip("\n")
    parts = (answer, *turn.parts[1:]) if answer else turn.parts[1:]
    return replace(turn, parts=parts, reasoning=reasoning if reasoning.strip() else None)


def match_tool_results(turns: Sequence[Turn]) -> dict[int, tuple[dict[str, Any] | None, bool]]:
    """Return the call that each tool message answers, and whether it is the first open call.

    Calls are matched by id, or otherwise in order. The call is None if no call is open.
    """
    answered: dict[int, tuple[dict[str, Any] | None, bool]] = {}
    pending: list[dict[str, Any]] = []
    for number, turn in enumerate(turns):
        if turn.role == "assistant":
            pending = list(turn.tool_calls)
        if turn.role != "tool":
            continue
        ids = [call.get("id") for call in pending]
        at = ids.index(turn.tool_call_id) if turn.tool_call_id in ids else 0
        answered[number] = (pending.pop(at) if pending else None, at == 0)
    return answered
