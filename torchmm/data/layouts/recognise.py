"""Which layout a record has, by its columns (see `docs/reference/data.md`), and what it becomes.

LAYOUTS is the table of all. An image or clip that the generator has to draw (see
`SampleOptions.generate`) is taken out of any of them and put after everything else, so that all
of the sample is its context.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from torchmm.data.corrupt import CorruptSampleError
from torchmm.data.layouts.captions import read_caption, read_interleaved
from torchmm.data.layouts.chat_keys import check_placeholders, is_empty
from torchmm.data.layouts.columns import (
    FILE_KINDS,
    TEXT_COLUMNS,
    file_segment,
    is_no_file,
    with_json_columns,
)
from torchmm.data.layouts.conversation import Conversation
from torchmm.data.layouts.conversations import COLUMNS as CONVERSATIONS
from torchmm.data.layouts.conversations import read_conversations
from torchmm.data.layouts.instructions import read_instruction, read_query
from torchmm.data.layouts.messages import read_chat
from torchmm.data.layouts.prompts import read_prompt
from torchmm.data.layouts.questions import ANSWERS, has_pairs, read_pairs, read_question
from torchmm.data.layouts.sample import (
    GeneratedSegment,
    Record,
    Sample,
    SampleOptions,
    Segment,
    TextSegment,
)

ChatRenderer = Callable[[Conversation, SampleOptions], Sample]
"""See `torchmm.data.media.chat.ChatTemplate`."""


class RecordLayout(NamedTuple):
    """How the records of many data sets are arranged."""

    name: str
    needs: tuple[tuple[str, ...], ...]
    """Columns: of each group one that is not None."""
    read: Callable[[Record], Sample | Conversation]
    """Raises CorruptSampleError for a malformed value."""
    when: Callable[[Record], bool] | None = None
    """What else has to hold."""

    def missing(self, filled: set[str]) -> list[tuple[str, ...]]:
        """Groups of which a record with these columns has none."""
        return [group for group in self.needs if filled.isdisjoint(group)]

    def matches(self, record: Record, filled: set[str]) -> bool:
        """Whether it reads the record, of which these columns are not None."""
        lacks = any(map(filled.isdisjoint, self.needs))
        return not lacks and (self.when is None or self.when(record))


LAYOUTS = (
    RecordLayout("messages", (("messages",),), read_chat),
    RecordLayout("conversations", (CONVERSATIONS,), read_conversations),
    RecordLayout("prompt and completion", (("prompt",), ("completion",)), read_prompt),
    RecordLayout("instruction", (("instruction",), ("output",)), read_instruction),
    RecordLayout("query", (("query",), ("response",)), read_query),
    RecordLayout("question", (("question",), ANSWERS), read_question),
    RecordLayout("question and answer pairs", (("texts",),), read_pairs, has_pairs),
    RecordLayout("interleaved", (("texts",),), read_interleaved),
    RecordLayout("caption", (TEXT_COLUMNS,), read_caption),
)
"""Tried in this order: the first that matches reads the record. Turns come before captions, as
data sets with turns often have them once more as one `text`."""
_SUGGEST = {name: TEXT_COLUMNS for names, _ in FILE_KINDS.values() for name in names} | {
    f"{kind}s": ("texts", "messages", "conversations", *TEXT_COLUMNS) for kind in FILE_KINDS
}
"""Columns that say what is read, and those that would say what is learnt from it."""
_PREFERENCES = (
    "chosen",
    "rejected",
    "rejected_response",
    "rejected_messages",
    "negative_messages",
    "kto_tag",
)
"""Columns of sets that say which answers are better: TRL's, LLaMA-Factory's, ms-swift's."""
_JUDGED = ("completion", "messages", *CONVERSATIONS, "response", "output")
"""Columns with an answer that `label` judges in the KTO formats of TRL and ms-swift."""


def parse_record(record: Record, render_chat: ChatRenderer) -> Sample:
    """Return the sample of a record of any layout.

    Raises:
        CorruptSampleError: The record has no known layout, or a malformed value.
    """
    columns = with_json_columns(record.columns)
    generated: tuple[Segment, ...] = ()
    name = record.options.generate
    if name is not None:
        if name not in columns:
            raise CorruptSampleError(
                f"the record has columns {sorted(columns)}, but `generate` is {name!r}; use "
                "one of the columns"
            )
        value = columns[name]
        columns = {key: other for key, other in columns.items() if key != name}
        if not is_no_file(value):
            generated = (GeneratedSegment(file_segment("image", value, record.root)),)
    # A record that compares answers has no loss here.
    preferences = [name for name in _PREFERENCES if not is_empty(columns.get(name))]
    label = columns.get("label")
    is_flag = isinstance(label, bool) or str(label).lower() in ("true", "false")
    if is_flag and not columns.keys().isdisjoint(_JUDGED):
        preferences.append("label")
    if preferences:
        raise CorruptSampleError(
            f"column {preferences[0]} belongs to preference data, which is not supported; "
            "keep only the preferred responses, in a column of another name"
        )
    record = replace(record, columns=columns)
    content = recognise(record).read(record)
    if isinstance(content, Conversation):
        said = [part for turn in content.turns for part in (*turn.parts, turn.reasoning)]
        check_placeholders(columns, [part for part in said if isinstance(part, str)])
        content = render_chat(content, record.options)
    else:
        texts = [segment for segment in content.segments if isinstance(segment, TextSegment)]
        check_placeholders(columns, [segment.text for segment in texts])
    return replace(content, segments=(*content.segments, *generated))


def recognise(record: Record) -> RecordLayout:
    """The first layout that the columns match.

    Raises:
        CorruptSampleError: there is none; what the nearest one lacks is said.
    """
    columns = record.columns
    filled = {name for name, value in columns.items() if value is not None}
    for layout in LAYOUTS:
        if layout.matches(record, filled):
            return layout
    for layout in LAYOUTS:
        missing = layout.missing(filled)
        if len(missing) < len(layout.needs):
            has = next(name for group in layout.needs for name in group if name in filled)
            raise CorruptSampleError(f"column `{has}` exists, but {_none_of(missing[0])}")
    for name, learnt in _SUGGEST.items():
        if name in filled:
            raise CorruptSampleError(f"column `{name}` exists, but {_none_of(learnt)}")
    known = ", ".join(" and ".join("/".join(g) for g in layout.needs) for layout in LAYOUTS)
    raise CorruptSampleError(
        f"no record format matches the columns {sorted(columns)}; supported formats have "
        f"{known} (docs/reference/data.md)"
    )


def _none_of(names: tuple[str, ...]) -> str:
    return f"no {names[0]}" if len(names) == 1 else f"none of {', '.join(names)}"


def layout_of(record: Record) -> str:
    """Name of a record's layout, for people; raises CorruptSampleError if it has none."""
    return recognise(replace(record, columns=with_json_columns(record.columns))).name


def is_chat(record: Record) -> bool:
    """Return whether a chat template renders a record.

    Raises:
        CorruptSampleError: No layout reads the record.
    """
    record = replace(record, columns=with_json_columns(record.columns))
    return isinstance(recognise(record).read(record), Conversation)
