"""The recipe's `[data.video]`: which frames of clips are read, and how large."""

from __future__ import annotations

from pydantic import Field

from torchmm.recipe.model_section import Section


class VideoConfig(Section):
    """Frames of a clip are evenly spaced and follow from its length alone: the same in every
    epoch, on every rank. Needs `pip install "torchmm[video]"`."""

    fps: float = Field(default=2.0, gt=0)
    """Frames per second that are read, within the limits below. Encoders whose patches span
    several frames (Qwen's two) read whole groups of them."""
    min_frames: int = Field(default=4, ge=1)
    """Of a clip that has so many: short ones are read at a higher rate."""
    max_frames: int = Field(default=64, ge=1)
    """Of a clip: long ones are read at a lower rate."""
    max_pixels: int = Field(default=20_000_000, ge=1)
    """All frames of a clip together after resizing: where sizes vary, frames become smaller, down
    to the processor's own minimum; where the encoder has one size, fewer."""
    timestamps: bool = True
    """Write "<1.5 seconds>" before every frame, where an encoder reads single frames (none that
    knows time): otherwise they stand behind each other."""
