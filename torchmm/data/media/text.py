"""Convert segments to token ids, targets and position ids.

Text from data is tokenized without special tokens. So "</s>" or "<image>" in a caption is plain
text. Only template text may contain special tokens. The `split_special_tokens` argument of
tokenizers is not used, because it changes the state of the shared tokenizer per call.

Text that is much longer than a sample is corrupt, because tokenizers may require seconds and much
memory for it. It is not truncated before tokenization, which would change its last tokens.

Shape legend: L tokens of one sample.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from torchmm.common.batch import IGNORE_TARGET, ImageMeta, MarkerText, TextSpec
from torchmm.common.errors import ConfigError
from torchmm.data.corrupt import CorruptSampleError
from torchmm.data.record_formats.sample import (
    AudioSegment,
    FileSegment,
    ImageSegment,
    Sample,
    Segment,
    TargetImageSegment,
    TextSegment,
    VideoSegment,
)

MIN_TEXT_LIMIT = 500_000
"""Minimum of the limit on the length of text, see `max_text_characters`."""
CHARACTERS_PER_TOKEN = 16
"""Upper bound of the mean number of characters per token."""


def max_text_characters(sequence_length: int) -> int:
    """Return the maximum number of characters of a text for this sequence length."""
    return max(MIN_TEXT_LIMIT, CHARACTERS_PER_TOKEN * sequence_length)


@dataclass(frozen=True)
class TiledSegment(ImageSegment):
    """Image that is cut into tiles."""

    markers: tuple[MarkerText, ...] = ()
    """Markers before, between and after the tiles."""


@dataclass(frozen=True)
class FramesSegment(VideoSegment):
    """Group of frames of a video."""

    markers: tuple[MarkerText, ...] = ()
    """Markers before and after the frames."""


@dataclass(frozen=True)
class AudioVideoSegment(VideoSegment):
    """Video and its audio track, whose tokens alternate."""

    is_audio: tuple[bool, ...] = ()
    """Whether each token is of the audio."""


@dataclass(frozen=True)
class EncodedSample:
    """Tokenized sample of at most `sequence_length` tokens."""

    ids: list[int]
    loss: list[bool]
    """Whether each token is a target."""
    image_starts: list[int]
    """Index of the first placeholder of each image or tile before the truncation."""
    target_positions: list[int] = field(default_factory=list)
    """Number of tokens before each target image."""
    truncated: bool = False
    """Whether tokens beyond `sequence_length` were dropped."""
    overflow_tokens: int = 0
    """Number of tokens, with markers, of the file before which the sample was truncated."""
    token_offsets: dict[int, np.ndarray] = field(default_factory=dict)
    """Positions of the tokens of a video and of its audio, by image. They are relative to the first
    placeholder. Placeholders of images that are not listed are consecutive, except for row ends."""

    @property
    def targets_L(self) -> np.ndarray:
        """Next token of each token, (L,), int64. IGNORE_TARGET if it is not in the loss."""
        targets_L = np.full(len(self.ids), IGNORE_TARGET, np.int64)
        in_loss = np.asarray(self.loss[1:], bool)
        targets_L[:-1][in_loss] = np.asarray(self.ids[1:], np.int64)[in_loss]
        return targets_L


class TextEncoder:
    """Tokenizer of samples for one LLM.

    Args:
        tokenizer: Fast Hugging Face tokenizer.
        spec: Special token ids and markers of the LLM.
        sequence_length: Maximum number of tokens of a sample.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, spec: TextSpec, sequence_length: int
    ) -> None:
        if not getattr(tokenizer, "is_fast", False):  # missing in mistral-common
            raise ConfigError(
                f"model.tokenizer: {type(tokenizer).__name__} has no tokenizer.json; use a "
                "directory saved with PreTrainedTokenizerFast.save_pretrained"
            )
        self.spec = spec
        self.sequence_length = sequence_length
        self._plain = _copy_backend(tokenizer, encode_special_tokens=True)
        self._with_special_tokens = _copy_backend(tokenizer, encode_special_tokens=False)

    def encode(
        self, sample: Sample, image_tokens: Sequence[int], columns: Sequence[int] = ()
    ) -> EncodedSample:
        """Tokenize a sample, expand images to placeholders, and truncate, but not inside an image.

        Args:
            sample: Segments in order.
            image_tokens: Number of placeholders of each image, tile, video or audio file.
            columns: Number of columns of each image, if rows end with a token.

        Raises:
            CorruptSampleError: A text is too long, or has an unpaired surrogate.
        """
        spec = self.spec
        limit = self.sequence_length
        out = EncodedSample([], [], [])
        if sample.add_bos and spec.bos_token_id is not None:
            _extend(out, [spec.bos_token_id], loss=False)
        counts = iter(zip(image_tokens, columns or [0] * len(image_tokens), strict=True))
        for piece in self._pieces(sample.segments):
            if isinstance(piece, TextSegment):
                _extend(out, self._encode_text(piece), piece.loss)
                if len(out.ids) > limit:
                    del out.ids[limit:], out.loss[limit:]
                    return replace(out, truncated=True)
            elif isinstance(piece, TargetImageSegment):
                out.target_positions.append(len(out.ids))
            else:
                block, starts = self._image_block(piece, counts)
                if len(out.ids) + len(block) > limit:
                    return replace(out, truncated=True, overflow_tokens=len(block))
                out.token_offsets.update(enumerate(piece.track_offsets(), len(out.image_starts)))
                out.image_starts.extend(len(out.ids) + start for start in starts)
                _extend(out, block, loss=False)
        if sample.add_eos and spec.eos_token_id is not None:
            if len(out.ids) == limit:
                return replace(out, truncated=True)
            _extend(out, [spec.eos_token_id], loss=out.loss[-1:] == [True])
        return out

    def _encode_text(self, segment: TextSegment) -> list[int]:
        text = segment.text
        longest = max_text_characters(self.sequence_length)
        if len(text) > longest:
            raise CorruptSampleError(
                f"text of {len(text)} characters is above the limit of {longest} for "
                f"training.sequence_length = {self.sequence_length}; split it into several "
                "samples"
            )
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise CorruptSampleError(
                f"text has a lone surrogate, {text[error.start]!r}, at character "
                f"{error.start}, which is half of a truncated or wrongly decoded character; "
                "write the text again"
            ) from error
        backend = self._with_special_tokens if segment.is_template else self._plain
        return backend.encode(text, add_special_tokens=False).ids

    def _pieces(
        self, segments: Sequence[Segment]
    ) -> list[TextSegment | TargetImageSegment | _ImageBlock]:
        """Return segments in which plain text around images is joined with adjacent text.

        Processors of Hugging Face tokenize both together. For example, the line feed at the end of
        a role header and the two line feeds before an image of Gemma are one token.
        """
        pieces: list[TextSegment | TargetImageSegment | _ImageBlock] = []
        after_image = False
        for segment in segments:
            if isinstance(segment, TextSegment):
                joins = after_image and not segment.loss
                pieces.append(_join_text(pieces.pop(), segment) if joins else segment)
                after_image = False
            elif isinstance(segment, TargetImageSegment):
                pieces.append(segment)
                after_image = False
            else:
                before, block, after = self._split(segment)
                if before.text:
                    last = pieces[-1] if pieces else None
                    if isinstance(last, TextSegment) and not last.loss:
                        before = _join_text(pieces.pop(), before)
                    pieces.append(before)
                pieces.append(block)
                after_image = bool(after.text)
                if after_image:
                    pieces.append(after)
        return pieces

    def _split(self, segment: FileSegment) -> tuple[TextSegment, _ImageBlock, TextSegment]:
        """Split a file into the plain text before it, its tokens, and the plain text after it."""
        spec = self.spec
        markers = [spec.image_prefix, spec.image_suffix]
        if isinstance(segment, TiledSegment | FramesSegment):
            markers = list(segment.markers)
        placeholder = spec.image_token_id
        if isinstance(segment, VideoSegment) and spec.video_token_id is not None:
            placeholder = spec.video_token_id
        if isinstance(segment, AudioSegment) and spec.sound_token_id is not None:
            placeholder = spec.sound_token_id
            markers = [spec.sound_prefix, spec.sound_suffix]
        assert placeholder is not None
        before = after = ""
        if markers[0] and isinstance(markers[0][0], str):
            before, markers[0] = markers[0][0], markers[0][1:]
        if markers[-1] and isinstance(markers[-1][-1], str):
            after, markers[-1] = markers[-1][-1], markers[-1][:-1]
        block = _ImageBlock(placeholder, markers)
        if isinstance(segment, AudioVideoSegment):
            assert spec.sound_token_id is not None
            markers = [
                spec.image_prefix + spec.sound_prefix,
                spec.sound_suffix + spec.image_suffix,
            ]
            block = _ImageBlock(placeholder, markers, spec.sound_token_id, segment.is_audio)
        return TextSegment(before, loss=False), block, TextSegment(after, loss=False)

    def _image_block(
        self, block: _ImageBlock, counts: Iterator[tuple[int, int]]
    ) -> tuple[list[int], list[int]]:
        """Return the token ids of an image, and the index of the first placeholder of each tile."""
        row_end = self.spec.row_end_id
        ids = self._encode_markers(block.markers[0])
        starts = []
        if block.is_audio:
            starts = [len(ids) + block.is_audio.index(kind) for kind in (False, True)]
            for _ in starts:
                next(counts)
            ids += [block.audio_placeholder if a else block.placeholder for a in block.is_audio]
            return ids + self._encode_markers(block.markers[1]), starts
        for markers in block.markers[1:]:
            starts.append(len(ids))
            tokens, columns = next(counts)
            placeholders = [block.placeholder] * tokens
            if row_end is not None:
                row = [block.placeholder] * columns
                placeholders = [*row, row_end] * (tokens // columns - 1) + row
            ids += placeholders + self._encode_markers(markers)
        return ids, starts

    def _encode_markers(self, markers: MarkerText) -> list[int]:
        ids: list[int] = []
        for marker in markers:
            ids += (
                [marker]
                if isinstance(marker, int)
                else self._encode_text(TextSegment(marker, False))
            )
        return ids


class _ImageBlock(NamedTuple):
    """Tokens of a file, which truncation does not divide."""

    placeholder: int
    """Token id of the placeholder."""
    markers: list[MarkerText]
    """Markers before, between and after the tiles. Two entries for a single image."""
    audio_placeholder: int = 0
    is_audio: tuple[bool, ...] = ()
    """Whether each token of a video with audio is of the audio. Empty for other files."""

    def track_offsets(self) -> list[np.ndarray]:
        """Return the offsets of video tokens and of audio tokens, or [] without audio."""
        is_audio = np.array(self.is_audio, bool)
        tracks = [np.flatnonzero(~is_audio), np.flatnonzero(is_audio)] if self.is_audio else []
        return [track_K - track_K[0] for track_K in tracks]


def _join_text(first: Any, second: TextSegment) -> TextSegment:
    """Join two adjacent texts that are not in the loss."""
    is_template = first.is_template or second.is_template
    return TextSegment(first.text + second.text, loss=False, is_template=is_template)


def _extend(out: EncodedSample, ids: list[int], loss: bool) -> None:
    out.ids.extend(ids)
    out.loss.extend([loss] * len(ids))


def _copy_backend(tokenizer: PreTrainedTokenizerBase, encode_special_tokens: bool) -> Tokenizer:
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = encode_special_tokens
    return backend


def placeholder_offsets(tokens: int, columns: int) -> np.ndarray:
    """Return the offsets of placeholders if rows end with a token: (tokens,), int64."""
    return np.arange(tokens) + np.arange(tokens) // columns


class VisionBlock(NamedTuple):
    """Grid of the placeholders of an image or video."""

    start: int
    """Index of the first placeholder."""
    frames: int
    rows: int
    columns: int
    time_step: float = 1.0
    """Time between frames, in position units if `per_second` is 1, else in seconds."""
    per_second: float = 1.0
    """Position units per second."""
    is_audio: np.ndarray | None = None
    """Whether each token from `start` on is audio of the video. None for a video without audio."""

    def times(self) -> np.ndarray:
        """Return the time of each frame in position units, (frames,), float32.

        The dtype and the order of products are those of transformers, so that rounding is equal.
        """
        frames_F = np.arange(self.frames, dtype=np.float32)
        return frames_F * np.float32(self.time_step) * np.float32(self.per_second)


def vision_block(
    spec: TextSpec,
    start: int,
    grid: tuple[int, int, int],
    image: ImageMeta,
    is_audio: np.ndarray | None = None,
) -> VisionBlock:
    """Return the block of an image or video.

    Args:
        spec: Format of the text for the LLM.
        start: Index of the first placeholder.
        grid: Frames, rows and columns of tokens.
        image: Metadata of the image or video.
        is_audio: See `VisionBlock`.
    """
    per_second = spec.tokens_per_second
    if per_second is None:
        return VisionBlock(start, *grid, is_audio=is_audio)
    step_s = image.duration_ms / (1000 * image.frames)
    if spec.clip_times == "sides":  # Qwen2.5-VL computes this product first
        return VisionBlock(start, *grid, per_second * step_s, is_audio=is_audio)
    return VisionBlock(start, *grid, step_s, per_second, is_audio)


def interleave_audio(block: VisionBlock, audio_tokens: int, chunk_tokens: int) -> np.ndarray:
    """Return whether each token of a video and its audio is of the audio (Qwen Omni models).

    Args:
        block: Video. Each audio token lasts one position unit.
        audio_tokens: Number of audio tokens.
        chunk_tokens: See `TextConventions.audio_chunk_tokens`.
    """
    times_V = block.times().repeat(block.rows * block.columns)
    tracks = [times_V, np.arange(audio_tokens, dtype=np.float32)]
    if chunk_tokens:
        tracks = [_chunk_numbers(times, chunk_tokens) for times in tracks]
    is_audio = np.repeat([False, True], [len(track) for track in tracks])
    return is_audio[np.argsort(np.concatenate(tracks), kind="stable")]


def _chunk_numbers(times: np.ndarray, chunk_tokens: int) -> np.ndarray:
    """Return the chunk of each token. As in transformers, it is at most one after the previous."""
    chunks = np.zeros(len(times), np.int64)
    chunk = 0
    for number, time in enumerate(times.tolist()):
        chunk += time >= (chunk + 1) * chunk_tokens
        chunks[number] = chunk
    return chunks


def mrope_positions(
    length: int,
    blocks: Sequence[VisionBlock],
    clip_times: Literal["sides", "whole", "fractional"] = "sides",
) -> np.ndarray:
    """Return the multimodal rotary positions of a sample (Qwen2-VL, section 2.1).

    Text has equal positions for time, height and width. Positions of an image or video start at the
    end of the preceding text. An image has a single time. The text after it starts after the larger
    side, as in transformers, even if the time of a video is longer. In Omni models it starts after
    the last position.

    Args:
        length: Number of tokens of the sample.
        blocks: Images and videos in order.
        clip_times: See `TextSpec.clip_times`.

    Returns:
        (3, L), int64, or float32 if times are fractional.
    """
    fractional = clip_times == "fractional"
    positions_3L = np.empty((3, length), np.float32 if fractional else np.int64)
    token = 0
    position: float = 0
    for block in blocks:
        start = block.start
        positions_3L[:, token:start] = position + np.arange(start - token)
        position += start - token
        times = block.times()
        if not fractional:
            times = times.astype(np.int64)
        rows_R = np.arange(block.rows)
        columns_C = np.arange(block.columns)
        grid = np.meshgrid(times, rows_R, columns_C, indexing="ij")
        positions_3K = np.stack(grid).reshape(3, -1)
        token = start + positions_3K.shape[1]
        if block.is_audio is not None:
            # Qwen2.5-Omni has equal positions for both markers before, and for both after.
            equal_markers = clip_times == "whole"
            if equal_markers:
                positions_3L[:, start - 1] -= 1
                position -= 1
            token = start + len(block.is_audio)
            both_3K = positions_3L[:, start:token]
            both_3K[:, ~block.is_audio] = position + positions_3K
            both_3K[:, block.is_audio] = position + np.arange(block.is_audio.sum())
            last = int(np.flatnonzero(block.is_audio != block.is_audio[-1])[-1]) + 1
            position = both_3K[:, last:].max() + 1
            if equal_markers:
                positions_3L[:, token : token + 2] = position
                token += 2
                position += 1
            continue
        positions_3L[:, start:token] = position + positions_3K
        if clip_times == "sides":
            position += max(block.rows, block.columns)
        else:
            position = positions_3L[:, start:token].max() + 1
    positions_3L[:, token:] = position + np.arange(length - token)
    return positions_3L
