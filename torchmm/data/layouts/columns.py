"""Values of a record's columns: texts, lists, files.

Data is not trusted: images, clips and sounds are bytes, `data:` addresses that hold them, or files
next to the data. A path may not leave the source's directory and no other address is followed: of a
source in a store, only those below its own folder there.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
from collections.abc import Mapping
from typing import Any

from torchmm.data.corrupt import CorruptSampleError
from torchmm.data.layouts.sample import (
    AudioSegment,
    FileSegment,
    ImageSegment,
    Root,
    VideoSegment,
)
from torchmm.data.sample_files import InnerFile, TableValue, content_of
from torchmm.data.storage.remote_files import RemoteFolder, RemoteName

IMAGE_COLUMNS = ("image", "jpg", "jpeg", "png", "webp")
VIDEO_COLUMNS = ("video", "mp4", "webm", "mkv", "mov", "avi")
AUDIO_COLUMNS = ("audio", "wav", "flac", "ogg", "mp3")
TEXT_COLUMNS = ("text", "txt", "caption")
FILE_KINDS: dict[str, tuple[tuple[str, ...], type[FileSegment]]] = {
    "image": (IMAGE_COLUMNS, ImageSegment),
    "video": (VIDEO_COLUMNS, VideoSegment),
    "audio": (AUDIO_COLUMNS, AudioSegment),
}
"""Columns with a file of each kind, in the order in which they are read."""
MAX_INLINE_BYTES = 100_000_000
"""Largest file that is written into a record as base64."""


def brief(value: Any) -> str:
    """A value for a message, without what is inside of it: data may nest deeper than Python."""
    if isinstance(value, Mapping):
        return f"a table of {', '.join(map(str, value)) or 'nothing'}"[:80]
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    return repr(value[:40] if isinstance(value, str | bytes) else value)


def with_json_columns(columns: dict[str, Any]) -> dict[str, Any]:
    """Columns plus those inside a webdataset's `json` member."""
    inner = columns.get("json")
    if isinstance(inner, str | bytes | TableValue):
        try:
            inner = json.loads(content_of(inner))
        except (ValueError, RecursionError) as error:
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


def text_of(value: Any, name: str = "text") -> str:
    """A text as a string; raises CorruptSampleError."""
    value = content_of(value)
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if not isinstance(value, str):
        raise CorruptSampleError(f"{name} is {type(value).__name__}, not a string")
    return value


def optional_text(columns: dict[str, Any], name: str) -> str:
    """The column's text, "" if it is missing or None; raises CorruptSampleError."""
    value = columns.get(name)
    return "" if value is None else text_of(value, f"column {name}")


def files_of(columns: dict[str, Any], root: Root) -> dict[str, list[FileSegment]]:
    """All files of a record by kind: those of `images`, or of `image`; either may hold one or many.

    Raises:
        CorruptSampleError: a value is no file, or both columns have some.
    """
    return {kind: _files_of_kind(columns, kind, root) for kind in FILE_KINDS}


def _files_of_kind(columns: dict[str, Any], kind: str, root: Root) -> list[FileSegment]:
    several = f"{kind}s"
    names = [n for n in (several, *FILE_KINDS[kind][0]) if columns.get(n) not in (None, [])]
    if not names:
        return []
    if names[0] == several and len(names) > 1:
        raise CorruptSampleError(f"columns {several} and {names[1]} both have {kind}s; keep one")
    value = columns[names[0]]
    values = value if isinstance(value, list) else [value]
    return [file_segment(kind, value, root) for value in values]


def file_segment(kind: str, value: Any, root: Root) -> Any:
    """A file of one of FILE_KINDS; raises CorruptSampleError."""
    return FILE_KINDS[kind][1](*_file(value, root, kind))


def _file(
    value: Any, root: Root, kind: str
) -> tuple[bytes | None, str | RemoteName | InnerFile | None]:
    """Bytes or path, from either or from the {"bytes", "path"} pair of `datasets`."""
    if isinstance(value, dict):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, bytes | InnerFile):
        return (value, None) if isinstance(value, bytes) else (None, value)
    if not isinstance(value, str) or not value:
        raise CorruptSampleError(f"{kind} is {type(value).__name__}, not bytes or a path")
    if value.startswith("data:"):
        return _data_address(value, kind), None
    if isinstance(root, RemoteFolder):
        named = root.join(value)
        if named is None:
            raise CorruptSampleError(f"{kind} path {value[:80]!r} leaves {root}")
        return None, named
    value = value.removeprefix("file://")
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


def _data_address(value: str, kind: str) -> bytes:
    """The bytes of data:image/png;base64,iVBOR..."""
    head, comma, content = value.partition(",")
    named = head.removeprefix("data:").partition("/")[0]
    if not comma or not head.endswith(";base64"):
        raise CorruptSampleError(f"{kind} is {value[:40]!r}, not data:TYPE;base64,CONTENT")
    if named in FILE_KINDS and named != kind:
        raise CorruptSampleError(f"{kind} is {head!r:.80}, data of another kind")
    return from_base64(content, kind)


def from_base64(content: Any, kind: str) -> bytes:
    """A file written as base64; raises CorruptSampleError."""
    if not isinstance(content, str) or not content:
        raise CorruptSampleError(f"{kind} data is {type(content).__name__}, not base64 text")
    size = len(content) * 3 // 4
    if size > MAX_INLINE_BYTES:
        raise CorruptSampleError(
            f"{kind} of {size} bytes inside the record, at most {MAX_INLINE_BYTES}; store it as "
            "a file beside the data"
        )
    try:
        return base64.b64decode(content, validate=True)
    except (binascii.Error, ValueError) as error:
        raise CorruptSampleError(f"{kind} data is no base64: {error}") from error
