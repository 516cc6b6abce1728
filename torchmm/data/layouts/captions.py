"""Layouts without turns: a file with its text, files and texts in reading order, text alone."""

from __future__ import annotations

from torchmm.data.corrupt import CorruptSampleError
from torchmm.data.layouts.columns import (
    FILE_KINDS,
    TEXT_COLUMNS,
    file_segment,
    list_of,
    text_of,
)
from torchmm.data.layouts.sample import Record, Sample, Segment, TextSegment


def is_caption(record: Record) -> bool:
    """Whether there is a text, with or without files."""
    return any(record.columns.get(name) is not None for name in TEXT_COLUMNS)


def read_caption(record: Record) -> Sample:
    """Files in the order of FILE_KINDS, the source's prompt, the text."""
    columns = record.columns
    segments: list[Segment] = []
    for kind, (names, _) in FILE_KINDS.items():
        value = next((columns[c] for c in names if columns.get(c) is not None), None)
        if value is not None:
            segments.append(file_segment(kind, value, record.root))
    if record.options.prompt and segments:
        segments.append(TextSegment(record.options.prompt, loss=False))
    text = next(columns[c] for c in TEXT_COLUMNS if columns.get(c) is not None)
    return Sample((*segments, TextSegment(text_of(text), loss=True)))


def is_interleaved(record: Record) -> bool:
    """Whether there are lists of texts and files."""
    return "texts" in record.columns and any(f"{kind}s" in record.columns for kind in FILE_KINDS)


def read_interleaved(record: Record) -> Sample:
    """Lists of one length, each with None where another has the element."""
    texts = list_of(record.columns, "texts")
    given = {kind: list_of(record.columns, f"{kind}s") for kind in FILE_KINDS}
    files = {kind: values for kind, values in given.items() if values}
    if any(len(values) != len(texts) for values in files.values()):
        found = ", ".join(f"{len(values)} {kind}s" for kind, values in files.items())
        raise CorruptSampleError(
            f"{found} but {len(texts)} texts; all lists need one entry per element, None where "
            "another list has it"
        )
    segments: list[Segment] = []
    for number, text in enumerate(texts):
        for kind, values in files.items():
            if values[number] is not None:
                segments.append(file_segment(kind, values[number], record.root))
        if text is not None:
            segments.append(TextSegment(text_of(text), loss=True))
    return Sample(tuple(segments))
