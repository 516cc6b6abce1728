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

from torchmm.data.corrupt import CorruptSampleError
from torchmm.data.sample_files import InnerFile, open_regular
from torchmm.data.storage.remote_files import RemoteFolder, RemoteName
from torchmm.recipe.data_section import SourceConfig

Root = str | RemoteFolder | None
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
        return cls(config.prompt, config.generate, config.train_on)


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
    path: str | RemoteName | InnerFile | None = None
    encoder: str | None = None
    """Name of the encoder that reads it, once that is known."""

    def read(self, max_bytes: int) -> bytes:
        """The file's bytes.

        Args:
            max_bytes: of the largest file that is read.

        Raises:
            CorruptSampleError: the file cannot be read, or is larger.
        """
        if self.data is not None:
            self._check_size(len(self.data), max_bytes)
            return self.data
        assert self.path is not None
        if isinstance(self.path, InnerFile):
            self._check_size(self.path.size, max_bytes)
            return self._read_inner(self.path)
        if isinstance(self.path, RemoteName):
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

    def _read_inner(self, file: InnerFile) -> bytes:
        try:
            return file.read()
        except OSError as error:
            raise CorruptSampleError(f"{self.kind} in {file}: {error.strerror}") from error
        except ValueError as error:
            raise CorruptSampleError(f"{self.kind} in {file}: {error}") from error

    def _check_size(self, size: int, max_bytes: int) -> None:
        if size > max_bytes:
            name = self.kind if self.path is None else f"{self.kind} file {self.path}"
            raise CorruptSampleError(
                f"{name} of {size} bytes; data.max_file_mb is {max_bytes / 1e6:g}"
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
