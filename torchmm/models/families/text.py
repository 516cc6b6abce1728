"""How images, clips and sounds appear in the text of a model's samples."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from torchmm.common.batch import ClipText


@dataclass(frozen=True)
class Token:
    """A token whose id only the tokenizer knows."""

    text: str
    needed: bool = True
    """Whether a tokenizer without it is refused; otherwise it spells the token as plain text."""


@dataclass(frozen=True)
class TextConventions:
    """How images appear in the text: the same for every sample of a model."""

    image_token: str | int
    """Placeholder, by token or by id."""
    prefix: tuple[int | str | Token, ...] = ()
    """What stands before every image: ids, plain text, tokens."""
    suffix: tuple[int | str | Token, ...] = ()
    row_end: Token | None = None
    """After every row of an image's placeholders but the last."""
    mrope: bool = False
    """Three position ids per token (time, row, column)."""
    video_token_id: int | None = None
    """Placeholder of clips, if it differs from that of images."""
    tokens_per_second: float | None = None
    """Time positions per second of a clip; None: one per group of frames."""
    clip_times: Literal["sides", "whole", "fractional"] = "sides"
    """Where M-RoPE continues behind a clip, and what times are. sides: after the larger of rows and
    columns; whole, fractional: after its last time too, which is cut to a whole number or not."""
    clip: ClipText = field(default_factory=ClipText)
    """Around groups of frames that are images of their own."""
    sound_token_id: int | None = None
    """Placeholder of sounds; None: sounds are written as images are."""
    sound_prefix: tuple[int | str | Token, ...] = ()
    sound_suffix: tuple[int | str | Token, ...] = ()
    around_sounds: tuple[str, str] = ("", "")
    """In chats, plain text before and after each sound with what else belongs to it; {} is its
    number in the chat, from 1."""
