"""Convert the contents of messages to text and files in reading order.

A content part may name its file, or use the next file of the columns of the record. A text may have
placeholders (`<image>`, `<video>`, `<audio>`). The numbers of files and placeholders must match,
because a missing or extra file would assign the remaining files to the wrong text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from torchmm.data.corrupt import CorruptSampleError
from torchmm.data.record_formats.chat_types import Part
from torchmm.data.record_formats.columns import MEDIA_TYPES
from torchmm.data.record_formats.content_parts import FilePart, read_part
from torchmm.data.record_formats.sample import FileSegment, Root

PLACEHOLDER = re.compile(f"<({'|'.join(MEDIA_TYPES)})>")

MessageContent = str | list[str | FilePart]
"""Content of one message: plain text, or content parts."""


def read_contents(
    contents: Sequence[tuple[str, Any]],
    files: Mapping[str, Sequence[FileSegment]],
    root: Root,
    placeholders: bool,
) -> list[tuple[Part, ...]]:
    """Return the text and files of all messages of a record.

    Args:
        contents: Role and content of each message. A content is text or a list of content parts.
        files: Files of the columns in order, by type.
        root: Directory to which paths in content parts are relative.
        placeholders: Whether files always have placeholders in text. Otherwise "<image>" in a text
            is a placeholder only if the record has images, but no content parts for them.

    Raises:
        CorruptSampleError: Contents are malformed, or the numbers of files do not match.
    """
    read: list[MessageContent] = []
    for role, content in contents:
        if not isinstance(content, str | list):
            raise CorruptSampleError(f"content is {type(content).__name__}, not a string or a list")
        is_text = isinstance(content, str)
        read.append(content if is_text else [read_part(item, role) for item in content])
    columns = {kind: list(files.get(kind, ())) for kind in MEDIA_TYPES}
    matched = {kind: _match_files(kind, read, columns[kind], placeholders) for kind in MEDIA_TYPES}
    marked = {kind for kind, (is_marked, _) in matched.items() if is_marked}
    by_order = {kind: uses_order for kind, (_, uses_order) in matched.items()}
    queues = {kind: iter(columns[kind]) for kind in MEDIA_TYPES}
    made = []
    for content in read:
        if isinstance(content, str):
            made.append(_split_at_placeholders(content, marked, queues))
            continue
        parts: list[Any] = []
        for part in content:
            if isinstance(part, str):
                parts.append(part)
            elif by_order[part.kind] or part.file is None:
                parts.append(part.with_options(next(queues[part.kind])))
            else:
                parts.append(part.open(root))
        made.append(tuple(parts))
    return made


def prepend_files(content: Any, files: Mapping[str, Sequence[FileSegment]]) -> Any:
    """Return a content with content parts for all files of a record before its text."""
    if not any(files.values()):
        return content
    parts = [{"type": kind} for kind in MEDIA_TYPES for _ in files[kind]]
    texts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    return [*parts, *texts]


def has_file_placeholders(
    contents: Sequence[Any], files: Mapping[str, Sequence[FileSegment]]
) -> bool:
    """Return True if messages have content parts or placeholders for files."""
    placeholders = [f"<{kind}>" for kind, of_kind in files.items() if of_kind]
    return any(
        any(placeholder in content for placeholder in placeholders)
        if isinstance(content, str)
        else isinstance(content, list)
        and any(isinstance(part, dict) and part.get("type") != "text" for part in content)
        for content in contents
    )


def _match_files(
    kind: str, read: Sequence[MessageContent], files: Sequence[FileSegment], always: bool
) -> tuple[bool, bool]:
    """Match the files of a type in columns to placeholders in text, or to content parts.

    Returns:
        Whether text has placeholders for the files, and whether all content parts use the files of
        the columns in order, including content parts that name a file.

    Raises:
        CorruptSampleError: The numbers do not match.
    """
    parts = [
        part
        for content in read
        if not isinstance(content, str)
        for part in content
        if isinstance(part, FilePart) and part.kind == kind
    ]
    if (always or files) and not parts:
        count = sum(content.count(f"<{kind}>") for content in read if isinstance(content, str))
        if count != len(files):
            raise CorruptSampleError(
                f"{count} <{kind}> placeholders but {len(files)} {kind} files; use one "
                "placeholder per file"
            )
        return True, True
    unnamed = sum(part.file is None for part in parts)
    if len(files) not in (len(parts), unnamed):
        raise CorruptSampleError(
            f"{len(parts)} {kind} parts in messages, {len(parts) - unnamed} of which have a "
            f"file, but {len(files)} {kind} files in columns"
        )
    return False, len(files) == len(parts)


def _split_at_placeholders(
    text: str, marked: set[str], queues: Mapping[str, Any]
) -> tuple[Part, ...]:
    """Split a text at its placeholders, and insert the next files."""
    if not marked or "<" not in text:
        return (text,)
    parts: list[Part] = []
    begin = 0
    for match in PLACEHOLDER.finditer(text):
        kind = match.group(1)
        if kind not in marked:
            continue
        if match.start() > begin:
            parts.append(text[begin : match.start()])
        parts.append(next(queues[kind]))
        begin = match.end()
    if begin < len(text) or not parts:
        parts.append(text[begin:])
    return tuple(parts)
