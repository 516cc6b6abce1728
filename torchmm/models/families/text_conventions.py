"""Representation of images, videos and audio in the text of samples."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from torchmm.common.batch import BoxFormat, ClipText


@dataclass(frozen=True)
class Token:
    """A token whose id is defined by the tokenizer."""

    text: str
    is_required: bool = True
    """Whether to reject tokenizers without the token. Otherwise, the text is tokenized."""


@dataclass(frozen=True)
class TextConventions:
    """The representation of media in the text of all samples of a model."""

    image_token: str | int
    """Placeholder of images, as a token or an id."""
    prefix: tuple[int | str | Token, ...] = ()
    """Ids, text and tokens before each image."""
    suffix: tuple[int | str | Token, ...] = ()
    """Ids, text and tokens after each image."""
    row_end: Token | None = None
    """Token after each row of image placeholders except the last, or None."""
    mrope: bool = False
    """Whether tokens have three position ids (time, row, column)."""
    video_token_id: int | None = None
    """Placeholder of videos, if it differs from the image placeholder."""
    tokens_per_second: float | None = None
    """Time positions per second of a video. None means one per group of frames."""
    clip_times: Literal["sides", "whole", "fractional"] = "sides"
    """Start of the M-RoPE positions after a video.

    "sides" continues after the maximum of rows and columns. "whole" and "fractional" also continue
    after the last time, which "whole" truncates to an integer.
    """
    clip: ClipText = field(default_factory=ClipText)
    """Text around groups of video frames that are separate images."""
    sound_token_id: int | None = None
    """Placeholder of audio. None means that audio uses the image placeholder and its markers."""
    sound_prefix: tuple[int | str | Token, ...] = ()
    """Ids, text and tokens before each audio."""
    sound_suffix: tuple[int | str | Token, ...] = ()
    """Ids, text and tokens after each audio."""
    around_sounds: tuple[str, str] = ("", "")
    """Text before and after each audio with its markers in chats. "{}" is replaced by the index of
    the audio in the chat, starting at 1."""
    audio_chunk_tokens: int | None = None
    """Time positions of the chunks in which a video and its audio alternate. 0 merges them by time.
    None means that the model does not read the audio of videos."""
    boxes: BoxFormat | None = None
    """Format of boxes and points. None means that it is unknown."""
