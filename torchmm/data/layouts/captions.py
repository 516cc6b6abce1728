"""Record formats without turns: captions, interleaved files and text, and plain text."""

from __future__ import annotations

from torchmm.data.corrupt import CorruptSampleError
from torchmm.data.layouts.columns import (
    FILE_KINDS,
    TEXT_COLUMNS,
    file_segment,
    files_of,
    is_no_file,
    list_of,
    text_of,
)
from torchmm.data.layouts.sample import Record, Sample, Segment, TextSegment


def read_caption(record: Record) -> Sample:
    """Read files in the order of FILE_KINDS, the prompt of the source, and the text."""
    columns = record.columns
    files = files_of(columns, record.root)
    segments: list[Segment] = [file for kind in FILE_KINDS for file in files[kind]]  # type: ignore[misc]
    if record.options.prompt and segments:
        segments.append(TextSegment(record.options.prompt, loss=False))
    text = next(columns[c] for c in TEXT_COLUMNS if columns.get(c) is not None)
    return Sample((*segments, TextSegment(text_of(text), loss=True)))


def read_interleaved(record: Record) -> Sample:
    """Read lists of equal length, with None for missing elements."""
    texts = list_of(record.columns, "texts")
    files = {
        kind: list_of(record.columns, f"{kind}s")
        for kind in FILE_KINDS
        if not is_no_file(record.columns.get(f"{kind}s"))
    }
    if any(len(values) != len(texts) for values in files.values()):
        counts = ", ".join(f"{len(values)} {kind}s" for kind, values in files.items())
        raise CorruptSampleError(
            f"{counts} but {len(texts)} texts; all lists must have the same length, with None "
            "for missing elements"
        )
    segments: list[Segment] = []
    for number, text in enumerate(texts):
        for kind, values in files.items():
            if not is_no_file(values[number]):
                segments.append(file_segment(kind, values[number], record.root))
        if text is not None:
            segments.append(TextSegment(text_of(text), loss=True))
    return Sample(tuple(segments))
