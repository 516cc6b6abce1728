"""One path from a raw record to a tokenised sample, used for measuring and for decoding alike.

Lengths that planning saw and tensors that training gets cannot disagree, because both come from
`SampleReader.read`; only the pixels are decoded later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from torchmm.common.batch import ImageMeta, ImageSpec, SampleMeta, TextSpec
from torchmm.common.errors import ConfigError
from torchmm.common.generated import GeneratedMeta
from torchmm.data.corrupt import CorruptSampleError, naming_place
from torchmm.data.layouts.recognise import parse_record
from torchmm.data.layouts.sample import (
    FileSegment,
    GeneratedSegment,
    ImageSegment,
    Record,
    Sample,
    Segment,
    TextSegment,
    VideoSegment,
    assign_encoders,
    limit_images,
    without_generated,
)
from torchmm.data.media.chat import ChatTemplate
from torchmm.data.media.generated_images import DrawingPreprocessor
from torchmm.data.media.medium import ImageMedia, MediaPreprocessor, open_media
from torchmm.data.media.text import EncodedSample, FramesSegment, TextEncoder, TiledSegment
from torchmm.data.media.tiles import Tile, TiledMedia, TiledPicture, cut_within
from torchmm.data.media.video import Clip, ClipFrames, ClipMedia
from torchmm.recipe.data_section import DataConfig

EncodedFile = bytes | ClipFrames | Tile
"""What becomes one image of an encoder."""


@dataclass(frozen=True)
class MeasuredSample:
    """A tokenised sample whose images are still files."""

    text: EncodedSample
    images: list[ImageMeta]
    """Images, sounds, and clips or their frames."""
    files: list[EncodedFile]
    """Not yet decoded, one per entry of `images`."""
    generated: list[GeneratedMeta] = field(default_factory=list)
    """Images to be drawn."""
    generated_files: list[bytes] = field(default_factory=list)


def placeholders(files: Sequence[EncodedFile], images: Sequence[ImageMeta]) -> list[int]:
    """In the text, of every image; tiles of AnyRes stand in those of the first one."""
    return [
        file.placeholders if isinstance(file, Tile) else image.tokens
        for file, image in zip(files, images, strict=True)
    ]


class SampleReader:
    """Turns records into tokenised samples with image sizes.

    Args:
        data: limits on images, frames of clips.
        sequence_length: longest sample in tokens.
        text_spec: how the LLM wants its text.
        image_specs: how encoders want their images, by name. Every image and clip goes to all that
            read images, every sound to all that hear; what none reads is left out.
        tokenizer: the LLM's tokenizer.
        drawings: prepares images to be drawn; without it, they are left out.

    Raises:
        ConfigError: an encoder's processor does not fit, or there is no placeholder.
    """

    def __init__(
        self,
        data: DataConfig,
        sequence_length: int,
        text_spec: TextSpec,
        image_specs: Mapping[str, ImageSpec],
        tokenizer: PreTrainedTokenizerBase,
        drawings: DrawingPreprocessor | None = None,
    ) -> None:
        if image_specs and text_spec.image_token_id is None:
            raise ConfigError("model.image_token: the tokenizer has no such token, but an encoder")
        self.media = {n: open_media(s, data.max_image_pixels) for n, s in image_specs.items()}
        self.encoders = tuple(image_specs)
        self._readers = {
            kind: [name for name, spec in image_specs.items() if spec.modality == kind]
            for kind in ("image", "audio")
        }
        self._readers["video"] = self._readers["image"]
        self.clips = {
            name: ClipMedia(medium.preprocessor, data.video, text_spec)
            for name, medium in self.media.items()
            if isinstance(medium, ImageMedia)
        }
        vocabulary = tokenizer.get_vocab()
        self.tiles = {
            name: TiledMedia(
                medium.spec.tiles, medium.preprocessor, text_spec, vocabulary, data.max_image_pixels
            )
            for name, medium in self.media.items()
            if isinstance(medium, ImageMedia) and medium.spec.tiles is not None
        }
        budgets = (data.max_tiles_per_sample, data.max_tiles_per_sequence)
        self._max_tiles = min((b for b in budgets if b is not None), default=None)
        self.drawings = drawings
        self.text_spec = text_spec
        self.max_pixels = data.max_image_pixels
        self._max_images = data.max_images_per_sample
        self._max_bytes = int(data.max_file_mb * 1e6)
        self._text = TextEncoder(tokenizer, text_spec, sequence_length)
        self._chat = ChatTemplate(tokenizer, text_spec.around_sounds)

    def read(self, record: Record) -> MeasuredSample:
        """Parse, check headers of files, tokenise, truncate.

        Raises:
            ConfigError: it has clips, and no library reads them.
            CorruptSampleError: the sample cannot be used, with place and reason.
        """
        with naming_place(record.where):
            return self._read(record)

    def _read(self, record: Record) -> MeasuredSample:
        sample = limit_images(parse_record(record, self._chat), self._max_images)
        sample = assign_encoders(sample, self._readers)
        if self.drawings is None:
            sample = without_generated(sample)
        sample, files, metas = self._open_files(sample)
        columns: list[int] = []
        if self.text_spec.row_end_id is not None:
            columns = [self.medium(image).block(image)[2] for image in metas]
        text = self._text.encode(sample, placeholders(files, metas), columns)
        generated, generated_files = self._measure_generated(sample, text)
        if not any(text.loss[1:]) and not generated:
            raise CorruptSampleError(
                f"nothing to predict in its first {len(text.ids)} tokens (no text, or cut at "
                f"training.sequence_length = {self._text.sequence_length})"
            )
        kept = len(text.image_starts)
        return MeasuredSample(text, metas[:kept], files[:kept], generated, generated_files)

    def _open_files(self, sample: Sample) -> tuple[Sample, list[EncodedFile], list[ImageMeta]]:
        """The sample with clips and pictures as their encoder reads them; its files; their
        metadata."""
        segments: list[Segment] = []
        files: list[EncodedFile] = []
        metas: list[ImageMeta] = []
        clips: dict[Any, Clip] = {}  # decoded once for all encoders
        tiled = self._cut(sample)
        for number, segment in enumerate(sample.segments):
            if number in tiled:
                assert isinstance(segment, ImageSegment) and segment.encoder is not None
                picture = tiled[number]
                segments.append(TiledSegment(encoder=segment.encoder, marks=picture.cut.marks))
                files += picture.tiles
                metas += [self._named(meta, segment.encoder) for meta in picture.metas]
                continue
            if isinstance(segment, VideoSegment):
                key = segment.data, segment.path
                if key not in clips:
                    clips[key] = Clip(segment.read(self._max_bytes), self.max_pixels)
                self._open_clip(segment, clips[key], segments, files, metas)
                continue
            segments.append(segment)
            if isinstance(segment, FileSegment):
                assert segment.encoder is not None
                data = segment.read(self._max_bytes)
                files.append(data)
                metas.append(self._named(self.media[segment.encoder].meta(data), segment.encoder))
        return replace(sample, segments=tuple(segments)), files, metas

    def _open_clip(
        self,
        segment: VideoSegment,
        clip: Clip,
        segments: list[Segment],
        files: list[EncodedFile],
        metas: list[ImageMeta],
    ) -> None:
        """Appends a clip, or its frames (or groups of them) with their times."""
        assert segment.encoder is not None
        medium = self.clips[segment.encoder]
        kind = FramesSegment if medium.grouped else TiledSegment
        for part in medium.parts(clip):
            if part.before:
                segments.append(TextSegment(part.before, loss=False))
            own = kind(encoder=segment.encoder, marks=part.marks)
            segments.append(own if part.marks else segment)
            files.append(part.file)
            metas.append(self._named(part.meta, segment.encoder))

    def _cut(self, sample: Sample) -> dict[int, TiledPicture]:
        """By position of its segment: every picture whose encoder cuts them."""
        pictures = {
            number: self.tiles[segment.encoder].open(segment.read(self._max_bytes))
            for number, segment in enumerate(sample.segments)
            if isinstance(segment, ImageSegment) and segment.encoder in self.tiles
        }
        return dict(zip(pictures, cut_within(pictures.values(), self._max_tiles), strict=True))

    def _named(self, meta: ImageMeta, encoder: str) -> ImageMeta:
        # Only if there are several, so that equal samples of most models have equal metadata.
        return replace(meta, encoder=encoder) if len(self.encoders) > 1 else meta

    def pixels(self, file: EncodedFile, image: ImageMeta) -> np.ndarray:
        """Encoder input of a file of a sample; raises CorruptSampleError."""
        name = image.encoder or self.encoders[0]
        if isinstance(file, ClipFrames):
            return self.clips[name].pixels(file, image)
        if isinstance(file, Tile):
            return file.pixels()
        return self.media[name].pixels(file, image)

    def medium(self, image: ImageMeta) -> MediaPreprocessor | ClipMedia:
        """Sizes of an image, sound or clip of a sample."""
        name = image.encoder or self.encoders[0]
        # Sounds have a duration too, and no clips.
        return self.clips.get(name, self.media[name]) if image.duration_ms else self.media[name]

    def _measure_generated(
        self, sample: Sample, text: EncodedSample
    ) -> tuple[list[GeneratedMeta], list[bytes]]:
        """Sizes and files of what is to be drawn and was not cut off."""
        segments = [s.file for s in sample.segments if isinstance(s, GeneratedSegment)]
        metas, files = [], []
        for segment, context_end in zip(segments, text.generated_at, strict=False):
            assert self.drawings is not None
            if context_end == 0:
                raise CorruptSampleError("there is nothing before the image to be drawn")
            files.append(segment.read(self._max_bytes))
            metas.append(self.drawings.meta(files[-1], context_end))
        return metas, files

    def meta(self, name: str, index: int, sample: MeasuredSample) -> SampleMeta:
        """Metadata of a sample of source `name`."""
        encoder = self.encoders[0] if sample.images and len(self.encoders) == 1 else None
        images, generated = tuple(sample.images), tuple(sample.generated)
        return SampleMeta(name, index, len(sample.text.ids), images, encoder, generated)
