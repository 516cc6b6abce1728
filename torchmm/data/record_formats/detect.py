"""Find the format of a record by its columns, and convert the record to a sample.

LAYOUTS lists all formats (see `docs/reference/data_formats.md`). A target image or video (see
`SampleOptions.target_image_column`) is moved to the end of the sample, so that all text is its
context.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from torchmm.data.corrupt import CorruptSampleError
from torchmm.data.record_formats.captions import read_caption, read_interleaved
from torchmm.data.record_formats.chat_keys import check_placeholders, is_empty
from torchmm.data.record_formats.chat_types import Conversation
from torchmm.data.record_formats.columns import (
    MEDIA_TYPES,
    TEXT_COLUMNS,
    file_segment,
    is_missing_file,
    with_json_columns,
)
from torchmm.data.record_formats.instructions import read_instruction, read_query
from torchmm.data.record_formats.messages import read_chat
from torchmm.data.record_formats.prompts import read_prompt
from torchmm.data.record_formats.questions import (
    ANSWER_COLUMNS,
    has_question_pairs,
    read_question,
    read_question_pairs,
)
from torchmm.data.record_formats.sample import (
    Record,
    Sample,
    SampleOptions,
    Segment,
    TargetImageSegment,
    TextSegment,
)
from torchmm.data.record_formats.sharegpt import CONVERSATION_COLUMNS as CONVERSATIONS
from torchmm.data.record_formats.sharegpt import read_conversations

ChatRenderer = Callable[[Conversation, SampleOptions], Sample]
"""See `torchmm.data.media.chat.ChatTemplate`."""
BoxWriter = Callable[[Sample | Conversation, Record], tuple[Sample | Conversation, Sequence[str]]]
"""See `torchmm.data.grounding.boxes.write_boxes`."""


class RecordFormat(NamedTuple):
    """Record format, with the columns that identify it."""

    name: str
    required_columns: tuple[tuple[str, ...], ...]
    """Groups of columns. At least one column of each group must be set."""
    read: Callable[[Record], Sample | Conversation]
    """Function that reads a record. Raises CorruptSampleError for a malformed value."""
    condition: Callable[[Record], bool] | None = None
    """Additional condition on the record."""

    def missing(self, set_columns: set[str]) -> list[tuple[str, ...]]:
        """Return the groups that have no column among these set columns."""
        return [group for group in self.required_columns if set_columns.isdisjoint(group)]

    def matches(self, record: Record, set_columns: set[str]) -> bool:
        """Return True if a record with these set columns has this format."""
        is_incomplete = any(map(set_columns.isdisjoint, self.required_columns))
        return not is_incomplete and (self.condition is None or self.condition(record))


RECORD_FORMATS = (
    RecordFormat("messages", (("messages",),), read_chat),
    RecordFormat("conversations", (CONVERSATIONS,), read_conversations),
    RecordFormat("prompt and completion", (("prompt",), ("completion",)), read_prompt),
    RecordFormat("instruction", (("instruction",), ("output",)), read_instruction),
    RecordFormat("query", (("query",), ("response",)), read_query),
    RecordFormat("question", (("question",), ANSWER_COLUMNS), read_question),
    RecordFormat(
        "question and answer pairs", (("texts",),), read_question_pairs, has_question_pairs
    ),
    RecordFormat("interleaved", (("texts",),), read_interleaved),
    RecordFormat("caption", (TEXT_COLUMNS,), read_caption),
)
"""All formats. The first match reads the record. Formats with turns precede captions, because
datasets with turns often also have a column `text`."""
_EXPECTED_TEXT_COLUMNS = {
    name: TEXT_COLUMNS for names, _ in MEDIA_TYPES.values() for name in names
} | {f"{kind}s": ("texts", "messages", "conversations", *TEXT_COLUMNS) for kind in MEDIA_TYPES}
"""Maps a file column to the text columns that are missing if no format matches."""
_PREFERENCE_COLUMNS = (
    "chosen",
    "rejected",
    "rejected_response",
    "rejected_messages",
    "negative_messages",
    "kto_tag",
)
"""Columns of preference data in the formats of TRL, LLaMA-Factory and ms-swift."""
_RATED_COLUMNS = ("completion", "messages", *CONVERSATIONS, "response", "output")
"""Columns with the response that `label` rates in the KTO formats of TRL and ms-swift."""


def parse_record(
    record: Record, render_chat: ChatRenderer, write_boxes: BoxWriter | None = None
) -> Sample:
    """Return the sample of a record in any format.

    Args:
        record: The record.
        render_chat: Function that applies the chat template.
        write_boxes: Function that writes the boxes of the column `objects` into the text.

    Raises:
        CorruptSampleError: No format matches the record, or a value is malformed.
    """
    columns = with_json_columns(record.columns)
    generated: tuple[Segment, ...] = ()
    name = record.options.target_image_column
    if name is not None:
        if name not in columns:
            raise CorruptSampleError(
                f"the record has columns {sorted(columns)}, but target_image_column = {name!r}; "
                "use "
                "one of the columns"
            )
        value = columns[name]
        columns = {key: each for key, each in columns.items() if key != name}
        if not is_missing_file(value):
            generated = (TargetImageSegment(file_segment("image", value, record.root)),)
    # The readers of pairs (`preference_pairs.py`) remove the columns of pairs.
    preferences = [name for name in _PREFERENCE_COLUMNS if not is_empty(columns.get(name))]
    label = columns.get("label")
    is_rating = isinstance(label, bool) or str(label).lower() in ("true", "false")
    if is_rating and not columns.keys().isdisjoint(_RATED_COLUMNS):
        preferences.append("label")
    if preferences:
        raise CorruptSampleError(
            f"column {preferences[0]} belongs to preference data; for pairs of a chosen and a "
            'rejected answer, set training.loss = "preference"; otherwise keep only the preferred '
            "responses, in a column of another name"
        )
    record = replace(record, columns=columns)
    content = detect_format(record).read(record)
    if isinstance(content, Conversation):
        parts = [part for turn in content.turns for part in (*turn.parts, turn.reasoning)]
        texts = [part for part in parts if isinstance(part, str)]
    else:
        texts = [segment.text for segment in content.segments if isinstance(segment, TextSegment)]
    # Texts before filling, because the boxes of some models look like placeholders.
    filled: Sequence[str] = ()
    if write_boxes is not None:
        content, filled = write_boxes(content, record)
    check_placeholders(columns, texts, filled)
    if isinstance(content, Conversation):
        content = render_chat(content, record.options)
    return replace(content, segments=(*content.segments, *generated))


def detect_format(record: Record) -> RecordFormat:
    """Return the first format that matches the columns.

    Raises:
        CorruptSampleError: No format matches. The message lists missing columns.
    """
    columns = record.columns
    set_columns = {name for name, value in columns.items() if value is not None}
    for record_format in RECORD_FORMATS:
        if record_format.matches(record, set_columns):
            return record_format
    for record_format in RECORD_FORMATS:
        missing = record_format.missing(set_columns)
        if len(missing) < len(record_format.required_columns):
            has = next(
                name
                for group in record_format.required_columns
                for name in group
                if name in set_columns
            )
            raise CorruptSampleError(f"column `{has}` exists, but {_describe_missing(missing[0])}")
    for name, text_columns in _EXPECTED_TEXT_COLUMNS.items():
        if name in set_columns:
            raise CorruptSampleError(
                f"column `{name}` exists, but {_describe_missing(text_columns)}"
            )
    formats = ", ".join(
        " and ".join("/".join(g) for g in record_format.required_columns)
        for record_format in RECORD_FORMATS
    )
    raise CorruptSampleError(
        f"no record format matches the columns {sorted(columns)}; supported formats have "
        f"{formats} (docs/reference/data_formats.md)"
    )


def _describe_missing(names: tuple[str, ...]) -> str:
    return f"no {names[0]}" if len(names) == 1 else f"none of {', '.join(names)}"


def detect_format_name(record: Record) -> str:
    """Return the name of the format of a record. Raise CorruptSampleError if none matches."""
    return detect_format(replace(record, columns=with_json_columns(record.columns))).name


def is_chat(record: Record) -> bool:
    """Return True if a record is a chat, to which a chat template is applied.

    Raises:
        CorruptSampleError: No format matches the record.
    """
    record = replace(record, columns=with_json_columns(record.columns))
    return isinstance(detect_format(record).read(record), Conversation)
