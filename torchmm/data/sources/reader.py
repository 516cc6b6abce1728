"""Convert records to tokenized samples, for measuring and for decoding.

Both use `SampleReader.read`, so the lengths of a plan match the tensors of a batch. Pixels are
decoded separately (`SampleReader.pixels`). If the sizes of images and audio are known from the
index, their files are not opened before they are decoded. Tiled images, videos and images with
boxes are always opened, because their text depends on the file.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from torchmm.common.batch import ImageMeta, ImageSpec, SampleMeta, TextSpec
from torchmm.common.errors import ConfigError
from torchmm.common.generated import GeneratedMeta
from torchmm.data.corrupt import BeyondLimitError, CorruptSampleError, record_errors_at
from torchmm.data.grounding.boxes import ImageSize, split_at_tokens, write_boxes
from torchmm.data.media.chat import ChatTemplate
from torchmm.data.media.chat_limits import LimitedTemplate
from torchmm.data.media.images import read_size, resolution_settings, unsupported_options
from torchmm.data.media.preprocessors import ImageMedia, MediaPreprocessor, open_media
from torchmm.data.media.text import (
    AudioVideoSegment,
    EncodedSample,
    FramesSegment,
    TextEncoder,
    TiledSegment,
    interleave_audio,
    vision_block,
)
from torchmm.data.media.tiles import Tile, TiledImage, TiledMedia, limit_total_tiles
from torchmm.data.media.video import FrameFiles, Video, VideoFile, VideoFrames, VideoMedia
from torchmm.data.record_formats.detect import parse_record
from torchmm.data.record_formats.sample import (
    FileSegment,
    ImageSegment,
    Record,
    Sample,
    Segment,
    TargetImageSegment,
    TextSegment,
    VideoSegment,
    assign_encoders,
    drop_target_images,
    limit_images,
)
from torchmm.data.sources.preference_pairs import split_pair
from torchmm.data.target_images import NoiseKey, TargetImage, TargetImagePreprocessor
from torchmm.recipe.data_section import DataConfig

EncodedFile = bytes | FileSegment | VideoFrames | Tile
"""Content of one encoder input."""
CHANGED_MESSAGE = "changed since it was indexed"

# Content that is dropped from used samples (`MeasuredSample.dropped`).
TRUNCATED_SAMPLES = "samples truncated at training.sequence_length"
EXTRA_IMAGES = "images or videos beyond data.max_images_per_sample"
EXTRA_FRAMES = "video frames beyond data.video.max_frames or data.video.max_pixels"
UNREAD_FILES = "files without an encoder in the model"
UNREAD_TARGETS = "target images without a generator in the model"


def require_bytes(file: bytes | FileSegment) -> bytes:
    """Return the bytes of a file that was read for measuring."""
    assert isinstance(file, bytes), file
    return file


@dataclass
class ReadCounter:
    """Counter of bytes that are read from files."""

    read_bytes: int = 0

    def read(self, segment: FileSegment, max_bytes: int) -> bytes:
        """Return the bytes of a file, and count them unless they are part of the record."""
        data = segment.read(max_bytes)
        if segment.data is None:
            self.read_bytes += len(data)
        return data


@dataclass(frozen=True)
class MeasuredSample:
    """Tokenized sample with undecoded files."""

    text: EncodedSample
    images: list[ImageMeta]
    """Sizes of images, audio files, and videos or their frames."""
    files: list[EncodedFile]
    """Undecoded file of each entry of `images`. A `FileSegment` has not been opened."""
    generated: list[GeneratedMeta] = field(default_factory=list)
    """Sizes of target images."""
    generated_files: list[bytes | FileSegment] = field(default_factory=list)
    dropped: dict[str, int] = field(default_factory=dict)
    """Number of dropped items by description, for example `EXTRA_IMAGES`."""
    chosen_tokens: int = 0
    """See `SampleMeta.chosen_tokens`."""


def count_placeholders(files: Sequence[EncodedFile], images: Sequence[ImageMeta]) -> list[int]:
    """Return the number of placeholders of each image. The first AnyRes tile has those of all."""
    return [
        file.placeholders if isinstance(file, Tile) else image.tokens
        for file, image in zip(files, images, strict=True)
    ]


def join_answers(
    chosen: MeasuredSample, rejected: MeasuredSample, sequence_length: int
) -> MeasuredSample:
    """Return a preference pair: the sample of the chosen answer, then that of the rejected answer.

    Raises:
        BeyondLimitError: The pair does not fit into a sequence. Truncated answers are not compared.
        CorruptSampleError: The answers have different images.
    """
    first = chosen.text
    second = rejected.text
    tokens = len(first.ids), len(second.ids)
    if first.truncated or second.truncated or sum(tokens) > sequence_length:
        raise BeyondLimitError(
            "preference pairs beyond training.sequence_length",
            f"the chosen and the rejected answer have {tokens[0]:,} and {tokens[1]:,} tokens with "
            f"the prompt, but training.sequence_length = {sequence_length:,}; raise it, or shorten "
            "the prompt",
        )
    if chosen.images != rejected.images:
        raise CorruptSampleError(
            f"the chosen answer has {len(chosen.images)} images with the prompt, and the rejected "
            f"answer {len(rejected.images)} or other sizes; move all images to the prompt"
        )
    text = EncodedSample(
        first.ids + second.ids,
        # The first token of a segment is not a target.
        [*first.loss, False, *second.loss[1:]],
        [*first.image_starts, *(tokens[0] + start for start in second.image_starts)],
        token_offsets=first.token_offsets
        | {len(first.image_starts) + n: offsets for n, offsets in second.token_offsets.items()},
    )
    return MeasuredSample(
        text,
        chosen.images + rejected.images,
        chosen.files + rejected.files,
        dropped=chosen.dropped,
        chosen_tokens=tokens[0],
    )


class SampleReader:
    """Converter of records to tokenized samples with image sizes.

    Args:
        data: Limits on images and video frames.
        sequence_length: Maximum number of tokens of a sample.
        text_spec: Format of the text for the LLM.
        image_specs: Format of the inputs of each encoder, by name. All vision encoders read each
            image and video, and all audio encoders each audio file. Unread files are omitted.
        tokenizer: Tokenizer of the LLM.
        target_preprocessor: Preprocessor of target images. If None, they are omitted.
        reads_pairs: Whether records are preference pairs.

    Raises:
        ConfigError: The processor of an encoder does not match, or there is no placeholder token.
    """

    def __init__(
        self,
        data: DataConfig,
        sequence_length: int,
        text_spec: TextSpec,
        image_specs: Mapping[str, ImageSpec],
        tokenizer: PreTrainedTokenizerBase,
        target_preprocessor: TargetImagePreprocessor | None = None,
        *,
        reads_pairs: bool = False,
    ) -> None:
        if image_specs and text_spec.image_token_id is None:
            raise ConfigError(
                "model.image_token: the tokenizer does not contain this token, but the model has "
                "an encoder; set it to a token of the tokenizer"
            )
        self.media = {n: open_media(s, data.max_image_pixels) for n, s in image_specs.items()}
        self.encoders = tuple(image_specs)
        self._readers = {
            kind: [name for name, spec in image_specs.items() if spec.modality == kind]
            for kind in ("image", "audio")
        }
        self._readers["video"] = self._readers["image"]
        self.video_media = {
            name: VideoMedia(medium.preprocessor, data.video, text_spec)
            for name, medium in self.media.items()
            if isinstance(medium, ImageMedia)
        }
        vocabulary = tokenizer.get_vocab()
        self.tiled_media = {
            name: TiledMedia(
                medium.spec.tiles, medium.preprocessor, text_spec, vocabulary, data.max_image_pixels
            )
            for name, medium in self.media.items()
            if isinstance(medium, ImageMedia) and medium.spec.tiles is not None
        }
        budgets = (data.max_tiles_per_sample, data.max_tiles_per_sequence)
        self._max_tiles = min((b for b in budgets if b is not None), default=None)
        self.target_preprocessor = target_preprocessor
        self.reads_pairs = reads_pairs
        self.text_spec = text_spec
        self.max_pixels = data.max_image_pixels
        self._frame_rate = data.video.fps
        self._max_images = data.max_images_per_sample
        self._max_bytes = int(data.max_file_mb * 1e6)
        self._text = TextEncoder(tokenizer, text_spec, sequence_length)
        self._oversized_meta = ImageMeta(0, 0, 0, sequence_length + 1)
        """Size of images that did not fit into a sample, whose sizes are not in the index."""
        tokens = text_spec.boxes.tokens if text_spec.boxes else ()
        known = [re.escape(token) for token in tokens if token in vocabulary]
        self._box_tokens = re.compile(f"({'|'.join(known)})") if known else None
        self._chat = LimitedTemplate(ChatTemplate(tokenizer, text_spec.around_sounds))

    def read(
        self,
        record: Record,
        index_meta: SampleMeta | None = None,
        read_counter: ReadCounter | None = None,
    ) -> MeasuredSample:
        """Parse a record, check headers of files, tokenize and truncate.

        Args:
            record: Record of a source.
            index_meta: Metadata from the index. If set, only tiled images and videos are opened.
            read_counter: Counter of read bytes.

        Raises:
            ConfigError: The record has videos, but PyAV is not installed.
            CorruptSampleError: The sample cannot be used. The message has location and reason.
            BeyondLimitError: The sample is valid, but exceeds a limit.
        """
        read_counter = read_counter or ReadCounter()
        with record_errors_at(record.location):
            if not self.reads_pairs:
                return self._read(record, index_meta, read_counter)
            answers = []
            for number, answer in enumerate(split_pair(record)):
                meta = index_meta
                if meta is not None:
                    count = len(meta.images) // 2
                    meta = replace(meta, images=meta.images[number * count :][:count])
                answers.append(self._read(answer, meta, read_counter))
            return join_answers(answers[0], answers[1], self._text.sequence_length)

    def _read(
        self, record: Record, index_meta: SampleMeta | None, read_counter: ReadCounter
    ) -> MeasuredSample:
        dropped: Counter[str] = Counter()
        boxes = partial(
            write_boxes,
            form=self.text_spec.boxes,
            read_size=partial(self._image_size, read_counter=read_counter),
        )
        sample = split_at_tokens(parse_record(record, self._chat, boxes), self._box_tokens)
        sample, dropped[EXTRA_IMAGES] = limit_images(sample, self._max_images)
        if not self.encoders:
            dropped[UNREAD_FILES] = sum(isinstance(s, FileSegment) for s in sample.segments)
        sample = assign_encoders(sample, self._readers)
        if self.target_preprocessor is None:
            targets = sum(isinstance(s, TargetImageSegment) for s in sample.segments)
            dropped[UNREAD_TARGETS] = targets
            sample = drop_target_images(sample)
        sample, files, metas = self._open_files(sample, index_meta, read_counter, dropped)
        columns: list[int] = []
        if self.text_spec.row_end_id is not None:
            columns = [self._count_columns(image) for image in metas]
        text = self._text.encode(sample, count_placeholders(files, metas), columns)
        generated, generated_files = self._measure_generated(sample, text, index_meta, read_counter)
        if not any(text.loss[1:]) and not generated:
            raise self._no_targets_error(text, files, dropped[EXTRA_IMAGES])
        dropped[TRUNCATED_SAMPLES] = int(text.truncated)
        kept = len(text.image_starts)
        return MeasuredSample(
            text, metas[:kept], files[:kept], generated, generated_files, dict(+dropped)
        )

    def _image_size(self, segment: FileSegment, read_counter: ReadCounter) -> ImageSize:
        """Return the size of an image before and after resizing for the first vision encoder."""
        size = read_size(read_counter.read(segment, self._max_bytes), self.max_pixels)
        media = (self.media[name] for name in self._readers["image"])
        medium = next((medium for medium in media if isinstance(medium, ImageMedia)), None)
        if medium is None:
            return ImageSize(size, size)
        meta = medium.preprocessor.meta(*size, options=segment.options)
        grid = medium.preprocessor.grid_of(meta)
        patch_px = medium.spec.patch_size_px
        return ImageSize(size, (grid.columns * patch_px, grid.rows * patch_px))

    def _no_targets_error(
        self, text: EncodedSample, files: Sequence[EncodedFile], dropped_images: int
    ) -> CorruptSampleError:
        """Return the error of a sample without text in the loss.

        Args:
            text: Truncated sample.
            files: Images, tiles, frames and audio before truncation.
            dropped_images: Number of images beyond `data.max_images_per_sample`.
        """
        reason = f"no text in the loss in the first {len(text.ids)} tokens"
        length = f"training.sequence_length = {self._text.sequence_length:,}"
        if text.overflow_tokens:
            kind, fix = self._shortening_advice(files[len(text.image_starts)])
            return BeyondLimitError(
                f"{kind} too large for training.sequence_length",
                f"{reason}: the next {kind} has {text.overflow_tokens:,} tokens with its "
                f"markers, more than fit in {length}; raise it, or {fix}",
            )
        if text.truncated:
            return BeyondLimitError(
                "no text in the loss within training.sequence_length",
                f"{reason}: the text was truncated at {length}; raise it, or shorten the prompt",
            )
        if dropped_images:
            return BeyondLimitError(
                "no text in the loss before the images beyond data.max_images_per_sample",
                f"{reason}: {dropped_images} images are beyond data.max_images_per_sample = "
                f"{self._max_images}, and the sample is truncated before them; raise the limit",
            )
        return CorruptSampleError(f"{reason}: the sample has no text in the loss")

    def _shortening_advice(self, file: EncodedFile) -> tuple[str, str]:
        """Return the type of a file and advice on how it uses fewer tokens."""
        if isinstance(file, VideoFrames | VideoSegment):
            return "video", "lower data.video.max_frames or data.video.max_pixels"
        name = self.encoders[0]
        processor: Any = None
        if isinstance(file, Tile):
            media = file.parent.media
            name, processor = media.images.spec.encoder, media.scheme.processor
        elif isinstance(medium := self.media[name], ImageMedia):
            processor = medium.preprocessor.processor
        if processor is None:
            return "audio", "split the audio into shorter files"
        keys = [f"{key} of its image processor" for key in resolution_settings(processor)]
        where = f"(model.processor or model.encoders.{name}.processor)"
        tiles = ["data.max_tiles_per_sample"] if isinstance(file, Tile) else []
        advice = [*tiles, *(f"{key} {where}" for key in keys)]
        smaller = "use an encoder or connector with fewer tokens per image"
        return "image", f"lower {' or '.join(advice)}" if advice else smaller

    def _count_columns(self, image: ImageMeta) -> int:
        if image is self._oversized_meta:
            return 1
        return self.preprocessor_of(image).token_grid(image)[2]

    def _open_files(
        self,
        sample: Sample,
        index_meta: SampleMeta | None,
        read_counter: ReadCounter,
        dropped: Counter[str],
    ) -> tuple[Sample, list[EncodedFile], list[ImageMeta]]:
        """Return the sample with expanded videos and tiles, its files and their metadata.

        Args:
            sample: Sample with an encoder for each file.
            index_meta: Metadata from the index, or None.
            read_counter: Counter of read bytes.
            dropped: Counter to which dropped frames are added.
        """
        segments: list[Segment] = []
        files: list[EncodedFile] = []
        metas: list[ImageMeta] = []
        videos: dict[VideoSegment, Video] = {}  # decoded once for all encoders
        tiled = self._tile_images(sample, read_counter)
        for number, segment in enumerate(sample.segments):
            if number in tiled:
                assert isinstance(segment, ImageSegment) and segment.encoder is not None
                tiled_image = tiled[number]
                segments.append(
                    TiledSegment(encoder=segment.encoder, markers=tiled_image.grid.markers)
                )
                files += tiled_image.tiles
                metas += [self._with_encoder(meta, segment.encoder) for meta in tiled_image.metas]
                continue
            if isinstance(segment, VideoSegment):
                key = replace(segment, encoder=None)
                if key not in videos:
                    videos[key] = self._open_video(segment, read_counter)
                self._append_video(segment, videos[key], segments, files, metas)
                assert segment.encoder is not None
                medium = self.video_media[segment.encoder]
                unread = medium.count_dropped_frames(videos[key], segment.options)
                dropped[EXTRA_FRAMES] += unread
                continue
            segments.append(segment)
            if isinstance(segment, FileSegment):
                if index_meta is None:
                    data = read_counter.read(segment, self._max_bytes)
                    files.append(data)
                    metas.append(self._measure(segment, data))
                else:
                    files.append(segment)
                    fits = len(metas) < len(index_meta.images)  # truncation keeps the first images
                    metas.append(index_meta.images[len(metas)] if fits else self._oversized_meta)
        for video in videos.values() if index_meta is None else ():
            video.check_files()
        return replace(sample, segments=tuple(segments)), files, metas

    def _measure(self, segment: FileSegment, data: bytes) -> ImageMeta:
        """Return the metadata of an image or audio file."""
        assert segment.encoder is not None
        medium = self.media[segment.encoder]
        if isinstance(medium, ImageMedia):
            meta = medium.meta(data, segment.options)
        else:
            meta = medium.meta(data)
        return self._with_encoder(meta, segment.encoder)

    def _open_video(self, segment: VideoSegment, read_counter: ReadCounter) -> Video:
        """Open a video file or the first frame of a list of frames."""
        if not segment.frames:
            return VideoFile(read_counter.read(segment, self._max_bytes), self.max_pixels)

        def read(frame: int) -> bytes:
            return read_counter.read(segment.frames[frame], self._max_bytes)

        options = segment.options
        frame_rate = options.sample_fps or options.fps or self._frame_rate
        return FrameFiles(read, len(segment.frames), frame_rate, self.max_pixels)

    def _append_video(
        self,
        segment: VideoSegment,
        video: Video,
        segments: list[Segment],
        files: list[EncodedFile],
        metas: list[ImageMeta],
    ) -> None:
        """Append a video, or its frames or groups of frames with their times."""
        assert segment.encoder is not None
        medium = self.video_media[segment.encoder]
        kind = FramesSegment if medium.is_stacked else TiledSegment
        parts = medium.parts(video, segment.options)
        if segment.options.use_audio_in_video:
            audio = self._read_audio(segment, video)
            if audio is not None:
                ((_, _, file, meta),) = parts
                data, audio_meta = audio
                block = vision_block(self.text_spec, 0, medium.token_grid(meta), meta)
                chunk_tokens = self.text_spec.audio_chunk_tokens
                assert chunk_tokens is not None
                is_audio = interleave_audio(block, audio_meta.tokens, chunk_tokens)
                segments.append(
                    AudioVideoSegment(encoder=segment.encoder, is_audio=tuple(is_audio.tolist()))
                )
                files += [file, data]
                metas += [self._with_encoder(meta, segment.encoder), audio_meta]
                return
        for part in parts:
            if part.before:
                segments.append(TextSegment(part.before, loss=False))
            frames = kind(encoder=segment.encoder, markers=part.markers)
            segments.append(frames if part.markers else segment)
            files.append(part.file)
            metas.append(self._with_encoder(part.meta, segment.encoder))

    def _read_audio(self, segment: VideoSegment, video: Video) -> tuple[bytes, ImageMeta] | None:
        """Return the audio track of a video with its metadata, or None if it has no audio.

        Raises:
            CorruptSampleError: The model does not read the audio of videos.
        """
        readers = self._readers
        if self.text_spec.audio_chunk_tokens is None or not readers["audio"]:
            raise CorruptSampleError(
                "use_audio_in_video = true requires Qwen2.5-Omni or Qwen3-Omni with a vision "
                "and an audio encoder; remove the key from the record"
            )
        data = video.audio(segment.options.video_start, segment.options.video_end)
        if data is None:
            return None
        (encoder,) = readers["audio"]
        return data, self._with_encoder(self.media[encoder].meta(data), encoder)

    def _tile_images(self, sample: Sample, read_counter: ReadCounter) -> dict[int, TiledImage]:
        """Return the images that are cut into tiles, by segment index."""
        tiled_images: dict[int, TiledImage] = {}
        for number, segment in enumerate(sample.segments):
            if not isinstance(segment, ImageSegment) or segment.encoder not in self.tiled_media:
                continue
            medium = self.tiled_media[segment.encoder]
            if segment.options.size_keys:
                spec = medium.images.spec
                raise unsupported_options(spec, segment.options, "cuts images into tiles")
            tiled_images[number] = medium.open(read_counter.read(segment, self._max_bytes))
        return dict(
            zip(
                tiled_images,
                limit_total_tiles([*tiled_images.values()], self._max_tiles),
                strict=True,
            )
        )

    def _with_encoder(self, meta: ImageMeta, encoder: str) -> ImageMeta:
        # Only with several encoders, so that metadata is equal for most models.
        return replace(meta, encoder=encoder) if len(self.encoders) > 1 else meta

    def pixels(
        self, file: EncodedFile, image: ImageMeta, read_counter: ReadCounter | None = None
    ) -> np.ndarray:
        """Decode a file of a sample to encoder inputs (`EncoderInputs.pixels`).

        Args:
            file: Undecoded file.
            image: Expected sizes.
            read_counter: Counter of read bytes.

        Raises:
            CorruptSampleError: The file cannot be decoded, or its sizes differ from `image`.
        """
        name = image.encoder or self.encoders[0]
        if isinstance(file, FileSegment):
            data = (read_counter or ReadCounter()).read(file, self._max_bytes)
            measured = self._measure(file, data)
            if measured != image:
                raise CorruptSampleError(f"{CHANGED_MESSAGE}: {image} -> {measured}")
            return self.media[name].pixels(data, image)
        if isinstance(file, VideoFrames):
            return self.video_media[name].pixels(file, image)
        if isinstance(file, Tile):
            return file.pixels()
        return self.media[name].pixels(file, image)

    def preprocessor_of(self, image: ImageMeta) -> MediaPreprocessor | VideoMedia:
        """Return the preprocessor of an image, audio file or video."""
        name = image.encoder or self.encoders[0]
        # Audio also has a duration, but audio encoders have no entry in `video_media`.
        return (
            self.video_media.get(name, self.media[name]) if image.duration_ms else self.media[name]
        )

    def _measure_generated(
        self,
        sample: Sample,
        text: EncodedSample,
        index_meta: SampleMeta | None,
        read_counter: ReadCounter,
    ) -> tuple[list[GeneratedMeta], list[bytes | FileSegment]]:
        """Return sizes and files of target images that were not truncated."""
        segments = [s.file for s in sample.segments if isinstance(s, TargetImageSegment)]
        metas: list[GeneratedMeta] = []
        files: list[bytes | FileSegment] = []
        for segment, context_end in zip(segments, text.target_positions, strict=False):
            assert self.target_preprocessor is not None
            if context_end == 0:
                raise CorruptSampleError("there is no text before the target image")
            if index_meta is None:
                data = read_counter.read(segment, self._max_bytes)
                files.append(data)
                grid_thw = self.target_preprocessor.grid(data)
            elif len(metas) < len(index_meta.generated):
                files.append(segment)
                grid_thw = index_meta.generated[len(metas)].grid_thw
            else:
                raise CorruptSampleError(f"{CHANGED_MESSAGE}: it has more target images")
            metas.append(GeneratedMeta(grid_thw, self.target_preprocessor.context(context_end)))
        return metas, files

    def decode_target_image(
        self,
        file: bytes | FileSegment,
        meta: GeneratedMeta,
        context_end: int,
        key: NoiseKey,
        read_counter: ReadCounter,
    ) -> TargetImage:
        """Decode a target image. See `TargetImagePreprocessor.decode` for the arguments.

        Raises:
            CorruptSampleError: The file cannot be decoded, or its sizes differ.
        """
        assert self.target_preprocessor is not None
        data = file if isinstance(file, bytes) else read_counter.read(file, self._max_bytes)
        grid_thw = self.target_preprocessor.grid(data)
        if grid_thw != meta.grid_thw:
            raise CorruptSampleError(
                f"{CHANGED_MESSAGE}: {meta.grid_thw} -> {grid_thw} patches of the target image"
            )
        return self.target_preprocessor.decode(data, meta, context_end, key)

    def meta(self, name: str, index: int, sample: MeasuredSample) -> SampleMeta:
        """Return the metadata of sample `index` of the source `name`."""
        encoder = self.encoders[0] if sample.images and len(self.encoders) == 1 else None
        images, generated = tuple(sample.images), tuple(sample.generated)
        tokens = len(sample.text.ids)
        return SampleMeta(name, index, tokens, images, encoder, generated, sample.chosen_tokens)
