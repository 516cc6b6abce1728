"""Contents of messages to their parts: texts, and every file where it belongs.

A file is named in its part, or is the next one of the record's columns, or has a placeholder in
the text (`<image>`, `<video>`, `<audio>`). Numbers have to agree: a file too many would be learnt
as a text without it, one too few would shift all that follow.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from torchmm.data.corrupt import CorruptSampleError
from torchmm.data.layouts.columns import FILE_KINDS
from torchmm.data.layouts.conversation import Part
from torchmm.data.layouts.inline_files import FilePart, read_part
from torchmm.data.layouts.sample import FileSegment, Root

PLACEHOLDER = re.compile(f"<({'|'.join(FILE_KINDS)})>")

Content = str | list[str | FilePart]
"""Of one message: plain text, or parts."""


def read_contents(
    contents: Sequence[tuple[str, Any]],
    files: Mapping[str, Sequence[FileSegment]],
    root: Root,
    placeholders: bool,
) -> list[tuple[Part, ...]]:
    """The parts of all messages of a record.

    Args:
        contents: role and content of each; a content is text or a list of parts.
        files: by kind: those of the record's columns, in order.
        root: directory that paths in parts are relative to.
        placeholders: the layout always marks files in its texts. Otherwise "<image>" in a text is
            a placeholder only in records with images and without parts for them; in all others it
            stays the text it is.

    Raises:
        CorruptSampleError: malformed contents, or numbers that do not agree.
    """
    read: list[Content] = []
    for role, content in contents:
        if not isinstance(content, str | list):
            raise CorruptSampleError(f"content is {type(content).__name__}, not a string or a list")
        is_text = isinstance(content, str)
        read.append(content if is_text else [read_part(item, role) for item in content])
    columns = {kind: list(files.get(kind, ())) for kind in FILE_KINDS}
    matched = {kind: _match_files(kind, read, columns[kind], placeholders) for kind in FILE_KINDS}
    marked = {kind for kind, (is_marked, _) in matched.items() if is_marked}
    by_order = {kind: uses_order for kind, (_, uses_order) in matched.items()}
    queues = {kind: iter(columns[kind]) for kind in FILE_KINDS}
    made = []
    for content in read:
        if isinstance(content, str):
            made.append(_split(content, marked, queues))
            continue
        parts: list[Any] = []
        for part in content:
            if isinstance(part, str):
                parts.append(part)
            elif by_order[part.kind] or part.named is None:
                parts.append(next(queues[part.kind]))
            else:
                parts.append(part.open(root))
        made.append(tuple(parts))
    return made


def with_files_first(content: Any, files: Mapping[str, Sequence[FileSegment]]) -> Any:
    """A content, text or parts of texts, after parts for all files of a record."""
    if not any(files.values()):
        return content
    parts = [{"type": kind} for kind in FILE_KINDS for _ in files[kind]]
    said = content if isinstance(content, list) else [{"type": "text", "text": content}]
    return [*parts, *said]


def has_marks(contents: Sequence[Any], files: Mapping[str, Sequence[FileSegment]]) -> bool:
    """Whether messages say where their files belong: by parts, or by placeholders."""
    marks = [f"<{kind}>" for kind, found in files.items() if found]
    return any(
        any(mark in content for mark in marks)
        if isinstance(content, str)
        else isinstance(content, list)
        and any(isinstance(part, dict) and part.get("type") != "text" for part in content)
        for content in contents
    )


def _match_files(
    kind: str, read: Sequence[Content], files: Sequence[FileSegment], always: bool
) -> tuple[bool, bool]:
    """Match the files of a kind in columns to placeholders in texts, or to parts.

    Returns:
        Whether placeholders in texts mark the files, and whether all parts, also those that name
        a file, use the files of the columns in order.

    Raises:
        CorruptSampleError: The numbers do not agree.
    """
    parts = [
        part
        for content in read
        if not isinstance(content, str)
        for part in content
        if isinstance(part, FilePart) and part.kind == kind
    ]
    if (always or files) and not parts:
        found = sum(content.count(f"<{kind}>") for content in read if isinstance(content, str))
        if found != len(files):
            raise CorruptSampleError(
                f"{found} <{kind}> placeholders but {len(files)} {kind} files; use one "
                "placeholder per file"
            )
        return True, True
    unnamed = sum(part.named is None for part in parts)
    if len(files) not in (len(parts), unnamed):
        raise CorruptSampleError(
            f"{len(parts)} {kind} parts in messages, {len(parts) - unnamed} of which have a "
            f"file, but {len(files)} {kind} files in columns"
        )
    return False, len(files) == len(parts)


def _split(text: str, marked: set[str], queues: Mapping[str, Any]) -> tuple[Part, ...]:
    """A plain text, cut at its placeholders."""
    if not marked or "<" not in text:
        return (text,)
    parts: list[Part] = []
    begin = 0
    for found in PLACEHOLDER.finditer(text):
        kind = found.group(1)
        if kind not in marked:
            continue
        if found.start() > begin:
            parts.append(text[begin : found.start()])
        parts.append(next(queues[kind]))
        begin = found.end()
    if begin < len(text) or not parts:
        parts.append(text[begin:])
    return tuple(parts)
