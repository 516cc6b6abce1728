"""How images appear in the text of a model's samples."""

from __future__ import annotations

from dataclasses import dataclass


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
    mrope: bool = False
    """Three position ids per token (time, row, column)."""
    video_token_id: int | None = None
    """Placeholder of clips, if it differs from that of images."""
    tokens_per_second: float | None = None
    """Time positions per second of a clip; None: one per group of frames."""
