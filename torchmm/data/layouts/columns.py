"""Values of a record's columns: texts, lists, files.

Data is not trusted: images, clips and sounds are bytes or files next to the data. A path may not
leave the source's directory and an address is never fetched.
"""

from __future__ import annotations

import json
import os
from typing import Any

from torchmm.data.corrupt import CorruptSampleError
from torchmm.data.layouts.sample import AudioSegment, FileSegment, ImageSegment, VideoSegment

IMAGE_COLUMNS = ("image", "jpg", "jpeg", "png", "webp")
VIDEO_COLUMNS = ("video", "mp4", "webm", "mkv", "mov", "avi")
AUDIO_COLUMNS = ("audio", "wav", "flac", "ogg", "mp3")
TEXT_COLUMNS = ("text", "txt", "caption")
FILE_KINDS: dict[str, tuple[tuple[str, ...], type[FileSegment]]] = {
    "image": (IMAGE_COLUMNS, ImageSegment),
    "video": (VIDEO_COLUMNS, VideoSegment),
    "audio": (AUDIO_COLUMNS, AudioSegment),
}
"""Columns with a file of each kind in captions, in the order in which they are read."""


def with_json_columns(columns: dict[str, Any]) -> dict[str, Any]:
    """Columns plus those inside a webdataset's `json` member."""
    inner = columns.get("json")
    if isinstance(inner, str | bytes):
        try:
            inner = json.loads(inner)
        except ValueError as error:
            raise CorruptSampleError(f"column json: {error}") from error
    return {**inner, **columns} if isinstance(inner, dict) else columns


def list_of(columns: dict[str, Any], name: str) -> list[Any]:
    """The column's list, [] if it is missing; raises CorruptSampleError."""
    value = columns.get(name)
    if value is None:
        return []
    if not isinstance(value, list):
        raise CorruptSampleError(f"column {name} is {type(value).__name__}, not a list")
    return value


def text_of(value: Any) -> str:
    """A text as a string; raises CorruptSampleError."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if not isinstance(value, str):
        raise CorruptSampleError(f"text is {type(value).__name__}, not a string")
    return value


def file_segment(kind: str, value: Any, root: str | None) -> Any:
    """A file of one of FILE_KINDS; raises CorruptSampleError."""
    return FILE_KINDS[kind][1](*_file(value, root, kind))


def _file(value: Any, root: str | None, kind: str) -> tuple[bytes | None, str | None]:
    """Bytes or path, from either or from the {"bytes", "path"} pair of `datasets`."""
    if isinstance(value, dict):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, bytes):
        return value, None
    if not isinstance(value, str) or not value:
        raise CorruptSampleError(f"{kind} is {type(value).__name__}, not bytes or a path")
    if "://" in value:
        raise CorruptSampleError(f"{kind} is an address ({value[:80]}), which is never fetched")
    if root is None:
        raise CorruptSampleError(f"{kind} is a path ({value[:80]}) in a source without directory")
    path = os.path.normpath(os.path.join(root, value))  # noqa: PTH118 - must not follow links
    if not path.startswith(os.path.join(root, "")):  # noqa: PTH118
        raise CorruptSampleError(
            f"{kind} path {value[:80]!r} leaves {root}; link the {kind} directory into it"
        )
    return None, path
