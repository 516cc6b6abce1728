"""Parts of a message as Hugging Face, Qwen, OpenAI and Anthropic write them: text, or a file.

{"type": "text", "text": "What is it?"}                              all; "input_text" is OpenAI
{"type": "image"}                                                    its file is in a column
{"type": "image", "image": "a.png"}, also "path", "url", "base64"    Hugging Face
{"image": "file:///data/a.png"}                                      Qwen
{"type": "image_url", "image_url": {"url": "data:image/png;..."}}    OpenAI
{"type": "input_audio", "input_audio": {"data": "...", "format": "wav"}}
{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "..."}}
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torchmm.data.corrupt import CorruptSampleError
from torchmm.data.layouts.chat_keys import check_part, is_empty
from torchmm.data.layouts.columns import FILE_KINDS, brief, file_segment, from_base64
from torchmm.data.layouts.sample import FileSegment, Root

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
"""Kind of file by the type of a part."""
_SOURCES = ("bytes", "path", "url", "base64", "source")
"""Keys with the file of a part, besides those of FILE_TYPES."""
_NO_CONTENT = {"detail", "format"}
"""Keys that say how an interface is to treat a part; `format` repeats what the file says."""


class FilePart(NamedTuple):
    """A file in a message."""

    kind: str
    role: str
    named: Any = None
    """What the part says of its file; None: it is the next one of the record's columns."""

    def open(self, root: Root) -> FileSegment:
        """The file that the part names; raises CorruptSampleError."""
        value = self.named
        if isinstance(value, list):
            raise CorruptSampleError(
                f"{self.kind} of a {self.role} message is a list of {len(value)} files, not "
                "one file"
            )
        if isinstance(value, dict):
            if not is_empty(value.get("file_id")):
                raise CorruptSampleError(
                    f"{self.kind} of a {self.role} message is file_id "
                    f"{brief(value['file_id'])}, which torchmm cannot download; store the "
                    "file locally"
                )
            for key in ("data", "base64"):
                if not is_empty(value.get(key)):
                    return FILE_KINDS[self.kind][1](from_base64(value[key], self.kind))
            value = value["url"] if not is_empty(value.get("url")) else value
        segment: FileSegment = file_segment(self.kind, value, root)
        return segment


def read_part(item: Any, role: str) -> str | FilePart:
    """One part of a content that is a list.

    Args:
        item: the part.
        role: who says it.

    Raises:
        CorruptSampleError: it is neither text nor a file, or has keys that would be lost.
    """
    kind = _type_of(item)
    if kind in TEXT_TYPES:
        check_part({**item, "type": "text"}, role)
        if isinstance(item.get("text"), str):
            return str(item["text"])
    elif kind in FILE_TYPES:
        return _read_file(item, FILE_TYPES[kind], role)
    raise CorruptSampleError(
        f"content part {brief(item)} is not supported; use one of text, {', '.join(FILE_KINDS)}"
    )


def _type_of(item: Any) -> Any:
    """The part's type; Qwen writes none, but the key of the content."""
    if not isinstance(item, dict):
        return None
    kind = item.get("type")
    if kind is None:
        filled = [key for key in ("text", *FILE_TYPES) if not is_empty(item.get(key))]
        return filled[0] if len(filled) == 1 else None
    return kind if isinstance(kind, str) else None


def _read_file(item: dict[str, Any], kind: str, role: str) -> FilePart:
    own = [key for key, other in FILE_TYPES.items() if other == kind]
    others = {key: item[key] for key in item if key not in {*own, *_SOURCES, *_NO_CONTENT, "type"}}
    check_part({**others, "type": kind}, role)
    named = [key for key in (*own, *_SOURCES) if not is_empty(item.get(key))]
    if not named:
        return FilePart(kind, role)
    # The path beside bytes only says where these once were.
    if len(named) > 1 and named != ["bytes", "path"]:
        raise CorruptSampleError(
            f"{kind} part of a {role} message specifies its file as {' and '.join(named)}; keep one"
        )
    value = item[named[0]]
    return FilePart(kind, role, {"base64": value} if named == ["base64"] else value)
