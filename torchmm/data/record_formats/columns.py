"""Read text, lists and files from the columns of a record.

Data is not trusted. Images, videos and audio are bytes, `data:` URLs, or files in the directory of
the source. Paths outside of this directory and URLs of other locations are rejected.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import os
import struct
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

import numpy as np

from torchmm.data.corrupt import CorruptSampleError
from torchmm.data.files.remote_files import RemotePath
from torchmm.data.files.sample_files import InnerFile, TableValue, read_value
from torchmm.data.record_formats.json_text import parse_json
from torchmm.data.record_formats.sample import (
    NO_OPTIONS,
    AudioSegment,
    FileSegment,
    ImageSegment,
    MediaOptions,
    Root,
    VideoSegment,
)

IMAGE_COLUMNS = ("image", "jpg", "jpeg", "png", "webp")
VIDEO_COLUMNS = ("video", "mp4", "webm", "mkv", "mov", "avi")
AUDIO_COLUMNS = ("audio", "wav", "flac", "ogg", "mp3")
TEXT_COLUMNS = ("text", "txt", "caption")
MEDIA_TYPES: dict[str, tuple[tuple[str, ...], type[FileSegment]]] = {
    "image": (IMAGE_COLUMNS, ImageSegment),
    "video": (VIDEO_COLUMNS, VideoSegment),
    "audio": (AUDIO_COLUMNS, AudioSegment),
}
"""Columns and segment class of each file type, in reading order."""
MAX_INLINE_BYTES = 100_000_000
"""Maximum size of a base64 file in a record."""
MAX_AMPLITUDE = 8.0
"""Maximum absolute value of decoded audio. The range is -1 to 1, with overshoot of resampling."""
MAX_SAMPLING_RATE = 768_000
"""Maximum sampling rate in Hz."""
MAX_CHANNELS = 64
"""Maximum number of audio channels."""


def truncate_repr(value: Any) -> str:
    """Return a short description of a value for messages, without nested values."""
    if isinstance(value, Mapping):
        return f"an object with {', '.join(map(str, value)) or 'no keys'}"[:80]
    if isinstance(value, list | tuple):
        return f"a list with {len(value)} elements"
    return repr(value[:40] if isinstance(value, str | bytes) else value)


def with_json_columns(columns: dict[str, Any]) -> dict[str, Any]:
    """Return the columns, with the columns in the `json` part of a WebDataset sample."""
    inner = columns.get("json")
    if isinstance(inner, str | bytes | TableValue):
        try:
            inner = json.loads(read_value(inner))
        except (ValueError, RecursionError) as error:
            raise CorruptSampleError(f"column json: {error}") from error
    return {**inner, **columns} if isinstance(inner, dict) else columns


def get_list(columns: dict[str, Any], name: str) -> list[Any]:
    """Return the list in a column, or [] if it is missing.

    Columns of CSV and Parquet files may have the list as JSON text.

    Raises:
        CorruptSampleError: The value is not a list.
    """
    value = columns.get(name)
    if value is None:
        return []
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = parse_json(value, f"column {name}")
    if not isinstance(value, list):
        raise CorruptSampleError(f"column {name} is {type(value).__name__}, not a list")
    return value


def to_text(value: Any, name: str = "text") -> str:
    """Return a text as a string. Raise CorruptSampleError if it is not text."""
    value = read_value(value)
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if not isinstance(value, str):
        raise CorruptSampleError(f"{name} is {type(value).__name__}, not a string")
    return value


def to_answer(value: Any, name: str) -> str:
    """Return an answer as a string. Numbers are written as in JSON.

    Raises:
        CorruptSampleError: The answer is neither text nor a finite number.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return json.dumps(value) if is_number and math.isfinite(value) else to_text(value, name)


def get_text(columns: dict[str, Any], name: str) -> str:
    """Return the text in a column, or "" if it is missing. May raise CorruptSampleError."""
    value = columns.get(name)
    return "" if value is None else to_text(value, f"column {name}")


def read_files(columns: dict[str, Any], root: Root) -> dict[str, list[FileSegment]]:
    """Return all files of a record by type, from columns such as `images` or `image`.

    Each column may have one file or a list of files.

    Raises:
        CorruptSampleError: A value is not a file, or both columns have files.
    """
    return {kind: _read_files_of_type(columns, kind, root) for kind in MEDIA_TYPES}


def file_columns(kind: str) -> tuple[str, ...]:
    """Return the names of the columns for files of a type."""
    return (f"{kind}s", *MEDIA_TYPES[kind][0])


def is_missing_file(value: Any) -> bool:
    """Return True if a value of a file column means "no file".

    Datasets contain None, NaN, an empty string or an empty list in rows without a file. `datasets`
    writes {"bytes": None, "path": None}.
    """
    if isinstance(value, float):
        return math.isnan(value)
    if isinstance(value, str):
        return not value.strip()
    if isinstance(value, list):
        return all(not isinstance(item, list) and is_missing_file(item) for item in value)
    if isinstance(value, dict):
        parts = [value[key] for key in ("bytes", "path", "array") if key in value]
        return bool(parts) and all(
            part is None or (isinstance(part, str) and not part.strip()) for part in parts
        )
    return value is None


def _read_files_of_type(columns: dict[str, Any], kind: str, root: Root) -> list[FileSegment]:
    several = f"{kind}s"
    names = [name for name in file_columns(kind) if not is_missing_file(columns.get(name))]
    if not names:
        return []
    if names[0] == several and len(names) > 1:
        raise CorruptSampleError(
            f"columns {several} and {names[1]} both contain {kind} files; keep one column"
        )
    value = columns[names[0]]
    values = value if isinstance(value, list) else [value]
    return [file_segment(kind, value, root) for value in values if not is_missing_file(value)]


def file_segment(kind: str, value: Any, root: Root, options: MediaOptions = NO_OPTIONS) -> Any:
    """Return the segment of a file, or of a video that is a list of frames.

    Args:
        kind: File type, a key of MEDIA_TYPES.
        value: File, list of image files, or object with a file and options, such as
            {"video": ["1.jpg", "2.jpg"], "fps": 1.0}.
        root: Directory to which paths are relative.
        options: Options of the content part of the file.

    Raises:
        CorruptSampleError: The value is not a file, or an option is not supported.
    """
    if isinstance(value, dict) and not is_missing_file(value.get(kind)):
        others = {key: each for key, each in value.items() if key not in (kind, "type")}
        options = MediaOptions.read(kind, others) if options == NO_OPTIONS else options
        value = value[kind]
    if kind == "video" and isinstance(value, list):
        frames = tuple(file_segment("image", frame, root) for frame in value)
        return VideoSegment(frames=frames, options=options)
    return MEDIA_TYPES[kind][1](*_read_file(value, root, kind), options=options)


def _read_file(
    value: Any, root: Root, kind: str
) -> tuple[bytes | None, str | RemotePath | InnerFile | None]:
    """Return the bytes or the path of a file.

    The value is bytes, a path, or an object of `datasets`: {"bytes", "path"}, or decoded audio with
    {"array", "sampling_rate"}.
    """
    if isinstance(value, dict):
        decoded = value.get("array") is not None and not value.get("bytes")
        value = encode_wav(value, kind) if decoded else value.get("bytes") or value.get("path")
    if isinstance(value, bytes | InnerFile):
        return (value, None) if isinstance(value, bytes) else (None, value)
    if not isinstance(value, str) or not value:
        raise CorruptSampleError(f"{kind} is {type(value).__name__}, not bytes or a path")
    if value.startswith("data:"):
        return _decode_data_url(value, kind), None
    if isinstance(root, RemotePath):
        named = root.join(value)
        if named is None:
            raise CorruptSampleError(f"{kind} path {value[:80]!r} is outside of {root}")
        return None, named
    value = _without_file_scheme(value)
    if "://" in value:
        raise CorruptSampleError(
            f"{kind} is a URL ({value[:80]}), which torchmm does not download; store the file "
            "locally"
        )
    if root is None:
        raise CorruptSampleError(
            f"{kind} is a path ({value[:80]}), but the source has no directory; set `files` of "
            "the source"
        )
    path = os.path.normpath(os.path.join(root, value))  # noqa: PTH118 - must not follow links
    if not path.startswith(os.path.join(root, "")):  # noqa: PTH118
        raise CorruptSampleError(
            f"{kind} path {value[:80]!r} is outside of {root}; set `files` of the source to "
            f"the directory of its {kind} files"
        )
    return None, path


def _without_file_scheme(path: str) -> str:
    """Return the path of a `file://` URL, without percent escapes, or an unchanged path."""
    if not path.startswith("file://"):
        return path
    return unquote(path.removeprefix("file://").removeprefix("localhost"))


def encode_wav(value: dict[str, Any], kind: str) -> bytes:
    """Return decoded audio as a WAVE file of 32-bit floats, which stores the samples unchanged.

    Args:
        value: Object with "array", (samples,) or (channels, samples), and "sampling_rate".
        kind: File type, a key of MEDIA_TYPES.

    Raises:
        CorruptSampleError: The type is not "audio", or a value is not audio.
    """
    if kind != "audio":
        raise CorruptSampleError(
            f"{kind} is an object with `array`, which is supported only for audio; store the "
            "encoded file"
        )
    rate = value.get("sampling_rate")
    number = isinstance(rate, int | float) and not isinstance(rate, bool)
    if not number or not 0 < rate <= MAX_SAMPLING_RATE or rate != int(rate):  # type: ignore[operator, arg-type]
        raise CorruptSampleError(
            f"audio has `array`, but sampling_rate = {truncate_repr(rate)}; use samples per "
            "second, "
            f"an integer up to {MAX_SAMPLING_RATE}"
        )
    rate = int(rate)
    samples_SC = _to_samples_by_channel(value["array"])
    size = samples_SC.size * 4
    channels = samples_SC.shape[1]
    # https://www.mmsp.ece.mcgill.ca/Documents/AudioFormats/WAVE/WAVE.html, format 3: IEEE float
    form = struct.pack("<HHIIHH", 3, channels, rate, rate * channels * 4, channels * 4, 32)
    head = b"WAVEfmt " + struct.pack("<I", len(form)) + form + b"data" + struct.pack("<I", size)
    return b"RIFF" + struct.pack("<I", len(head) + size) + head + samples_SC.tobytes()


def _to_samples_by_channel(array: Any) -> np.ndarray:
    """Return decoded audio as little-endian float32 (samples, channels).

    `datasets` and librosa have channels first, soundfile has channels last. The shorter axis is
    assumed to be the channel axis.
    """
    try:
        samples = np.asarray(array)
    except (ValueError, OverflowError) as error:
        raise CorruptSampleError(f"`array` of audio is not rectangular: {error}") from error
    if samples.dtype.kind not in "fiu":
        raise CorruptSampleError(
            f"`array` of audio has values of type {samples.dtype}, not numbers"
        )
    if samples.ndim == 1:
        samples = samples[:, None]
    if samples.ndim != 2 or samples.size == 0:
        raise CorruptSampleError(
            f"`array` of audio has shape {np.shape(array)}; use (samples,) or (channels, samples)"
        )
    if samples.shape[0] < samples.shape[1]:
        samples = samples.T
    if samples.shape[1] > MAX_CHANNELS or samples.shape[0] == samples.shape[1] > 1:
        raise CorruptSampleError(
            f"`array` of audio has shape {np.shape(array)}, in which the channel dimension is "
            "ambiguous"
        )
    peak = float(np.abs(samples.astype(np.float64)).max())
    if not peak <= (1 if samples.dtype.kind in "iu" else MAX_AMPLITUDE):
        raise CorruptSampleError(
            f"`array` of audio has a value of magnitude {peak:g}; scale samples to the range "
            "-1 to 1"
        )
    return np.ascontiguousarray(samples, "<f4")


def _decode_data_url(value: str, kind: str) -> bytes:
    """Return the bytes of a data URL such as data:image/png;base64,iVBOR..."""
    head, comma, content = value.partition(",")
    named = head.removeprefix("data:").partition("/")[0]
    if not comma or not head.endswith(";base64"):
        raise CorruptSampleError(f"{kind} is {value[:40]!r}, not data:TYPE;base64,CONTENT")
    if named in MEDIA_TYPES and named != kind:
        raise CorruptSampleError(f"{kind} is {head!r:.80}, data of another type")
    return decode_base64(content, kind)


def decode_base64(content: Any, kind: str) -> bytes:
    """Decode a base64 file. Raise CorruptSampleError if it is not valid."""
    if not isinstance(content, str) or not content:
        raise CorruptSampleError(f"{kind} data is {type(content).__name__}, not base64 text")
    size = len(content) * 3 // 4
    if size > MAX_INLINE_BYTES:
        raise CorruptSampleError(
            f"{kind} of {size} bytes inside the record, but the limit is {MAX_INLINE_BYTES}; "
            "store it as a file next to the data"
        )
    try:
        return base64.b64decode(content, validate=True)
    except (binascii.Error, ValueError) as error:
        raise CorruptSampleError(f"{kind} data is not valid base64: {error}") from error
