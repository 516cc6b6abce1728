"""Record formats without turns: captions, interleaved files and text, and plain text."""

from __future__ import annotations

from torchmm.data.corrupt import CorruptSampleError
from torchmm.data.record_formats.columns import (
    MEDIA_TYPES,
    TEXT_COLUMNS,
    file_segment,
    get_list,
    is_missing_file,
    read_files,
    to_text,
)
from torchmm.data.record_formats.sample import Record, Sample, Segment, TextSegment


def read_caption(record: Record) -> Sample:
    """Read files in the order of MEDIA_TYPES, the prompt of the source, and the text."""
    columns = record.columns
    files = read_files(columns, record.root)
    segments: list[Segment] = [file for kind in MEDIA_TYPES for file in files[kind]]  # type: ignore[misc]
    if record.options.prompt and segments:
        segments.append(TextSegment(record.options.prompt, loss=False))
    text = next(columns[c] for c in TEXT_COLUMNS if columns.get(c) is not None)
    return Sample((*segments, TextSegment(to_text(text), loss=True)))


def read_interleaved(record: Record) -> Sample:
    """Read lists of equal length, with None for missing elements."""
    texts = get_list(record.columns, "texts")
    files = {
        kind: get_list(record.columns, f"{kind}s")
        for kind in MEDIA_TYPES
        if not is_missing_file(record.columns.get(f"{kind}s"))
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
            if not is_missing_file(values[number]):
                segments.append(file_segment(kind, values[number], record.root))
        if text is not None:
            segments.append(TextSegment(to_text(text), loss=True))
    return Sample(tuple(segments))
