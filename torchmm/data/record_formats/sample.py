"""Types for raw records, and for samples as segments in reading order.

All record formats (`detect.py`) are converted to these types. The code after the conversion
(`torchmm.data.media`, `torchmm.data.sources.reader`) is independent of the record format.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from torchmm.data.corrupt import BeyondLimitError, CorruptSampleError
from torchmm.data.files.remote_files import RemotePath
from torchmm.data.files.sample_files import InnerFile, open_regular
from torchmm.recipe.data_section import SourceConfig

Root = str | RemotePath | None
"""Local or remote directory to which paths in records are relative."""


@dataclass(frozen=True)
class SampleOptions:
    """Settings of a source for the conversion of records to samples."""

    prompt: str = ""
    """Text between the image and the text of a caption sample."""
    target_image_column: str | None = None
    """Column with a target image or video."""
    train_on: str = "assistant"
    """Messages of a chat that are included in the loss, see `SourceConfig.train_on`."""
    train_template_prefix: bool = False
    """See `SourceConfig.train_template_prefix`."""
    box_format: str | None = None
    """See `SourceConfig.box_format`."""

    @classmethod
    def of(cls, config: SourceConfig) -> SampleOptions:
        """Return the options of a source in a recipe."""
        return cls(
            config.prompt,
            config.target_image_column,
            config.train_on,
            config.train_template_prefix,
            config.box_format,
        )


@dataclass(frozen=True)
class Record:
    """Raw sample: columns, and the directory to which image paths are relative."""

    columns: dict[str, Any]
    root: Root = None
    options: SampleOptions = SampleOptions()
    location: str = ""
    """File and line or row, for messages. Empty if unknown."""


@dataclass(frozen=True)
class TextSegment:
    """Text, which may be included in the loss."""

    text: str
    loss: bool
    is_template: bool = False
    """Whether the text is from the chat template, so that its special tokens are parsed."""


@dataclass(frozen=True)
class MediaOptions:
    """Size limits and frame sampling of one image or video, with the names of `qwen_vl_utils`.

    None selects the value of the recipe or of the image processor.
    """

    fps: float | None = None
    """Frames to read per second. For a list of frames without `sample_fps`: its frame rate."""
    sample_fps: float | None = None
    """Frame rate of a list of frames."""
    nframes: int | None = None
    """Number of frames to read, rounded to complete groups of the encoder."""
    min_frames: int | None = None
    max_frames: int | None = None
    min_pixels: int | None = None
    """Minimum number of pixels of an image or frame after resizing."""
    max_pixels: int | None = None
    """Maximum number of pixels of an image or frame after resizing."""
    total_pixels: int | None = None
    """Maximum number of pixels of all frames of a video. Frames of one patch count once."""
    resized_height: int | None = None
    """Height after resizing, rounded to a multiple of a token. Overrides the limits on pixels."""
    resized_width: int | None = None
    video_start: float | None = None
    """Time of the first frame in seconds."""
    video_end: float | None = None
    """Time of the last frame in seconds."""
    use_audio_in_video: bool | None = None
    """Whether to read the audio track of the video."""

    @property
    def size_keys(self) -> list[str]:
        """Names of the options that change the size of images or frames."""
        return [key for key in (*_IMAGE_OPTIONS, "total_pixels") if getattr(self, key) is not None]

    @classmethod
    def read(cls, kind: str, values: Mapping[str, Any]) -> MediaOptions:
        """Return the options of a file. Null and NaN are ignored.

        Args:
            kind: File type, "image", "video" or "audio".
            values: Options by name.

        Raises:
            CorruptSampleError: An option is unknown or invalid, or two options contradict.
        """
        options: dict[str, Any] = {}
        for key, value in values.items():
            if key not in MEDIA_OPTIONS.get(kind, ()):
                raise CorruptSampleError(
                    f"{kind} has {key} = {value!r:.80}, which is not supported"
                )
            if value is None or value != value:  # noqa: PLR0124 - NaN in tables
                continue
            options[key] = _check_option(kind, key, value)
        for low, high in (("min_frames", "max_frames"), ("min_pixels", "max_pixels")):
            if options.get(low, 0) > options.get(high, 1 << 31):
                raise CorruptSampleError(
                    f"{kind} has {low} = {options[low]} and {high} = {options[high]}; swap them"
                )
        if "fps" in options and "nframes" in options:
            raise CorruptSampleError(f"{kind} has fps and nframes; keep one")
        sides = [options[key] for key in ("resized_height", "resized_width") if key in options]
        if len(sides) == 1 or (sides and max(sides) > MAX_ASPECT_RATIO * min(sides)):
            raise CorruptSampleError(
                f"{kind} has resized_height = {options.get('resized_height')} and resized_width = "
                f"{options.get('resized_width')}; set both, with an aspect ratio of at most "
                f"{MAX_ASPECT_RATIO}"
            )
        return cls(**options)


def _check_option(kind: str, key: str, value: Any) -> Any:
    """Return the value of an option of `MediaOptions`. May raise CorruptSampleError."""
    is_time = key in ("fps", "sample_fps", "video_start", "video_end")
    minimum = 0 if key.startswith("video_") else MIN_FRAME_RATE if is_time else 1
    if key == "use_audio_in_video":
        valid = isinstance(value, bool)
        expected = "true or false"
    else:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        valid = is_number and minimum <= value < 1 << 31 and (is_time or value % 1 == 0)
        expected = f"{'a number' if is_time else 'an integer'} of at least {minimum}"
    if not valid:
        raise CorruptSampleError(f"{kind} has {key} = {value!r:.80}; use {expected}")
    return value if is_time or isinstance(value, bool) else int(value)


MIN_FRAME_RATE = 1e-4
"""Minimum frame rate of a list of frames in Hz."""
MAX_ASPECT_RATIO = 200
"""Maximum aspect ratio of images and frames, as in the Qwen2-VL processor."""
_IMAGE_OPTIONS = ("min_pixels", "max_pixels", "resized_height", "resized_width")
MEDIA_OPTIONS = {
    "image": _IMAGE_OPTIONS,
    "video": tuple(field.name for field in fields(MediaOptions)),
}
"""Names of the options by file type."""
NO_OPTIONS = MediaOptions()


@dataclass(frozen=True)
class FileSegment:
    """Encoded file: bytes or location."""

    data: bytes | None = None
    path: str | RemotePath | InnerFile | None = None
    encoder: str | None = None
    """Name of the encoder that reads the file. None before `assign_encoders`."""
    options: MediaOptions = NO_OPTIONS

    def read(self, max_bytes: int) -> bytes:
        """Return the bytes of the file.

        Args:
            max_bytes: Size of the largest file that is read.

        Raises:
            CorruptSampleError: The file cannot be read, or is too large.
        """
        if self.data is not None:
            self._check_size(len(self.data), max_bytes)
            return self.data
        assert self.path is not None
        if isinstance(self.path, InnerFile):
            self._check_size(self.path.size, max_bytes)
            try:
                return self.path.read()
            except OSError as error:
                text = f"{self.kind} in {self.path}: {error.strerror}"
                raise CorruptSampleError(text) from error
            except ValueError as error:
                raise CorruptSampleError(f"{self.kind} in {self.path}: {error}") from error
        if isinstance(self.path, RemotePath):
            file = self.path.find()
            if file is None:
                raise CorruptSampleError(f"{self.kind} file {self.path}: no such object")
            self._check_size(file.size, max_bytes)
            return file.read_bytes()
        try:
            with open_regular(self.path) as stream:
                size = os.fstat(stream.fileno()).st_size
                self._check_size(size, max_bytes)
                return stream.read(size)
        except CorruptSampleError:
            raise
        except OSError as error:
            raise CorruptSampleError(f"{self.kind} file {self.path}: {error.strerror}") from error
        except ValueError as error:
            raise CorruptSampleError(f"{self.kind} file {self.path!r}: {error}") from error

    def _check_size(self, size: int, max_bytes: int) -> None:
        if size > max_bytes:
            name = self.kind if self.path is None else f"{self.kind} file {self.path}"
            raise CorruptSampleError(
                f"{name} has {size} bytes, but data.max_file_mb is {max_bytes / 1e6:g}"
            )

    @property
    def kind(self) -> str:
        """Type of the file, for messages."""
        return "image"


@dataclass(frozen=True)
class ImageSegment(FileSegment):
    """Image file."""


@dataclass(frozen=True)
class VideoSegment(FileSegment):
    """Video file, or a list of frames."""

    frames: tuple[ImageSegment, ...] = ()
    """Image files of the frames. Empty for a video file."""

    @property
    def kind(self) -> str:
        return "video"


@dataclass(frozen=True)
class AudioSegment(FileSegment):
    """Audio file."""

    @property
    def kind(self) -> str:
        return "audio"


@dataclass(frozen=True)
class TargetImageSegment:
    """Target image or video of the generator, which has no tokens."""

    file: ImageSegment


Segment = TextSegment | ImageSegment | VideoSegment | AudioSegment | TargetImageSegment


@dataclass(frozen=True)
class Sample:
    """Segments in reading order, with flags for BOS and EOS tokens.

    The flags are False for chats, because chat templates write these tokens.
    """

    segments: tuple[Segment, ...]
    add_bos: bool = True
    add_eos: bool = True


def limit_images(sample: Sample, max_images: int) -> tuple[Sample, int]:
    """Truncate a sample before the first image or video beyond `max_images`.

    The text after that image is dropped with it, because it may describe the image.

    Returns:
        The sample, and the number of dropped images and videos.
    """
    positions = [
        position
        for position, segment in enumerate(sample.segments)
        if isinstance(segment, ImageSegment | VideoSegment)
    ]
    if len(positions) <= max_images:
        return sample, 0
    kept = sample.segments[: positions[max_images]]
    return Sample(kept, sample.add_bos, add_eos=False), len(positions) - max_images


def assign_encoders(sample: Sample, readers: Mapping[str, Sequence[str]]) -> Sample:
    """Return the sample with each file repeated for all encoders that read it.

    Args:
        sample: Sample without encoders.
        readers: Names of encoders by file type: "image", "video" and "audio". If the model has no
            encoder, files are dropped.

    Raises:
        BeyondLimitError: Text in the loss follows a file for which the model has no encoder,
            although it has other encoders.
    """
    segments: list[Segment] = []
    for number, segment in enumerate(sample.segments):
        if isinstance(segment, FileSegment):
            unread = any(readers.values()) and not readers.get(segment.kind)
            after = sample.segments[number:] if unread else ()
            if any(isinstance(each, TextSegment) and each.loss for each in after):
                raise BeyondLimitError(
                    f"{segment.kind} without an encoder",
                    f"the sample has {_with_article(segment.kind)} file, followed by text in the "
                    "loss, but the model has no encoder for it; add an encoder of this "
                    "modality to model.encoders, or remove the column",
                )
            names = readers.get(segment.kind, ())
            segments.extend(replace(segment, encoder=name) for name in names)
        else:
            segments.append(segment)
    return replace(sample, segments=tuple(segments))


def _with_article(kind: str) -> str:
    return f"a {kind}" if kind == "video" else f"an {kind}"


def drop_target_images(sample: Sample) -> Sample:
    """Return the sample without target images."""
    kept = tuple(s for s in sample.segments if not isinstance(s, TargetImageSegment))
    return replace(sample, segments=kept)
