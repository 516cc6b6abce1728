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

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from torchmm.common.batch import IGNORE_TARGET, TextSpec
from torchmm.common.errors import ConfigError
from torchmm.data.corrupt import CorruptSampleError
from torchmm.data.layouts.sample import GeneratedSegment, Sample, TextSegment, VideoSegment

MAX_TEXT_CHARACTERS = 500_000
"""Longest text that is tokenised, unless a sample has room for more: see `longest_text`."""
CHARACTERS_PER_TOKEN = 16
"""Far more than tokens of any language have on average."""


def longest_text(sequence_length: int) -> int:
    """Characters of the longest text that is tokenised for samples of so many tokens."""
    return max(MAX_TEXT_CHARACTERS, CHARACTERS_PER_TOKEN * sequence_length)


@dataclass(frozen=True)
class EncodedSample:
    """One tokenised sample of at most `sequence_length` tokens."""

    ids: list[int]
    loss: list[bool]
    """Whether the token is to be predicted."""
    image_starts: list[int]
    """Position of the first placeholder of every image that was kept."""
    generated_at: list[int] = field(default_factory=list)
    """Tokens before every image to be drawn that was kept."""

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
        if not tokenizer.is_fast:
            raise ConfigError(
                f"model.tokenizer: {type(tokenizer).__name__} has no tokenizer.json; convert it "
                "with AutoTokenizer.from_pretrained(...).save_pretrained(DIR) and name DIR"
            )
        self.spec = spec
        self.sequence_length = sequence_length
        self._plain = _copy_backend(tokenizer, encode_special_tokens=True)
        self._scaffold = _copy_backend(tokenizer, encode_special_tokens=False)

    def encode(self, sample: Sample, image_tokens: Sequence[int]) -> EncodedSample:
        """Tokenise, expand images to placeholders and truncate, never inside an image.

        Args:
            sample: segments in order.
            image_tokens: placeholders of each image, clip or sound.

        Raises:
            CorruptSampleError: a text is far too long, or has half a character.
        """
        spec = self.spec
        limit = self.sequence_length
        out = EncodedSample([], [], [])
        if sample.add_bos and spec.bos_token_id is not None:
            _extend(out, [spec.bos_token_id], loss=False)
        counts = iter(image_tokens)
        for segment in sample.segments:
            if isinstance(segment, TextSegment):
                _extend(out, self._encode_text(segment), segment.loss)
                if len(out.ids) > limit:
                    del out.ids[limit:], out.loss[limit:]
                    return out
            elif isinstance(segment, GeneratedSegment):
                out.generated_at.append(len(out.ids))
            else:
                block = self._image_block(next(counts), isinstance(segment, VideoSegment))
                if len(out.ids) + len(block) > limit:
                    return out
                out.image_starts.append(len(out.ids) + len(spec.image_prefix_ids))
                _extend(out, block, loss=False)
        if sample.add_eos and spec.eos_token_id is not None and len(out.ids) < limit:
            _extend(out, [spec.eos_token_id], loss=out.loss[-1:] == [True])
        return out

    def _encode_text(self, segment: TextSegment) -> list[int]:
        text = segment.text
        longest = longest_text(self.sequence_length)
        if len(text) > longest:
            raise CorruptSampleError(
                f"text of {len(text)} characters, at most {longest} for training.sequence_length "
                f"= {self.sequence_length}; split it into several samples"
            )
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise CorruptSampleError(
                f"text has a lone surrogate, {text[error.start]!r}, at character {error.start}: "
                "half of a character that was cut in two, or wrongly decoded; write it anew"
            ) from error
        backend = self._scaffold if segment.scaffold else self._plain
        return backend.encode(text, add_special_tokens=False).ids

    def _image_block(self, tokens: int, is_clip: bool) -> list[int]:
        spec = self.spec
        placeholder = spec.image_token_id
        if is_clip and spec.video_token_id is not None:
            placeholder = spec.video_token_id
        assert placeholder is not None
        return [*spec.image_prefix_ids, *([placeholder] * tokens), *spec.image_suffix_ids]


def _extend(out: EncodedSample, ids: list[int], loss: bool) -> None:
    out.ids.extend(ids)
    out.loss.extend([loss] * len(ids))


def _copy_backend(tokenizer: PreTrainedTokenizerBase, encode_special_tokens: bool) -> Tokenizer:
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = encode_special_tokens
    return backend


class VisionBlock(NamedTuple):
    """The placeholders of an image or clip, in output tokens."""

    start: int
    frames: int
    rows: int
    columns: int
    time_step: float = 1.0
    """Time positions from a frame to the next."""


def mrope_positions(length: int, blocks: Sequence[VisionBlock]) -> np.ndarray:
    """Multimodal rotary positions of one sample (Qwen2-VL section 2.1): int64 (3, L).

    Text counts up in all three rows (time, height, width). Rows and columns of a frame count up
    from where the text before it ended, and so does the time of a clip's frames; an image has one
    time. Text after it continues after the larger side, as in Hugging Face's code, even if a clip
    lasts longer than that (Qwen's original code then continued after its last time).

    Args:
        length: tokens of the sample.
        blocks: images and clips, in order.
    """
    positions_3L = np.empty((3, length), np.int64)
    token, position = 0, 0
    for start, frames, rows, columns, time_step in blocks:
        positions_3L[:, token:start] = np.arange(position, position + start - token)
        position += start - token
        token = start + frames * rows * columns
        # float32, as Hugging Face multiplies: products just below a whole number count as it does.
        times = (np.arange(frames, dtype=np.float32) * np.float32(time_step)).astype(np.int64)
        grid = np.meshgrid(times, np.arange(rows), np.arange(columns), indexing="ij")
        positions_3L[:, start:token] = position + np.stack(grid).reshape(3, -1)
        position += max(rows, columns)
    positions_3L[:, token:] = np.arange(position, position + length - token)
    return positions_3L
