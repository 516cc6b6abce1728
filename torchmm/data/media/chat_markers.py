"""Find the strings of a chat in the output of its chat template, with marker strings.

The template is rendered twice: with the strings of the sample, and with a marker for each string. A
marker is a number between two private-use characters:

    messages    {"role": "user", "content": "Hi"}   {"role": "user", "content": "<000000>"}
    rendered    <|user|>Hi<|end|>                    <|user|><000000><|end|>

The text between markers is from the template. If both renderings match, no string was lost, moved
or changed, and each character is attributed to the template or to the data.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torchmm.data.corrupt import CorruptSampleError
from torchmm.data.record_formats.chat_types import Conversation, Turn
from torchmm.data.record_formats.sample import FileSegment

FILE_CHARACTER = "\ufffc"
"""Placeholder for a file in a text without markers."""
_MARKER = re.compile(r"(?:\ue000|\\ue000)(\d{6})(?:\ue001|\\ue001)")
"""Pattern of a marker, also if JSON-escaped. Markers have equal lengths, so sorting keeps the
order."""
_CONTROL_KEYS = ("type",)
"""Keys in tool schemas whose values control the output of templates."""


class MessageStyle(NamedTuple):
    """Message format that a chat template accepts."""

    parts: bool
    """Whether contents are lists of content parts instead of strings."""
    json_arguments: bool
    """Whether arguments of tool calls are JSON text instead of objects."""


@dataclass(frozen=True)
class Marker:
    """Marker of a string or file of the sample."""

    value: str | FileSegment
    kind: str
    turn: int | None = None
    """Index of the turn. None for the description of a tool."""
    scalars: list[Any] = field(default_factory=list)
    """Arguments that are not strings, between this marker and the next marker."""

    @property
    def location(self) -> str:
        """Location in the conversation, for messages."""
        if self.turn is None:
            return f"{self.value!r:.80} of tools"
        kind = "tool_calls" if self.kind in ("call", "arguments") else self.kind
        return f"{kind} of message {self.turn + 1}"

    @property
    def must_match(self) -> bool:
        """True if the string must occur exactly once and in order, unlike names."""
        return self.kind in ("content", "reasoning_content", "arguments")


class PlainWriter:
    """Writer that leaves strings unchanged."""

    def put(self, value: str | FileSegment, kind: str, turn: int | None) -> str:
        """Return the string that represents a value in the template.

        Args:
            value: String or file.
            kind: Key of the value in its turn, see `Marker`.
            turn: Index of the turn. None for the description of a tool.
        """
        return value if isinstance(value, str) else FILE_CHARACTER

    def scalar(self, value: Any) -> Any:
        """Return the representation of an argument that is not a string."""
        return value


class MarkerWriter(PlainWriter):
    """Writer that replaces strings by markers and stores the markers."""

    def __init__(self) -> None:
        self.markers: list[Marker] = []
        self._tool_markers: dict[str, str] = {}

    def put(self, value: str | FileSegment, kind: str, turn: int | None) -> str:
        """Return a new marker. Blank strings are unchanged, because templates test for them."""
        if isinstance(value, str) and not value.strip():
            return value
        if turn is None and value in self._tool_markers:  # templates compare names
            return self._tool_markers[str(value)]
        marker = f"\ue000{len(self.markers):06d}\ue001"
        self.markers.append(Marker(value, kind, turn))
        if turn is None:
            self._tool_markers[str(value)] = marker
        return marker

    def scalar(self, value: Any) -> Any:
        """Return the value, and store it with the preceding marker."""
        self.markers[-1].scalars.append(value)
        return value


def template_messages(
    conversation: Conversation, style: MessageStyle, writer: PlainWriter
) -> list[dict[str, Any]]:
    """Return the messages of a conversation in the format of chat templates."""
    return [_template_message(k, turn, style, writer) for k, turn in enumerate(conversation.turns)]


def _template_message(
    number: int, turn: Turn, style: MessageStyle, writer: PlainWriter
) -> dict[str, Any]:
    texts = [writer.put(part, "content", number) for part in turn.parts]
    message: dict[str, Any] = {"role": turn.role, "content": "".join(texts)}
    if style.parts:
        message["content"] = [{"type": "text", "text": text} for text in texts]
    if turn.reasoning is not None:
        reasoning = writer.put(turn.reasoning, "reasoning_content", number)
        # Templates read one of these keys.
        message |= dict.fromkeys(("reasoning_content", "reasoning", "thinking"), reasoning)
    if turn.tool_calls:
        message["tool_calls"] = [
            _template_call(call, number, style, writer) for call in turn.tool_calls
        ]
    if turn.name is not None:
        message["name"] = writer.put(turn.name, "name", number)
    if turn.tool_call_id is not None:
        message["tool_call_id"] = turn.tool_call_id
    return message


def _template_call(
    call: dict[str, Any], number: int, style: MessageStyle, writer: PlainWriter
) -> dict[str, Any]:
    name = writer.put(call["function"]["name"], "call", number)
    arguments = _template_arguments(call["function"]["arguments"], number, writer)
    if style.json_arguments:
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {"name": name, "arguments": arguments}}


def _template_arguments(value: Any, number: int, writer: PlainWriter) -> Any:
    """Return arguments in which all strings, including keys, are passed to the writer."""
    if isinstance(value, dict):
        renamed = {}
        for key, item in value.items():
            name = writer.put(key, "arguments", number)
            renamed[name] = _template_arguments(item, number, writer)
        return renamed
    if isinstance(value, list):
        return [_template_arguments(item, number, writer) for item in value]
    if isinstance(value, str):
        return writer.put(value, "arguments", number)
    return writer.scalar(value)


def template_tools(
    tools: Sequence[dict[str, Any]], writer: PlainWriter
) -> list[dict[str, Any]] | None:
    """Return tools in which all text and parameter names are passed to the writer."""
    return [_template_schema(tool, "", writer) for tool in tools] or None


def _template_schema(value: Any, parent: str, writer: PlainWriter) -> Any:
    if isinstance(value, dict):
        names = parent == "properties"
        return {
            writer.put(key, "tools", None) if names else key: (
                item
                if key in _CONTROL_KEYS and not names and isinstance(item, str)
                else _template_schema(item, "" if names else key, writer)
            )
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [_template_schema(item, "", writer) for item in value]
    return writer.put(value, "tools", None) if isinstance(value, str) else value


def unmarked_strings(conversation: Conversation) -> Iterator[str]:
    """Yield strings that have no marker, because templates depend on their values."""
    for turn in conversation.turns:
        yield turn.tool_call_id or ""
        yield from (call.get("id", "") for call in turn.tool_calls)
    pending: list[tuple[Any, str]] = [(tool, "") for tool in conversation.tools]
    options = conversation.template_options
    yield from (json.dumps(options, ensure_ascii=False),) if options else ()
    while pending:
        value, parent = pending.pop()
        if isinstance(value, dict):
            names = parent == "properties"
            yield from (() if names else value)
            pending.extend((item, "" if names else key) for key, item in value.items())
        elif isinstance(value, list):
            pending.extend((item, "") for item in value)
        elif isinstance(value, str) and parent in _CONTROL_KEYS:
            yield value


@dataclass(frozen=True)
class AlignedRendering:
    """Rendered text with the positions of the strings of the sample."""

    text: str
    """Text with the strings of the sample, and FILE for files."""
    markers: list[Marker]
    """Markers in the order of the text."""
    positions: list[tuple[int, int]]
    """Start and end of each string in the text."""
    is_first: list[bool]
    """Whether this is the first occurrence of each string."""

    def template_range(self, number: int) -> tuple[int, int]:
        """Return start and end of the template text before a marker."""
        start = self.positions[number - 1][1] if number else 0
        end = self.positions[number][0] if number < len(self.positions) else len(self.text)
        return start, end


def align_rendering(
    marked_text: str,
    plain_text: str,
    markers: Sequence[Marker],
    optional: set[int],
    before_last_user: range = range(0),
) -> AlignedRendering:
    """Find the strings of a sample in its rendered text.

    Args:
        marked_text: Text rendered with markers.
        plain_text: Text rendered with the strings of the sample.
        markers: All markers.
        optional: Turns for which the name of the tool may be omitted.
        before_last_user: Turns for which the reasoning may be omitted. Most templates write the
            reasoning only after the last user message.

    Raises:
        CorruptSampleError: The template omits, moves, repeats or changes a string.
    """
    pieces = _MARKER.split(marked_text)
    numbers = [int(piece) for piece in pieces[1::2]]
    if any(number >= len(markers) for number in numbers):
        raise CorruptSampleError(
            "the chat template writes characters of the Unicode private use area"
        )
    is_first = _check_complete(numbers, markers, optional, before_last_user)
    ordered = [markers[number] for number in numbers]
    for marker, piece in zip(ordered, pieces[2::2], strict=True):
        _check_scalars(marker, piece)
    positions = _find_positions(pieces[0::2], ordered, plain_text)
    return AlignedRendering(plain_text, ordered, positions, is_first)


def split_at_markers(text: str) -> list[str]:
    """Return the text before the first marker, and the text after each marker."""
    return _MARKER.split(text)[0::2]


def _check_complete(
    numbers: Sequence[int], markers: Sequence[Marker], optional: set[int], before_last_user: range
) -> list[bool]:
    """Check that no marker is missing, and return whether each one is a first occurrence."""
    first: dict[int, int] = {}
    for position, number in enumerate(numbers):
        if number in first and markers[number].must_match:
            raise CorruptSampleError(f"the chat template repeats {markers[number].location}")
        first.setdefault(number, position)
    for number, marker in enumerate(markers):
        may_be_omitted = (marker.kind == "name" and marker.turn in optional) or (
            marker.kind == "reasoning_content" and marker.turn in before_last_user
        )
        if number not in first and not may_be_omitted:
            raise CorruptSampleError(f"the chat template omits {marker.location}")
    order = [n for n in first if markers[n].kind not in ("name", "tools")]
    last: dict[Any, int] = {}
    turn = 0
    for number in order:
        marker = markers[number]
        assert marker.turn is not None
        if marker.turn < turn or number < last.get((marker.turn, marker.kind), 0):
            raise CorruptSampleError(f"the chat template moves {marker.location}")
        turn = marker.turn
        last[turn, marker.kind] = number
    return [first[number] == position for position, number in enumerate(numbers)]


def _check_scalars(marker: Marker, piece: str) -> None:
    """Check that arguments without a marker follow the marker before them, such as numbers."""
    position = 0
    for scalar in marker.scalars:
        forms = {json.dumps(scalar), str(scalar)}
        ends = [start + len(form) for form in forms if (start := piece.find(form, position)) >= 0]
        if not ends:
            raise CorruptSampleError(
                f"the chat template omits {json.dumps(scalar):.80} in {marker.location}"
            )
        position = min(ends)


def _find_positions(
    template_texts: Sequence[str], ordered: Sequence[Marker], plain_text: str
) -> list[tuple[int, int]]:
    positions: list[tuple[int, int]] = []
    position = len(template_texts[0])
    if not plain_text.startswith(template_texts[0]):
        raise CorruptSampleError(_describe_change(ordered[:1]))
    for number, (marker, after) in enumerate(zip(ordered, template_texts[1:], strict=True)):
        for text in _written_forms(marker.value):
            end = position + len(text)
            if plain_text.startswith(text, position) and plain_text.startswith(after, end):
                break
        else:
            matches = any(
                plain_text.startswith(text, position) for text in _written_forms(marker.value)
            )
            following = ordered[number + 1 : number + 2]
            raise CorruptSampleError(
                _describe_change(following if matches and following else [marker])
            )
        positions.append((position, end))
        position = end + len(after)
    if position != len(plain_text):
        raise CorruptSampleError(_describe_change(ordered[-1:]))
    return positions


def _describe_change(markers: Sequence[Marker]) -> str:
    what = markers[0].location if markers else "the conversation"
    return (
        f"the chat template changes {what}, or its output depends on the content (for example "
        "reasoning inside of content; use reasoning_content instead)"
    )


def _written_forms(value: str | FileSegment) -> Iterator[str]:
    """Yield forms in which a template may write a string: trimmed or not, JSON-escaped or not."""
    if not isinstance(value, str):
        yield FILE_CHARACTER
        return
    core = value.strip()
    begin = value.index(core)
    before = value[:begin]
    after = value[begin + len(core) :]
    texts = [
        head + core + tail
        for head in (before, before.lstrip("\n"), "")
        for tail in (after, after.rstrip("\n"), "")
    ]
    texts = list(dict.fromkeys(texts))
    yield from texts
    for ascii_only in (False, True):
        yield from (json.dumps(text, ensure_ascii=ascii_only)[1:-1] for text in texts)
