"""Which layout a record has, by its columns (see `docs/data.md`), and what it becomes.

    caption       image, video, audio, text (or: a webdataset's jpg/png/webp/mp4/wav/.., txt/json)
    interleaved   images, videos, audios, texts: of one length, None where another has the element
    chat          messages [{role, content}], images, videos, audios: in the order of their parts
    text          text

An image or clip that the generator has to draw (see `SampleOptions.generate`) is taken out of any
of them and put after everything else, so that all of the sample is its context.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from torchmm.data.corrupt import CorruptSampleError
from torchmm.data.layouts.captions import (
    is_caption,
    is_interleaved,
    read_caption,
    read_interleaved,
)
from torchmm.data.layouts.columns import file_segment, with_json_columns
from torchmm.data.layouts.conversation import Conversation
from torchmm.data.layouts.messages import is_chat, read_chat
from torchmm.data.layouts.sample import GeneratedSegment, Record, Sample, SampleOptions, Segment

FORMATS_HELP = (
    "known are caption (image, video or audio, text), interleaved (texts and images, videos or "
    "audios), chat (messages and the same) and text; see docs/data.md"
)

ChatRenderer = Callable[[Conversation, SampleOptions], Sample]
"""See `torchmm.data.media.chat.ChatTemplate`."""


class Layout(NamedTuple):
    """How the records of many data sets are arranged."""

    name: str
    matches: Callable[[Record], bool]
    read: Callable[[Record], Sample | Conversation]
    """Raises CorruptSampleError for a malformed value."""


LAYOUTS = (
    Layout("chat", is_chat, read_chat),
    Layout("interleaved", is_interleaved, read_interleaved),
    Layout("caption", is_caption, read_caption),
)
"""Tried in this order: the first that matches reads the record."""


def parse_record(record: Record, render_chat: ChatRenderer) -> Sample:
    """Recognise the layout of a record and cut it into segments.

    Raises:
        CorruptSampleError: no known layout, or a malformed value.
    """
    columns = with_json_columns(record.columns)
    drawn: tuple[Segment, ...] = ()
    if record.options.generate is not None:
        columns, drawn = _take_generated(columns, record.options.generate, record.root)
    record = replace(record, columns=columns)
    layout = recognise(record)
    content = layout.read(record)
    if isinstance(content, Conversation):
        content = render_chat(content, record.options)
    return replace(content, segments=(*content.segments, *drawn))


def recognise(record: Record) -> Layout:
    """The first layout that the columns match.

    Raises:
        CorruptSampleError: there is none.
    """
    for layout in LAYOUTS:
        if layout.matches(record):
            return layout
    raise CorruptSampleError(f"no format for columns {sorted(record.columns)}: {FORMATS_HELP}")


def layout_of(record: Record) -> str:
    """Name of a record's layout, for people; raises CorruptSampleError if it has none."""
    return recognise(replace(record, columns=with_json_columns(record.columns))).name


def _take_generated(
    columns: dict[str, Any], name: str, root: str | None
) -> tuple[dict[str, Any], tuple[Segment, ...]]:
    """The other columns, and the content of the one to be drawn, if it is not empty."""
    if name not in columns:
        raise CorruptSampleError(
            f"has columns {sorted(columns)}, but `generate` names {name!r}; name one of them"
        )
    others = {key: value for key, value in columns.items() if key != name}
    value = columns[name]
    return others, () if value is None else (GeneratedSegment(file_segment("image", value, root)),)
