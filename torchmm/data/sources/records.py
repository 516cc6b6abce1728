"""Records of any source to typed segments: what is text, what is image, what counts in the loss.

The format is recognised by the columns of each record (see `docs/data.md`):

    caption       image, video, audio, text (or: a webdataset's jpg/png/webp/mp4/wav/.., txt/json)
    interleaved   images, videos, audios, texts: of one length, None where another has the element
    chat          messages [{role, content}], images, videos, audios: in the order of their parts
    text          text

An image or clip that the generator has to draw (see `Record.generate`) is taken out of any of them
and put after everything else, so that all of the sample is its context.

Data is not trusted: images, clips and sounds are bytes or files next to the data. A path may not
leave the source's directory and an address is never fetched.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torchmm.data.media.chat_keys import check_record
from torchmm.data.sources.corrupt import CorruptSampleError

IMAGE_COLUMNS = ("image", "jpg", "jpeg", "png", "webp")
VIDEO_COLUMNS = ("video", "mp4", "webm", "mkv", "mov", "avi")
AUDIO_COLUMNS = ("audio", "wav", "flac", "ogg", "mp3")
TEXT_COLUMNS = ("text", "txt", "caption")
FORMATS_HELP = (
    "known are caption (image, video or audio, text), interleaved (texts and images, videos or "
    "audios), chat (messages and the same) and text; see docs/data.md"
)


@dataclass(frozen=True)
class Record:
    """One raw sample: its columns, and the directory that image paths are relative to."""

    columns: dict[str, Any]
    root: str | None = None
    generate: str | None = None
    """Column with an image or clip that is to be drawn, not read."""


@dataclass(frozen=True)
class TextSegment:
    """Text, predicted by the model or only read by it."""

    text: str
    loss: bool
    scaffold: bool = False
    """Comes from the chat template, so that special tokens in it are special."""


@dataclass(frozen=True)
class FileSegment:
    """An encoded file: its bytes, or where they are."""

    data: bytes | None = None
    path: str | None = None
    encoder: str | None = None
    """Name of the encoder that reads it, once that is known."""

    def read(self) -> bytes:
        """The file's bytes.

        Raises:
            CorruptSampleError: the file cannot be read.
        """
        if self.data is not None:
            return self.data
        assert self.path is not None
        try:
            return Path(self.path).read_bytes()
        except OSError as error:
            raise CorruptSampleError(f"{self.kind} file {self.path}: {error.strerror}") from error

    @property
    def kind(self) -> str:
        """What it is, for messages."""
        return "image"


@dataclass(frozen=True)
class ImageSegment(FileSegment):
    """An image."""


@dataclass(frozen=True)
class VideoSegment(FileSegment):
    """A clip."""

    @property
    def kind(self) -> str:
        return "video"


@dataclass(frozen=True)
class AudioSegment(FileSegment):
    """A sound."""

    @property
    def kind(self) -> str:
        return "audio"


@dataclass(frozen=True)
class GeneratedSegment:
    """An image or clip that the generator has to draw; it takes no tokens."""

    file: ImageSegment


Segment = TextSegment | ImageSegment | VideoSegment | AudioSegment | GeneratedSegment


@dataclass(frozen=True)
class Sample:
    """Segments in reading order. A chat template writes its own start and end tokens."""

    segments: tuple[Segment, ...]
    add_bos: bool = True
    add_eos: bool = True


ChatRenderer = Callable[
    [list[dict[str, Any]], list[ImageSegment], list[AudioSegment], list[VideoSegment]], Sample
]
FILE_KINDS: dict[str, tuple[tuple[str, ...], type[FileSegment]]] = {
    "image": (IMAGE_COLUMNS, ImageSegment),
    "video": (VIDEO_COLUMNS, VideoSegment),
    "audio": (AUDIO_COLUMNS, AudioSegment),
}
"""Columns with a file of each kind in captions, in the order in which they are read."""


def parse_record(record: Record, prompt: str, render_chat: ChatRenderer) -> Sample:
    """Recognise the format of a record and cut it into segments.

    Args:
        record: as a source gave it.
        prompt: text between the image and the text of a caption sample.
        render_chat: see `torchmm.data.media.chat.ChatTemplate`.

    Raises:
        CorruptSampleError: no known format, or a malformed value.
    """
    columns = _with_json_columns(record.columns)
    drawn: tuple[Segment, ...] = ()
    if record.generate is not None:
        columns, drawn = _take_generated(columns, record.generate, record.root)
    sample = _parse_columns(replace(record, columns=columns), prompt, render_chat)
    return replace(sample, segments=(*sample.segments, *drawn))


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
    return others, () if value is None else (
        GeneratedSegment(ImageSegment(*_file(value, root, "image"))),
    )


def _parse_columns(record: Record, prompt: str, render_chat: ChatRenderer) -> Sample:
    """`parse_record` without an image to be drawn."""
    columns = record.columns
    if columns.get("messages") is not None:
        check_record(columns)
        files = [
            [_segment(kind, value, record.root) for value in _list(columns, f"{kind}s")]
            for kind in ("image", "audio", "video")
        ]
        return render_chat(_list(columns, "messages"), *files)
    if "texts" in columns and any(f"{kind}s" in columns for kind in FILE_KINDS):
        return _parse_interleaved(columns, record.root)
    text = next((columns[c] for c in TEXT_COLUMNS if columns.get(c) is not None), None)
    if text is None:
        raise CorruptSampleError(f"no format for columns {sorted(columns)}: {FORMATS_HELP}")
    segments: list[Segment] = []
    for kind, (names, _) in FILE_KINDS.items():
        value = next((columns[c] for c in names if columns.get(c) is not None), None)
        if value is not None:
            segments.append(_segment(kind, value, record.root))
    if prompt and segments:
        segments.append(TextSegment(prompt, loss=False))
    return Sample((*segments, TextSegment(_text(text), loss=True)))


def limit_images(sample: Sample, max_images: int) -> Sample:
    """The sample without the images and clips after the first `max_images`; 0 leaves text and
    sounds."""
    kept: list[Segment] = []
    images = 0
    for segment in sample.segments:
        if isinstance(segment, ImageSegment | VideoSegment):
            images += 1
            if images > max_images:
                continue
        kept.append(segment)
    return Sample(tuple(kept), sample.add_bos, sample.add_eos)


def assign_encoders(sample: Sample, readers: Mapping[str, Sequence[str]]) -> Sample:
    """The sample with a file for every encoder that reads it, one after another.

    Args:
        readers: names of encoders by kind, "image", "video" and "audio"; files without any are
            left out.
    """
    segments: list[Segment] = []
    for segment in sample.segments:
        if isinstance(segment, FileSegment):
            names = readers.get(segment.kind, ())
            segments.extend(replace(segment, encoder=name) for name in names)
        else:
            segments.append(segment)
    return replace(sample, segments=tuple(segments))


def without_generated(sample: Sample) -> Sample:
    """The sample without what is to be drawn."""
    kept = tuple(s for s in sample.segments if not isinstance(s, GeneratedSegment))
    return replace(sample, segments=kept)


def _parse_interleaved(columns: dict[str, Any], root: str | None) -> Sample:
    texts = _list(columns, "texts")
    given = {kind: _list(columns, f"{kind}s") for kind in FILE_KINDS}
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
                segments.append(_segment(kind, values[number], root))
        if text is not None:
            segments.append(TextSegment(_text(text), loss=True))
    return Sample(tuple(segments))


def _with_json_columns(columns: dict[str, Any]) -> dict[str, Any]:
    """Columns plus those inside a webdataset's `json` member."""
    inner = columns.get("json")
    if isinstance(inner, str | bytes):
        try:
            inner = json.loads(inner)
        except ValueError as error:
            raise CorruptSampleError(f"column json: {error}") from error
    return {**inner, **columns} if isinstance(inner, dict) else columns


def _list(columns: dict[str, Any], name: str) -> list[Any]:
    value = columns.get(name)
    if value is None:
        return []
    if not isinstance(value, list):
        raise CorruptSampleError(f"column {name} is {type(value).__name__}, not a list")
    return value


def _text(value: Any) -> str:
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if not isinstance(value, str):
        raise CorruptSampleError(f"text is {type(value).__name__}, not a string")
    return value


def _segment(kind: str, value: Any, root: str | None) -> Any:
    """A file of one of FILE_KINDS."""
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
