"""A record as a source gave it, and the sample it becomes: segments in reading order.

Every layout (`recognise.py`) ends in these types, and everything after it (`torchmm.data.media`,
`torchmm.data.sources.reader`) begins with them, so that no code after this folder knows in which
layout a data set was published.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torchmm.data.corrupt import BeyondLimitError, CorruptSampleError
from torchmm.data.files.remote import RemotePath
from torchmm.data.files.sample_files import InnerFile, open_regular
from torchmm.recipe.data_section import SourceConfig

Root = str | RemotePath | None
"""What paths in records are relative to: a directory, or a folder elsewhere."""


@dataclass(frozen=True)
class SampleOptions:
    """What a recipe says about how the records of a source become samples."""

    prompt: str = ""
    """Text between the image and the text of a caption sample."""
    generate: str | None = None
    """Column with an image or clip that is to be drawn, not read."""
    train_on: str = "assistant"
    """What of a chat counts in the loss; see `SourceConfig.train_on`."""

    @classmethod
    def of(cls, config: SourceConfig) -> SampleOptions:
        """Those of a recipe's source."""
        return cls(config.prompt, config.target_image_column, config.train_on)


@dataclass(frozen=True)
class Record:
    """One raw sample: its columns, and the directory that image paths are relative to."""

    columns: dict[str, Any]
    root: Root = None
    options: SampleOptions = SampleOptions()
    where: str = ""
    """File and line, or row, for messages; empty where the source cannot say."""


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
    path: str | RemotePath | InnerFile | None = None
    encoder: str | None = None
    """Name of the encoder that reads it, once that is known."""

    def read(self, max_bytes: int) -> bytes:
        """Return the bytes of the file.

        Args:
            max_bytes: Size of the largest file that is read.

        Raises:
            CorruptSampleError: The file cannot be read, or is larger.
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


def limit_images(sample: Sample, max_images: int) -> tuple[Sample, int]:
    """Truncate a sample before the first image or video beyond `max_images`.

    The text after that image is dropped with it, because it may describe the image.

    Returns:
        the sample, and the number of dropped images and videos.
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
    """Return the sample with one file for every encoder that reads it, one after another.

    Args:
        readers: names of encoders by file type, "image", "video" and "audio". Without any encoder
            in the model, files are dropped.

    Raises:
        BeyondLimitError: the model has encoders, but none for a file that text in the loss follows.
    """
    segments: list[Segment] = []
    for number, segment in enumerate(sample.segments):
        if isinstance(segment, FileSegment):
            unread = any(readers.values()) and not readers.get(segment.kind)
            after = sample.segments[number:] if unread else ()
            if any(isinstance(other, TextSegment) and other.loss for other in after):
                raise BeyondLimitError(
                    f"{segment.kind} without an encoder",
                    f"the sample has {_article(segment.kind)} file, followed by text in the "
                    "loss, but the model has no encoder for it; add an encoder of this "
                    "modality to model.encoders, or remove the column",
                )
            names = readers.get(segment.kind, ())
            segments.extend(replace(segment, encoder=name) for name in names)
        else:
            segments.append(segment)
    return replace(sample, segments=tuple(segments))


def _article(kind: str) -> str:
    return f"a {kind}" if kind == "video" else f"an {kind}"


def without_generated(sample: Sample) -> Sample:
    """The sample without what is to be drawn."""
    kept = tuple(s for s in sample.segments if not isinstance(s, GeneratedSegment))
    return replace(sample, segments=kept)
