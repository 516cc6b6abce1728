"""A chat, whatever layout it was published in: turns with everything that was said in them.

Layouts that are chats (`messages.py` and the rest of this folder) make one of these, and
`torchmm.data.media.chat` renders it through the tokenizer's template. What neither can express is
refused by name, never dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torchmm.data.layouts.sample import AudioSegment, ImageSegment, VideoSegment

ROLES = ("system", "user", "assistant", "tool")

Part = str | ImageSegment | AudioSegment | VideoSegment
"""A piece of what is said: text, or a file."""


@dataclass(frozen=True)
class Turn:
    """One message."""

    role: str
    """One of ROLES."""
    parts: tuple[Part, ...] = ()
    reasoning: str | None = None
    """What an assistant thought before it answered."""
    tool_calls: tuple[dict[str, Any], ...] = ()
    """Calls as templates expect them: {"type": "function", "function": {"name", "arguments"}},
    arguments as a table; "id" where the data have one."""
    name: str | None = None
    """Of the tool that answers."""
    tool_call_id: str | None = None
    """Which call a tool answers."""
    train: bool | None = None
    """Whether it counts in the loss; None: as the source's `train_on` says."""


@dataclass(frozen=True)
class Conversation:
    """Turns in order."""

    turns: tuple[Turn, ...]
    tools: tuple[dict[str, Any], ...] = ()
    """Descriptions of the tools that may be called, for the template."""
    template_options: dict[str, Any] = field(default_factory=dict)
    """Variables of the chat template that the record sets, as `enable_thinking`."""


def answered_calls(turns: Sequence[Turn]) -> dict[int, tuple[dict[str, Any] | None, bool]]:
    """Which call every turn of a tool answers, and whether that is the first one still open.

    By its id, else by its order; None if there is no such call.
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
