"""Segments to token ids, targets and positions.

Text from data is encoded with special tokens switched off: "</s>" or "<image>" in a caption stays
a string of characters and cannot end a sample or claim an image. Only the scaffolding of a chat
template, which comes with the tokenizer, may contain special tokens. Rejected: the tokenizer's own
`split_special_tokens` argument, because it flips a switch of the shared tokenizer per call.

What a text may cost is bounded: one that is far longer than a sample can keep is corrupt before a
tokenizer sees it (they need seconds and hundreds of bytes per character of a long word). Rejected:
to cut it there, which would move the boundaries of its last tokens.

Shape legend: L tokens of one sample.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from torchmm.common.batch import IGNORE_TARGET, Marks, TextSpec
from torchmm.common.errors import ConfigError
from torchmm.data.corrupt import CorruptSampleError
from torchmm.data.layouts.sample import (
    AudioSegment,
    FileSegment,
    GeneratedSegment,
    ImageSegment,
    Sample,
    Segment,
    TextSegment,
    VideoSegment,
)

MAX_TEXT_CHARACTERS = 500_000
"""Longest text that is tokenised, unless a sample has room for more: see `longest_text`."""
CHARACTERS_PER_TOKEN = 16
"""Far more than tokens of any language have on average."""


def longest_text(sequence_length: int) -> int:
    """Characters of the longest text that is tokenised for samples of so many tokens."""
    return max(MAX_TEXT_CHARACTERS, CHARACTERS_PER_TOKEN * sequence_length)


@dataclass(frozen=True)
class TiledSegment(ImageSegment):
    """A picture that is cut into tiles."""

    marks: tuple[Marks, ...] = ()
    """Before, between and after its tiles."""


@dataclass(frozen=True)
class FramesSegment(VideoSegment):
    """A group of frames of a clip."""

    marks: tuple[Marks, ...] = ()
    """Before and after them."""


@dataclass(frozen=True)
class EncodedSample:
    """One tokenised sample of at most `sequence_length` tokens."""

    ids: list[int]
    loss: list[bool]
    """Whether the token is to be predicted."""
    image_starts: list[int]
    """Position of the first placeholder of every image (or tile) that was kept."""
    generated_at: list[int] = field(default_factory=list)
    """Tokens before every image to be drawn that was kept."""
    truncated: bool = False
    """Whether tokens beyond `sequence_length` were dropped."""
    unfitting_tokens: int = 0
    """Tokens of the image, video or audio before which the sample was truncated, with markers."""

    @property
    def targets_L(self) -> np.ndarray:
        """int64: next token where it counts in the loss, IGNORE_TARGET elsewhere and at the end."""
        targets_L = np.full(len(self.ids), IGNORE_TARGET, np.int64)
        wanted = np.asarray(self.loss[1:], bool)
        targets_L[:-1][wanted] = np.asarray(self.ids[1:], np.int64)[wanted]
        return targets_L


class TextEncoder:
    """Encodes samples for one LLM.

    Args:
        tokenizer: a fast Hugging Face tokenizer.
        spec: the LLM's special ids.
        sequence_length: longest sample in tokens.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, spec: TextSpec, sequence_length: int
    ) -> None:
        if not getattr(tokenizer, "is_fast", False):  # mistral-common's has no such attribute
            raise ConfigError(
                f"model.tokenizer: {type(tokenizer).__name__} has no tokenizer.json; use a "
                "directory saved with PreTrainedTokenizerFast.save_pretrained"
            )
        self.spec = spec
        self.sequence_length = sequence_length
        self._plain = _copy_backend(tokenizer, encode_special_tokens=True)
        self._scaffold = _copy_backend(tokenizer, encode_special_tokens=False)

    def encode(
        self, sample: Sample, image_tokens: Sequence[int], columns: Sequence[int] = ()
    ) -> EncodedSample:
        """Tokenize a sample, expand images to placeholders and truncate, never inside an image.

        Args:
            sample: segments in order.
            image_tokens: placeholders of each image, tile, clip or sound.
            columns: of each image, where rows end with a token.

        Raises:
            CorruptSampleError: a text is far too long, or has half a character.
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
            elif isinstance(piece, GeneratedSegment):
                out.generated_at.append(len(out.ids))
            else:
                block, starts = self._image_block(piece, counts)
                if len(out.ids) + len(block) > limit:
                    return replace(out, truncated=True, unfitting_tokens=len(block))
                out.image_starts.extend(len(out.ids) + start for start in starts)
                _extend(out, block, loss=False)
        if sample.add_eos and spec.eos_token_id is not None:
            if len(out.ids) == limit:
                return replace(out, truncated=True)
            _extend(out, [spec.eos_token_id], loss=out.loss[-1:] == [True])
        return out

    def _encode_text(self, segment: TextSegment) -> list[int]:
        text = segment.text
        longest = longest_text(self.sequence_length)
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
        backend = self._scaffold if segment.scaffold else self._plain
        return backend.encode(text, add_special_tokens=False).ids

    def _pieces(
        self, segments: Sequence[Segment]
    ) -> list[TextSegment | GeneratedSegment | _ImageBlock]:
        """Segments, with plain text beside images joined to texts that are only read.

        Hugging Face's processors write it into the text before they tokenise: the line feed that
        ends a turn's head and the two before Gemma's images are one token.
        """
        pieces: list[TextSegment | GeneratedSegment | _ImageBlock] = []
        after_image = False
        for segment in segments:
            if isinstance(segment, TextSegment):
                joins = after_image and not segment.loss
                pieces.append(_joined(pieces.pop(), segment) if joins else segment)
                after_image = False
            elif isinstance(segment, GeneratedSegment):
                pieces.append(segment)
                after_image = False
            else:
                before, block, after = self._split(segment)
                if before.text:
                    last = pieces[-1] if pieces else None
                    if isinstance(last, TextSegment) and not last.loss:
                        before = _joined(pieces.pop(), before)
                    pieces.append(before)
                pieces.append(block)
                after_image = bool(after.text)
                if after_image:
                    pieces.append(after)
        return pieces

    def _split(self, segment: FileSegment) -> tuple[TextSegment, _ImageBlock, TextSegment]:
        """Plain text before an image, clip or sound; the rest of it; plain text after it."""
        spec = self.spec
        marks = [spec.image_prefix, spec.image_suffix]
        if isinstance(segment, TiledSegment | FramesSegment):
            marks = list(segment.marks)
        placeholder = spec.image_token_id
        if isinstance(segment, VideoSegment) and spec.video_token_id is not None:
            placeholder = spec.video_token_id
        if isinstance(segment, AudioSegment) and spec.sound_token_id is not None:
            placeholder = spec.sound_token_id
            marks = [spec.sound_prefix, spec.sound_suffix]
        assert placeholder is not None
        before = after = ""
        if marks[0] and isinstance(marks[0][0], str):
            before, marks[0] = marks[0][0], marks[0][1:]
        if marks[-1] and isinstance(marks[-1][-1], str):
            after, marks[-1] = marks[-1][-1], marks[-1][:-1]
        block = _ImageBlock(placeholder, marks)
        return TextSegment(before, loss=False), block, TextSegment(after, loss=False)

    def _image_block(
        self, block: _ImageBlock, counts: Iterator[tuple[int, int]]
    ) -> tuple[list[int], list[int]]:
        """Return the token ids of an image, and where the placeholders of each tile start."""
        row_end = self.spec.row_end_id
        ids = self._encode_marks(block.marks[0])
        starts = []
        for marks in block.marks[1:]:
            starts.append(len(ids))
            tokens, columns = next(counts)
            placeholders = [block.placeholder] * tokens
            if row_end is not None:
                row = [block.placeholder] * columns
                placeholders = [*row, row_end] * (tokens // columns - 1) + row
            ids += placeholders + self._encode_marks(marks)
        return ids, starts

    def _encode_marks(self, marks: Marks) -> list[int]:
        ids: list[int] = []
        for mark in marks:
            ids += [mark] if isinstance(mark, int) else self._encode_text(TextSegment(mark, False))
        return ids


class _ImageBlock(NamedTuple):
    """Tokens of an image, clip or sound, which no truncation divides."""

    placeholder: int
    marks: list[Marks]
    """Before, between and after its tiles; two for a single image."""


def _joined(first: Any, second: TextSegment) -> TextSegment:
    """One text of two that are only read; one of them stands beside an image."""
    scaffold = first.scaffold or second.scaffold
    return TextSegment(first.text + second.text, loss=False, scaffold=scaffold)


def _extend(out: EncodedSample, ids: list[int], loss: bool) -> None:
    out.ids.extend(ids)
    out.loss.extend([loss] * len(ids))


def _copy_backend(tokenizer: PreTrainedTokenizerBase, encode_special_tokens: bool) -> Tokenizer:
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = encode_special_tokens
    return backend


def places_in_rows(tokens: int, columns: int) -> np.ndarray:
    """int64 (tokens,): where an image's placeholders are, relative to the first, if a token stands
    between its rows."""
    return np.arange(tokens) + np.arange(tokens) // columns


class VisionBlock(NamedTuple):
    """The placeholders of an image or clip, in output tokens."""

    start: int
    frames: int
    rows: int
    columns: int
    time_step: float = 1.0
    """From a frame to the next, in time positions if `per_second` is 1, else in seconds."""
    per_second: float = 1.0
    """Time positions per second."""


def mrope_positions(
    length: int,
    blocks: Sequence[VisionBlock],
    clip_times: Literal["sides", "whole", "fractional"] = "sides",
) -> np.ndarray:
    """Multimodal rotary positions of one sample (Qwen2-VL section 2.1): int64 (3, L), float32 if
    times are fractional.

    Text counts up in all three rows (time, height, width). Rows and columns of a frame count up
    from where the text before it ended, and so does the time of a clip's frames; an image has one
    time. Text after it continues after the larger side, as in Hugging Face's code, even if a clip
    lasts longer than that; in Omni models it then continues after its last time.

    Args:
        length: tokens of the sample.
        blocks: images and clips, in order.
        clip_times: see `TextSpec.clip_times`.
    """
    fractional = clip_times == "fractional"
    positions_3L = np.empty((3, length), np.float32 if fractional else np.int64)
    token = 0
    position: float = 0
    for start, frames, rows, columns, time_step, per_second in blocks:
        positions_3L[:, token:start] = position + np.arange(start - token)
        position += start - token
        token = start + frames * rows * columns
        # In float32 and in this order, as Hugging Face multiplies: products just below a whole
        # number count as it does.
        times = np.arange(frames, dtype=np.float32) * np.float32(time_step) * np.float32(per_second)
        if not fractional:
            times = times.astype(np.int64)
        grid = np.meshgrid(times, np.arange(rows), np.arange(columns), indexing="ij")
        positions_3L[:, start:token] = position + np.stack(grid).reshape(3, -1)
        if clip_times == "sides":
            position += max(rows, columns)
        else:
            position = positions_3L[:, start:token].max() + 1
    positions_3L[:, token:] = position + np.arange(length - token)
    return positions_3L
