"""Content parts in the formats of Hugging Face, Qwen, OpenAI and Anthropic: text or files.

{"type": "text", "text": "What is it?"}                              all; "input_text" is OpenAI
{"type": "image"}                                                    its file is in a column
{"type": "image", "image": "a.png"}, also "path", "url", "base64"    Hugging Face
{"image": "file:///data/a.png"}                                      Qwen
{"type": "video", "video": "a.mp4", "fps": 1.0, "max_pixels": 50176} Qwen, see `MediaOptions`
{"type": "video", "video": ["1.jpg", "2.jpg"], "sample_fps": 1.0}    Qwen: frames of a video
{"type": "image_url", "image_url": {"url": "data:image/png;..."}}    OpenAI
{"type": "input_audio", "input_audio": {"data": "...", "format": "wav"}}
{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "..."}}
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from torchmm.data.corrupt import CorruptSampleError
from torchmm.data.record_formats.chat_keys import check_part_keys, is_empty
from torchmm.data.record_formats.columns import (
    MEDIA_TYPES,
    decode_base64,
    file_segment,
    truncate_repr,
)
from torchmm.data.record_formats.sample import (
    MEDIA_OPTIONS,
    NO_OPTIONS,
    FileSegment,
    MediaOptions,
    Root,
)

TEXT_TYPES = ("text", "input_text", "output_text")
FILE_TYPES = {
    "image": "image",
    "image_url": "image",
    "input_image": "image",
    "video": "video",
    "video_url": "video",
    "input_video": "video",
    "audio": "audio",
    "audio_url": "audio",
    "input_audio": "audio",
}
"""Type of file by type of content part."""
_FILE_KEYS = ("bytes", "path", "url", "base64", "source")
"""Further keys with the file of a content part, in addition to FILE_TYPES."""
_IGNORED_KEYS = {"detail", "format"}
"""Keys that have no effect: `detail` is an API option, and `format` is also in the file."""


class FilePart(NamedTuple):
    """File in a message."""

    kind: str
    role: str
    file: Any = None
    """File as in the content part. None for the next file of the columns."""
    options: MediaOptions = NO_OPTIONS

    def open(self, root: Root) -> FileSegment:
        """Return the named file. Raise CorruptSampleError if it is not supported."""
        value = self.file
        if isinstance(value, list) and self.kind != "video":
            raise CorruptSampleError(
                f"{self.kind} of a {self.role} message is a list of {len(value)} files, not "
                "one file"
            )
        if isinstance(value, dict):
            if not is_empty(value.get("file_id")):
                raise CorruptSampleError(
                    f"{self.kind} of a {self.role} message is file_id "
                    f"{truncate_repr(value['file_id'])}, which torchmm cannot download; store the "
                    "file locally"
                )
            for key in ("data", "base64"):
                if not is_empty(value.get(key)):
                    data = decode_base64(value[key], self.kind)
                    return MEDIA_TYPES[self.kind][1](data, options=self.options)
            value = value["url"] if not is_empty(value.get("url")) else value
        segment: FileSegment = file_segment(self.kind, value, root, self.options)
        return segment

    def with_options(self, segment: FileSegment) -> FileSegment:
        """Return a file of the columns with the options of this part, if it has any."""
        return segment if self.options == NO_OPTIONS else replace(segment, options=self.options)


def read_part(item: Any, role: str) -> str | FilePart:
    """Read a content part.

    Args:
        item: The content part.
        role: Role of the message.

    Raises:
        CorruptSampleError: The part is neither text nor a file, or has unsupported keys.
    """
    kind = _part_type(item)
    if kind in TEXT_TYPES:
        check_part_keys({**item, "type": "text"}, role)
        if isinstance(item.get("text"), str):
            return str(item["text"])
    elif kind in FILE_TYPES:
        return _read_file_part(item, FILE_TYPES[kind], role)
    raise CorruptSampleError(
        f"content part {truncate_repr(item)} is not supported; use one of text, "
        f"{', '.join(MEDIA_TYPES)}"
    )


def _part_type(item: Any) -> Any:
    """Return the type of a content part. In the format of Qwen, it is the key of the content."""
    if not isinstance(item, dict):
        return None
    kind = item.get("type")
    if kind is None:
        filled = [key for key in ("text", *FILE_TYPES) if not is_empty(item.get(key))]
        return filled[0] if len(filled) == 1 else None
    return kind if isinstance(kind, str) else None


def _read_file_part(item: dict[str, Any], kind: str, role: str) -> FilePart:
    type_keys = [key for key, value in FILE_TYPES.items() if value == kind]
    option_keys = MEDIA_OPTIONS.get(kind, ())
    options = MediaOptions.read(kind, {key: item[key] for key in option_keys if key in item})
    read_keys = {*type_keys, *_FILE_KEYS, *_IGNORED_KEYS, *option_keys, "type"}
    check_part_keys(
        {**{key: item[key] for key in item if key not in read_keys}, "type": kind}, role
    )
    named = [key for key in (*type_keys, *_FILE_KEYS) if not is_empty(item.get(key))]
    if not named:
        return FilePart(kind, role, options=options)
    # In {"bytes", "path"}, the path is only the origin of the bytes.
    if len(named) > 1 and named != ["bytes", "path"]:
        raise CorruptSampleError(
            f"{kind} part of a {role} message specifies its file as {' and '.join(named)}; keep one"
        )
    value = item[named[0]]
    return FilePart(kind, role, {"base64": value} if named == ["base64"] else value, options)
